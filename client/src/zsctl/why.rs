//! `zsctl why`: explains the state of a job in sentences.

use serde_json::json;
use zeroshard_client::{Cluster, Error, JobState, JobStatus, JobWait, Result};

use crate::table::ago;

/// Explains a job.
///
/// # Errors
/// [`Error::UnknownJob`]; those of [`Cluster::status`].
pub(crate) async fn run(name: &str, cluster: &Cluster, json: bool) -> Result<()> {
    let status = cluster.status().await?;
    let unknown = || Error::UnknownJob { job: name.to_owned() };
    let job = status.jobs.iter().find(|job| job.name == name).ok_or_else(unknown)?;
    let (state, advice) = (state(job), advice(job));
    let (wait, trouble) = (job.wait.as_ref(), job.trouble.as_ref());
    let event = json!({
        "event": "why", "job": name, "state": job.state.to_string(), "text": state,
        "failure": job.failure, "waiting_for": wait.map(|wait| &wait.reason),
        "waited_seconds": wait.map(|wait| wait.waited.as_secs_f64()),
        "trouble": trouble.map(|trouble| json!({
            "error": trouble.error, "message": trouble.message,
            "seconds_ago": trouble.ago.as_secs_f64(),
        })),
        "advice": advice,
    });
    let mut lines = vec![state];
    if let Some(JobWait { reason, waited, .. }) = wait {
        lines.push(format!("It has made no progress for {}: {reason}.", ago(*waited)));
    }
    if let Some(slowest) = job.slowest {
        let (rank, late) = (slowest.rank, ago(slowest.late));
        lines
            .push(format!("Rank {rank} is the last to commit, {late} after the first on average."));
    }
    if let Some(trouble) = trouble {
        let (error, message) = (&trouble.error, &trouble.message);
        lines.push(format!("The last error was {} ago: {error}: {message}.", ago(trouble.ago)));
    }
    lines.push(format!("Recommended action: {advice}."));
    crate::print(json, &event, &lines.join("\n"));
    Ok(())
}

/// A sentence about the state, the version and the workers.
fn state(job: &JobStatus) -> String {
    let name = &job.name;
    if let Some(failure) = &job.failure {
        return format!("Job {name:?} has failed: {failure}.");
    }
    let version = match job.version {
        Some(version) => format!("at version {version}"),
        None => "without initial parameters".to_owned(),
    };
    let (workers, world, epoch) = (job.joined.len(), job.world, job.epoch);
    let mut text = format!(
        "Job {name:?} is {}, {version}, in epoch {epoch}, with {workers} of {world} workers",
        job.state
    );
    if job.degraded_slices > 0 {
        text += &format!("; {} of its slices have too few replicas", job.degraded_slices);
    }
    if let Some(version) = job.saved_version {
        text += &format!("; its last checkpoint is of version {version}");
    }
    text + "."
}

/// The action that is recommended to the operator.
fn advice(job: &JobStatus) -> String {
    let name = &job.name;
    match (job.state, &job.wait) {
        (JobState::Failed, _) => format!(
            "correct the cause, delete the job (zsctl delete {name}), and create it again; \
             `zsctl checkpoint ls {name} --url URL` lists its checkpoints, from which it can \
             continue"
        ),
        (_, Some(wait)) if wait.lacks_servers => "start the missing shard servers, or uncordon \
             one (zsctl uncordon SERVER); `zsctl doctor` checks the connections"
            .to_owned(),
        (_, Some(wait)) if wait.lacks_workers => {
            "start a worker for each missing rank; the job continues from the current version"
                .to_owned()
        }
        (JobState::Open, Some(_)) => format!(
            "none, unless the wait lasts too long: then look at the logs of these ranks; if one of \
             them hangs, `zsctl evict {name} RANK` lets another worker take its rank"
        ),
        (JobState::Open, None) if job.degraded_slices > 0 => {
            "start another shard server if too few are connected".to_owned()
        }
        (JobState::Open, None) if job.joined.is_empty() => {
            format!("none; all ranks have ended, and `zsctl delete {name}` frees the memory")
        }
        _ => "none".to_owned(),
    }
}
