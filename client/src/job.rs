//! A rank's part in a job: pull, push, commit.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures_util::future::try_join_all;
use tokio::{sync::watch, task::JoinHandle};
use zeroshard_proto::{DType, Error, JobSpec, Optimizer, Placement, Result, error::Remedy, pb};

use crate::{
    Cluster, Gradient, Target, Traffic,
    cluster::{Deadline, Description},
    hash, pull, push,
};

/// The coordinator's news of a job's end is at most so much later than the servers'.
const NEWS_TIMEOUT: Duration = Duration::from_secs(5);

/// This rank's word that it has pushed all of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Commit {
    /// The step: the version that it started from.
    pub step: u64,
    /// This step's hyperparameters, one for each parameter group; empty: those of the job.
    pub groups: Vec<Optimizer>,
    /// Gradients are those of the loss times this.
    pub loss_scale: f64,
    /// Clip by global norm: the largest norm of the mean gradient.
    pub max_norm: Option<f64>,
    /// This rank's loss; the report has the mean over the ranks.
    pub loss: Option<f64>,
}

impl Commit {
    /// With the job's hyperparameters, without loss scale or clipping.
    pub fn new(step: u64) -> Self {
        Self { step, groups: Vec::new(), loss_scale: 1.0, max_norm: None, loss: None }
    }
}

/// What became of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// The version that the step made.
    pub version: u64,
    /// False: skipped, because a gradient was inf or NaN.
    pub applied: bool,
    /// Global L2 norm of the mean, unscaled gradient, before clipping.
    pub gradient_norm: f64,
    /// 1 where nothing was clipped.
    pub clip_coefficient: f64,
    /// The first tensor in manifest order with inf or NaN, and the lowest rank that sent one (`None`: only the
    /// sum over the ranks was not finite).
    pub overflow: Option<(usize, Option<u32>)>,
    /// Mean over the ranks, if all of them gave one.
    pub loss: Option<f64>,
    /// Number of ranks.
    pub world: u32,
}

/// What the coordinator last said.
#[derive(Debug, Clone)]
struct Membership {
    epoch: u64,
    version: Option<u64>,
    placement: Arc<Placement>,
    /// Why the lease has ended, if it has.
    ended: Option<Error>,
}

