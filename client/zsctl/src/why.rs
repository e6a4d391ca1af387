//! `zsctl why`: explains the state of the cluster and of its jobs in sentences.

use serde_json::json;
use zeroshard_client::{Advice, Cluster, Error, JobStatus, JobWait, Result, Status};

use crate::{status::version_of, table::ago};

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
    jobs.into_iter().for_each(|job| explain(job, json));
    Ok(())
}

/// Says what is wrong with the cluster itself, and what to do.
fn explain_cluster(status: &Status, json: bool) {
    let problems = status.problems();
    let Some(advice) = &status.advice else { return };
    let event = json!({
        "event": "cluster", "problems": problems, "advice": advice.text,
        "command": advice.command,
    });
    let lines = problems.iter().map(|problem| format!("Cluster: {problem}."));
    let lines: Vec<String> = lines.chain([recommended(Some(advice))]).collect();
    crate::print(json, &event, &lines.join("\n"));
}

fn recommended(advice: Option<&Advice>) -> String {
    match advice {
        Some(advice) if advice.command.is_some() => format!("Recommended action: {advice}"),
        Some(advice) => format!("Recommended action: {advice}."),
        None => "Recommended action: none.".to_owned(),
    }
}

fn explain(job: &JobStatus, json: bool) {
    let name = &job.name;
    let (state, advice) = (state(job), job.advice.as_ref());
    let (wait, trouble) = (job.wait.as_ref(), job.trouble.as_ref());
    let event = json!({
        "event": "why", "job": name, "state": job.state.to_string(), "text": state,
        "failure": job.failure, "waiting_for": wait.map(|wait| &wait.reason),
        "waited_seconds": wait.map(|wait| wait.waited.as_secs_f64()),
        "trouble": trouble.map(|trouble| json!({
            "error": trouble.error, "message": trouble.message,
            "seconds_ago": trouble.ago.as_secs_f64(),
        })),
        "advice": advice.map(|advice| &advice.text),
        "command": advice.and_then(|advice| advice.command.as_ref()),
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
    lines.push(recommended(advice));
    crate::print(json, &event, &lines.join("\n"));
}

/// A sentence about the state, the version and the workers.
fn state(job: &JobStatus) -> String {
    let name = &job.name;
    if let Some(failure) = &job.failure {
        return format!("Job {name:?} has failed: {failure}.");
    }
    let version = match job.version {
        Some(_) => format!("at version {}", version_of(job)),
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
