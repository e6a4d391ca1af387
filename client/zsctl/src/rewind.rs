//! `zsctl rewind`.

use std::ops::Range;

use serde_json::json;
use zeroshard_client::{Cluster, Error, Result};
use zeroshard_model::LineVersion;

use crate::print;

/// Flags of `zsctl rewind`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Name of the job; `zsctl status` lists the jobs
    job: String,
    /// Version of the checkpoint; `zsctl checkpoint ls` lists them
    #[arg(long, value_name = "VERSION")]
    to: u64,
    /// URL of the directory or prefix with the checkpoint [default: that of the job's policy]
    #[arg(long, env = "ZEROSHARD_CHECKPOINTS", value_name = "URL")]
    url: Option<String>,
    /// Batches to skip after this version: the first one, and the one after the last. You may
    /// repeat the flag. Loops over `zeroshard.steps` skip them
    #[arg(long, value_name = "BEGIN..END", value_parser = batches)]
    skip: Vec<Range<u64>>,
    /// Number of seconds to wait until the job continues. It may still return afterwards
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub(crate) within: u64,
}

/// Parses a range of batches such as `100..120`.
fn batches(text: &str) -> Result<Range<u64>> {
    let invalid = || Error::invalid("--skip", format!("{text:?}"), "a range such as 100..120");
    let (start, end) = text.split_once("..").ok_or_else(invalid)?;
    let (start, end) = (start.parse().ok(), end.parse().ok());
    let (start, end) = start.zip(end).ok_or_else(invalid)?;
    if start < end { Ok(start..end) } else { Err(invalid()) }
}

/// Returns a job to a checkpoint.
///
/// # Errors
/// Those of [`Cluster::rewind`].
pub(crate) async fn run(arguments: &Arguments, cluster: &Cluster, json: bool) -> Result<()> {
    let Arguments { job, to: version, url, skip, .. } = arguments;
    let line = cluster.rewind(job, *version, url.as_deref(), skip).await?;
    let event = json!({"event": "rewound", "job": job, "version": version, "line": line});
    let now = LineVersion { version: *version, line };
    print(json, &event, &format!("job {job:?} continues from version {now}"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_batches_are_read() {
        assert_eq!(batches("100..120").unwrap(), 100..120);
        for invalid in ["", "5", "5..", "5..5", "6..5", "-1..5"] {
            assert!(batches(invalid).is_err(), "{invalid:?}");
        }
    }
}
