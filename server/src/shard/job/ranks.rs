//! The ranks of a job, as far as the coordinator has announced them to this server.

use std::collections::{BTreeMap, BTreeSet};

use zeroshard_proto::pb;

/// Leases, and ranks that contribute nothing.
#[derive(Debug, Default)]
pub(super) struct Ranks {
    /// The lease of each rank that has one. The pushes of a rank must carry it.
    leases: BTreeMap<u32, u64>,
    /// Ranks that have no more data.
    done: BTreeSet<u32>,
    /// Ranks that have left in order. This server does not use them; a coordinator that is
    /// restarted does.
    left: BTreeSet<u32>,
    /// Ranks that rest.
    resting: BTreeMap<u32, pb::RankRests>,
}

impl Ranks {
    pub(super) fn lease(&self, rank: u32) -> Option<u64> {
        self.leases.get(&rank).copied()
    }

    pub(super) fn grant(&mut self, rank: u32, lease: u64) {
        self.left.remove(&rank);
        self.leases.insert(rank, lease);
    }

    /// The lease has ended, in order if the rank has `left`.
    pub(super) fn end_lease(&mut self, rank: u32, left: bool) {
        self.leases.remove(&rank);
        self.done.remove(&rank);
        match left {
            true => self.left.insert(rank),
            false => self.left.remove(&rank),
        };
    }

    /// The rank has no more data.
    pub(super) fn finish(&mut self, rank: u32) {
        self.leases.remove(&rank);
        self.left.remove(&rank);
        self.resting.remove(&rank);
        self.done.insert(rank);
    }

    /// A rest begins or ends.
    pub(super) fn rest(&mut self, rests: &pb::RankRests) {
        match rests.ends {
            true => self.resting.remove(&rests.rank),
            false => self.resting.insert(rests.rank, rests.clone()),
        };
    }

    /// Adds the ranks to the description of a job.
    pub(super) fn describe(&self, held: &mut pb::HeldJob) {
        let lease = |(&rank, &lease): (&u32, &u64)| pb::HeldLease { rank, lease };
        held.leases = self.leases.iter().map(lease).collect();
        held.done = self.done.iter().copied().collect();
        held.left = self.left.iter().copied().collect();
        held.resting = self.resting.values().cloned().collect();
    }
}
