//! `zsctl delete`: deletes a job after a confirmation.

use std::io::{IsTerminal, Write, stderr, stdin};

use serde_json::json;
use zeroshard_client::{Cluster, Error, JobStatus, Result};

/// Flags of `zsctl delete`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Name of the job; `zsctl status` lists the jobs
    job: String,
    /// Delete the job without asking for confirmation
    #[arg(long, short)]
    yes: bool,
}

/// Deletes the job after the user has confirmed it.
///
/// # Errors
/// [`Error::Refused`] if the deletion is not confirmed; those of [`Cluster::delete_job`].
pub(crate) async fn run(arguments: &Arguments, cluster: &Cluster, json: bool) -> Result<()> {
    let Arguments { job, yes } = arguments;
    if !yes {
        let jobs = cluster.status().await?.jobs;
        let found = jobs.into_iter().find(|found| found.name == *job);
        confirm(&found.ok_or_else(|| Error::UnknownJob { job: job.clone() })?)?;
    }
    cluster.delete_job(job).await?;
    let event = json!({"event": "deleted", "job": job});
    crate::print(json, &event, &format!("job {job:?} is deleted"));
    Ok(())
}

/// Asks the user on the terminal to confirm the deletion.
fn confirm(job: &JobStatus) -> Result<()> {
    let refused = || {
        let name = &job.name;
        let sentence = format!("job {name:?} is kept; confirm on a terminal, or with --yes");
        Err(Error::refused(sentence))
    };
    if !stdin().is_terminal() || !stderr().is_terminal() {
        return refused();
    }
    let version =
        job.version.map_or("no version".to_owned(), |version| format!("version {version}"));
    let (name, joined) = (&job.name, job.joined.len());
    let question =
        format!("delete job {name:?} ({version}, {joined} workers) and its state? [y/N] ");
    let mut answer = String::new();
    let asked =
        stderr().write_all(question.as_bytes()).and_then(|()| stdin().read_line(&mut answer));
    match (asked, answer.trim()) {
        (Ok(_), "y" | "Y" | "yes") => Ok(()),
        _ => refused(),
    }
}
