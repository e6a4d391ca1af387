//! Keeps what the last steps have changed in a slice, for readers that follow the job.
//!
//! A history exists while somebody follows the job in its view: a dtype, and the whole tensor or a
//! box. It lists how the published values changed from one version to the next. If a change is
//! missing, readers fetch the slice in full. A history takes at most about twice the memory of the
//! values: for a reader that is further behind, the values are smaller than the changes.

use std::{
    collections::VecDeque,
    sync::{Arc, OnceLock},
};

use bytes::Bytes;
use zeroshard_changes::{Recorded, block};
use zeroshard_model::View;

use crate::budget::{Budget, Space};

/// The memory that a change takes in addition to its bytes.
const OVERHEAD: u64 = 64;

/// The bytes that a history may take even if the slice is tiny: a few hundred changes.
const SMALL: u64 = 64 << 10;

/// The changes of a slice in one view.
pub(super) struct History {
    view: View,
    /// The hash of the values with which the history began. It may be computed after further steps,
    /// because each change says by how much it alters the hash.
    begun: Arc<OnceLock<u64>>,
    /// The hash at version `first` minus `begun`: the sum over the changes that were dropped.
    dropped: u64,
    /// The version before the first change.
    first: u64,
    changes: VecDeque<Change>,
    /// The size of all changes in bytes.
    bytes: u64,
    /// The maximum of `bytes`.
    limit: u64,
    budget: Arc<Budget>,
}

struct Change {
    bytes: Bytes,
    hash_difference: u64,
    _space: Space,
}

/// The changes between two versions of a slice, as far as its history has them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Since {
    /// The reader must fetch the slice in full.
    Unknown,
    /// The hash is still being computed.
    Pending,
    /// One change per step, and the hash of the values after the last step.
    Known { changes: Vec<Bytes>, hash: u64 },
}

impl History {
    /// Begins with a version, of which the view has `numel` elements of the slice. The caller
    /// stores their hash in `begun`.
    pub(super) fn new(
        (view, numel): (View, usize),
        version: u64,
        begun: Arc<OnceLock<u64>>,
        budget: Arc<Budget>,
    ) -> Self {
        let limit = 2 * block::most_bytes(view.dtype(), numel) as u64 + SMALL;
        let changes = VecDeque::new();
        Self { view, begun, dropped: 0, first: version, changes, bytes: 0, limit, budget }
    }

    pub(super) fn view(&self) -> &View {
        &self.view
    }

    /// Returns `false` if the first hash is missing, and nobody computes it any more.
    pub(super) fn is_useful(&self) -> bool {
        self.begun.get().is_some() || Arc::strong_count(&self.begun) > 1
    }

    /// Appends the change of a step. Returns `false` if it is unknown (`None`): the history is then
    /// of no use.
    pub(super) fn push(&mut self, recorded: Option<Recorded>) -> bool {
        let Some(Recorded { change, hash_difference, .. }) = recorded else { return false };
        let bytes = change.len() as u64 + OVERHEAD;
        while self.bytes + bytes > self.limit && self.drop_oldest() {}
        let space = loop {
            match self.budget.take(bytes) {
                None if self.drop_oldest() => {}
                space => break space,
            }
        };
        match space {
            Some(_space) => {
                self.bytes += bytes;
                let bytes = Bytes::from(change.into_boxed_slice());
                self.changes.push_back(Change { bytes, hash_difference, _space });
            }
            // There is no room: readers fetch this version in full.
            None => self.advance(hash_difference),
        }
        true
    }

    /// Drops the oldest change. Returns `false` if there is none.
    fn drop_oldest(&mut self) -> bool {
        let Some(Change { bytes, hash_difference, _space }) = self.changes.pop_front() else {
            return false;
        };
        self.bytes -= bytes.len() as u64 + OVERHEAD;
        self.advance(hash_difference);
        true
    }

    /// Moves the first version past a step whose change is not kept.
    fn advance(&mut self, hash_difference: u64) {
        self.first += 1;
        self.dropped = self.dropped.wrapping_add(hash_difference);
    }

    /// Returns the changes between two versions.
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
