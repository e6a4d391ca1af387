//! Where the arrays of a slice are: in memory, or in another tier.

use std::{iter::repeat_n, sync::Arc};

use zeroshard_kernels::{Backend, Failure, fill};
use zeroshard_model::{
    DType, Error, Optimizer, Result,
    optimizer::{Code, StateShape},
};

use super::versioned::Versioned;
use crate::{
    device::Home,
    tier::{Array, Form, Kind, Tier, Tiers},
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
        let Home { device, places, .. } = self.home;
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
        match self.paged(kind, dtype, numel, filled) {
            Some(paged) => paged,
            None => self.in_memory(dtype, numel, filled),
        }
    }

    /// Allocates an array that processes on this host can map if it is in memory: published
    /// parameters, or a gradient whose place they take. `kind`: [`Kind::Master`] if the array also
    /// holds the master weights.
    pub(super) fn shared(
        &self,
        kind: Option<Kind>,
        dtype: DType,
        numel: usize,
    ) -> Result<Array<B>> {
        if let Some(paged) = kind.and_then(|kind| self.paged(kind, dtype, numel, None)) {
            return paged;
        }
        let Some(arena) = self.home.arena else { return self.in_memory(dtype, numel, None) };
        let buffer = self.home.device.backend.allocate_in(arena, dtype, numel);
        Ok(Array::Memory(Arc::new(buffer.map_err(|failure| self.failed(failure))?)))
    }

    /// An array outside of memory, if this is where it belongs.
    fn paged(
        &self,
        kind: Kind,
        dtype: DType,
        numel: usize,
        filled: Option<f32>,
    ) -> Option<Result<Array<B>>> {
        let Home { device, places, .. } = self.home;
        let (tiers, tier) = (device.tiers.as_ref()?, places.tier(kind));
        let is_paged = dtype == DType::F32 && tier != Tier::Memory;
        let form = Form { numel, code: None };
        is_paged.then(|| tiers.paged(tier, self.slice, form, filled))
    }

    /// An array of 8-bit state, whose elements are 0.
    fn coded(&self, position: usize, form: Form) -> Result<Array<B>> {
        let Home { device, places, .. } = self.home;
        let tier = places.tier(Kind::State(position));
        match device.tiers.as_ref().filter(|_| tier != Tier::Memory) {
            Some(tiers) => tiers.paged(tier, self.slice, form, Some(0.0)),
            None => {
                let buffer = form.allocate(&*device.backend);
                Ok(Array::Memory(Arc::new(buffer.map_err(|failure| self.failed(failure))?)))
            }
        }
    }

    /// An array in memory.
    pub(super) fn in_memory(
        &self,
        dtype: DType,
        numel: usize,
        filled: Option<f32>,
    ) -> Result<Array<B>> {
        let backend = &*self.home.device.backend;
        let allocated = backend.allocate(dtype, numel);
        let mut buffer = allocated.map_err(|failure| self.failed(failure))?;
        if let Some(value) = filled.filter(|&value| value != 0.0) {
            fill(backend, &mut buffer, value)?;
        }
        Ok(Array::Memory(Arc::new(buffer)))
    }

    fn failed(&self, failure: Failure) -> Error {
        failure.of(format!("slice {} of tensor {:?}", self.slice, self.tensor))
    }

    /// The state tensors before the first step: those of an optimizer, whose `codes` are those of
    /// 8-bit state, and those of averages.
    pub(super) fn state(
        &self,
        (optimizer, codes): (&Optimizer, &[Code]),
        (shape, numel): (&[u64], usize),
        averages: usize,
    ) -> Result<Vec<Versioned<B>>> {
        let own = optimizer.state_shapes(shape).into_iter();
        let own = own.map(|shape| (shape, Some(optimizer.initial_state())));
        let averages = repeat_n((StateShape::Elements, None), averages);
        let state = own.chain(averages).enumerate().map(|(position, (shape, filled))| {
            let numel = shape.numel(numel);
            if let Some(&code) = codes.get(position) {
                return self.coded(position, Form { numel, code: Some(code) }).map(Versioned::new);
            }
            self.array(Kind::State(position), DType::F32, numel, filled).map(Versioned::new)
        });
        state.collect()
    }
}
