//! What the workers of a job compute together: all-reduce, all-gather and their like over f32 data.
//!
//! [`Collectives`] is what the rest needs to know; [`Peers`] does it over gRPC from worker to
//! worker, and is where a faster transport (NCCL, shared memory) would take its place. Results are
//! the same bits on every rank, and do not depend on timing: the order of a sum follows from the
//! ranks and the sizes alone.

mod algorithms;
mod error;
mod mailbox;
mod operation;
mod peers;
mod service;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::fmt;

use zeroshard_proto::layout::Reduction;

pub use error::{Error, Place, Result};
pub use peers::{Listening, Options, Peers};

/// Operations among the ranks of a group.
///
/// A group is a list of distinct ranks, this one among them; its order is the order of parts. Every
/// rank of the group calls the same operations in the same order, from one thread at a time; two
/// ranks that do not are told what each of them called. Whatever fails, fails all operations from
/// then on with the same error, on this rank and on those that wait for it.
pub trait Collectives: fmt::Debug + Send + Sync {
    /// This worker's rank.
    fn rank(&self) -> u32;

    /// The reduction of everybody's `data`, which has one size everywhere.
    ///
    /// # Errors
    /// All operations: [`Error`].
    fn all_reduce(&self, group: &[u32], reduction: Reduction, data: Vec<f32>) -> Result<Vec<f32>>;

    /// Everybody's `data`, in the group's order. `sizes`: how many elements each has.
    fn all_gather(&self, group: &[u32], sizes: &[usize], data: Vec<f32>) -> Result<Vec<Vec<f32>>>;

    /// The reduction of what everybody has for this rank: `parts[i]` is for `group[i]`, and may
    /// have a size of its own.
    fn reduce_scatter(
        &self,
        group: &[u32],
        reduction: Reduction,
        parts: Vec<Vec<f32>>,
    ) -> Result<Vec<f32>>;

    /// Sends `data` to another rank; does not wait until it is received.
    fn send(&self, to: u32, data: Vec<f32>) -> Result<()>;

    /// The next `elements` that another rank sends to this one.
    fn recv(&self, from: u32, elements: usize) -> Result<Vec<f32>>;

    /// Makes sure that all ranks of the group say the same about something.
    ///
    /// # Errors
    /// [`Error::Disagreement`] with what each of two ranks said.
    fn agree(&self, group: &[u32], about: &str, said: &str) -> Result<()>;
}
