//! `zsctl status`: the leader, the servers and the jobs, and what is wrong with them.

use std::{process::ExitCode, time::Duration};

use comfy_table::Table;
use serde_json::json;
use zeroshard_client::{Cluster, JobState, JobStatus, MissingServer, Result, ServerStatus, Status};
use zeroshard_model::LineVersion;

use crate::{
    PROBLEM,
    table::{ago, human, table},
    transport::Transport,
};

/// The duration above which the output mentions a wait, even if no rank or server is missing.
const QUIET: Duration = Duration::from_secs(10);

/// Flags of `zsctl status`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Time without a step after which a job counts as a problem, even if all of its workers and
    /// servers are connected [default: no limit]
    #[arg(long, value_name = "SECONDS")]
    late: Option<u64>,
}

/// Prints servers and jobs. Returns [`PROBLEM`] if a job needs attention.
///
/// # Errors
/// Those of [`Cluster::status`].
pub(crate) async fn run(arguments: &Arguments, cluster: &Cluster, json: bool) -> Result<ExitCode> {
    let status = cluster.status().await?;
    let late = arguments.late.map(Duration::from_secs);
    let problems: Vec<_> = status.jobs.iter().map(|job| problem(job, late)).collect();
    let of_cluster = status.problems();
    let jobs = || status.jobs.iter().zip(&problems);
    if json {
        say!("{}", leader_json(&status, cluster.address()));
        status.servers.iter().for_each(|server| say!("{}", server_json(server)));
        status.missing.iter().for_each(|missing| say!("{}", missing_json(missing)));
        for (job, problem) in jobs() {
            let transport = Transport::of(job, &status.servers);
            say!("{}", job_json(job, &transport, problem.as_deref()));
        }
    } else {
        say!("{}\n", leader(&status, cluster.address()));
        say!("{}\n\n{}", servers(&status), table_of(&status.jobs, &status.servers));
        for job in &status.jobs {
            if let Some(note) = Transport::of(job, &status.servers).note(&job.name) {
                say!("{note}");
            }
        }
        let notes = jobs().filter_map(|(job, problem)| note(job, problem.as_deref()));
        let notes: Vec<_> = of_cluster.iter().cloned().chain(notes).collect();
        if !notes.is_empty() {
            say!("\n{}", notes.join("\n"));
            say!("`zsctl why` explains what to do");
        } else if let Some(advice) = status.advice.as_ref().filter(|_| status.jobs.is_empty()) {
            say!("\n{advice}");
        }
    }
    match !of_cluster.is_empty() || problems.iter().any(Option::is_some) {
        true => Ok(ExitCode::from(PROBLEM)),
        false => Ok(ExitCode::SUCCESS),
    }
}

/// The reason why a job needs attention.
fn problem(job: &JobStatus, late: Option<Duration>) -> Option<String> {
    let is_late = |waited: Duration| late.is_some_and(|late| waited >= late);
    let waits = job.wait.as_ref().filter(|wait| is_late(wait.waited));
    job.problem().or_else(|| waits.map(|wait| wait.reason.clone()))
}

/// A line for a job that has a problem or waits for a long time.
fn note(job: &JobStatus, problem: Option<&str>) -> Option<String> {
    let name = &job.name;
    match (&job.wait, problem) {
        (Some(wait), problem) if problem.is_some() || wait.waited >= QUIET => {
            let waited = ago(wait.waited);
            Some(format!("job {name:?} has made no progress for {waited}: {}", wait.reason))
        }
        (_, Some(problem)) if job.failure.is_none() => Some(format!("job {name:?}: {problem}")),
        _ => None,
    }
}

/// A line about the coordinator that answered, which is the leader.
fn leader(status: &Status, address: &str) -> String {
    let recovering = if status.recovering { ", recovering" } else { "" };
    let connected = match status.missing.len() {
        0 => format!("{} servers", status.servers.len()),
        missing => {
            format!("{} of {} servers", status.servers.len(), status.servers.len() + missing)
        }
    };
    format!(
        "leader {address}, version {}, leading for {}{recovering}; {connected}, {} jobs",
        status.version,
        ago(status.leading),
        status.jobs.len()
    )
}

fn leader_json(status: &Status, address: &str) -> serde_json::Value {
    json!({
        "event": "leader", "address": address, "version": status.version,
        "leading_seconds": status.leading.as_secs_f64(), "recovering": status.recovering,
        "connected_servers": status.servers.len(), "missing_servers": status.missing.len(),
        "problems": status.problems(),
    })
}

