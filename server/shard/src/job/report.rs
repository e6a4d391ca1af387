//! The description of a job for a coordinator that does not know it.

use zeroshard_kernels::Backend;
use zeroshard_model::Attempt;

use super::{Decided, Job, Ready, Rest};
use crate::slice::Role;

/// The state of a job, in which all commands of the last coordinator have been carried out.
pub struct JobReport<D> {
    /// The open attempt.
    pub attempt: Attempt,
    /// `true` if version 0 is published.
    pub published: bool,
    /// Before that: whether the server has all initial parameters of its slices.
    pub initialised: bool,
    /// The leases, by rank.
    pub leases: Vec<(u32, u64)>,
    /// Ranks that have no more data.
    pub done: Vec<u32>,
    /// Ranks that have left in order.
    pub left: Vec<u32>,
    pub resting: Vec<Rest>,
    /// If the attempt is open because every rank has rested: the highest rank of the last step.
    pub rested: Option<u32>,
    /// The gradients of the open attempt, if they are complete.
    pub ready: Option<Ready>,
    /// The slices without content, also those without memory.
    pub empty: Vec<u32>,
    /// The slices whose content is being copied.
    pub copying: Vec<u32>,
    /// The number of the last copy that has begun; 0 for none.
    pub copies: u64,
    /// The epoch and the version in which the job was restored while ranks were waiting.
    pub restored: Option<(u64, u64)>,
    /// The decision about the previous step, and the gradients that it is about.
    pub decided: Option<Decided<D>>,
}

impl<B: Backend, D: Send + Sync> Job<B, D> {
    /// The state of this job, in which all commands of the last coordinator have been carried out.
    pub fn report(&self) -> JobReport<D> {
        let with = |role| {
            self.slices().filter(move |(_, slice)| slice.role() == role).map(|(index, _)| index)
        };
        let (empty, copying) =
            (with(Role::Empty).chain(self.unallocated()).collect(), with(Role::Copying).collect());
        let ranks = self.ranks();
        let (leases, done) = (ranks.leases(), ranks.done());
        let (left, resting) = (ranks.left(), ranks.resting());
        drop(ranks);
        let progress = self.progress();
        JobReport {
            attempt: progress.attempt,
            published: progress.version.is_some(),
            initialised: progress.is_upload && progress.waiting == 0,
            leases,
            done,
            left,
            resting,
            rested: progress.rested,
            ready: progress.reduced(),
            empty,
            copying,
            copies: progress.copies,
            restored: self.restored.get().copied(),
            decided: progress.last.clone(),
        }
    }
}
