//! The links from ranks to servers that do not work.

use std::{collections::BTreeMap, time::Duration};

use crate::ids::{Lease, Now, ServerId};

/// How long a server must be reported until the job continues without it. It is longer than the
/// interval of a rank's reports, so that the ranks have repeated them.
pub(crate) const SERVER_PATIENCE: Duration = Duration::from_secs(4);

/// How long a rank must report a server until it counts as lost.
pub(crate) const RANK_PATIENCE: Duration = Duration::from_secs(15);

/// The links of a job that do not work.
#[derive(Debug, Default)]
pub struct Links {
    /// By server and rank.
    pub(crate) broken: BTreeMap<(ServerId, u32), Broken>,
    /// When the job has last continued without a server because of reports.
    pub(crate) dropped: Option<Now>,
    /// When they are looked at again.
    pub(crate) due: Option<Now>,
}

/// A link that does not work.
#[derive(Debug)]
pub(crate) struct Broken {
    /// The lease of the rank that has reported it.
    pub(crate) lease: Lease,
    pub(crate) since: Now,
    /// When the last report expires.
    pub(crate) until: Now,
    pub(crate) cause: String,
}

impl Links {
    /// The number of links that do not work.
    pub(crate) fn number(&self) -> usize {
        self.broken.len()
    }

    pub(crate) fn due(&self) -> Option<Now> {
        self.due
    }

    /// The next time at which a report expires, or has lasted for long enough.
    pub(crate) fn next_deadline(&self, now: Now) -> Option<Now> {
        let of = |link: &Broken| {
            let judged = [SERVER_PATIENCE, RANK_PATIENCE].map(|patience| link.since + patience);
            judged.into_iter().filter(|&at| at > now).chain([link.until]).min()
        };
        self.broken.values().filter_map(of).min()
    }
}
