//! Ranks that have no worker and need none.

use std::collections::{BTreeMap, BTreeSet};

/// Ranks that have left in order. INVARIANT: no rank is in both, or has a worker.
#[derive(Debug, Default)]
pub struct Departed {
    /// Ranks that will have data again, and that no other worker has taken since.
    left: BTreeSet<u32>,
    /// Ranks that have no more data, with the first version at which that is known.
    done: BTreeMap<u32, u64>,
}

impl Departed {
    /// The ranks that the servers of a job at this `version` describe. They may have been done at
    /// an earlier one.
    pub(crate) fn learned(left: BTreeSet<u32>, done: BTreeSet<u32>, version: u64) -> Self {
        Self { left, done: done.into_iter().map(|rank| (rank, version)).collect() }
    }

    /// A rank's worker has left.
    pub(crate) fn leave(&mut self, rank: u32) {
        self.left.insert(rank);
    }

    /// A rank's worker has left, and has no more data since this version.
    pub(crate) fn finish(&mut self, rank: u32, version: u64) {
        self.done.insert(rank, version);
    }

    /// A worker takes the rank. Returns whether it was done.
    pub(crate) fn rejoin(&mut self, rank: u32) -> bool {
        self.left.remove(&rank);
        self.done.remove(&rank).is_some()
    }

    /// The job returns to this version. Ranks that had data at this version are not done any more.
    pub(crate) fn return_to(&mut self, version: u64) {
        self.done.retain(|_, since| *since <= version);
    }

    pub(crate) fn has_left(&self, rank: u32) -> bool {
        self.left.contains(&rank)
    }

    pub(crate) fn is_done(&self, rank: u32) -> bool {
        self.done.contains_key(&rank)
    }

    /// The ranks that have left, and are not done.
    pub(crate) fn left(&self) -> impl Iterator<Item = u32> {
        self.left.iter().copied()
    }

    /// The ranks that are done.
    pub(crate) fn done(&self) -> impl ExactSizeIterator<Item = u32> {
        self.done.keys().copied()
    }

    /// The number of ranks that have left or are done.
    pub(crate) fn len(&self) -> usize {
        self.left.len() + self.done.len()
    }
}
