//! The checkpoints of an open job: the save in progress, the next one and the last one.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use bytes::Bytes;
use zeroshard_model::{CheckpointPolicy, Error, JobSpec, Line, LineVersion, RecentSteps, Result};

use crate::{
    state::{members::Members, user_data::UserData},
    vocabulary::{
        calls::Saved,
        commands::{Checkpoint, SavePlan},
        events::Completion,
        ids::{Caller, JobRef, Now, ServerId, Waiter, expire},
        reports::Files,
    },
};

/// How long a save may take. It is given up afterwards, so that a store that does not respond does
/// not end all later saves as well.
pub(crate) const SAVE_LIMIT: Duration = Duration::from_secs(3600);

/// The pause after a failed save of an unused job.
const RETRY: Duration = Duration::from_secs(60);

/// The checkpoints of an open job.
#[derive(Debug, Default)]
pub struct Saves {
    current: Option<Saving>,
    /// The save that begins when the current one has ended.
    next: Option<Next>,
    /// The last complete checkpoint, and where it is.
    last: Option<(Saved, String)>,
    /// When that checkpoint was completed.
    completed: Option<Now>,
    /// The number of saves that have failed since, and the error of the last one.
    failures: u32,
    failure: Option<String>,
    /// The checkpoint from which the job has started or to which it has returned.
    origin: Option<Checkpoint>,
    /// When the last save began; before the first one, when the first step was decided.
    began: Option<Now>,
    /// When an unused job is saved again, after a save has failed.
    retry_at: Now,
    /// The data of the ranks for the current version.
    user_data: UserData,
}

/// A save that is not complete.
#[derive(Debug)]
struct Saving {
    plan: SavePlan,
    since: Now,
    deadline: Now,
    /// The servers that have not written their slices yet. If it is empty, and no data of a rank is
    /// awaited, the manifest is being written.
    pending: BTreeSet<ServerId>,
    files: Vec<Files>,
    user_data: UserData,
    recent: RecentSteps,
    waiters: Vec<Waiter>,
}

/// A save that waits for the end of another one.
#[derive(Debug)]
pub(crate) struct Next {
    pub(crate) url: String,
    pub(crate) keep: u32,
    pub(crate) waiters: Vec<Waiter>,
}

/// A save that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) version: u64,
    pub(crate) url: String,
    pub(crate) since: Now,
    /// The calls that wait for it.
    pub(crate) waiters: Vec<Waiter>,
}

/// What a save waits for.
#[derive(Debug)]
pub(crate) enum Lacks {
    /// Servers that write their slices.
    Servers(BTreeSet<ServerId>),
    /// A rank that has not sent its data.
    Rank(u32),
    Manifest,
}

impl Saves {
    /// Registers a request to save `version`. Returns `true` if no save is running, so that the
    /// caller must begin one.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the next save has another place.
    pub(crate) fn request(
        &mut self,
        job: &str,
        version: u64,
        (url, keep): (&str, u32),
        waiter: Waiter,
    ) -> Result<bool> {
        let Some(saving) = &mut self.current else { return Ok(true) };
        if saving.plan.version.version == version && saving.plan.url == url {
            saving.waiters.push(waiter);
            return Ok(false);
        }
        let running = saving.plan.version.version;
        let next = Next { url: url.to_owned(), keep, waiters: Vec::new() };
        let next = self.next.get_or_insert(next);
        if next.url != url {
            let cause =
                format!("its version {running} is being saved, and the next at {}", next.url);
            return Err(Error::Unavailable { peer: format!("job {job:?}"), cause });
        }
        next.waiters.push(waiter);
        Ok(false)
    }

    /// Begins a save by `servers`. `recent`: the figures of the steps before the version.
    pub(crate) fn begin(
        &mut self,
        (plan, recent): (SavePlan, RecentSteps),
        servers: BTreeSet<ServerId>,
        waiters: Vec<Waiter>,
        now: Now,
    ) {
        self.began = Some(now);
        self.current = Some(Saving {
            plan,
            since: now,
            deadline: now + SAVE_LIMIT,
            pending: servers,
            files: Vec::new(),
            user_data: self.user_data.clone(),
            recent,
            waiters,
        });
    }

