//! Waiting for changes of the membership, and ending calls because of them: a new epoch, the end of
//! the lease, or the job's return to a checkpoint.

use std::{sync::atomic::Ordering, time::Duration};

use zeroshard_model::{Error, Result};
use zeroshard_net::Deadline;

use super::{
    Job,
    membership::{CHANGE_TIMEOUT, Membership},
};
use crate::retry::drops_job;

impl Job {
    /// Runs `work`, unless the coordinator announces a later epoch: a server of this epoch that was
    /// lost does not answer.
    ///
    /// # Errors
    /// [`Error::StaleEpoch`]; those of `work`.
    pub(super) async fn while_in<T>(
        &self,
        epoch: u64,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let done = self.unless(|now| now.epoch > epoch, work).await;
        done.unwrap_or_else(|now| {
            let (job, current) = (self.0.spec.name.clone(), now.epoch);
            Err(Error::StaleEpoch { job, epoch, current })
        })
    }

    /// Runs `work`, unless the membership becomes one for which `ended` is true. Returns this
    /// membership then.
    pub(super) async fn unless<T>(
        &self,
        ended: impl FnMut(&Membership) -> bool,
        work: impl Future<Output = T>,
    ) -> Result<T, Membership> {
        let mut membership = self.0.membership.clone();
        tokio::select! {
            biased;
            result = work => Ok(result),
            Ok(now) = membership.wait_for(ended) => Err(now.clone()),
        }
    }

    /// Runs `work`, unless the lease ends or the job returns to a checkpoint first. A server only
    /// knows that it was told to drop the job; its error is replaced by the coordinator's reason.
    pub(super) async fn unless_ended<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let mut membership = self.0.membership.clone();
        let before = membership.borrow().restored;
        let ends = |now: &Membership| now.ended.is_some() || now.restored != before;
        let error = tokio::select! {
            biased;
            result = work => match result {
                Err(error) if drops_job(&error) || matches!(error, Error::RolledBack { .. }) => {
                    error
                }
                result => return result,
            },
            Ok(now) = membership.wait_for(ends) => {
                let now = now.clone();
                return Err(self.reason(&now));
            }
        };
        match tokio::time::timeout(self.change_timeout(), membership.wait_for(ends)).await {
            Ok(Ok(now)) => {
                let now = now.clone();
                Err(self.reason(&now))
            }
            _ => Err(error),
        }
    }

    /// Why calls end whose lease has ended, or whose job has returned to a checkpoint. The attempts
    /// of the job end with them.
    fn reason(&self, now: &Membership) -> Error {
        self.end_rolled_back();
        let restored = || now.restored.map(|restored| self.rolled_back(restored.version));
        let lost = || Error::LeaseLost { job: self.0.spec.name.clone(), rank: self.0.rank };
        now.ended.clone().or_else(restored).unwrap_or_else(lost)
    }

    pub(super) fn rolled_back(&self, version: u64) -> Error {
        Error::RolledBack { job: self.0.spec.name.clone(), version }
    }

    /// How long the coordinator may take to announce what becomes of a job that a server has
    /// dropped.
    pub(super) fn change_timeout(&self) -> Duration {
        match self.0.spec.is_restored_on_loss() {
            true => self.0.cluster.options.timeout,
            false => CHANGE_TIMEOUT,
        }
    }

    /// Waits until this rank has another lease than `lease`, which has ended.
    ///
    /// # Errors
    /// The reason for the end of the membership; [`Error::Timeout`].
    pub(super) async fn wait_for_lease_after(&self, lease: u64, deadline: Deadline) -> Result<()> {
        let mut membership = self.0.membership.clone();
        let again = membership.wait_for(|now| now.lease != lease || now.ended.is_some());
        let waiting_for =
            || format!("rank {} of job {:?} to join again", self.0.rank, self.0.spec.name);
        // The same reason as in `wait_for_change`.
        let _ = deadline.limit(waiting_for, again).await?;
        self.current().map(|_| ())
    }

    /// Waits until the coordinator has announced an epoch later than `epoch`.
    pub(super) async fn wait_for_change(&self, epoch: u64, deadline: Deadline) -> Result<()> {
        let mut membership = self.0.membership.clone();
        let later = membership.wait_for(|now| now.epoch > epoch || now.ended.is_some());
        let waiting_for = || format!("{} to announce the epoch after {epoch}", self.0.cluster.peer);
        // The watcher keeps the sender until the lease has ended, and announces the end first.
        let _ = deadline.limit(waiting_for, later).await?;
        self.current().map(|_| ())
    }

    /// Checks that the job has not returned to a version before `version` between two calls.
    ///
    /// # Errors
    /// [`Error::RolledBack`], once for each restoration.
    pub(super) fn check_restored(&self, version: u64) -> Result<()> {
        let restored = self.0.membership.borrow().restored;
        let known = self.0.restoration.load(Ordering::Acquire);
        match restored.filter(|of| of.epoch > known && of.version < version) {
            None => Ok(()),
            Some(restored) => {
                self.end_rolled_back();
                Err(self.rolled_back(restored.version))
            }
        }
    }

    /// Ends the attempts of the epochs before the last restoration of the job from a checkpoint.
    /// Calls that return [`Error::RolledBack`] have done this; it is for callers who know of the
    /// restoration from [`Self::restored`].
    pub fn end_rolled_back(&self) {
        let Some(restored) = self.0.membership.borrow().restored else { return };
        self.0.restoration.fetch_max(restored.epoch, Ordering::AcqRel);
        let error = self.rolled_back(restored.version);
        self.0.attempts.lock().retain(|_, state| {
            let is_open = state.epoch >= restored.epoch;
            if !is_open {
                state.end(error.clone(), 0);
            }
            is_open
        });
    }
}
