//! Arithmetic on the numbers of a slice, without networking, tasks or a clock.
//!
//! [`Backend`] is the interface of a device. [`cpu::Cpu`] is the reference, which every other
//! backend equals bit for bit (tested by `conformance`). The rules that make this possible: element
//! arithmetic in f32 in the order of the kernels, no fused multiply-add, IEEE division and square
//! root, scalars computed in f64 and rounded once, sums in f64 over fixed lanes of fixed blocks.
//!
//! Callers validate the arguments. An offset outside a buffer, an incomplete element or a wrong
//! number of state buffers is a bug in the server, and panics.

// The kernels call functions that are compiled for the instruction set found at run time, and
// memory is viewed as numbers.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use zeroshard_model::{
    Elements,
    dtype::DType,
    optimizer::{AppliedSteps, Optimizer},
};

pub mod cpu;
mod cuda;
mod failure;
pub mod loops;
mod memory;
mod optim;

#[cfg(test)]
mod conformance;

pub use cpu::Cpu;
pub use cuda::driver::lane::Lane;
pub use failure::{DeviceName, Failure, Result};
pub use memory::{Memory, has_headroom};
pub use optim::{fill, initial_state};

/// The number of GPUs of this machine.
///
/// # Errors
/// [`Failure::Unavailable`] if there is no driver, no GPU, or an old driver.
pub fn gpus() -> Result<usize> {
    cuda::driver::library::device_count()
}

/// Opens a GPU.
///
/// # Errors
/// [`Failure`] if there is no such GPU, or it cannot be used.
pub fn gpu(number: usize) -> Result<impl Backend> {
    cuda::Cuda::open(number)
}

/// A device that holds slices of numbers and computes on them.
///
/// After an error, the elements that the operation was to write have undefined values. A device
/// may carry out an operation after the call has returned; the error of a later call is then the
/// error of that operation.
pub trait Backend: Send + Sync + 'static {
    /// `true` if a block is best summed as soon as it is complete, while it is in cache. Otherwise
    /// all blocks are summed at once.
    const SUMS_EARLY: bool;

    /// An array of elements of one dtype.
    type Buffer: Send + Sync + 'static;

    /// The device.
    fn device(&self) -> DeviceName {
        DeviceName::Cpu
    }

    /// Returns whether every operation fails from now on.
    fn is_lost(&self) -> bool {
        false
    }

    /// Returns the counters of the device, if it is a GPU.
    fn usage(&self) -> Option<Usage> {
        None
    }

    /// Allocates a zeroed array. Its memory may be provided when it is used for the first time, or
    /// by [`Backend::populate`].
    ///
    /// # Errors
    /// [`Failure::OutOfMemory`] if the device does not have enough memory; existing arrays are not
    /// affected.
    fn allocate(&self, dtype: DType, numel: usize) -> Result<Self::Buffer>;

    /// Provides the memory of these elements now, so that their first use is as fast as later ones.
    fn populate(&self, buffer: &mut Self::Buffer, range: Range<usize>);

    /// The number of elements of `buffer`.
    fn numel(&self, buffer: &Self::Buffer) -> usize;

    /// The dtype of the elements of `buffer`.
    fn dtype(&self, buffer: &Self::Buffer) -> DType;

    /// Converts `src` and stores it. `src` is little endian, of `dtype`, at any address, with one
    /// value for each element of `at`. Returns whether all values of `src` are finite; a device may
    /// carry out the rest later.
    fn store(
        &self,
        dst: &mut Self::Buffer,
        at: impl Into<Elements>,
        src: &[u8],
        dtype: DType,
    ) -> Result<bool>;

    /// Converts `src` like [`Backend::store`], and adds it to `dst`, which is f32. Returns whether
    /// all values of `src` are finite.
    fn accumulate(
        &self,
        dst: &mut Self::Buffer,
        at: impl Into<Elements>,
        src: &[u8],
        dtype: DType,
    ) -> Result<bool>;

    /// Replaces every NaN among these elements of `dst`, which is f32, by 0x7fc00000. The bits of
    /// the NaN that an addition produces depend on the order of its operands and on the machine.
    fn canonicalise(&self, dst: &mut Self::Buffer, at: impl Into<Elements>) -> Result<()>;

    /// Reads elements as little-endian bytes of `dtype`, rounded to nearest even. If the elements
    /// are consecutive and `dtype` is the buffer's own dtype, nothing is copied, and the bytes keep
    /// the buffer alive. Otherwise they are copied once.
    fn read(
        &self,
        src: &Arc<Self::Buffer>,
        from: impl Into<Elements>,
        dtype: DType,
    ) -> Result<Bytes>;

    /// The sum of squares of each block of `range` in f64. `range` begins at the beginning of a
    /// block; see [`loops::sum`] for the order. A sum is finite exactly if every element of the
    /// block is finite.
    fn block_sums(&self, src: &Self::Buffer, range: Range<usize>) -> Result<Vec<f64>>;

    /// Applies one optimizer step in one pass over memory (LAMB: two, Adafactor: three). `master`,
    /// `state` (one buffer for each of [`Optimizer::state`], in that order) and `gradient` are f32
    /// and of equal size, except state of another shape ([`Optimizer::state_shapes`]). The new
    /// master is also cast into `published`, if there is one, while it is in cache.
    fn apply(
        &self,
        update: &Update<'_>,
        master: Output<'_, Self::Buffer>,
        state: Vec<Output<'_, Self::Buffer>>,
        gradient: &Self::Buffer,
        published: Option<&mut Self::Buffer>,
    ) -> Result<()>;

    /// Copies `src` into `dst`, which has the same number of elements, and casts if the dtypes
    /// differ.
    fn copy(&self, src: &Self::Buffer, dst: &mut Self::Buffer) -> Result<()>;
}