    /// Returns `true` if the policy asks for a save of the new version.
    pub(crate) fn is_due(&mut self, policy: &CheckpointPolicy, version: u64, now: Now) -> bool {
        let began = *self.began.get_or_insert(now);
        let by_steps = policy.every_steps.is_some_and(|every| version.is_multiple_of(every));
        let by_time = policy.every.is_some_and(|every| now.saturating_sub(began) >= every);
        by_steps || by_time
    }

    /// Queues another save after the current one, unless one is queued already.
    pub(crate) fn save_again(&mut self, url: String, keep: u32) {
        self.next.get_or_insert(Next { url, keep, waiters: Vec::new() });
    }

    /// Records that a server has written its slices. Returns `true` if the save was waiting for
    /// them, and `None` if the current save has another number.
    pub(crate) fn written(&mut self, server: ServerId, save: u64, files: Files) -> Option<bool> {
        let saving = self.current.as_mut().filter(|saving| saving.plan.save == save)?;
        let is_awaited = saving.pending.remove(&server);
        if is_awaited {
            saving.files.push(files);
        }
        Some(is_awaited)
    }

    /// Returns the contents of the manifest once all servers and ranks have done their part.
    pub(crate) fn complete(
        &mut self,
        job: JobRef,
        spec: &Arc<JobSpec>,
        line: &Arc<Line>,
    ) -> Option<Completion> {
        let is_complete =
            |saving: &&mut Saving| saving.pending.is_empty() && saving.user_data.is_complete();
        let saving = self.current.as_mut().filter(is_complete)?;
        let (user_data, lost_ranks) = saving.user_data.take();
        Some(Completion {
            job,
            spec: spec.clone(),
            line: line.clone(),
            plan: saving.plan.clone(),
            files: std::mem::take(&mut saving.files),
            user_data,
            lost_ranks,
            recent: saving.recent.clone(),
        })
    }

    /// Ends a save. `outcome`: its size in bytes, or why it has failed. Returns `None` if the
    /// current save has another number.
    pub(crate) fn end(&mut self, save: u64, outcome: &Result<u64>, now: Now) -> Option<Ended> {
        let Saving { plan, since, waiters, .. } =
            self.current.take_if(|saving| saving.plan.save == save)?;
        let SavePlan { version: LineVersion { version, .. }, url, .. } = plan;
        match outcome {
            &Ok(bytes) => {
                self.last = Some((Saved { version, bytes }, url.clone()));
                self.completed = Some(now);
                self.failures = 0;
                self.failure = None;
            }
            Err(error) => {
                self.retry_at = now + RETRY;
                self.failures = self.failures.saturating_add(1);
                self.failure = Some(error.to_string());
            }
        }
        Some(Ended { version, url, since, waiters })
    }

    /// Takes the queued save.
    pub(crate) fn take_next(&mut self) -> Option<Next> {
        self.next.take()
    }

    /// Returns the version of the current save, and what it waits for.
    pub(crate) fn lacks(&self) -> Option<(u64, Lacks)> {
        let Saving { plan, pending, user_data, .. } = self.current.as_ref()?;
        let lacks = match user_data.awaited().next() {
            _ if !pending.is_empty() => Lacks::Servers(pending.clone()),
            Some(rank) => Lacks::Rank(rank),
            None => Lacks::Manifest,
        };
        Some((plan.version.version, lacks))
    }

    /// Returns the number of the current save if its deadline has come.
    pub(crate) fn overdue(&self, now: Now) -> Option<u64> {
        let saving = self.current.as_ref().filter(|saving| saving.deadline <= now)?;
        Some(saving.plan.save)
    }