fn missing_json(MissingServer { server, name, since, cause }: &MissingServer) -> serde_json::Value {
    json!({
        "event": "missing_server", "id": hex(server.id), "name": name, "address": server.address,
        "missing_seconds": since.as_secs_f64(), "cause": cause,
    })
}

/// The id of a server, as logs show it.
fn hex(id: u64) -> String {
    format!("{id:016x}")
}

/// The name that the operator gave a server, or else its id. Commands accept both.
fn id(id: u64, name: &str) -> String {
    if name.is_empty() { hex(id) } else { name.to_owned() }
}

fn servers(status: &Status) -> Table {
    let mut table = table(&[
        "SERVER",
        "ID",
        "SLICES",
        "MASTER",
        "STATE",
        "GRADIENTS",
        "PUBLISHED",
        "PARKED",
        "FREE",
        "ZONE",
        "CONNECTION",
    ]);
    for MissingServer { server, name, since, .. } in &status.missing {
        let (head, state) = ([server.address.clone(), id(server.id, name)], missing_for(*since));
        table.add_row(head.into_iter().chain(vec!["-".to_owned(); 8]).chain([state]));
    }
    for status in &status.servers {
        let bytes = [
            status.master_bytes,
            status.state_bytes,
            status.accumulator_bytes,
            status.published_bytes,
            status.parked_bytes,
        ];
        let server = &status.server;
        let head = [server.address.clone(), id(server.id, &status.name), status.slices.to_string()];
        let zone = if status.zone.is_empty() { "-".to_owned() } else { status.zone.clone() };
        let left = |capacity: u64| human(capacity.saturating_sub(status.assigned_bytes));
        let free = status.capacity_bytes.map_or("no limit".to_owned(), left);
        let state = if status.cordoned { "cordoned" } else { "connected" }.to_owned();
        let tail = [free, zone, state];
        table.add_row(head.into_iter().chain(bytes.map(human)).chain(tail));
    }
    table
}

fn missing_for(since: Duration) -> String {
    format!("missing for {}", ago(since))
}

fn table_of(jobs: &[JobStatus], servers: &[ServerStatus]) -> Table {
    let mut table = table(&[
        "JOB",
        "VERSION",
        "EPOCH",
        "WORKERS",
        "PARAMETERS",
        "TENSORS",
        "SLICES",
        "TRANSPORT",
        "LATE RANK",
        "CHECKPOINT",
        "STATE",
    ]);
    for job in jobs {
        table.add_row([
            job.name.clone(),
            version_of(job),
            job.epoch.to_string(),
            format!("{}/{}", job.joined.len(), job.world),
            job.parameters.to_string(),
            job.tensors.to_string(),
            job.slices.to_string(),
            Transport::of(job, servers).summary(),
            late_rank(job),
            checkpoint(job),
            state(job),
        ]);
    }
    table
}

/// The rank that commits last, and its delay.
pub(crate) fn late_rank(job: &JobStatus) -> String {
    let late =
        |slowest: zeroshard_client::SlowRank| format!("{} (+{})", slowest.rank, ago(slowest.late));
    job.slowest.map_or("-".to_owned(), late)
}

/// The version of a job, and its line if it has returned to a checkpoint.
pub(crate) fn version_of(job: &JobStatus) -> String {
    let named = |version| LineVersion { version, line: job.line }.to_string();
    job.version.map_or("-".to_owned(), named)
}

/// The version of the last checkpoint, its age, and the number of saves that have failed since.
fn checkpoint(job: &JobStatus) -> String {
    let mut text = job.saved_version.map_or("-".to_owned(), |version| version.to_string());
    if let Some(saved) = job.saved_ago {
        text += &format!(" ({} ago)", ago(saved));
    }
    if job.failed_saves > 0 {
        text += &format!(", {} failed", job.failed_saves);
    }
    text
}

/// The state of a job in a few words, or the reason of its failure.
pub(crate) fn state(job: &JobStatus) -> String {
    match (&job.failure, job.state) {
        (Some(failure), _) => format!("failed: {failure}"),
        (_, JobState::Open) if job.wait.as_ref().is_some_and(|wait| wait.is_blocked()) => {
            "blocked".to_owned()
        }
        (_, JobState::Open) if job.version.is_none() => "waiting for initial parameters".to_owned(),
        (_, JobState::Open) if job.degraded_slices > 0 => "too few replicas".to_owned(),
        (_, JobState::Open) if job.failed_saves > 0 => "saves fail".to_owned(),
        (_, JobState::Open) => "ok".to_owned(),
        (_, state) => state.to_string(),
    }
}

