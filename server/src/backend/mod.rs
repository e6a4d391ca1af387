//! Arithmetic on a slice's numbers, and nothing else: no wire, no tasks, no clock.
//!
//! [`Backend`] is what a device must do; [`cpu::Cpu`] is the reference, which every other backend
//! equals bit for bit (`conformance` is the proof). The rules that make that possible: element
//! arithmetic in f32 in the order that the kernels write down, no fused multiply-add, IEEE division
//! and square root, scalars computed in f64 and rounded once, sums in f64 over fixed lanes of fixed
//! blocks.
//!
//! Callers validate: an offset outside a buffer, a torn element or a wrong number of state buffers
//! is a bug in the server, and panics.

// The kernels call functions compiled for the instruction set that was found at run time; memory is
// viewed as numbers.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use zeroshard_proto::Elements;
use zeroshard_proto::dtype::DType;
use zeroshard_proto::optimizer::Optimizer;

pub mod cpu;
#[cfg(test)]
pub(crate) mod instrumented;
pub mod kernels;
mod memory;

#[cfg(test)]
mod conformance;

pub use cpu::Cpu;

/// A device that holds slices of numbers and computes on them.
pub trait Backend: Send + Sync + 'static {
    /// An array of some number of elements of one dtype.
    type Buffer: Send + Sync + 'static;

    /// A zeroed array.
    ///
    /// # Errors
    /// [`OutOfMemory`] where the device has not that much; nothing is lost then.
    fn allocate(&self, dtype: DType, numel: usize) -> Result<Self::Buffer, OutOfMemory>;

    /// How many elements `buffer` has.
    fn numel(&self, buffer: &Self::Buffer) -> usize;

    /// The dtype of `buffer`'s elements.
    fn dtype(&self, buffer: &Self::Buffer) -> DType;

    /// Converts `src` (little endian, of `dtype`, at any address, one value for each of `at`) and
    /// stores it. Returns whether all values of `src` are finite.
    fn store(
        &self,
        dst: &mut Self::Buffer,
        at: impl Into<Elements>,
        src: &[u8],
        dtype: DType,
    ) -> bool;

    /// Converts `src` as [`Backend::store`] does, and adds it to `dst`, which is f32. Returns
    /// whether all values of `src` are finite.
    fn accumulate(
        &self,
        dst: &mut Self::Buffer,
        at: impl Into<Elements>,
        src: &[u8],
        dtype: DType,
    ) -> bool;

    /// Makes every NaN among these elements of `dst`, which is f32, the same one, 0x7fc00000. Which
    /// NaN an addition gives depends on the order of its operands and on the machine.
    fn canonicalise(&self, dst: &mut Self::Buffer, at: impl Into<Elements>);

    /// Elements as little-endian bytes of `dtype`, rounded to nearest even. Where they are
    /// consecutive and `dtype` is the buffer's own nothing is copied: the bytes keep the buffer
    /// alive. Else they are copied once.
    fn read(&self, src: &Arc<Self::Buffer>, from: impl Into<Elements>, dtype: DType) -> Bytes;

    /// The sum of squares of the elements of `range`, which begins where a block does, in f64: see
    /// [`kernels::sum`] for the order. It is finite exactly if every element is.
    fn sum_of_squares(&self, src: &Self::Buffer, range: Range<usize>) -> f64;

    /// One optimizer step in one pass over memory (LAMB: two). `master`, `state` (one buffer for
    /// each of [`Optimizer::state`], in that order) and `gradient` are f32 and of equal size. The
    /// new master is also cast into `published`, where there is one, while it is in cache.
    fn apply(
        &self,
        update: &Update<'_>,
        master: &mut Self::Buffer,
        state: &mut [&mut Self::Buffer],
        gradient: &Self::Buffer,
        published: Option<&mut Self::Buffer>,
    );

    /// Copies all of `src` into `dst`, which has as many elements, casting where the dtypes differ.
    fn copy(&self, src: &Self::Buffer, dst: &mut Self::Buffer);
}

/// What is the same for every slice of a parameter group in one step.
#[derive(Clone, Copy, Debug)]
pub struct Update<'a> {
    /// The optimizer and this step's hyperparameters.
    pub optimizer: &'a Optimizer,
    /// How many steps will have been applied after this one: 1 at the first. Skipped steps do not
    /// count.
    pub step: u64,
    /// What the gradient is multiplied by: clip coefficient over loss scale and number of
    /// contributions.
    pub coefficient: f32,
}

/// The device cannot hold another array of that size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("out of memory: cannot allocate {numel} elements of {dtype}")]
pub struct OutOfMemory {
    /// How many elements were asked for.
    pub numel: usize,
    /// Of which dtype.
    pub dtype: DType,
}
