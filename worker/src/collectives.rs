//! Collective operations among the workers of a job: all-reduce, all-gather and others, on f32
//! data.
//!
//! [`Collectives`] is the interface; [`Peers`] implements it over gRPC between workers, and on
//! request sends large messages over NCCL. Results have the same bits on every rank, whatever the
//! timing and the transport, because the order of a sum depends only on the ranks and the sizes.

mod algorithms;
mod connections;
mod error;
mod gate;
mod listening;
mod mailbox;
mod nccl;
#[cfg(test)]
mod nccl_tests;
mod operation;
mod options;
mod peers;
mod service;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::fmt;

use zeroshard_model::Reduction;

pub use error::{Error, Place, Result};
pub use listening::Listening;
pub use options::Options;
pub use peers::Peers;

/// Collective operations in a group of ranks.
///
/// A group is a list of distinct ranks that includes this rank. Parts are in the order of the
/// group. Every rank of the group must call the same operations in the same order, from one thread
/// at a time. If two ranks call different operations, they receive [`Error::Disagreement`], which
/// names both calls. After an error, all later operations return the same error, and other ranks
/// that wait for this rank receive [`Error::Lost`].
pub trait Collectives: fmt::Debug + Send + Sync {
    /// The rank of this worker.
    fn rank(&self) -> u32;

    /// Reduces the `data` of all ranks, which must have the same size on each rank.
    ///
    /// # Errors
    /// Like all operations: [`Error`].
    fn all_reduce(&self, group: &[u32], reduction: Reduction, data: Vec<f32>) -> Result<Vec<f32>>;

    /// Gathers the `data` of all ranks, in the order of the group. `sizes` has the number of
    /// elements of each rank.
    fn all_gather(&self, group: &[u32], sizes: &[usize], data: Vec<f32>) -> Result<Vec<Vec<f32>>>;

    /// Reduces the parts that all ranks pass for this rank. `parts[i]` is the part for `group[i]`;
    /// the parts may have different sizes.
    fn reduce_scatter(
        &self,
        group: &[u32],
        reduction: Reduction,
        parts: Vec<Vec<f32>>,
    ) -> Result<Vec<f32>>;

    /// Sends `parts[i]` to `group[i]`, and returns the parts that the ranks have sent to this one,
    /// which have `sizes[i]` elements. The part of this rank itself is returned as it is.
    fn all_to_all(
        &self,
        group: &[u32],
        sizes: &[usize],
        parts: Vec<Vec<f32>>,
    ) -> Result<Vec<Vec<f32>>>;

    /// Sends `data` to another rank, without waiting for the receiver.
    fn send(&self, to: u32, data: Vec<f32>) -> Result<()>;

    /// Receives the next message of another rank, which must have `elements` elements.
    fn recv(&self, from: u32, elements: usize) -> Result<Vec<f32>>;

    /// Checks that all ranks of the group pass the same text. `about` names the subject in errors.
    ///
    /// # Errors
    /// [`Error::Disagreement`] with the texts of two ranks.
    fn agree(&self, group: &[u32], about: &str, text: &str) -> Result<()>;
}
