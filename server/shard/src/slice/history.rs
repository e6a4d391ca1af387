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
use zeroshard_changes::{Recorded, block, hash};
use zeroshard_kernels::Backend;
use zeroshard_model::{DType, Result};

use super::{Slice, recording::Recording};
use crate::{
    budget::{Budget, Space},
    tier::Array,
};

/// The elements that are hashed at once.
const PIECE: usize = 1 << 18;

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

/// Values that are to be hashed, because a history has begun with them.
pub struct Unhashed<B: Backend> {
    array: Array<B>,
    dtype: DType,
    first: u64,
    hash: Arc<OnceLock<u64>>,
}

impl<B: Backend> Unhashed<B> {
    /// Computes the hash. Steps go on meanwhile, beside the values.
    ///
    /// # Errors
    /// Those of [`Array::read`].
    pub fn compute(self, backend: &B) -> Result<()> {
        let (numel, mut sum) = (self.array.numel(backend), 0u64);
        for start in (0..numel).step_by(PIECE) {
            let range = start..numel.min(start + PIECE);
            let values = self.array.read(backend, range, self.dtype)?;
            sum = sum.wrapping_add(hash::of(self.dtype, self.first + start as u64, &values));
        }
        self.hash.get_or_init(|| sum);
        Ok(())
    }
}

impl History {
    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns `false` if the hash is missing, and nobody computes it any more.
    fn is_useful(&self) -> bool {
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

    fn since(&self, from: u64, to: u64) -> Since {
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

impl<B: Backend> Slice<B> {
    /// Records the changes of the next steps in `dtype`, within `budget`. Returns values to hash if
    /// that begins here. `None` also if the slice has no content yet.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::OutOfMemory`] if the next step may be decided at any moment, and
    /// there is not enough memory for its result beside the values that are to be hashed.
    pub fn follow(&self, dtype: DType, budget: &Arc<Budget>) -> Result<Option<Unhashed<B>>> {
        let mut inner = self.lock();
        let inner = &mut *inner;
        let Some(version) = self.version().filter(|_| self.role().has_content()) else {
            return Ok(None);
        };
        inner.check()?;
        inner.histories.retain(|of| of.dtype != dtype || of.is_useful());
        if inner.histories.iter().any(|of| of.dtype == dtype) {
            return Ok(None);
        }
        let values = inner.published.as_ref().unwrap_or(&inner.master);
        let array = values.current().clone();
        if inner.is_reported() {
            inner.reserve_versions(&self.backend)?;
        }
        let hash = Arc::new(OnceLock::new());
        inner.histories.push(History {
            dtype,
            begun: hash.clone(),
            dropped: 0,
            first: version,
            changes: VecDeque::new(),
            bytes: 0,
            limit: 2 * block::most_bytes(dtype, self.spec.numel) as u64 + SMALL,
            budget: budget.clone(),
        });
        Ok(Some(Unhashed { array, dtype, first: self.spec.offset as u64, hash }))
    }

    /// Returns whether the changes of steps are recorded in `dtype`, and their hash is known or being
    /// computed.
    pub fn is_followed(&self, dtype: DType) -> bool {
        let inner = self.lock();
        inner.histories.iter().any(|of| of.dtype == dtype && of.is_useful())
    }

    /// Ends the history in `dtype`, because nobody follows the job in it any more.
    pub fn unfollow(&self, dtype: DType) {
        self.lock().histories.retain(|of| of.dtype != dtype);
    }

    /// The changes of the published values in `dtype` between two versions that can be read.
    pub fn changes(&self, dtype: DType, from: u64, to: u64) -> Since {
        let inner = self.lock();
        let history = inner.histories.iter().find(|of| of.dtype == dtype);
        history.map_or(Since::Unknown, |history| history.since(from, to))
    }

    /// Records a step, if somebody follows the job.
    pub(super) fn recording(&self, histories: &[History]) -> Option<Recording> {
        let dtypes = || histories.iter().map(History::dtype);
        (!histories.is_empty()).then(|| Recording::new(self.dtype, &self.spec, dtypes()))
    }
}
