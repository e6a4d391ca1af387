//! Begins, reads and ends the histories of a slice.

use std::sync::{Arc, OnceLock};

use zeroshard_changes::hash;
use zeroshard_kernels::Backend;
use zeroshard_model::{DType, Elements, Result, View};

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
    /// The elements of the slice that belong to the view.
    elements: Elements,
    /// The position of the first one in the array of a reader.
    first: u64,
    hash: Arc<OnceLock<u64>>,
}

impl<B: Backend> Unhashed<B> {
    /// Computes the hash. Meanwhile steps continue, and write to other memory.
    ///
    /// # Errors
    /// Those of [`Array::read`].
    pub fn compute(self, backend: &B) -> Result<()> {
        let (dtype, numel, mut sum) = (self.dtype, self.elements.numel(), 0u64);
        for start in (0..numel).step_by(PIECE) {
            let elements = self.elements.select(start..numel.min(start + PIECE));
            let values = self.array.read(backend, elements, dtype)?;
            sum = sum.wrapping_add(hash::of(dtype, self.first + start as u64, &values));
        }
        self.hash.get_or_init(|| sum);
        Ok(())
    }
}

impl<B: Backend> Slice<B> {
    /// Records what the next steps change in `view`, within `budget`. If this call begins a
    /// history, returns the values that the caller must hash. Returns `None` if there already is a
    /// history, or if the slice has no content yet.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::OutOfMemory`] if the coordinator may decide the next step at any
    /// moment, and the server has no memory for its result beside the values to hash.
    pub fn follow(&self, view: &View, budget: &Arc<Budget>) -> Result<Option<Unhashed<B>>> {
        let mut inner = self.lock();
        let inner = &mut *inner;
        let Some(version) = self.version().filter(|_| self.role().has_content()) else {
            return Ok(None);
        };
        inner.check()?;
        inner.histories.retain(|of| of.view() != view || of.is_useful());
        if inner.histories.iter().any(|of| of.view() == view) {
            return Ok(None);
        }
        let values = inner.published.as_ref().unwrap_or(&inner.master);
        let array = values.current().clone();
        if inner.is_reported() {
            inner.reserve_versions(&self.backend)?;
        }
        let hash = Arc::new(OnceLock::new());
        let elements = view.elements(&self.spec);
        let first = view.positions(&self.spec).start as u64;
        let size = (view.clone(), elements.numel());
        inner.histories.push(History::new(size, version, hash.clone(), budget.clone()));
        Ok(Some(Unhashed { array, dtype: view.dtype(), elements, first, hash }))
    }

    /// Returns whether the slice records changes in `view`, and their hash is known or being
    /// computed.
    pub fn is_followed(&self, view: &View) -> bool {
        let inner = self.lock();
        inner.histories.iter().any(|of| of.view() == view && of.is_useful())
    }

    /// Ends the history in `view`. Called when nobody follows the tensor in this view any more.
    pub fn unfollow(&self, view: &View) {
        self.lock().histories.retain(|of| of.view() != view);
    }

    /// Returns how the published values in `view` changed between two readable versions.
    pub fn changes(&self, view: &View, from: u64, to: u64) -> Since {
        let inner = self.lock();
        let history = inner.histories.iter().find(|of| of.view() == view);
        history.map_or(Since::Unknown, |history| history.since(from, to))
    }

    /// Returns what records the next step, or `None` if nobody follows the job.
    pub(super) fn recording(&self, histories: &[History]) -> Option<Recording> {
        let views = histories.iter().map(History::view);
        (!histories.is_empty()).then(|| Recording::new(self.dtype, &self.spec, views))
    }
}
