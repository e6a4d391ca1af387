//! Where the arrays of a slice are: in memory or on disk.

use std::sync::Arc;

use zeroshard_proto::{DType, Optimizer, Result, optimizer::StateShape};

use super::versioned::Versioned;
use crate::{
    backend::{Backend, Failure},
    optim,
    tier::{Array, Kind, OnDisk, Paged, Tiers},
};

/// Where the arrays of a slice are allocated.
pub(crate) struct Home<'a, B: Backend> {
    pub(crate) backend: &'a B,
    /// The arrays that are on disk.
    pub(crate) disk: Option<(&'a Arc<Tiers<B>>, OnDisk)>,
}

impl<'a, B: Backend> From<&'a B> for Home<'a, B> {
    fn from(backend: &'a B) -> Self {
        Self { backend, disk: None }
    }
}

impl<'a, B: Backend> Home<'a, B> {
    /// The same for a slice of `tensor`, for errors.
    pub(super) fn of(self, slice: u32, tensor: &'a str) -> Of<'a, B> {
        Of { home: self, slice, tensor }
    }
}

/// Where the arrays of one slice are allocated.
pub(super) struct Of<'a, B: Backend> {
    home: Home<'a, B>,
    slice: u32,
    tensor: &'a str,
}

impl<B: Backend> Of<'_, B> {
    /// The tiers, if arrays of the slice are on disk.
    pub(super) fn tiers(&self) -> Option<&Arc<Tiers<B>>> {
        self.home.disk.filter(|(_, on_disk)| !on_disk.is_empty()).map(|(tiers, _)| tiers)
    }

    /// An array of `numel` elements; `filled`: their value, otherwise they are written before they
    /// are read.
    pub(super) fn array(
        &self,
        kind: Kind,
        dtype: DType,
        numel: usize,
        filled: Option<f32>,
    ) -> Result<Array<B>> {
        match self.home.disk {
            Some((tiers, on_disk)) if on_disk.has(kind) && dtype == DType::F32 => {
                Ok(Array::Disk(Arc::new(Paged::new(tiers, self.slice, numel, filled)?)))
            }
            _ => self.in_memory(dtype, numel, filled),
        }
    }

    /// An array in memory.
    pub(super) fn in_memory(
        &self,
        dtype: DType,
        numel: usize,
        filled: Option<f32>,
    ) -> Result<Array<B>> {
        let Self { home: Home { backend, .. }, slice, tensor } = *self;
        let of_slice = |failure: Failure| failure.of(format!("slice {slice} of tensor {tensor:?}"));
        let mut buffer = backend.allocate(dtype, numel).map_err(of_slice)?;
        if let Some(value) = filled.filter(|&value| value != 0.0) {
            optim::fill(backend, &mut buffer, value)?;
        }
        Ok(Array::Memory(Arc::new(buffer)))
    }

    /// The state tensors before the first step.
    pub(super) fn state(
        &self,
        optimizer: &Optimizer,
        shape: &[u64],
        numel: usize,
    ) -> Result<Vec<Versioned<B>>> {
        let state = optimizer.state_shapes(shape).into_iter().enumerate();
        let state = state.map(|(position, shape): (usize, StateShape)| {
            let filled = Some(optimizer.initial_state());
            let numel = shape.numel(numel);
            self.array(Kind::State(position), DType::F32, numel, filled).map(Versioned::new)
        });
        state.collect()
    }
}
