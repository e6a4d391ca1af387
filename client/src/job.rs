//! A rank's part in a job: its lease and its word about each step. What it moves is in `transfer`.

use std::sync::{Arc, Mutex};

use futures_util::future::{Either, select};
use tokio::{sync::watch, task::JoinHandle};
use zeroshard_proto::{Error, JobSpec, Placement, Result, pb};

use crate::{
    Cluster, Commit, Reduced, StepReport, Target, Traffic,
    cluster::{Deadline, Description},
    pull,
    region::Share,
    state,
};
use membership::{Membership, watch_membership};

mod membership;
mod transfer;

/// A rank's lease on a job. It ends with [`Job::leave`]; dropped without, the rank counts as lost.
#[derive(Debug)]
pub struct Job {
    cluster: Cluster,
    spec: Arc<JobSpec>,
    rank: u32,
    lease: u64,
    /// What the rank has of each tensor.
    shares: Vec<Share>,
    membership: watch::Receiver<Membership>,
    watcher: JoinHandle<()>,
    /// The step that was last pushed to, and the epoch in which that began: gradients of an older epoch are gone.
    round: Mutex<Option<(u64, u64)>>,
}

impl Drop for Job {
    fn drop(&mut self) {
        self.watcher.abort();
    }
}

impl Job {
    pub(crate) async fn join(cluster: Cluster, job: &str, rank: u32, address: &str) -> Result<Self> {
        let mut stream = cluster
            .retry("a lease", |mut client, _| {
                let request =
                    pb::JoinRequest { job: job.to_owned(), rank, address: address.to_owned(), wait_ms: 0 };
                async move { client.join(request).await }
            })
            .await?;
        let deadline = Deadline::after(cluster.options.deadline);
        let first = deadline
            .limit(|| format!("the lease of rank {rank} of job {job:?}"), stream.message())
            .await?
            .map_err(|status| Error::from_status(&status, &cluster.peer))?
            .ok_or_else(|| Error::LeaseLost { job: job.to_owned(), rank })?;
        let spec = JobSpec::try_from(first.spec.clone().unwrap_or_default())?;
        let lease = first.lease;
        let (told, membership) = watch::channel(Membership::try_from(first)?);
        let lost = Error::LeaseLost { job: job.to_owned(), rank };
        let watcher = tokio::spawn(watch_membership(stream, told, cluster.peer.clone(), lost));
        let (shares, round) = (Share::all(&spec, rank), Mutex::default());
        Ok(Self { cluster, spec: Arc::new(spec), rank, lease, shares, membership, watcher, round })
    }

    /// What the job is.
    pub fn spec(&self) -> &JobSpec {
        &self.spec
    }

    /// This worker's rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// The version that the job was at when the coordinator last spoke of it; `None` before the initial
    /// parameters are complete.
    pub fn version(&self) -> Option<u64> {
        self.membership.borrow().version
    }

    /// The membership generation.
    pub fn epoch(&self) -> u64 {
        self.membership.borrow().epoch
    }

    /// Whether this rank uploads what it has of a tensor, or another rank that has the same.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a tensor that there is not.
    pub fn uploads(&self, tensor: usize) -> Result<bool> {
        Ok(pull::share("uploaded", &self.spec.manifest, &self.shares, tensor)?.uploads())
    }

    /// Where each rank's worker is reached by the others, in rank order. Waits until all have joined and said so.
    ///
    /// # Errors
    /// [`Error::Timeout`] naming who has not.
    pub async fn peers(&self) -> Result<Vec<String>> {
        let deadline = Deadline::after(self.cluster.options.deadline);
        let world = self.spec.world as usize;
        let mut membership = self.membership.clone();
        let all = membership.wait_for(|now| now.peers.len() == world || now.ended.is_some());
        let waiting_for = || {
            let known = &self.membership.borrow().peers;
            let missing = (0..self.spec.world).find(|rank| !known.contains_key(rank)).unwrap_or_default();
            format!(
                "{} of job {:?} to say where it is reached",
                self.spec.describe_rank(missing),
                self.spec.name
            )
        };
        // The sender lives as long as the watcher, and that as long as we.
        let _ = deadline.limit(waiting_for, all).await?;
        Ok(self.current()?.peers.into_values().collect())
    }

    /// Payload bytes that all jobs of this cluster connection have moved.
    pub fn traffic(&self) -> Traffic {
        self.cluster.shards.traffic()
    }

