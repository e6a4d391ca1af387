//! Collective operations among the workers of a job: all-reduce, all-gather and others, on f32
//! data.
//!
//! [`Collectives`] is the interface; [`Peers`] implements it over gRPC from worker to worker. A
//! faster transport (NCCL, shared memory) would be another implementation. Results have the same
//! bits on every rank, and do not depend on timing: the order of a sum follows from the ranks and
//! the sizes alone.

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

use zeroshard_proto::Reduction;

pub use error::{Error, Place, Result};
pub use peers::{Listening, Options, Peers};

/// Operations among the ranks of a group.
///
/// A group is a list of distinct ranks, this one among them; its order is the order of parts. Every
/// rank of the group calls the same operations in the same order, from one thread at a time; two
/// ranks that do not get [`Error::Disagreement`] with both calls. After an error all later
/// operations return the same error, on this rank and on those that wait for it.
pub trait Collectives: fmt::Debug + Send + Sync {
    /// This worker's rank.
    fn rank(&self) -> u32;

    /// The reduction of the `data` of all ranks, which has the same size on each.
    ///
    /// # Errors
    /// All operations: [`Error`].
    fn all_reduce(&self, group: &[u32], reduction: Reduction, data: Vec<f32>) -> Result<Vec<f32>>;

    /// The `data` of all ranks, in the group's order. `sizes`: the number of elements of each.
    fn all_gather(&self, group: &[u32], sizes: &[usize], data: Vec<f32>) -> Result<Vec<Vec<f32>>>;

    /// The reduction of all ranks' parts for this rank: `parts[i]` is for `group[i]`, and may have
    /// a size of its own.
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

    /// Checks that all ranks of the group pass the same text about something.
    ///
    /// # Errors
    /// [`Error::Disagreement`] with the texts of two ranks.
    fn agree(&self, group: &[u32], about: &str, said: &str) -> Result<()>;
}
