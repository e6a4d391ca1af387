//! The launches of an optimizer's step.

use zeroshard_model::geometry::blocks::{BLOCK, TILE};

use super::launch::{Address, Array, Launch, Published};
use crate::{
    kernel::{self, Update},
    random,
};

/// The arrays of a step, and their numbers of elements.
pub(crate) struct Step {
    pub(crate) numel: usize,
    pub(crate) master: Array,
    pub(crate) state: Vec<(Array, usize)>,
    pub(crate) gradient: Address,
    pub(crate) published: Published,
    /// `None`: the state is f32.
    pub(crate) rounding: Option<Rounding>,
}

/// The rounding of 8-bit state after a step.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Rounding {
    key: u64,
    /// The number of the first tile in the tensor.
    tile: u64,
}

impl Rounding {
    pub(super) fn of(update: &Update<'_>) -> Self {
        let tile = update.at.element / TILE as u64;
        Self { key: random::key(update.step, update.at.tensor), tile }
    }
}

/// Memory for the sums of a step. Its initial content does not matter.
pub(crate) struct Scratch(Address);

impl Scratch {
    pub(crate) fn take(&mut self, bytes: usize) -> Address {
        let taken = self.0;
        self.0 += bytes.next_multiple_of(size_of::<f64>()) as Address;
        taken
    }
}

impl Step {
    /// The number of bytes that the step needs for its sums.
    pub(super) fn scratch_bytes(&self) -> usize {
        let rows = self.state.first().map_or(0, |(_, rows)| *rows);
        size_of::<f64>() * (2 * self.sum_blocks() + 2 * rows + 1)
    }

    /// The launches, in order. `scratch` is the address of [`Self::scratch_bytes`] of memory.
    pub(super) fn launches(&self, update: &Update<'_>, scratch: Address) -> Vec<Launch> {
        if self.numel == 0 {
            return self.copies().collect();
        }
        kernel::of(update.optimizer).launches(update, self, Scratch(scratch))
    }

    /// One launch over all elements, with the arrays in the order of the kernels. A kernel for
    /// 8-bit state has its rounding as the last argument.
    pub(crate) fn one<S: Copy>(&self, kernel: &'static str, scalars: S) -> Vec<Launch> {
        let launch = Launch::over_elements(kernel, self.numel).with(scalars).with(self.numel);
        let launch = launch.with(self.gradient).with(self.published).with(self.master);
        let launch = self.state.iter().fold(launch, |launch, (state, _)| launch.with(*state));
        vec![match self.rounding {
            None => launch,
            Some(rounding) => launch.with(rounding),
        }]
    }

    /// The launches that copy held values of state tensors, because there is nothing to step.
    fn copies(&self) -> impl Iterator<Item = Launch> {
        let held = self.state.iter().filter(|(state, numel)| state.from != state.to && *numel > 0);
        held.map(|(state, numel)| Launch::conversion((state.to, 0), *numel, (state.from, 0)))
    }

    /// The number of blocks of a sum over all elements.
    pub(crate) fn sum_blocks(&self) -> usize {
        self.numel.div_ceil(BLOCK)
    }
}