/// The counters of a GPU since it was opened.
#[derive(Debug, Clone, PartialEq)]
pub struct Usage {
    /// The bytes of its memory that are in use, by any process, and of all of it. None: the device
    /// is lost.
    pub memory: Option<(u64, u64)>,
    /// Bytes copied to the device.
    pub uploaded: u64,
    /// Bytes copied from the device.
    pub downloaded: u64,
    /// The time in kernels.
    pub kernels: Duration,
}

/// An array that a step reads and writes.
pub struct Output<'a, T> {
    /// Receives the new values.
    pub buffer: &'a mut T,
    /// The earlier values, if they are not in `buffer` because a reader holds them.
    pub earlier: Option<Arc<T>>,
}

impl<'a, T> From<&'a mut T> for Output<'a, T> {
    fn from(buffer: &'a mut T) -> Self {
        Self { buffer, earlier: None }
    }
}

/// The parameters of a step that are equal for all slices of a parameter group.
#[derive(Clone, Copy, Debug)]
pub struct Update<'a> {
    /// The optimizer and this step's hyperparameters.
    pub optimizer: &'a Optimizer,
    /// The number of applied steps including this one: 1 at the first. Skipped steps do not count.
    pub step: u64,
    /// The values of [`Optimizer::scalar_state`] before this step.
    pub scalar_state: [f32; 2],
    /// The factor of the gradient: the clip coefficient divided by the loss scale and the number of
    /// contributions.
    pub coefficient: f32,
}

impl<'a> Update<'a> {
    /// The step that follows the `applied` ones.
    pub fn after(applied: AppliedSteps, optimizer: &'a Optimizer, coefficient: f32) -> Self {
        let scalar_state = match optimizer {
            _ if applied.count > 0 => applied.scalar_state,
            Optimizer::NAdam(_) => [1.0, 0.0],
            Optimizer::Asgd(asgd) => [asgd.lr as f32, 1.0],
            _ => [0.0; 2],
        };
        Self { optimizer, step: applied.count + 1, scalar_state, coefficient }
    }

    /// The applied steps, including this one.
    pub fn applied(&self) -> AppliedSteps {
        let Self { step, scalar_state: [first, _], .. } = *self;
        let scalar_state = match self.optimizer {
            Optimizer::NAdam(nadam) => [loops::nadam::mu_product_after(nadam, step, first), 0.0],
            Optimizer::Asgd(asgd) => loops::asgd::eta_and_mu_after(asgd, step),
            _ => [0.0; 2],
        };
        AppliedSteps { count: step, scalar_state }
    }
}
