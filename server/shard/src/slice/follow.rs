//! Begins, reads and ends the histories of a slice.

use std::sync::{Arc, OnceLock};

use zeroshard_changes::hash;
use zeroshard_kernels::Backend;
use zeroshard_model::{DType, Result};

use super::{
    Slice,
    history::{History, Since},
    recording::Recording,
};
use crate::{budget::Budget, tier::Array};

/// The number of elements that are hashed at once.
const PIECE: usize = 1 << 18;

/// The values with which a history begins, and whose hash it still needs.
pub struct Unhashed<B: Backend> {
    array: Array<B>,
    dtype: DType,
    first: u64,
    hash: Arc<OnceLock<u64>>,
}

impl<B: Backend> Unhashed<B> {
    /// Computes the hash. Meanwhile steps continue, and write to other memory.
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

impl<B: Backend> Slice<B> {
    /// Records what the next steps change in `dtype`, within `budget`. If this call begins a
    /// history, returns the values that the caller must hash. Returns `None` if there already is a
    /// history, or if the slice has no content yet.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::OutOfMemory`] if the coordinator may decide the next step at any
    /// moment, and the server has no memory for its result beside the values to hash.
    pub fn follow(&self, dtype: DType, budget: &Arc<Budget>) -> Result<Option<Unhashed<B>>> {
        let mut inner = self.lock();
        let inner = &mut *inner;
        let Some(version) = self.version().filter(|_| self.role().has_content()) else {
            return Ok(None);
        };
        inner.check()?;
        inner.histories.retain(|of| of.dtype() != dtype || of.is_useful());
        if inner.histories.iter().any(|of| of.dtype() == dtype) {
            return Ok(None);
        }
        let values = inner.published.as_ref().unwrap_or(&inner.master);
        let array = values.current().clone();
        if inner.is_reported() {
            inner.reserve_versions(&self.backend)?;
        }
        let hash = Arc::new(OnceLock::new());
        let size = (dtype, self.spec.numel);
        inner.histories.push(History::new(size, version, hash.clone(), budget.clone()));
        Ok(Some(Unhashed { array, dtype, first: self.spec.offset as u64, hash }))
    }

    /// Returns whether the slice records changes in `dtype`, and their hash is known or being
    /// computed.
    pub fn is_followed(&self, dtype: DType) -> bool {
        let inner = self.lock();
        inner.histories.iter().any(|of| of.dtype() == dtype && of.is_useful())
    }

    /// Ends the history in `dtype`. Called when nobody follows the job in this dtype any more.
    pub fn unfollow(&self, dtype: DType) {
        self.lock().histories.retain(|of| of.dtype() != dtype);
    }

    /// Returns how the published values in `dtype` changed between two readable versions.
    pub fn changes(&self, dtype: DType, from: u64, to: u64) -> Since {
        let inner = self.lock();
        let history = inner.histories.iter().find(|of| of.dtype() == dtype);
        history.map_or(Since::Unknown, |history| history.since(from, to))
    }

    /// Returns what records the next step, or `None` if nobody follows the job.
    pub(super) fn recording(&self, histories: &[History]) -> Option<Recording> {
        let dtypes = histories.iter().map(History::dtype);
        (!histories.is_empty()).then(|| Recording::new(self.dtype, &self.spec, dtypes))
    }
}
