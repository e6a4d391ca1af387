//! The metrics of a job.

use crate::{
    job::{Job, Phase},
    operators::metrics_view::{JobMetrics, JobState},
};

impl Phase {
    pub fn shown(&self) -> JobState {
        match self {
            Self::Waiting { interrupted: Some(_), .. }
            | Self::Opening { interrupted: Some(_), .. } => JobState::Restoring,
            Self::Waiting { interrupted: None, .. } => JobState::Waiting,
            Self::Opening { interrupted: None, .. } => JobState::Opening,
            Self::Open(_) => JobState::Open,
            Self::Recovering(_) => JobState::Recovering,
            Self::Failed { .. } | Self::Gone => JobState::Failed,
        }
    }
}

impl Job {
    /// The metrics of the job.
    pub fn metrics(&self) -> JobMetrics {
        let open = match &self.phase {
            Phase::Open(open) => Some(open),
            _ => None,
        };
        JobMetrics {
            state: self.phase.shown(),
            epoch: self.epoch,
            version: open.and_then(|open| open.version.current()),
            workers: open.map_or(0, |open| open.members.len()),
            degraded: open.map_or(0, |open| open.degraded_slices(&self.spec)),
            broken_links: open.map_or(0, |open| open.broken_links.number()),
            slowest: open.and_then(|open| open.lateness.slowest()),
        }
    }
}
