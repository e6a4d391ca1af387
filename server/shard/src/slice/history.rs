//! The changes of a slice's last steps, for readers that follow the job.
//!
//! A history exists while somebody follows the job in its dtype. It says how the published values
//! have changed from one version to the next, as far as it knows; what it does not know, a reader
//! fetches in full. It takes at most about twice the memory of the values: a reader that is further
//! behind fetches less if it fetches all of them.

use std::{
    collections::VecDeque,
    sync::{Arc, OnceLock},
};

use bytes::Bytes;
use zeroshard_changes::{Recorded, block};
use zeroshard_model::DType;

use crate::budget::{Budget, Space};

/// What a change takes in memory besides its bytes.
const OVERHEAD: u64 = 64;

/// The bytes that a history may have however small the slice is: some hundred changes.
const SMALL: u64 = 64 << 10;

/// The changes of a slice in one dtype.
pub(super) struct History {
    dtype: DType,
    /// The hash of the values at the version with which the history began. It is computed while
    /// steps go on, because each change has the difference that it makes to the hash.
    begun: Arc<OnceLock<u64>>,
    /// The difference between the hashes of the first version and of the one that was the first
    /// when the history began.
    dropped: u64,
    /// The version before the first change.
    first: u64,
    changes: VecDeque<Change>,
    /// The bytes of all changes.
    bytes: u64,
    /// The most bytes of all changes.
    limit: u64,
    budget: Arc<Budget>,
}

struct Change {
    bytes: Bytes,
    hash_difference: u64,
    _space: Space,
}

/// What a slice knows about the changes between two versions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Since {
    /// The slice has to be fetched in full.
    Unknown,
    /// The hash is still being computed.
    Pending,
    /// One change for each step, and the hash of the values after the last one.
    Known { changes: Vec<Bytes>, hash: u64 },
}

impl History {
    /// Begins with a version of `numel` elements, whose hash the caller puts into `begun`.
    pub(super) fn new(
        (dtype, numel): (DType, usize),
        version: u64,
        begun: Arc<OnceLock<u64>>,
        budget: Arc<Budget>,
    ) -> Self {
        let limit = 2 * block::most_bytes(dtype, numel) as u64 + SMALL;
        let changes = VecDeque::new();
        Self { dtype, begun, dropped: 0, first: version, changes, bytes: 0, limit, budget }
    }

    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns `false` if the hash is missing, and nobody computes it any more.
    pub(super) fn is_useful(&self) -> bool {
        self.begun.get().is_some() || Arc::strong_count(&self.begun) > 1
    }

    /// Appends the change of a step; `None`: it is not known.
    pub(super) fn push(&mut self, recorded: Option<Recorded>) -> bool {
        let Some(Recorded { change, hash_difference, .. }) = recorded else { return false };
        let bytes = change.len() as u64 + OVERHEAD;
        while self.bytes + bytes > self.limit && self.drop_oldest() {}
        loop {
            if let Some(_space) = self.budget.take(bytes) {
                self.bytes += bytes;
                let bytes = Bytes::from(change.into_boxed_slice());
                self.changes.push_back(Change { bytes, hash_difference, _space });
                return true;
            }
            if !self.drop_oldest() {
                // There is no room: readers fetch this version in full.
                self.first += 1;
                self.dropped = self.dropped.wrapping_add(hash_difference);
                return true;
            }
        }
    }

    /// Returns `false` if there is no change.
    fn drop_oldest(&mut self) -> bool {
        let Some(Change { bytes, hash_difference, _space }) = self.changes.pop_front() else {
            return false;
        };
        self.bytes -= bytes.len() as u64 + OVERHEAD;
        self.first += 1;
        self.dropped = self.dropped.wrapping_add(hash_difference);
        true
    }

    /// What is known between two versions.
    pub(super) fn since(&self, from: u64, to: u64) -> Since {
        let end = self.first + self.changes.len() as u64;
        if from < self.first || to < from || end < to {
            return Since::Unknown;
        }
        let Some(begun) = self.begun.get() else { return Since::Pending };
        let [from, to] = [from, to].map(|version| (version - self.first) as usize);
        let differences = self.changes.range(..to).map(|change| change.hash_difference);
        let hash = differences.fold(begun.wrapping_add(self.dropped), u64::wrapping_add);
        let changes = self.changes.range(from..to).map(|change| change.bytes.clone()).collect();
        Since::Known { changes, hash }
    }
}
