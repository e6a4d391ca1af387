//! One try at a step: gradients, new values and the rank's vote, with an identity that allows the
//! servers to refuse messages of earlier tries. This file has the identity, and decides whether an
//! error has ended the attempt.

use std::sync::{Arc, atomic::Ordering};

use tokio::sync::watch;
use zeroshard_model::{Error, Result};
use zeroshard_net::{Deadline, trace::Trace};
use zeroshard_proto::pb;

use super::{Job, Member, attempts::State, membership::Membership};

mod push;
mod votes;

/// One try at a step, from [`Job::attempt`]. Cheap to clone.
///
/// Gradients that are pushed in one attempt never count in another. An attempt ends when its epoch
/// ends (a rank was lost or has left), when all ranks discard it, or when the step is decided. From
/// the first call that notices the end, every push and every discard of all handles returns
/// [`Error::StepAborted`], including calls that started before. If the step was decided, they
/// return [`Error::StepMismatch`].
#[derive(Debug, Clone)]
pub struct Attempt {
    job: Job,
    state: Arc<State>,
}

impl Job {
    /// The open attempt at `step`. The same attempt is returned until it has ended; then the next
    /// attempt, in the current epoch.
    ///
    /// # Errors
    /// [`Error::LeaseLost`], [`Error::JobFailed`], [`Error::JobReplaced`]: no further attempt can
    /// be opened. [`Error::RolledBack`]: the job has returned to an earlier version.
    pub fn attempt(&self, step: u64) -> Result<Attempt> {
        self.check_restored(step)?;
        if let Some(restored) = self.0.membership.borrow().restored {
            self.0.restoration.fetch_max(restored.epoch, Ordering::AcqRel);
        }
        let mut attempts = self.0.attempts.lock();
        let before = attempts.get(&step).map(|state| (state.clone(), state.end.borrow().clone()));
        if let Some((state, None)) = before {
            return Ok(Attempt { job: self.clone(), state });
        }
        let Membership { lease, epoch, .. } = self.current()?;
        let number = match before {
            Some((state, Some(end))) if state.epoch == epoch => end.next,
            _ => 0,
        };
        let state = Arc::new(State { lease, epoch, step, number, end: watch::Sender::new(None) });
        attempts.insert(step, state.clone());
        Ok(Attempt { job: self.clone(), state })
    }
}

impl Attempt {
    /// The step, which equals the version from which it starts.
    pub fn step(&self) -> u64 {
        self.state.step
    }

    /// The epoch of the attempt.
    pub fn epoch(&self) -> u64 {
        self.state.epoch
    }

    /// The number of the attempt: 0 for the first in its epoch, and one more after each discarded
    /// attempt.
    pub fn number(&self) -> u32 {
        self.state.number
    }

    /// The trace of the step in the epoch of the attempt.
    pub(super) fn trace(&self) -> Trace {
        Trace::of_step(self.job.0.id, self.state.epoch, self.state.step)
    }

    fn turn(&self) -> pb::Turn {
        let Member { spec, id, rank, .. } = &*self.job.0;
        let State { epoch, step, number: attempt, .. } = *self.state;
        let job = spec.name.clone();
        pb::Turn { job, job_id: *id, lease: self.state.lease, epoch, rank: *rank, step, attempt }
    }

    /// Checks that the attempt is open; a later epoch ends it.
    ///
    /// # Errors
    /// The reason for the end of the attempt.
    pub(super) async fn check_epoch(&self, deadline: Deadline) -> Result<()> {
        let ended = self.state.end.borrow().as_ref().map(|end| end.error.clone());
        if let Some(error) = ended.or_else(|| self.rolled_back()) {
            return Err(error);
        }
        let (epoch, current) = (self.state.epoch, self.job.current()?.epoch);
        match current > epoch {
            false => Ok(()),
            true => {
                let job = self.job.0.spec.name.clone();
                Err(self.noted(Error::StaleEpoch { job, epoch, current }, deadline).await)
            }
        }
    }

    /// Runs `work`, unless the attempt ends first.
    pub(super) async fn while_open<T>(
        &self,
        work: impl Future<Output = Result<T>>,
        deadline: Deadline,
    ) -> Result<T> {
        let mut end = self.state.end.subscribe();
        let result = tokio::select! {
            biased;
            Ok(end) = end.wait_for(Option::is_some) => {
                return Err(end.as_ref().expect("it was waited for").error.clone());
            }
            result = self.job.while_in(self.state.epoch, work) => result,
        };
        match result {
            Ok(value) => Ok(value),
            Err(error) => Err(self.noted(error, deadline).await),
        }
    }