/// A rank's lease on a job. It ends with [`Job::leave`]; dropped without, the rank counts as lost.
#[derive(Debug)]
pub struct Job {
    cluster: Cluster,
    spec: Arc<JobSpec>,
    rank: u32,
    lease: u64,
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
    pub(crate) async fn join(cluster: Cluster, job: &str, rank: u32) -> Result<Self> {
        let mut stream = cluster
            .retry("a lease", |mut client, _| {
                let request = pb::JoinRequest { job: job.to_owned(), rank };
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
        Ok(Self { cluster, spec: Arc::new(spec), rank, lease, membership, watcher, round: Mutex::default() })
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

    /// Payload bytes that all jobs of this cluster connection have moved.
    pub fn traffic(&self) -> Traffic {
        self.cluster.shards.traffic()
    }

    /// Uploads the initial parameters; in any number of calls, all tensors that own their storage, by rank 0,
    /// once. A rank that is lost before [`Self::version`] tells of version 0 makes the servers drop them.
    ///
    /// # Errors
    /// [`Error::StaleEpoch`]: upload all of them again. [`Error::Invalid`] for sizes that do not fit,
    /// [`Error::Timeout`].
    pub async fn initialise(&self, parameters: Vec<Gradient>) -> Result<()> {
        // Always f32: the master weights are.
        self.push_as(None, DType::F32, parameters).await
    }

    /// Pushes gradients of `step`; in any number of calls, all tensors that train.
    ///
    /// # Errors
    /// [`Error::StepAborted`]: run the step again. [`Error::Invalid`], [`Error::Timeout`], …
    pub async fn push(&self, step: u64, gradients: Vec<Gradient>) -> Result<()> {
        self.push_as(Some(step), self.cluster.options.wire, gradients).await
    }

    async fn push_as(&self, step: Option<u64>, dtype: DType, data: Vec<Gradient>) -> Result<()> {
        let deadline = Deadline::after(self.cluster.options.deadline);
        let Membership { epoch, placement, .. } = self.current()?;
        if let Some(step) = step {
            self.enter_round(step, epoch)?;
        }
        let world = self.spec.world;
        let plans = push::plan(&self.spec.manifest, &placement, self.rank, world, data)?;
        let begin = pb::PushBegin { job: self.spec.name.clone(), epoch, rank: self.rank, step };
        let push = Push { job: self, begin, dtype, deadline };
        let pushes = plans.into_iter().map(|plan| push.to_one(plan));
        let pushed = self.unless_ended(try_join_all(pushes)).await;
        match (pushed, step) {
            (Ok(_), _) => Ok(()),
            (Err(error @ Error::StaleEpoch { .. }), Some(step)) => {
                Err(self.aborted(step, error, deadline).await)
            }
            (Err(error), _) => Err(self.explained(error).await),
        }
    }

    /// Fills the targets with the parameters at `version`; waits for it.
    ///
    /// # Errors
    /// [`Error::VersionGone`], [`Error::Timeout`] if it does not come, [`Error::Invalid`] for sizes that do not
    /// fit.
    pub async fn pull(&self, version: u64, targets: Vec<Target<'_>>) -> Result<()> {
        let deadline = Deadline::after(self.cluster.options.deadline);
        let plans = pull::plan(&self.spec.manifest, &self.current()?.placement, targets)?;
        let pulls = plans.into_iter().map(|plan| self.pull_from_one(plan, version, deadline));
        match self.unless_ended(try_join_all(pulls)).await {
            Ok(_) => Ok(()),
            Err(error) => Err(self.explained(error).await),
        }
    }

    async fn pull_from_one(&self, mut plan: pull::Plan<'_>, version: u64, deadline: Deadline) -> Result<()> {
        loop {
            let epoch = self.current()?.epoch;
            let of = pull::PullOf {
                job: &self.spec.name,
                epoch,
                version,
                dtype: self.cluster.options.wire,
                chunk_bytes: self.cluster.options.chunk_bytes,
                wait_ms: (deadline.left().as_millis() as u32).saturating_sub(200).max(1),
            };
            let waiting_for = format!("version {version} from shard server {}", plan.server.address);
            let pull = plan.pull(&self.cluster.shards, &of);
            let error = match deadline.limit(|| waiting_for, pull).await? {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            match error.remedy() {
                Remedy::Retry => deadline.pause(error).await?,
                Remedy::Refresh => self.wait_for_news(epoch, deadline).await?,
                Remedy::RedoStep | Remedy::GiveUp => return Err(error),
            }
        }
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
        };
        let report = self
            .cluster
            .retry("the decision", |mut client, wait_ms| {
                let request = pb::CommitRequest { wait_ms, ..request.clone() };
                async move { client.commit(request).await }
            })
            .await;
        match report {
            Ok(report) => Ok(self.report(report)),
            Err(error @ (Error::StaleEpoch { .. } | Error::StepAborted { .. })) => {
                Err(self.aborted(commit.step, error, deadline).await)
            }
            Err(error) => Err(error),
        }
    }

    /// The hash of all of the job's state at `version`, which must be the current one.
    ///
    /// # Errors
    /// [`Error::VersionGone`], [`Error::Timeout`].
    pub async fn state_hash(&self, version: u64) -> Result<String> {
        let Membership { epoch, placement, .. } = self.current()?;
        let spec = JobSpec::clone(&self.spec);
        let placement = Placement::clone(&placement);
        let description = Description { spec, epoch, placement, version: Some(version) };
        hash::state_hash(&self.cluster, &description, version).await
    }

    /// Ends the lease in order: the others are not disturbed.
    ///
    /// # Errors
    /// [`Error::Timeout`].
    pub async fn leave(self) -> Result<()> {
        let request = pb::LeaveRequest { job: self.spec.name.clone(), lease: self.lease };
        self.cluster
            .retry("leave", |mut client, _| {
                let request = request.clone();
                async move { client.leave(request).await }
            })
            .await?;
        Ok(())
    }

    /// Notes that `step` is worked on in `epoch`.
    ///
    /// # Errors
    /// [`Error::StepAborted`], once, if that began in an earlier epoch: the servers have dropped what was pushed
    /// then.
    fn enter_round(&self, step: u64, epoch: u64) -> Result<()> {
        let mut round = self.round.lock().unwrap_or_else(PoisonError::into_inner);
        match round.replace((step, epoch)) {
            Some((pushed, began)) if pushed == step && began != epoch => {
                *round = None;
                let job = self.spec.name.clone();
                let cause = format!("a rank was lost after its gradients were pushed in epoch {began}");
                Err(Error::StepAborted { job, step, epoch, cause })
            }
            _ => Ok(()),
        }
    }

    /// `work`, unless the lease ends before.
    async fn unless_ended<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let mut membership = self.membership.clone();
        tokio::select! {
            biased;
            result = work => result,
            Ok(now) = membership.wait_for(|now| now.ended.is_some()) => {
                Err(now.ended.clone().expect("it was waited for"))
            }
        }
    }

    /// The coordinator's reason for what a server knows no more of than that it was told to drop the job.
    async fn explained(&self, error: Error) -> Error {
        if !matches!(error, Error::JobFailed { .. } | Error::UnknownJob { .. }) {
            return error;
        }
        let mut membership = self.membership.clone();
        let ended = membership.wait_for(|now| now.ended.is_some());
        match tokio::time::timeout(NEWS_TIMEOUT, ended).await {
            Ok(Ok(now)) => now.ended.clone().unwrap_or(error),
            _ => error,
        }
    }

    fn current(&self) -> Result<Membership> {
        let membership = self.membership.borrow().clone();
        match membership.ended {
            Some(error) => Err(error),
            None => Ok(membership),
        }
    }

    /// Waits until the coordinator has told of a later epoch than `epoch`.
    async fn wait_for_news(&self, epoch: u64, deadline: Deadline) -> Result<()> {
        let mut membership = self.membership.clone();
        let later = membership.wait_for(|now| now.epoch > epoch || now.ended.is_some());
        let waiting_for = || format!("{} to tell of the epoch after {epoch}", self.cluster.peer);
        // The watcher keeps its end until the lease has ended, and says so first.
        let _ = deadline.limit(waiting_for, later).await?;
        self.current().map(|_| ())
    }

    /// The error of a step that was overtaken by a new epoch, once that is known here.
    async fn aborted(&self, step: u64, error: Error, deadline: Deadline) -> Error {
        *self.round.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let new = match &error {
            Error::StepAborted { epoch, .. } => *epoch,
            Error::StaleEpoch { current, .. } => *current,
            _ => return error,
        };
        match self.wait_for_news(new.saturating_sub(1), deadline).await {
            Ok(()) if matches!(error, Error::StepAborted { .. }) => error,
            Ok(()) => Error::StepAborted {
                job: self.spec.name.clone(),
                step,
                epoch: self.epoch(),
                cause: "the membership changed".to_owned(),
            },
            Err(error) => error,
        }
    }

    fn report(&self, report: pb::StepReport) -> StepReport {
        let slices = self.spec.manifest.slices();
        let overflow = report.overflow.and_then(|overflow| {
            let slice = slices.get(overflow.slice as usize)?;
            Some((slice.tensor, overflow.rank))
        });
        StepReport {
            version: report.version,
            applied: report.applied,
            gradient_norm: report.gradient_norm,
            clip_coefficient: report.clip_coefficient,
            overflow,
            loss: report.loss,
            world: report.world,
        }
    }
}

/// One push, to all servers that hold a part of it.
struct Push<'a> {
    job: &'a Job,
    begin: pb::PushBegin,
    dtype: DType,
    deadline: Deadline,
}

impl Push<'_> {
    async fn to_one(&self, mut plan: push::Plan) -> Result<()> {
        let Self { job, begin, dtype, deadline } = self;
        let waiting_for = format!(
            "shard server {} to take rank {}'s push of step {:?} in epoch {}",
            plan.server.address, begin.rank, begin.step, begin.epoch
        );
        loop {
            let chunk = job.cluster.options.chunk_bytes;
            let push = plan.push(&job.cluster.shards, begin.clone(), *dtype, chunk);
            match deadline.limit(|| waiting_for.clone(), push).await? {
                Ok(_) => return Ok(()),
                Err(error) if error.remedy() == Remedy::Retry => deadline.pause(error).await?,
                Err(error) => return Err(error),
            }
        }
    }
}

impl TryFrom<pb::Membership> for Membership {
    type Error = Error;

    fn try_from(message: pb::Membership) -> Result<Self> {
        Ok(Self {
            epoch: message.epoch,
            version: message.version,
            placement: Arc::new(message.placement.unwrap_or_default().try_into()?),
            ended: None,
        })
    }
}

/// Passes on what the coordinator says, until the lease ends.
async fn watch_membership(
    mut stream: tonic::Streaming<pb::Membership>,
    told: watch::Sender<Membership>,
    peer: String,
    lost: Error,
) {
    let ended = loop {
        match stream.message().await {
            Ok(Some(message)) => match Membership::try_from(message) {
                Ok(membership) => _ = told.send_replace(membership),
                Err(error) => break error,
            },
            Ok(None) => break lost,
            Err(status) => match Error::from_status(&status, &peer) {
                error @ Error::JobFailed { .. } => break error,
                error => {
                    tracing::warn!(%error, "the membership stream broke");
                    break lost;
                }
            },
        }
    };
    told.send_modify(|membership| membership.ended = Some(ended));
}
