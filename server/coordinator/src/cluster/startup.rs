//! The first seconds of a coordinator: servers of an earlier one connect, and describe its jobs.

use std::time::Duration;

use zeroshard_model::Error;

use crate::vocabulary::ids::Now;

/// How long a job waits for its servers, and then for its ranks. A server notices that the host of
/// the coordinator is gone after 30 s at most (`KEEPALIVE_INTERVAL` and `KEEPALIVE_TIMEOUT`), dials
/// for 5 s (`CONNECT_TIMEOUT`), and describes its jobs in 8 s (`DESCRIPTION_LIMIT`). Calls of
/// clients wait for 60 s by default.
pub const RECOVERY: Duration = Duration::from_secs(45);

/// The part of [`LEARNING`] in which servers of an earlier coordinator may return after the first
/// new one. They dial again after half a second (`shard::RECONNECT`).
pub const SETTLING: Duration = Duration::from_secs(1);

/// How long a coordinator that has just started waits before it places new jobs, and tells those
/// who are not members of a job that it does not exist: a server may describe a job of that name.
/// Servers of a coordinator whose process has ended dial again at once. Members of a job know that
/// it exists, and wait for [`RECOVERY`].
pub const LEARNING: Duration = Duration::from_secs(10);

/// The time in which servers may describe jobs of an earlier coordinator.
#[derive(Debug, Default)]
pub struct Startup {
    /// Until then, servers may still describe jobs of an earlier coordinator, and no new job is
    /// placed.
    learns_until: Option<Now>,
    /// Until then, the members of jobs that no server has described wait for their servers.
    members_wait_until: Option<Now>,
    /// Until then, servers of an earlier coordinator may return after the first new one.
    settles_until: Option<Now>,
    /// `true` if a server has followed another coordinator before; `None` before the first one
    /// registers.
    has_returning: Option<bool>,
}

impl Startup {
    /// Begins the learning period of a coordinator that starts at time 0.
    pub(crate) fn starting() -> Self {
        Self {
            learns_until: Some(LEARNING),
            members_wait_until: Some(RECOVERY),
            settles_until: Some(SETTLING),
            has_returning: None,
        }
    }

    /// Records that a server has registered. `is_new`: it has followed another coordinator before.
    pub(crate) fn registered(&mut self, is_new: bool) {
        self.has_returning = Some(is_new || self.has_returning == Some(true));
    }

    /// Returns whether servers may still describe jobs: the coordinator has just started, and
    /// servers of an earlier one have registered, or have had no time to.
    pub fn is_learning(&self) -> bool {
        let has_settled = self.settles_until.is_none() && self.has_returning == Some(false);
        self.learns_until.is_some() && !has_settled
    }

    /// Returns whether a job that no server has described may still appear, so that its members
    /// wait.
    pub(crate) fn members_wait(&self) -> bool {
        self.members_wait_until.is_some()
    }

    /// Ends the periods that are over. Returns whether more jobs may be placed or recovered now.
    pub(crate) fn expire(&mut self, now: Now) -> bool {
        self.members_wait_until.take_if(|until| *until <= now);
        let has_settled = self.settles_until.take_if(|until| *until <= now).is_some();
        has_settled | self.learns_until.take_if(|until| *until <= now).is_some()
    }

    pub(crate) fn next_deadline(&self) -> Option<Now> {
        let times = [self.learns_until, self.members_wait_until, self.settles_until];
        times.into_iter().flatten().min()
    }
}

/// The error for a member's call about a job that a new coordinator may still learn.
pub(crate) fn unknown_yet(job: &str) -> Error {
    Error::Unavailable {
        peer: format!("job {job:?}"),
        cause: "the coordinator was started and its shard servers have not all connected".into(),
    }
}
