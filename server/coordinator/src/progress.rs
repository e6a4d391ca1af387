//! What operators see of the progress of a job.

use zeroshard_model::Error;

use crate::{figures::JobState, ids::Now};

/// The progress of a job.
#[derive(Debug, Default)]
pub struct Progress {
    /// The state and the version of the job, which it has had since `since`.
    pub(crate) mark: Option<(JobState, Option<u64>)>,
    pub(crate) since: Now,
    /// The last error that has ended a step or an attempt, and its time.
    pub(crate) trouble: Option<(Error, Now)>,
    /// Such an error that the current event has caused.
    pub(crate) fresh: Option<Error>,
}

/// The input that a job waits for.
#[derive(Debug, Clone, PartialEq)]
pub struct Wait {
    pub reason: String,
    /// `true` if ranks have no worker.
    pub lacks_workers: bool,
    /// `true` if servers are missing or not connected.
    pub lacks_servers: bool,
}

impl Progress {
    /// Records an error that has ended a step or an attempt.
    pub(crate) fn disturbed(&mut self, error: Error) {
        self.fresh = Some(error);
    }

    /// The time of the last step, or of the last change of state.
    pub fn since(&self) -> Now {
        self.since
    }

    /// The last error that has ended a step or an attempt, and its time.
    pub fn trouble(&self) -> Option<&(Error, Now)> {
        self.trouble.as_ref()
    }
}