    /// Says that this rank has pushed all of the step; answered when the step is decided.
    ///
    /// # Errors
    /// [`Error::StepAborted`]: run the step again. [`Error::Disagreement`] with another rank,
    /// [`Error::Timeout`] naming who did not commit.
    pub async fn commit(&self, commit: Commit) -> Result<StepReport> {
        let deadline = Deadline::after(self.cluster.options.deadline);
        let epoch = self.current()?.epoch;
        self.enter_round(commit.step, epoch)?;
        let request = pb::CommitRequest {
            job: self.spec.name.clone(),
            lease: self.lease,
            epoch,
            rank: self.rank,
            step: commit.step,
            groups: commit.groups.iter().map(Into::into).collect(),
            loss_scale: commit.loss_scale,
            max_norm: commit.max_norm,
            loss: commit.loss,
            wait_ms: 0,
            discard: commit.discard,
            job_id: 0,
            attempt: 0,
        };
        let report = self
            .cluster
            .retry("the decision", |mut client, wait_ms| {
                let request = pb::CommitRequest { wait_ms, ..request.clone() };
                async move { client.commit(request).await }
            })
            .await;
        match report {
            Ok(report) => Ok(StepReport::new(&report, &self.spec.manifest)),
            Err(error) => Err(self.abort_noted(commit.step, error, deadline).await),
        }
    }

    /// Commits, and fills the targets with the parameters of the version that the step makes. The pull is sent
    /// beside the commit, so that its bytes come slice by slice while the servers still apply the step.
    ///
    /// # Errors
    /// Those of [`Self::commit`], and then what is in the targets means nothing; those of [`Self::pull`].
    pub async fn commit_and_pull(&self, commit: Commit, targets: Vec<Target<'_>>) -> Result<StepReport> {
        let pull = self.pull(commit.step.saturating_add(1), targets);
        let commit = self.commit(commit);
        match select(Box::pin(commit), Box::pin(pull)).await {
            Either::Left((report, pull)) => {
                let report = report?;
                pull.await?;
                Ok(report)
            }
            Either::Right((pulled, commit)) => {
                // What became of the step matters more than why the pull failed.
                let report = commit.await?;
                pulled?;
                Ok(report)
            }
        }
    }

    /// The norm of the step's mean gradient once every rank has pushed it, before the step is decided: for a caller
    /// whose commit depends on it. `loss_scale` as in [`Commit`].
    ///
    /// # Errors
    /// [`Error::StepAborted`]: run the step again. [`Error::Timeout`] naming whose gradients are missing.
    pub async fn reduce(&self, step: u64, loss_scale: f64) -> Result<Reduced> {
        let deadline = Deadline::after(self.cluster.options.deadline);
        let epoch = self.current()?.epoch;
        self.enter_round(step, epoch)?;
        let (job, lease, rank) = (self.spec.name.clone(), self.lease, self.rank);
        let request = pb::ReduceRequest {
            job,
            lease,
            epoch,
            rank,
            step,
            loss_scale,
            wait_ms: 0,
            job_id: 0,
            attempt: 0,
        };
        let report = self
            .cluster
            .retry("the gradient's norm", |mut client, wait_ms| {
                let request = pb::ReduceRequest { wait_ms, ..request.clone() };
                async move { client.reduce(request).await }
            })
            .await;
        match report {
            Ok(report) => Ok(Reduced::new(&report, &self.spec.manifest)),
            Err(error) => Err(self.abort_noted(step, error, deadline).await),
        }
    }

    async fn abort_noted(&self, step: u64, error: Error, deadline: Deadline) -> Error {
        match error {
            Error::StaleEpoch { .. } | Error::StepAborted { .. } => self.aborted(step, error, deadline).await,
            other => other,
        }
    }

    /// The hash of all of the job's state at `version`, which must be the current one.
    ///
    /// # Errors
    /// [`Error::VersionGone`], [`Error::Timeout`].
    pub async fn state_hash(&self, version: u64) -> Result<String> {
        state::hash(&self.cluster, &self.described(version)?, version).await
    }

    /// How many steps were applied to each tensor, by its index, at `version`, which must be the current one: skipped
    /// steps do not count, nor do those that had no gradient of it. 0 for what does not train.
    ///
    /// # Errors
    /// [`Error::VersionGone`], [`Error::Timeout`].
    pub async fn applied_steps(&self, version: u64) -> Result<Vec<u64>> {
        state::applied_steps(&self.cluster, &self.described(version)?, version).await
    }

    fn described(&self, version: u64) -> Result<Description> {
        let Membership { epoch, placement, .. } = self.current()?;
        let spec = JobSpec::clone(&self.spec);
        Ok(Description { spec, epoch, placement: Placement::clone(&placement), version: Some(version) })
    }

    /// Ends the lease in order: the others are not disturbed.
    ///
    /// # Errors
    /// [`Error::Timeout`].
    pub async fn leave(&self) -> Result<()> {
        let request =
            pb::LeaveRequest { job: self.spec.name.clone(), lease: self.lease, ..Default::default() };
        self.cluster
            .retry("leave", |mut client, _| {
                let request = request.clone();
                async move { client.leave(request).await }
            })
            .await?;
        Ok(())
    }
}
