//! When and where jobs are saved, and what they are restored from.

use std::{ops::RangeInclusive, time::Duration};

use crate::{Error, Result, line::LineVersion};

/// The allowed intervals between checkpoints that are taken by time.
pub const INTERVALS: RangeInclusive<Duration> =
    Duration::from_secs(1)..=Duration::from_secs(86_400 * 365);
/// The schemes of the URLs at which checkpoints can be stored.
pub const SCHEMES: [&str; 4] = ["file", "s3", "gs", "az"];
/// The maximum size of the data that a rank stores in a checkpoint, in bytes.
pub const MAX_USER_DATA: usize = 16 << 20;

/// The maximum length of a URL.
pub const MAX_URL: usize = 4096;

/// When and where a job is saved, and what happens when a server is lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointPolicy {
    /// The directory or prefix that holds the checkpoints of all jobs.
    pub url: String,
    /// The job is saved at each multiple of this version.
    pub every_steps: Option<u64>,
    /// The job is saved at the first version after this time since the last save began.
    pub every: Option<Duration>,
    /// The number of complete checkpoints that are kept; 0: all.
    pub keep: u32,
    /// The effect of the loss of a server that holds the only copy of a slice.
    pub on_loss: OnLoss,
    /// The effect of a server that has no memory for second copies of slices that are being saved.
    pub on_memory_shortage: OnMemoryShortage,
}

/// The effect of the loss of a server that holds the only copy of a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnLoss {
    /// The job fails.
    #[default]
    Fail,
    /// The job is restored from its last checkpoint.
    Restore,
}

/// The effect of a step on a slice that is being saved, where the server has no memory for a second
/// copy of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnMemoryShortage {
    /// The step waits until the slice is written, at most for 30 s. Then the save is given up.
    #[default]
    Wait,
    /// The save is given up with an error, and the step continues.
    GiveUp,
}

/// A part of a slice in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The f32 master weights; for a tensor that does not train, its content.
    Values,
    /// The state tensor at this position of [`Optimizer::state`](crate::Optimizer::state).
    State(usize),
}

/// A checkpoint from which a job starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restore {
    /// The directory or prefix that holds the checkpoints.
    pub url: String,
    /// The name of the job that was saved.
    pub job: String,
    /// The version.
    pub version: RestoreVersion,
    /// The line of the version, even if the job has abandoned it. `None`: the current line, which
    /// includes the versions that it shares with earlier lines.
    pub line: Option<u64>,
}

/// The version from which a job starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RestoreVersion {
    /// This one.
    Exactly(u64),
    /// The latest complete checkpoint.
    Latest,
    /// The latest complete checkpoint; without one the job starts anew.
    LatestIfAny,
}

/// How a line of a job begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Without a checkpoint.
    Anew,
    /// From this version of the job with this id, which has the same name.
    From(u64, LineVersion),
}

impl CheckpointPolicy {
    /// Checks the URL and the intervals.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn validate(&self) -> Result<()> {
        check_url(&self.url)?;
        if self.every_steps == Some(0) {
            return Err(Error::invalid("every_steps of the checkpoints", 0, "at least 1"));
        }
        if let Some(every) = self.every.filter(|every| !INTERVALS.contains(every)) {
            let expected = format!("{:?} to {:?}", INTERVALS.start(), INTERVALS.end());
            let what = "every_ms of the checkpoints";
            return Err(Error::invalid(what, format!("{every:?}"), expected));
        }
        Ok(())
    }
}

/// Checks the form of a URL. The store may still be unreachable.
///
/// # Errors
/// [`Error::Invalid`].
pub fn check_url(url: &str) -> Result<()> {
    let scheme = url.split_once("://").map(|(scheme, _)| scheme);
    let is_known = scheme.is_some_and(|scheme| SCHEMES.contains(&scheme));
    if is_known && url.len() <= MAX_URL {
        return Ok(());
    }
    let expected = format!(
        "a URL with one of the schemes {}, for example file:///checkpoints or \
         s3://bucket/prefix, of at most {MAX_URL} bytes",
        SCHEMES.join(", ")
    );
    Err(Error::invalid("url of the checkpoints", format_args!("{url:?}"), expected))
}

/// Returns whether two URLs name the same place.
pub fn is_same_place(one: &str, other: &str) -> bool {
    one.trim_end_matches('/') == other.trim_end_matches('/')
}
