//! Broken links: servers that ranks report they cannot reach.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::vocabulary::ids::{Lease, Now, ServerId};

/// A job continues without a server that has been reported for this long. Ranks repeat their
/// reports more often than that.
pub(crate) const SERVER_PATIENCE: Duration = Duration::from_secs(4);

/// A rank that reports a server for this long counts as lost.
pub(crate) const RANK_PATIENCE: Duration = Duration::from_secs(15);

/// Reports expire after this time unless they are repeated.
const REPORT_LIFE: Duration = Duration::from_secs(8);

/// A job drops at most one server in this time.
const PAUSE: Duration = Duration::from_secs(60);

/// The broken links of a job.
#[derive(Debug, Default)]
pub struct BrokenLinks {
    /// By server and rank.
    broken: BTreeMap<(ServerId, u32), Broken>,
    /// When the job last dropped a server.
    dropped: Option<Now>,
    /// When they are looked at again.
    due: Option<Now>,
}

/// A broken link.
#[derive(Debug)]
struct Broken {
    /// The lease of the rank that has reported it.
    lease: Lease,
    since: Now,
    /// When the last report expires.
    until: Now,
    cause: String,
}

impl BrokenLinks {
    /// Returns the number of broken links.
    pub(crate) fn number(&self) -> usize {
        self.broken.len()
    }

    /// When they are looked at again.
    pub(crate) fn due(&self) -> Option<Now> {
        self.due
    }

    /// Records the report of a rank with this lease that it cannot reach a server. Returns `true`
    /// if the link was not known to be broken.
    pub(crate) fn report(
        &mut self,
        link: (ServerId, u32),
        lease: Lease,
        cause: String,
        now: Now,
    ) -> bool {
        let before = self.broken.get(&link).map(|link| link.since);
        let since = before.unwrap_or(now);
        self.broken.insert(link, Broken { lease, since, until: now + REPORT_LIFE, cause });
        before.is_none()
    }

    /// Drops reports that have expired, and those for which `counts` is false.
    pub(crate) fn forget(&mut self, now: Now, counts: impl Fn(ServerId, u32, Lease) -> bool) {
        self.broken
            .retain(|&(server, rank), link| link.until > now && counts(server, rank, link.lease));
    }

    /// Schedules the next check: when a report expires, or has lasted for one of the times above.
    pub(crate) fn schedule(&mut self, now: Now) {
        let of = |link: &Broken| {
            let judged = [SERVER_PATIENCE, RANK_PATIENCE].map(|patience| link.since + patience);
            judged.into_iter().filter(|&at| at > now).chain([link.until]).min()
        };
        self.due = self.broken.values().filter_map(of).min();
    }

    /// Returns the ranks that cannot reach a server.
    pub(crate) fn ranks_without(&self, server: ServerId) -> BTreeSet<u32> {
        self.of(server).map(|(rank, _)| rank).collect()
    }

    /// Returns the ranks that have reported a server for at least `patience`.
    pub(crate) fn ranks_long_without(
        &self,
        server: ServerId,
        patience: Duration,
        now: Now,
    ) -> BTreeSet<u32> {
        let lasting = self.of(server).filter(|(_, link)| link.since + patience <= now);
        lasting.map(|(rank, _)| rank).collect()
    }

    /// Returns the cause that the first of these ranks gave.
    pub(crate) fn cause(&self, server: ServerId) -> &str {
        self.of(server).map(|(_, link)| &*link.cause).next().unwrap_or_default()
    }

    fn of(&self, server: ServerId) -> impl Iterator<Item = (u32, &Broken)> {
        let links = self.broken.range((server, 0)..=(server, u32::MAX));
        links.map(|(&(_, rank), link)| (rank, link))
    }

    /// Returns `true` if the job has not dropped a server lately.
    pub(crate) fn may_drop(&self, now: Now) -> bool {
        self.dropped.is_none_or(|dropped| dropped + PAUSE <= now)
    }

    /// Records that the job continues without a server.
    pub(crate) fn dropped(&mut self, now: Now) {
        self.dropped = Some(now);
    }
}
