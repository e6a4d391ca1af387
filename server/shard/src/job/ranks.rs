//! The ranks of a job, as far as the coordinator has announced them to this server.

use std::collections::{BTreeMap, BTreeSet};

/// A rest of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rest {
    pub rank: u32,
    /// The step in which the rest began.
    pub since: u64,
    /// `true` if means exclude the rank.
    pub excluded: bool,
}

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
    resting: BTreeMap<u32, Rest>,
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

    /// A rest begins, or `ends`.
    pub(super) fn rest(&mut self, rest: Rest, ends: bool) {
        match ends {
            true => self.resting.remove(&rest.rank),
            false => self.resting.insert(rest.rank, rest),
        };
    }

    /// The ranks that have a lease, with it.
    pub(super) fn leases(&self) -> Vec<(u32, u64)> {
        self.leases.iter().map(|(&rank, &lease)| (rank, lease)).collect()
    }

    /// The ranks that have no more data.
    pub(super) fn done(&self) -> Vec<u32> {
        self.done.iter().copied().collect()
    }

    /// The ranks that have left in order.
    pub(super) fn left(&self) -> Vec<u32> {
        self.left.iter().copied().collect()
    }

    /// The rests that have not ended.
    pub(super) fn resting(&self) -> Vec<Rest> {
        self.resting.values().copied().collect()
    }
}