    /// Returns the number of the current save if it waits for the server.
    pub(crate) fn awaits(&self, server: ServerId) -> Option<u64> {
        let saving = self.current.as_ref().filter(|saving| saving.pending.contains(&server))?;
        Some(saving.plan.save)
    }

    /// The version that is being saved.
    pub fn current(&self) -> Option<u64> {
        self.current.as_ref().map(|saving| saving.plan.version.version)
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

    /// Returns the URL of the last complete checkpoint.
    pub(crate) fn last_url(&self) -> Option<&str> {
        self.last.as_ref().map(|(_, url)| url.as_str())
    }

    /// Returns when the last checkpoint was completed.
    pub fn completed(&self) -> Option<Now> {
        self.completed
    }

    /// Returns how many saves have failed since the last complete checkpoint.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Returns the error of the last failed save.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Returns when an unused job may be saved again after a failure.
    pub(crate) fn retry_at(&self) -> Now {
        self.retry_at
    }

    /// Returns the checkpoint from which the job started or to which it returned.
    pub(crate) fn origin(&self) -> Option<&Checkpoint> {
        self.origin.as_ref()
    }

    /// Records that the job was restored from a checkpoint with this data of the ranks.
    pub(crate) fn restored(&mut self, checkpoint: Checkpoint, user_data: UserData) {
        self.origin = Some(checkpoint);
        self.user_data = user_data;
    }

    /// Records a new version. `user_data`: the data of the ranks for it.
    pub(crate) fn stepped(&mut self, user_data: UserData) {
        self.user_data = user_data;
    }

    /// Records a version that a step has made and a new coordinator has learned. The data that
    /// `ranks` sent to the old coordinator is lost.
    pub(crate) fn learned(&mut self, ranks: &[u32], members: &Members) {
        self.user_data = UserData::lost_with_coordinator(ranks, members);
    }

    /// Records a restored version that a new coordinator has learned. Its checkpoint still exists.
    pub(crate) fn learned_restored(&mut self) {
        self.user_data = UserData::unread();
    }

    /// Returns the first rank whose lost data prevents a save of the current version. `has_ended`:
    /// the training has ended.
    pub(crate) fn lost_data(&self, has_ended: bool) -> Option<u32> {
        self.user_data.lost(has_ended)
    }

    /// Returns the first rank that ended before it sent its data of the current version.
    pub(crate) fn first_without_data(&self) -> Option<u32> {
        self.user_data.first_missing()
    }

    /// Notes that a rank has ended. Returns `true` if its data of the current version is missing
    /// now.
    pub(crate) fn rank_ended(&mut self, rank: u32) -> bool {
        self.user_data.ended(rank)
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

    /// Removes the calls whose deadline has come, and returns them. The saves continue.
    pub(crate) fn expire(&mut self, now: Now) -> Vec<Waiter> {
        expire(self.waiting(), now)
    }

    /// Drops the calls of a caller that has disconnected. The saves continue.
    pub(crate) fn forget_caller(&mut self, caller: Caller) {
        self.waiting().for_each(|waiters| waiters.retain(|waiter| waiter.caller != caller));
    }

    /// The calls that wait for the current save, and those that wait for the next one.
    fn waiting(&mut self) -> impl Iterator<Item = &mut Vec<Waiter>> {
        let current = self.current.iter_mut().map(|saving| &mut saving.waiters);
        current.chain(self.next.iter_mut().map(|next| &mut next.waiters))
    }

    /// Stores the data of a rank for `version`. `current`: the version of the job. Returns `true`
    /// if the current save was waiting for the data.
    pub(crate) fn set_user_data(
        &mut self,
        version: u64,
        current: u64,
        rank: u32,
        data: &Bytes,
    ) -> bool {
        if version == current {
            self.user_data.set(rank, data.clone());
        }
        let saving = self.current.as_mut().filter(|saving| saving.plan.version.version == version);
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
        let rank = user_data.awaited().find(|&rank| is_over(rank))?;
        let (job, version) = (job.to_owned(), version.version);
        Some((*save, Error::UserDataLost { job, version, rank }))
    }
}
