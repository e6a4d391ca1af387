//! The data of the ranks arrives, is lost, or is sent again.

use bytes::Bytes;
use zeroshard_model::{Error, Result};

use crate::{
    cluster::context::Context,
    job::{Job, Phase},
    state::members::Cause,
    vocabulary::{
        calls::{Attach, RankData, Reply},
        events::Action,
        ids::Caller,
    },
};

impl Job {
    pub(crate) fn user_data(&mut self, caller: Caller, data: RankData, cx: &mut Context<'_>) {
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
        if open.saves.set_user_data(version, open.step(), rank, data) {
            self.complete_if_written(cx);
        }
    }

    /// A worker has continued its lease with a new coordinator, and sends its data again.
    pub(crate) fn attached_data(&mut self, attach: &Attach, cx: &mut Context<'_>) {
        if let Some((version, data)) = &attach.user_data {
            self.store_data(attach.rank, *version, data, cx);
        }
    }

    /// If the data of a rank was lost with the last coordinator, returns the job to its last
    /// checkpoint, if the policy asks for it. A job that all ranks have left stays at its last
    /// version, because its training has ended. Returns whether the job returns to a checkpoint.
    pub(crate) fn return_without_data(&mut self, cx: &mut Context<'_>) -> bool {
        let Self { spec, phase: Phase::Open(open), .. } = self else { return false };
        let Some(rank) = open.saves.first_without_data() else { return false };
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
    pub(crate) fn without_data_of(
        &mut self,
        rank: u32,
        cause: Cause,
        cx: &mut Context<'_>,
    ) -> bool {
        let Phase::Open(open) = &mut self.phase else { return false };
        if !open.saves.rank_ended(rank) {
            return false;
        }
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
