//! Values of 8-bit state that arrive in chunks of any size: initial values, those of a checkpoint,
//! and those of another server or job.
//!
//! The elements of a tile have one exponent, so that rounding chunk by chunk would give results
//! that depend on the chunks. The values of a state tensor of the slice are therefore f32 until all
//! of them have arrived, and are then rounded once.

use std::ops::Range;

use zeroshard_kernels::{Backend, Failure};
use zeroshard_model::{DType, Result};

use super::{Inner, versioned::Versioned};
use crate::{ranges::Ranges, tier::Array};

/// The number of elements that are decoded at once.
const DECODED: usize = 1 << 18;

/// The values of a state tensor. Elements that have not arrived have their earlier values.
pub(super) struct Staged<B: Backend> {
    values: B::Buffer,
    /// The elements that have arrived, if they arrive in ranges.
    arrived: Ranges,
}

impl<B: Backend> Staged<B> {
    /// The values of `state`, for changes.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::OutOfMemory`]; [`zeroshard_model::Error::Storage`].
    pub(super) fn values<'a>(
        staged: &'a mut Option<Self>,
        backend: &B,
        state: &Versioned<B>,
    ) -> Result<&'a mut B::Buffer> {
        match staged {
            Some(staged) => Ok(&mut staged.values),
            none => Ok(&mut none.insert(Self::of(backend, state.current())?).values),
        }
    }

    fn of(backend: &B, state: &Array<B>) -> Result<Self> {
        let numel = state.numel(backend);
        let values = backend.allocate(DType::F32, numel);
        let of_upload = |failure: Failure| failure.of("values of 8-bit state that arrive");
        let mut values = values.map_err(of_upload)?;
        for start in (0..numel).step_by(DECODED) {
            let range = start..numel.min(start + DECODED);
            let bytes = state.read(backend, range.clone(), DType::F32)?;
            backend.store(&mut values, range, &bytes, DType::F32)?;
        }
        Ok(Self { values, arrived: Ranges::default() })
    }

    /// Its memory in bytes.
    pub(super) fn bytes(&self, backend: &B) -> u64 {
        backend.bytes(&self.values) as u64
    }
}

impl<B: Backend> Inner<B> {
    /// Returns whether a state tensor is 8-bit state.
    pub(super) fn is_coded(&self, position: usize) -> bool {
        position < self.staged.len()
    }

    /// Stores values of consecutive elements of 8-bit state, and encodes all elements when they
    /// have arrived.
    ///
    /// # Errors
    /// Those of [`Staged::values`].
    pub(super) fn stage(
        &mut self,
        backend: &B,
        position: usize,
        elements: Range<usize>,
        bytes: &[u8],
    ) -> Result<()> {
        let staged = &mut self.staged[position];
        let values = Staged::values(staged, backend, &self.state[position])?;
        backend.store(values, elements.clone(), bytes, DType::F32)?;
        let numel = backend.numel(values);
        let is_complete = staged.as_mut().is_some_and(|staged| {
            staged.arrived.insert(elements);
            staged.arrived.is_all(numel)
        });
        if is_complete { self.encode_staged(backend, position) } else { Ok(()) }
    }

    /// Encodes the values of a state tensor that have arrived, if there are any.
    ///
    /// # Errors
    /// Those of [`Versioned::write`], after which the values are kept.
    pub(super) fn encode_staged(&mut self, backend: &B, position: usize) -> Result<()> {
        if let Some(Staged { values, .. }) = &self.staged[position] {
            let mut state = self.state[position].write(backend)?;
            backend.copy(values, &mut state)?;
            drop(state);
            self.staged[position] = None;
        }
        Ok(())
    }

    /// Encodes all values that have arrived: no others will.
    ///
    /// # Errors
    /// Those of [`Self::encode_staged`].
    pub(super) fn encode_all_staged(&mut self, backend: &B) -> Result<()> {
        (0..self.staged.len()).try_for_each(|position| self.encode_staged(backend, position))
    }

    /// Forgets the values that have arrived: all of them will arrive again.
    pub(super) fn forget_staged(&mut self) {
        self.staged.fill_with(|| None);
    }
}
