//! Captures a step of a slice: its state before the step, and the contributions to the step.
//!
//! `crate::replay` applies a captured step again.

use std::sync::Arc;

use bytes::Bytes;
use zeroshard_kernels::Backend;
use zeroshard_model::{AppliedSteps, Error, Result};

use super::{Inner, Slice, versioned::Versioned};
use crate::{
    budget::{Budget, Space},
    round::{Chunk, Contributed, exhausted},
    tier::Array,
};

/// A slice before a step, and the contributions to the step.
#[derive(Debug, Default)]
pub struct CapturedSlice {
    /// The hash of the slice before the step: [`Slice::digest`].
    pub before: [u8; 32],
    /// The steps that were applied before.
    pub applied: AppliedSteps,
    /// The master weights and the state tensors, as f32 in little-endian bytes. 8-bit state is
    /// decoded, which loses nothing.
    pub state: Vec<Bytes>,
    /// Disjoint parts of the contributions, in the dtype in which they were added.
    pub chunks: Vec<Chunk>,
    /// The ranks whose other elements count as zeros.
    pub absent: Vec<u32>,
    /// The figures of each rank's contribution.
    pub figures: Vec<Contributed>,
    /// The sum of squares of the reduced gradient.
    pub sum_of_squares: f64,
    /// The part of the budget that it takes.
    pub space: Vec<Space>,
}

impl<B: Backend> Slice<B> {
    /// Keeps the contributions to the attempts that begin from now on, for [`Self::capture`].
    pub fn begin_capture(&self, budget: &Arc<Budget>) {
        self.lock().open.iter_mut().for_each(|open| open.round.begin_recording(budget));
    }

    /// Drops the contributions that were kept, and keeps nothing more.
    pub fn end_capture(&self) {
        self.lock().open.iter_mut().for_each(|open| open.round.end_recording());
    }

    /// Captures the open step, whose gradient is complete, and keeps nothing more. The caller has
    /// begun the capture before the step.
    ///
    /// # Errors
    /// [`Error::Refused`] if the capture began after the step, or if new values of the slice come
    /// with the step; [`Error::OutOfMemory`] if the budget has no room; [`Error::VersionGone`];
    /// [`Error::Storage`], [`Error::Device`].
    pub fn capture(&self, job: &str, version: u64, budget: &Arc<Budget>) -> Result<CapturedSlice> {
        let mut inner = self.lock();
        self.check_version(job, version)?;
        inner.check()?;
        if inner.replacement.is_some() {
            return Err(Error::refused(
                "the ranks send new values of a trained tensor with the step, so gradients do not \
                 determine it; it cannot be captured",
            ));
        }
        let Some(open) = &mut inner.open else {
            return Err(Error::refused("a tensor that is not trained has no step to capture"));
        };
        let recorded = open.round.take_recorded()?;
        open.round.end_recording();
        let captured = CapturedSlice {
            chunks: recorded.chunks,
            absent: open.round.absents().collect(),
            figures: open.round.contributions().collect(),
            sum_of_squares: open.round.sum_of_squares(),
            applied: inner.applied,
            space: recorded.space,
            ..CapturedSlice::default()
        };
        self.with_state(&inner, captured, budget)
    }

    /// The sizes in bytes of what [`CapturedSlice::state`] contains.
    pub(crate) fn state_bytes(&self) -> Vec<usize> {
        let inner = self.lock();
        let size =
            |array: &Array<B>| array.numel(&self.backend) * array.dtype(&self.backend).size();
        arrays(&inner).map(size).collect()
    }

    /// Adds a copy of the state, which the step is about to overwrite. The lock is held, so that
    /// the step needs no memory for a second version.
    fn with_state(
        &self,
        inner: &Inner<B>,
        mut captured: CapturedSlice,
        budget: &Arc<Budget>,
    ) -> Result<CapturedSlice> {
        let mut hasher = self.hasher(&inner.applied);
        for array in arrays(inner) {
            let (numel, dtype) = (array.numel(&self.backend), array.dtype(&self.backend));
            let bytes = (numel * dtype.size()) as u64;
            captured.space.push(budget.take(bytes).ok_or_else(|| exhausted(budget, bytes))?);
            let values = array.read(&self.backend, 0..numel, dtype)?;
            hasher.update(&values);
            captured.state.push(Bytes::copy_from_slice(&values));
        }
        Ok(CapturedSlice { before: *hasher.finalize().as_bytes(), ..captured })
    }
}

/// The master weights and the state tensors.
fn arrays<B: Backend>(inner: &Inner<B>) -> impl Iterator<Item = &Array<B>> {
    [&inner.master].into_iter().chain(&inner.state).map(Versioned::current)
}
