//! `zsctl cordon`, `uncordon`, `drain` and `evict`.

use std::time::{Duration, Instant};

use serde_json::json;
use tokio::time::sleep;
use zeroshard_client::{Cluster, Drained, Error, Result, Stays};

use crate::print;

/// The pause between two drain requests.
const PAUSE: Duration = Duration::from_millis(500);

/// A shard server.
#[derive(Debug, clap::Args)]
pub(crate) struct Server {
    /// Address or id of the server, as in `zsctl status`, or its name (`--id`)
    server: String,
}

/// Flags of `zsctl drain`.
#[derive(Debug, clap::Args)]
pub(crate) struct Drain {
    #[command(flatten)]
    server: Server,
    /// Let jobs without replicas return to their last checkpoint and repeat the steps since then,
    /// if their policy does so after the loss of a server
    #[arg(long)]
    restore: bool,
    /// Number of seconds after which to give up. The server then stays cordoned
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    within: u64,
}

/// Flags of `zsctl evict`.
#[derive(Debug, clap::Args)]
pub(crate) struct Evict {
    /// Name of the job; `zsctl status` lists the jobs
    job: String,
    /// Rank to evict
    rank: u32,
}

/// Cordons a server, or uncordons it.
///
/// # Errors
/// Those of [`Cluster::cordon_server`].
pub(crate) async fn cordon(
    Server { server }: &Server,
    cordoned: bool,
    cluster: &Cluster,
    json: bool,
) -> Result<()> {
    let server = cluster.cordon_server(server, cordoned).await?;
    let (event, what) = match cordoned {
        true => ("cordoned", "is cordoned: it receives no new slices"),
        false => ("uncordoned", "is not cordoned"),
    };
    let event =
        json!({"event": event, "server": format!("{:016x}", server.id), "address": server.address});
    print(json, &event, &format!("shard server {} {what}", server.address));
    Ok(())
}

/// Drains a server, and reports the progress on standard error.
///
/// # Errors
/// [`Error::Timeout`] and [`Error::Invalid`], which name the jobs that need the server; those of
/// [`Cluster::drain_server`].
pub(crate) async fn drain(drain: &Drain, cluster: &Cluster, json: bool) -> Result<()> {
    let (began, limit) = (Instant::now(), Duration::from_secs(drain.within.max(1)));
    let mut reported = Vec::new();
    loop {
        let Drained { server, stays, degraded_slices } =
            cluster.drain_server(&drain.server.server, drain.restore).await?;
        let address = &server.address;
        if stays.is_empty() {
            let event = json!({
                "event": "drained", "server": format!("{:016x}", server.id), "address": address,
                "degraded_slices": degraded_slices,
            });
            let copied = match degraded_slices {
                0 => String::new(),
                slices => {
                    format!("; {slices} slices are still being copied to have all their replicas")
                }
            };
            let text = format!("shard server {address} has no slices, and can be stopped{copied}");
            print(json, &event, &text);
            return Ok(());
        }
        let reasons: Vec<String> = stays.iter().map(reason).collect();
        let is_final = stays.iter().all(|stays| !stays.transient);
        // The text of an error is limited, so it has a single reason at most.
        if reasons != reported && !(is_final && reasons.len() == 1) {
            stays.iter().for_each(|stays| progress(address, stays, json));
        }
        if is_final {
            return Err(Error::refused(format!(
                "shard server {address} is cordoned now, and needed by {}; stop it when no job \
                 needs it",
                summary(&reasons)
            )));
        }
        if began.elapsed() + PAUSE >= limit {
            let waiting_for =
                format!("shard server {address}, which is needed by {}", summary(&reasons));
            return Err(Error::Timeout { waiting_for, waited_ms: limit.as_millis() as u64 });
        }
        reported = reasons;
        sleep(PAUSE).await;
    }
}

/// The only reason, or the number of jobs whose reasons have been printed.
fn summary(reasons: &[String]) -> String {
    match reasons {
        [reason] => reason.clone(),
        several => format!("{} jobs, which are listed above", several.len()),
    }
}

/// Reports what a job waits for.
fn progress(address: &str, stays: &Stays, json: bool) {
    let event = json!({
        "event": "draining", "address": address, "job": stays.job, "waiting_for": stays.reason,
    });
    match json {
        true => say!("{event}"),
        false => eprintln!("zsctl: {}", reason(stays)),
    }
}

fn reason(Stays { job, reason, .. }: &Stays) -> String {
    format!("job {job:?}: {reason}")
}

/// Evicts a rank.
///
/// # Errors
/// Those of [`Cluster::evict_rank`].
pub(crate) async fn evict(
    Evict { job, rank }: &Evict,
    cluster: &Cluster,
    json: bool,
) -> Result<()> {
    let epoch = cluster.evict_rank(job, *rank).await?;
    let event = json!({"event": "evicted", "job": job, "rank": rank, "epoch": epoch});
    let text = format!("rank {rank} of job {job:?} is free for another worker, in epoch {epoch}");
    print(json, &event, &text);
    Ok(())
}
