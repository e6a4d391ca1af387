//! The identities and times that events, commands and answers have in common.

use std::time::Duration;

use zeroshard_model::Error;

/// A point in time: the duration since the driver started.
pub type Now = Duration;

/// The number of an open call. The driver never reuses one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Caller(pub u64);

/// The random number of a worker's lease on a rank; never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lease(pub u64);

/// The id of a shard server. It survives restarts of the server.
pub type ServerId = u64;

/// One control stream of a shard server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    pub server: ServerId,
    /// The number of the stream. The driver never reuses one.
    pub stream: u64,
}

/// A job as its members and servers identify it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobRef {
    pub name: String,
    pub id: u64,
}

/// A caller and the deadline of its call.
#[derive(Debug, Clone, Copy)]
pub struct Waiter {
    pub caller: Caller,
    pub since: Now,
    pub deadline: Now,
}

impl Waiter {
    pub fn new(caller: Caller, now: Now, wait: Duration) -> Self {
        Self { caller, since: now, deadline: now + wait }
    }

    /// The error for a call whose deadline has passed.
    pub fn timeout(&self, now: Now, waiting_for: String) -> Error {
        let waited_ms = now.saturating_sub(self.since).as_millis() as u64;
        Error::Timeout { waiting_for, waited_ms }
    }
}

/// Removes the calls whose deadline has come from their lists, and returns them.
pub(crate) fn expire<'a>(
    lists: impl IntoIterator<Item = &'a mut Vec<Waiter>>,
    now: Now,
) -> Vec<Waiter> {
    let late = |waiter: &mut Waiter| waiter.deadline <= now;
    let expired = lists.into_iter().flat_map(|of| of.extract_if(.., late).collect::<Vec<_>>());
    expired.collect()
}
