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
    optimizer::{AppliedSteps, Code, Optimizer},
};
use zeroshard_shm::Arena;

pub mod cpu;
mod cuda;
mod failure;
mod kernel;
mod layout;
pub mod loops;
mod memory;
mod optim;
mod random;

#[cfg(test)]
mod conformance;

pub use cpu::Cpu;
pub use cuda::driver::lane::Lane;
pub use failure::{DeviceName, Failure, Result};
pub use kernel::reads_gradient_once;
pub use loops::running_average::weight_of;
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

    /// Returns whether [`Backend::apply`] calls its `record`: this process can read the memory of
    /// the device.
    fn records(&self) -> bool {
        true
    }

    /// Allocates a zeroed array. Its memory may be provided when it is used for the first time, or
    /// by [`Backend::populate`].
    ///
    /// # Errors
    /// [`Failure::OutOfMemory`] if the device does not have enough memory; existing arrays are not
    /// affected.
    fn allocate(&self, dtype: DType, numel: usize) -> Result<Self::Buffer>;

    /// Allocates like [`Backend::allocate`], in `arena` if the device has such memory and there is
    /// room.
    ///
    /// # Errors
    /// Those of [`Backend::allocate`].
    fn allocate_in(&self, _arena: &Arc<Arena>, dtype: DType, numel: usize) -> Result<Self::Buffer> {
        self.allocate(dtype, numel)
    }

    /// Allocates an array of 8-bit optimizer state ([`loops::code`]) whose elements are 0. It has
    /// dtype f32 for all operations: [`Backend::read`] and [`Backend::copy`] decode. What encodes
    /// ([`Backend::store`], [`Backend::copy`]) writes whole tiles, rounded to nearest. No other
    /// operation than [`Backend::apply`] accepts it.
    ///
    /// # Errors
    /// Those of [`Backend::allocate`].
    fn allocate_coded(&self, code: Code, numel: usize) -> Result<Self::Buffer>;

    /// Allocates another array of the same size, dtype and code, if possible in the same arena.
    ///
    /// # Errors
    /// Those of [`Backend::allocate`].
    fn another(&self, of: &Self::Buffer) -> Result<Self::Buffer>;

    /// The size of `buffer` in bytes.
    fn bytes(&self, buffer: &Self::Buffer) -> usize;

    /// The bytes of an array in its arena, if it is in one.
    fn place(&self, _buffer: &Self::Buffer) -> Option<Range<usize>> {
        None
    }

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

    /// Reads the elements `tiles` of 8-bit state, which are whole tiles, as they are stored: a byte
    /// for each element, followed by a byte for each tile.
    fn read_tiles(&self, src: &Self::Buffer, tiles: Range<usize>) -> Result<Bytes>;

    /// Stores what [`Backend::read_tiles`] of a buffer with the same code has returned.
    fn store_tiles(&self, dst: &mut Self::Buffer, tiles: Range<usize>, src: &[u8]) -> Result<()>;

    /// The sum of squares of each block of `range` in f64. `range` begins at the beginning of a
    /// block; see [`loops::sum`] for the order. A sum is finite exactly if every element of the
    /// block is finite.
    fn block_sums(&self, src: &Self::Buffer, range: Range<usize>) -> Result<Vec<f64>>;

    /// Applies one optimizer step in one pass over memory (LAMB: two, Adafactor: three). `master`,
    /// `state` (one buffer for each of [`Optimizer::state`], in that order) and `gradient` are f32
    /// and of equal size, except state of another shape ([`Optimizer::state_shapes`]). All state of
    /// an optimizer with [`Optimizer::state_codes`] may have these codes instead; the new values
    /// are then rounded stochastically. The new master is also cast into `published`, if there is
    /// one, while it is in cache.
    ///
    /// `gradient`: `None` if it is in `master.buffer`, where the new values replace it, and the
    /// earlier values are elsewhere. Only optimizers that [read it once](reads_gradient_once) can
    /// do this.
    ///
    /// `record`: receives the old and the new master while both are in cache, if the device
    /// [records](Backend::records).
    fn apply(
        &self,
        update: &Update<'_>,
        master: Output<'_, Self::Buffer>,
        state: Vec<Output<'_, Self::Buffer>>,
        gradient: Option<&Self::Buffer>,
        published: Option<&mut Self::Buffer>,
        record: Option<&mut dyn Record>,
    ) -> Result<()>;

    /// Moves a running average by the fraction `weight` towards `values`, which is f32 and of the
    /// same size. The average is the sum of two f32 arrays: see [`loops::running_average`].
    fn average(
        &self,
        weight: f64,
        values: &Self::Buffer,
        average: [Output<'_, Self::Buffer>; 2],
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

/// Receives the parameters of a step, in the order of the elements.
pub trait Record {
    /// Receives the next elements: the values before and after the step.
    fn record(&mut self, before: &[f32], after: &[f32]);
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
    /// The first element of the arrays.
    pub at: Position,
}

/// An element of a job, by which the rounding of 8-bit state differs from that of other elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// The index of the tensor in the job.
    pub tensor: u64,
    /// The number of the element in the tensor: the first one of a tile.
    pub element: u64,
}

impl<'a> Update<'a> {
    /// The step that follows the `applied` ones, at the beginning of the first tensor.
    pub fn after(applied: AppliedSteps, optimizer: &'a Optimizer, coefficient: f32) -> Self {
        let scalar_state = match applied.count {
            0 => kernel::of(optimizer).scalars_before(),
            _ => applied.scalar_state,
        };
        let at = Position::default();
        Self { optimizer, step: applied.count + 1, scalar_state, coefficient, at }
    }

    /// The applied steps, including this one, without those that count for averages.
    pub fn applied(&self) -> AppliedSteps {
        let scalar_state = kernel::of(self.optimizer).scalars_after(self);
        AppliedSteps { scalar_state, ..AppliedSteps::new(self.step) }
    }
}
