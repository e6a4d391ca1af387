//! The descriptions of jobs by their servers, for a coordinator that does not know them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use zeroshard_model::{Attempt, JobSpec, Restore, Succession};

use super::{
    decisions::Decision,
    events::{Lease, ServerId},
    jobs::Plan,
    reduce::Reduced,
};

/// A job as one of its servers describes it.
#[derive(Debug, Clone)]
pub(crate) struct Held {
    pub(crate) id: u64,
    /// The term of the coordinator that the server has followed last.
    pub(crate) term: u64,
    pub(crate) spec: Arc<JobSpec>,
    pub(crate) plan: Plan,
    pub(crate) succession: Option<Arc<Succession>>,
    pub(crate) restore: Option<Arc<Restore>>,
    /// The open attempt.
    pub(crate) attempt: Attempt,
    /// `true` if version 0 is published.
    pub(crate) published: bool,
    /// Before that: whether the server has all initial parameters of its slices.
    pub(crate) initialised: bool,
    pub(crate) ranks: Ranks,
    /// If the attempt is open because every rank has rested: the highest rank of the last step.
    pub(crate) rested: Option<u32>,
    /// The gradients of the open attempt, if they are complete.
    pub(crate) ready: Option<Reduced>,
    /// The slices of which the server is a backup without complete content.
    pub(crate) empty: BTreeSet<u32>,
    /// The number of the last copy of which the server has been told; 0 for none.
    pub(crate) copies: u64,
    /// `true` if the server was reading the checkpoint to which the job returns. It has no slices.
    pub(crate) restoring: bool,
    /// The epoch and the version in which the job was restored while ranks were waiting.
    pub(crate) restored: Option<(u64, u64)>,
    /// The decision about the previous step, and the gradients that it is about.
    pub(crate) decided: Option<(Decision, Reduced)>,
}

/// A server's knowledge of the ranks of a job.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Ranks {
    pub(crate) leases: BTreeMap<u32, Lease>,
    /// Ranks that have no more data.
    pub(crate) done: BTreeSet<u32>,
    /// Ranks that have left in order.
    pub(crate) left: BTreeSet<u32>,
    /// For each rank that rests, the step since when, and whether means exclude it.
    pub(crate) resting: BTreeMap<u32, (u64, bool)>,
}

/// How late a description is: the term of the coordinator that the server has followed, and the
/// epoch of the job.
pub(crate) type Age = (u64, u64);

impl Held {
    pub(super) fn age(&self) -> Age {
        (self.term, self.attempt.epoch)
    }

    /// The slices whose content `server` has. It must be the one that has sent this description.
    pub(super) fn full_slices(&self, server: ServerId) -> BTreeSet<u32> {
        let slices = self.plan.placement.slices_of(server).map(|(slice, _)| slice as u32);
        slices.filter(|slice| !self.restoring && !self.empty.contains(slice)).collect()
    }
}
