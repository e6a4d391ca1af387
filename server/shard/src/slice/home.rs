//! Where the arrays of a slice are: in memory, or in another tier.

use std::sync::Arc;

use zeroshard_kernels::{Backend, Failure, fill};
use zeroshard_model::{DType, Optimizer, Result, optimizer::StateShape};

use super::versioned::Versioned;
use crate::{
    device::Home,
    tier::{Array, Kind, Tier, Tiers},
};

/// Where the arrays of one slice are allocated.
pub(super) struct Of<'a, B: Backend> {
    pub(super) home: Home<'a, B>,
    pub(super) slice: u32,
    /// Its tensor, for errors.
    pub(super) tensor: &'a str,
}

impl<B: Backend> Of<'_, B> {
    pub(super) fn backend(&self) -> Arc<B> {
        self.home.device.backend.clone()
    }

    /// The tiers, if arrays of the slice are outside of memory.
    pub(super) fn tiers(&self) -> Option<Arc<Tiers<B>>> {
        let Home { device, places } = self.home;
        device.tiers.as_ref().filter(|_| !places.are_all_in_memory()).cloned()
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
        let Home { device, places } = self.home;
        match (&device.tiers, places.tier(kind)) {
            (Some(tiers), tier) if dtype == DType::F32 && tier != Tier::Memory => {
                tiers.paged(tier, self.slice, numel, filled)
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
        let Self { home: Home { device, .. }, slice, tensor } = *self;
        let backend = &*device.backend;
        let of_slice = |failure: Failure| failure.of(format!("slice {slice} of tensor {tensor:?}"));
        let mut buffer = backend.allocate(dtype, numel).map_err(of_slice)?;
        if let Some(value) = filled.filter(|&value| value != 0.0) {
            fill(backend, &mut buffer, value)?;
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
