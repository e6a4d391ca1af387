//! The checkpoints of an open job: the save in progress, the next one and the last one.

use std::collections::BTreeSet;

use bytes::Bytes;
use zeroshard_model::Error;

use crate::{
    calls::Saved,
    commands::{Checkpoint, SavePlan},
    ids::{Now, ServerId, Waiter},
    reports::Files,
    user_data::UserData,
};

/// The checkpoints of an open job.
#[derive(Debug, Default)]
pub struct Saves {
    pub(crate) current: Option<Saving>,
    /// The save that begins when the current one has ended.
    pub(crate) next: Option<Next>,
    /// The last complete checkpoint, and where it is.
    pub(crate) last: Option<(Saved, String)>,
    /// When that checkpoint was completed.
    pub completed: Option<Now>,
    /// The number of saves that have failed since, and the error of the last one.
    pub failures: u32,
    pub failure: Option<String>,
    /// The checkpoint from which the job has started or to which it has returned.
    pub(crate) origin: Option<Checkpoint>,
    /// When the last save began; before the first one, when the first step was decided.
    pub(crate) began: Option<Now>,
    /// When an unused job is saved again, after a save has failed.
    pub(crate) retry_at: Now,
    /// That of the ranks for the current version.
    pub(crate) user_data: UserData,
}

/// A save that is not complete.
#[derive(Debug)]
pub(crate) struct Saving {
    pub(crate) plan: SavePlan,
    pub(crate) since: Now,
    pub(crate) deadline: Now,
    /// The servers that have not written their slices yet. If it is empty, and no data of a rank is
    /// awaited, the manifest is being written.
    pub(crate) pending: BTreeSet<ServerId>,
    pub(crate) files: Vec<Files>,
    pub(crate) user_data: UserData,
    pub(crate) waiters: Vec<Waiter>,
}

/// A save that waits for the end of another one.
#[derive(Debug)]
pub(crate) struct Next {
    pub(crate) url: String,
    pub(crate) keep: u32,
    pub(crate) waiters: Vec<Waiter>,
}

impl Saves {
    /// Returns whether the current save waits for a server.
    pub(crate) fn awaits(&self, server: ServerId) -> bool {
        self.current.as_ref().is_some_and(|saving| saving.pending.contains(&server))
    }

    /// The version that is being saved.
    pub fn current(&self) -> Option<u64> {
        self.current.as_ref().map(|saving| saving.plan.version)
    }

    /// The last version that has been saved.
    pub fn last(&self) -> Option<u64> {
        self.last.as_ref().map(|(saved, _)| saved.version)
    }

    /// The last complete checkpoint, if it is of this version and at `url`.
    pub(crate) fn saved(&self, version: u64, url: &str) -> Option<Saved> {
        let (saved, place) = self.last.as_ref()?;
        Some(*saved).filter(|saved| saved.version == version && place == url)
    }

    pub(crate) fn next_deadline(&self) -> Option<Now> {
        let saving = self.current.as_ref()?;
        let waiters = self.next.iter().flat_map(|next| &next.waiters).chain(&saving.waiters);
        waiters.map(|waiter| waiter.deadline).chain([saving.deadline]).min()
    }

    /// Gives up all saves, and returns the calls that wait for them.
    pub(crate) fn into_waiters(self) -> Vec<Waiter> {
        let current = self.current.map(|saving| saving.waiters).unwrap_or_default();
        let next = self.next.map(|next| next.waiters).unwrap_or_default();
        [current, next].concat()
    }

    /// Removes the calls from those that wait. Returns them.
    pub(crate) fn take_waiters(&mut self, taken: impl Fn(&Waiter) -> bool) -> Vec<Waiter> {
        let current = self.current.iter_mut().map(|saving| &mut saving.waiters);
        let waiting = current.chain(self.next.iter_mut().map(|next| &mut next.waiters));
        waiting
            .flat_map(|waiters| waiters.extract_if(.., |of| taken(of)).collect::<Vec<_>>())
            .collect()
    }

    /// Stores the data of a rank for a version. Returns whether the current save has waited for it.
    pub(crate) fn set_user_data(&mut self, version: u64, rank: u32, data: &Bytes) -> bool {
        let saving = self.current.as_mut().filter(|saving| saving.plan.version == version);
        saving.is_some_and(|saving| saving.user_data.set(rank, data.clone()))
    }

    /// If the current save waits for the data of a rank for which `is_over` is true: the number of
    /// the save, and its error.
    pub(crate) fn without_data_of(
        &self,
        job: &str,
        is_over: impl Fn(u32) -> bool,
    ) -> Option<(u64, Error)> {
        let Saving { plan: SavePlan { save, version, .. }, user_data, .. } =
            self.current.as_ref()?;
        let rank = user_data.awaited.iter().copied().find(|&rank| is_over(rank))?;
        let (job, version) = (job.to_owned(), *version);
        Some((*save, Error::UserDataLost { job, version, rank }))
    }

    /// The current save, if it has this number.
    pub(crate) fn of(&mut self, save: u64) -> Option<&mut Saving> {
        self.current.as_mut().filter(|saving| saving.plan.save == save)
    }
}
