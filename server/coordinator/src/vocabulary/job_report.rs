//! The descriptions of jobs by their servers, for a coordinator that does not know them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use zeroshard_model::{Attempt, Fork, JobSpec, Line, RecentSteps, Restore};

use crate::{
    placement::plan::Plan,
    vocabulary::{
        decision::Decision,
        gradient::Reduced,
        ids::{Lease, ServerId},
    },
};

/// A job as one of its servers describes it.
#[derive(Debug, Clone)]
pub struct JobReport {
    pub id: u64,
    /// The term of the coordinator that the server has followed last.
    pub term: u64,
    pub spec: Arc<JobSpec>,
    pub plan: Plan,
    pub fork: Option<Arc<Fork>>,
    pub restore: Option<Arc<Restore>>,
    /// The current line.
    pub line: Arc<Line>,
    /// The figures that the policy on spikes had when the server opened the job.
    pub recent: RecentSteps,
    /// The open attempt.
    pub attempt: Attempt,
    /// `true` if version 0 is published.
    pub published: bool,
    /// Before that: whether the server has all initial parameters of its slices.
    pub initialised: bool,
    pub ranks: Ranks,
    /// If the attempt is open because every rank has rested: the highest rank of the last step.
    pub rested: Option<u32>,
    /// The gradients of the open attempt, if they are complete.
    pub ready: Option<Reduced>,
    /// The slices that the server holds as a backup, and has not copied completely.
    pub empty: BTreeSet<u32>,
    /// The number of the last command to copy slices that the server has received; 0: none.
    pub copies: u64,
    /// `true` if the job returns to a checkpoint, and the server was reading it. It has no slices.
    pub restoring: bool,
    /// The epoch and the version to which the job was restored while ranks were waiting.
    pub restored: Option<(u64, u64)>,
    /// The decision about the previous step, and the gradients that it is about.
    pub decided: Option<(Decision, Reduced)>,
}

/// A server's knowledge of the ranks of a job.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Ranks {
    pub leases: BTreeMap<u32, Lease>,
    /// Ranks that have no more data.
    pub done: BTreeSet<u32>,
    /// Ranks that have left in order.
    pub left: BTreeSet<u32>,
    /// For each rank that rests, the step since when, and whether means exclude it.
    pub resting: BTreeMap<u32, (u64, bool)>,
}

/// How late a description is: the term of the coordinator that the server has followed, and the
/// epoch of the job.
pub type Age = (u64, u64);

impl JobReport {
    pub(crate) fn age(&self) -> Age {
        (self.term, self.attempt.epoch)
    }

    /// The slices that `server`, which has sent this description, holds completely.
    pub(crate) fn full_slices(&self, server: ServerId) -> BTreeSet<u32> {
        let slices = self.plan.placement.slices_of(server).map(|(slice, _)| slice as u32);
        slices.filter(|slice| !self.restoring && !self.empty.contains(slice)).collect()
    }
}