fn server_json(status: &ServerStatus) -> serde_json::Value {
    json!({
        "event": "server", "id": hex(status.server.id), "name": status.name,
        "address": status.server.address, "version": status.version, "cordoned": status.cordoned,
        "zone": status.zone, "slices": status.slices,
        "master_bytes": status.master_bytes, "state_bytes": status.state_bytes,
        "accumulator_bytes": status.accumulator_bytes, "published_bytes": status.published_bytes,
        "parked_bytes": status.parked_bytes, "capacity_bytes": status.capacity_bytes,
        "assigned_bytes": status.assigned_bytes,
    })
}

fn job_json(job: &JobStatus, transport: &Transport, problem: Option<&str>) -> serde_json::Value {
    let reasons = transport.reasons.iter();
    let reasons = reasons.map(|(server, why)| json!({"server": server, "reason": why}));
    json!({
        "event": "job", "name": job.name, "version": job.version, "line": job.line, "epoch": job.epoch, "world": job.world,
        "joined": job.joined, "parameters": job.parameters, "tensors": job.tensors, "slices": job.slices,
        "failure": job.failure, "state": job.state.to_string(), "problem": problem,
        "waiting_for": job.wait.as_ref().map(|wait| &wait.reason),
        "waited_seconds": job.wait.as_ref().map(|wait| wait.waited.as_secs_f64()),
        "slowest_rank": job.slowest.map(|slowest| slowest.rank),
        "late_seconds": job.slowest.map(|slowest| slowest.late.as_secs_f64()),
        "degraded_slices": job.degraded_slices, "saved_version": job.saved_version,
        "saved_seconds_ago": job.saved_ago.map(|ago| ago.as_secs_f64()),
        "failed_saves": job.failed_saves, "save_error": job.save_error, "transport": transport.summary(),
        "no_shared_memory": reasons.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use zeroshard_client::JobWait;

    use super::*;

    fn job() -> JobStatus {
        JobStatus {
            name: "a".into(),
            id: 1,
            line: 0,
            epoch: 2,
            world: 1,
            joined: Vec::new(),
            version: Some(3),
            parameters: 3,
            tensors: 1,
            slices: 1,
            resting: Vec::new(),
            failure: None,
            state: JobState::Open,
            wait: None,
            slowest: None,
            degraded_slices: 0,
            trouble: None,
            saved_version: None,
            saved_ago: None,
            failed_saves: 0,
            save_error: String::new(),
            advice: None,
        }
    }

    fn waiting(seconds: u64, lacks_workers: bool) -> JobStatus {
        let waited = Duration::from_secs(seconds);
        let (reason, lacks_servers) = ("step 3 waits for rank 0".to_owned(), false);
        JobStatus { wait: Some(JobWait { reason, waited, lacks_workers, lacks_servers }), ..job() }
    }

    #[test]
    fn bytes_have_the_largest_unit_that_fits() {
        assert_eq!(human(0), "0 B");
        assert_eq!(human(1023), "1023 B");
        assert_eq!(human(1536), "1.5 KiB");
        assert_eq!(human(5 << 40), "5.0 TiB");
        assert_eq!(human(u64::MAX), "16777216.0 TiB");
    }

    #[test]
    fn a_failed_job_shows_its_reason() {
        let job = JobStatus {
            failure: Some("server 2 is gone".into()),
            state: JobState::Failed,
            ..job()
        };
        let table = table_of(std::slice::from_ref(&job), &[]).to_string();
        assert!(table.contains("failed: server 2 is gone"));
        assert_eq!(job_json(&job, &Transport::default(), None)["failure"], "server 2 is gone");
        assert!(problem(&job, None).unwrap().contains("server 2 is gone"));
    }

    #[test]
    fn a_wait_for_present_ranks_is_a_problem_only_beyond_the_limit() {
        let (brief, long) = (waiting(1, false), waiting(60, false));
        assert_eq!(problem(&long, None), None);
        let limit = Some(Duration::from_secs(30));
        assert_eq!((problem(&brief, limit), note(&brief, None)), (None, None));
        assert!(problem(&long, limit).unwrap().contains("rank 0"));
        assert!(note(&long, None).unwrap().contains("60 s"));
        let blocked = waiting(1, true);
        assert!(problem(&blocked, None).is_some());
        assert_eq!(state(&blocked), "blocked");
        assert!(note(&blocked, Some("")).unwrap().contains("rank 0"));
    }
}