    /// Returns the error of a call for `error`, and ends the attempt if `error` means that it has
    /// ended.
    async fn noted(&self, error: Error, deadline: Deadline) -> Error {
        let State { epoch, number, .. } = *self.state;
        let error = self.trace().name_in(error);
        if let Some(error) = self.rolled_back() {
            return error;
        }
        let (new_epoch, cause) = match &error {
            // The coordinator has answered before its message about the new epoch has arrived.
            Error::RolledBack { .. } => (epoch.saturating_add(1), None),
            Error::StaleAttempt { current, .. } if *current > number => {
                let error = self.aborted(epoch, format!("attempt {number} was discarded"));
                return self.state.end(error, *current);
            }
            Error::StaleEpoch { current, .. } if *current > epoch => (*current, None),
            Error::StepAborted { epoch: current, cause, .. } => (*current, Some(cause.clone())),
            // The coordinator had no connection to this worker for too long.
            Error::LeaseLost { .. } => {
                let lease = self.state.lease;
                if let Err(ended) = self.job.wait_for_lease_after(lease, deadline).await {
                    return ended;
                }
                let cause = format!("the lease of rank {} had ended", self.job.0.rank);
                (epoch.saturating_add(1), Some(cause))
            }
            // The rank left during this attempt or before it. The epoch is then the same, and the
            // attempt continues when another worker has taken the rank.
            Error::RankLeft { rank, .. } => {
                if self.job.epoch() > epoch {
                    let left = format!("rank {rank} has left");
                    self.state.end(self.aborted(self.job.epoch(), left), 0);
                }
                return error;
            }
            _ => return error,
        };
        if matches!(error, Error::StaleEpoch { .. } | Error::StepAborted { .. }) {
            self.job.0.attempts.know(new_epoch);
        }
        // The next attempt belongs to the new epoch, which must be known here before this attempt
        // ends.
        if let Err(error) = self.job.wait_for_change(new_epoch.saturating_sub(1), deadline).await {
            return error;
        }
        if let Some(error) = self.rolled_back() {
            return error;
        }
        let cause = match cause {
            Some(cause) => cause,
            None => self.cause_of_new_epoch().await,
        };
        let Self { job, state } = self;
        match job.version() {
            Some(version) if version > state.step => self.decided(),
            _ => self.state.end(self.aborted(job.epoch(), cause), 0),
        }
    }

    /// Ends the attempt, and all others of its epoch or earlier ones, if the job has returned to a
    /// checkpoint since. Returns the error for its calls.
    fn rolled_back(&self) -> Option<Error> {
        let restored = self.job.0.membership.borrow().restored?;
        if self.state.epoch >= restored.epoch {
            return None;
        }
        self.job.end_rolled_back();
        Some(self.state.end(self.job.rolled_back(restored.version), 0))
    }

    /// Names the first rank without a worker.
    async fn cause_of_new_epoch(&self) -> String {
        let Member { cluster, spec, .. } = &*self.job.0;
        let jobs = cluster.status().await.map(|status| status.jobs).unwrap_or_default();
        let missing = jobs
            .iter()
            .find(|job| job.name == spec.name)
            .and_then(|job| (0..spec.world).find(|rank| !job.joined.contains(rank)));
        match missing {
            Some(rank) => format!("{} was lost or has left", spec.describe_rank(rank)),
            None => {
                let since = self.state.epoch;
                format!("a rank or a shard server was lost or has left since epoch {since}")
            }
        }
    }

    fn aborted(&self, epoch: u64, cause: String) -> Error {
        let (job, step) = (self.job.0.spec.name.clone(), self.state.step);
        self.trace().name_in(Error::StepAborted { job, step, epoch, cause })
    }

    /// Ends the attempt because the step was decided, and returns the error for further pushes.
    fn decided(&self) -> Error {
        let (job, step) = (self.job.0.spec.name.clone(), self.state.step);
        self.job.0.attempts.lock().retain(|&other, _| other >= step);
        let current = step.saturating_add(1);
        self.state.end(Error::StepMismatch { job, step, current }, self.state.number)
    }
}
