//! `zsctl why`: explains the state of the cluster and of its jobs in sentences.

use serde_json::json;
use zeroshard_client::{Cluster, Error, JobState, JobStatus, JobWait, Result, Status};

use crate::table::ago;

/// Explains the cluster, and a job or all jobs.
///
/// # Errors
/// [`Error::UnknownJob`]; those of [`Cluster::status`].
pub(crate) async fn run(name: Option<&str>, cluster: &Cluster, json: bool) -> Result<()> {
    let status = cluster.status().await?;
    let is_named = |job: &&JobStatus| name.is_none_or(|name| job.name == name);
    let jobs: Vec<&JobStatus> = status.jobs.iter().filter(is_named).collect();
    explain_cluster(&status, json);
    if let Some(job) = name.filter(|_| jobs.is_empty()) {
        return Err(Error::UnknownJob { job: job.to_owned() });
    }
    jobs.into_iter().for_each(|job| explain(job, &status, json));
    Ok(())
}

/// Says what is wrong with the cluster itself, and what to do.
fn explain_cluster(status: &Status, json: bool) {
    let problems = status.problems();
    if problems.is_empty() {
        return;
    }
    let advice = advice_for_cluster(status);
    let event = json!({"event": "cluster", "problems": problems, "advice": advice});
    let lines = problems.iter().map(|problem| format!("Cluster: {problem}."));
    let advice = format!("Recommended action: {advice}.");
    let lines: Vec<String> = lines.chain([advice]).collect();
    crate::print(json, &event, &lines.join("\n"));
}

fn advice_for_cluster(status: &Status) -> String {
    let missing: Vec<&str> =
        status.missing.iter().map(|missing| missing.server.address.as_str()).collect();
    match &missing[..] {
        [] if status.recovering => {
            "wait: servers of the last coordinator connect within seconds; if a server does not \
             appear, look at its log"
                .to_owned()
        }
        [] => "start shard servers with the address of this coordinator (zeroshard-server shard \
               --coordinator HOST:PORT)"
            .to_owned(),
        missing => format!(
            "look at the logs of {0} and start it again, or, if it will not come back, remove it \
             from the list (zsctl drain {1}); `zsctl doctor` checks the connections",
            missing.join(", "),
            missing[0]
        ),
    }
}

fn explain(job: &JobStatus, status: &Status, json: bool) {
    let name = &job.name;
    let (state, advice) = (state(job), advice(job, status));
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
    if job.failed_saves > 0 {
        let (failed, error) = (job.failed_saves, &job.save_error);
        text += &format!("; the last {failed} saves have failed: {error}");
    }
    text + "."
}

/// The action that is recommended to the operator.
fn advice(job: &JobStatus, status: &Status) -> String {
    let name = &job.name;
    if job.failed_saves > 0 && job.failure.is_none() {
        return "make sure that the coordinator and every shard server can write to the URL of the \
                checkpoints, and that there is space: until a save succeeds, a loss goes back to \
                the last checkpoint"
            .to_owned();
    }
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
        (JobState::Recovering | JobState::Restoring, _) => {
            "wait: the job continues when its shard servers have connected again".to_owned()
        }
        (JobState::Open, None) if job.degraded_slices > 0 => {
            "start another shard server if too few are connected".to_owned()
        }
        (JobState::Open, None) if job.joined.is_empty() => {
            format!("none; all ranks have ended, and `zsctl delete {name}` frees the memory")
        }
        _ if !status.problems().is_empty() => "see the cluster above".to_owned(),
        _ => "none".to_owned(),
    }
}
