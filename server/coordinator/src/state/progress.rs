//! What operators see of the progress of a job.

use zeroshard_model::Error;

use crate::{operators::metrics_view::JobState, vocabulary::ids::Now};

/// The progress of a job.
#[derive(Debug, Default)]
pub struct Progress {
    /// The state and the version of the job. They have not changed since `since`.
    mark: Option<(JobState, Option<u64>)>,
    since: Now,
    /// The last error that has ended a step or an attempt, and its time.
    trouble: Option<(Error, Now)>,
    /// Such an error that the current event has caused.
    fresh: Option<Error>,
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

    /// Updates the progress after an event at `now`.
    pub(crate) fn note(&mut self, state: JobState, version: Option<u64>, now: Now) {
        let mark = Some((state, version));
        if self.mark != mark {
            self.mark = mark;
            self.since = now;
        }
        if let Some(error) = self.fresh.take() {
            self.trouble = Some((error, now));
        }
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
