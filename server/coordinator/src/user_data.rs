//! The ranks' data for checkpoints: random states, positions in their data, and so on.
//!
//! A rank sends its data with its commit, or after the step if the data depends on the step. In the
//! second case a checkpoint of the version is complete only with the data of every such rank. If a
//! rank ends before it has sent its data, no checkpoint of the version can be made, and no worker
//! could continue from the version as that rank would have.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use zeroshard_model::{Error, Result};

use super::{
    context::Context,
    epochs::Cause,
    events::{Action, Attach, Caller, JobRef, Lease, Reply},
    members::Members,
    state::{Job, Phase},
};

/// The data of the ranks for a version.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct UserData {
    pub(super) ranks: BTreeMap<u32, Bytes>,
    /// The ranks that have not sent their data yet.
    pub(super) awaited: BTreeSet<u32>,
    /// The ranks that ended before they had sent their data.
    pub(super) missing: BTreeSet<u32>,
    /// `true` if the last coordinator had the data that is missing, as far as it had been sent.
    pub(super) went_with_coordinator: bool,
    /// `true` if the version was restored under the last coordinator, which had read the data.
    pub(super) is_unread: bool,
}

/// The data of one rank, sent after a step.
#[derive(Debug)]
pub struct RankData {
    pub job: JobRef,
    pub rank: u32,
    pub lease: Lease,
    pub version: u64,
    pub data: Bytes,
}

impl UserData {
    /// That of a version that was restored from a checkpoint, which may lack that of some ranks.
    pub fn restored(ranks: BTreeMap<u32, Bytes>, lost: &[u32]) -> Self {
        Self { ranks, missing: lost.iter().copied().collect(), ..Self::default() }
    }

    /// The data of ranks, none of which has been received by this coordinator. That of ranks that
    /// are not `members` is lost.
    pub(super) fn lost_with_coordinator(ranks: &[u32], members: &Members) -> Self {
        let is_member = |rank: &u32| members.get(*rank).is_some();
        let (awaited, missing) = ranks.iter().partition(|rank| is_member(rank));
        Self { awaited, missing, went_with_coordinator: true, ..Self::default() }
    }

    /// The first rank without whose data the version cannot be saved. When the training has ended,
    /// the model is saved without data that ranks have sent and the last coordinator has lost. If a
    /// rank has never sent it, programs continue from an earlier checkpoint.
    pub(super) fn lost(&self, has_ended: bool) -> Option<u32> {
        let is_needed = |_: &u32| !(has_ended && self.went_with_coordinator);
        self.missing.first().copied().filter(is_needed).or(self.is_unread.then_some(0))
    }

    /// The ranks that have data.
    pub(super) fn all(&self) -> BTreeSet<u32> {
        self.ranks.keys().chain(&self.awaited).chain(&self.missing).copied().collect()
    }

    /// Returns whether every rank has sent its data.
    pub(super) fn is_complete(&self) -> bool {
        self.awaited.is_empty()
    }

    /// Stores the data of a rank. Returns whether it was the last that was awaited.
    pub(super) fn set(&mut self, rank: u32, data: Bytes) -> bool {
        if !data.is_empty() {
            self.ranks.insert(rank, data);
        }
        self.awaited.remove(&rank) && self.is_complete()
    }
}

impl Job {
    pub(super) fn user_data(&mut self, caller: Caller, data: RankData, cx: &mut Context<'_>) {
        let stored = self.try_user_data(data, cx);
        cx.push(Action::Answer(caller, stored.map(|()| Reply::UserDataStored)));
    }

    fn try_user_data(&mut self, data: RankData, cx: &mut Context<'_>) -> Result<()> {
        let RankData { job, rank, lease, version, data } = data;
        let open = self.phase.open_mut(&job.name)?;
        if open.members.rank_of(lease) != Some(rank) {
            return Err(Error::LeaseLost { job: job.name, rank });
        }
        let current = open.step();
        if version > current {
            return Err(Error::RolledBack { job: job.name, version: current });
        }
        self.store_data(rank, version, &data, cx);
        Ok(())
    }

    fn store_data(&mut self, rank: u32, version: u64, data: &Bytes, cx: &mut Context<'_>) {
        let Phase::Open(open) = &mut self.phase else { return };
        if version == open.step() {
            open.saves.user_data.set(rank, data.clone());
        }
        if open.saves.set_user_data(version, rank, data) {
            self.complete_if_written(cx);
        }
    }

    /// A worker has continued its lease with a new coordinator, and sends its data again.
    pub(super) fn attached_data(&mut self, attach: &Attach, cx: &mut Context<'_>) {
        if let Some((version, data)) = &attach.user_data {
            self.store_data(attach.rank, *version, data, cx);
        }
    }

    /// If the data of a rank was lost with the last coordinator, returns the job to its last
    /// checkpoint, if the policy asks for it. A job that all ranks have left stays at its last
    /// version, because its training has ended. Returns whether the job returns to a checkpoint.
    pub(super) fn return_without_data(&mut self, cx: &mut Context<'_>) -> bool {
        let Self { spec, phase: Phase::Open(open), .. } = self else { return false };
        let Some(&rank) = open.saves.user_data.missing.first() else { return false };
        if open.has_ended(spec.world) {
            return false;
        }
        let version = open.step();
        let loss = format!(
            "the data of rank {rank} for checkpoints of version {version} was lost with the \
             coordinator"
        );
        self.interrupt(&loss, cx)
    }

    /// The lease of a rank ends. If its data of the current version is missing, returns the job to
    /// its last checkpoint, if the policy asks for it; otherwise gives up the save of the version.
    /// Returns whether the job returns to a checkpoint.
    pub(super) fn without_data_of(
        &mut self,
        rank: u32,
        cause: Cause,
        cx: &mut Context<'_>,
    ) -> bool {
        let Phase::Open(open) = &mut self.phase else { return false };
        if !open.saves.user_data.awaited.remove(&rank) {
            return false;
        }
        open.saves.user_data.missing.insert(rank);
        let version = open.step();
        let loss = format!("rank {rank} ended before it had sent its data of version {version}");
        if self.interrupt(&loss, cx) {
            self.end_interrupted(rank, cause);
            return true;
        }
        if let Phase::Open(open) = &self.phase
            && let Some((save, error)) =
                open.saves.without_data_of(&self.name, |other| other == rank)
        {
            self.save_ended(save, Err(error), cx);
        }
        false
    }
}
