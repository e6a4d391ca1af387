//! A rank's membership in a job: its lease, and its calls to the coordinator and the servers
//! outside a step. Gradients and votes are in `attempt`.

use std::{
    sync::{Arc, Mutex, PoisonError, atomic::AtomicU64},
    time::Duration,
};

use bytes::Bytes;
use tokio::{sync::watch, task::JoinHandle};
use zeroshard_model::{
    AppliedSteps, DType, Error, JobSpec, JobVersion, Placement, Result, TensorId,
    checkpoint::MAX_USER_DATA, local::LocalTensor,
};
use zeroshard_net::Deadline;
use zeroshard_proto::pb;

use crate::{Cluster, Traffic, cluster::Description, local::local, retry::drops_job, state};
use attempt::Attempts;
use membership::{Membership, NEWS_TIMEOUT, SentData};

mod attempt;
mod join;
mod links;
mod membership;
mod transfer;

pub use attempt::Attempt;

/// How long a save may take. It has the same limit in the coordinator.
const SAVE_LIMIT: Duration = Duration::from_secs(3600);

/// The pause before servers are asked again that did not know of a new placement.
const NEWS_PAUSE: Duration = Duration::from_millis(20);

/// A rank's lease on a job. Cheap to clone. The lease ends with [`Job::leave`] or
/// [`Job::leave_done`]. If the last clone and the last [`Attempt`] are dropped without one of these
/// calls, the rank counts as lost.
#[derive(Debug, Clone)]
pub struct Job(Arc<Member>);

/// The state that a job and its attempts share.
#[derive(Debug)]
struct Member {
    cluster: Cluster,
    spec: Arc<JobSpec>,
    /// The id, which distinguishes the job from earlier and later jobs of the same name.
    id: u64,
    rank: u32,
    /// The parts of all tensors that the rank holds.
    locals: Vec<LocalTensor>,
    membership: watch::Receiver<Membership>,
    watcher: JoinHandle<()>,
    attempts: Arc<Attempts>,
    /// The first epoch after the last restoration that the caller knows of.
    restoration: AtomicU64,
    user_data: Arc<Mutex<SentData>>,
}

impl Drop for Member {
    fn drop(&mut self) {
        self.watcher.abort();
    }
}

impl Job {
    /// The spec of the job.
    pub fn spec(&self) -> &JobSpec {
        &self.0.spec
    }

    /// The tensor with this name.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the job has no tensor of this name.
    pub fn tensor(&self, name: &str) -> Result<TensorId> {
        self.0.spec.manifest.find(name)
    }

    /// The id, which distinguishes the job from earlier and later jobs of the same name.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// The job at a version, which another job can take over from.
    pub fn at(&self, version: u64) -> JobVersion {
        JobVersion { job: self.0.spec.name.clone(), job_id: self.0.id, version }
    }

    /// This worker's rank.
    pub fn rank(&self) -> u32 {
        self.0.rank
    }

    /// The dtype of parameters and gradients on the network.
    pub fn wire(&self) -> DType {
        self.0.cluster.options.wire
    }

    /// The time limit of a call.
    pub fn timeout(&self) -> Duration {
        self.0.cluster.options.timeout
    }

    /// The number of this worker's lease, which no other worker has. It changes when the
    /// coordinator had no connection to this worker for too long, and the rank has joined again.
    pub fn lease(&self) -> u64 {
        self.0.membership.borrow().lease
    }

    /// The version of the job in the coordinator's last message; `None` before the initial
    /// parameters are complete.
    pub fn version(&self) -> Option<u64> {
        self.0.membership.borrow().version
    }

    /// The last time that the job was restored from a checkpoint because a server was lost: the
    /// first epoch after it, and the version of the checkpoint. `None` if it never was.
    pub fn restored(&self) -> Option<(u64, u64)> {
        let restored = self.0.membership.borrow().restored?;
        Some((restored.epoch, restored.version))
    }

    /// The membership generation.
    pub fn epoch(&self) -> u64 {
        self.0.membership.borrow().epoch
    }

    /// Returns whether this rank uploads its box of a tensor. Of several ranks with the same box,
    /// one uploads it.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown tensor.
    pub fn uploads(&self, tensor: TensorId) -> Result<bool> {
        Ok(local("uploaded", &self.0.spec.manifest, &self.0.locals, tensor)?.uploads())
    }

    /// The address at which other workers reach a rank ([`Cluster::join_at`]). Waits until the rank
    /// has joined with one.
    ///
    /// # Errors
    /// [`Error::Timeout`].
    pub async fn peer(&self, rank: u32) -> Result<String> {
        let Member { cluster, spec, membership, .. } = &*self.0;
        let mut now = membership.clone();
        let there = now.wait_for(|now| now.peers.contains_key(&rank) || now.ended.is_some());
        let waiting_for = || {
            format!("{} of job {:?} to announce its address", spec.describe_rank(rank), spec.name)
        };
        // The sender lives as long as the watcher, which lives as long as this job.
        let _ = Deadline::after(cluster.options.timeout).limit(waiting_for, there).await?;
        Ok(self.current()?.peers.remove(&rank).unwrap_or_default())
    }

    /// Waits until the initial parameters of all ranks are complete on all servers, and returns the
    /// version. If an uploading rank leaves before that, its uploads are dropped.
    ///
    /// # Errors
    /// [`Error::Timeout`].
    pub async fn initialised(&self) -> Result<u64> {
        let Member { cluster, spec, membership, .. } = &*self.0;
        let mut now = membership.clone();
        let there = now.wait_for(|now| now.version.is_some() || now.ended.is_some());
        let waiting_for =
            || format!("the initial parameters of job {:?} from all ranks that upload", spec.name);
        // The same reason as in `peer`.
        let _ = Deadline::after(cluster.options.timeout).limit(waiting_for, there).await?;
        Ok(self.current()?.version.unwrap_or_default())
    }

    /// The number of payload bytes that all jobs of this cluster connection have transferred.
    pub fn traffic(&self) -> Traffic {
        self.0.cluster.shards.traffic()
    }

    /// The hash of the job's whole state at `version`, which must be the current version.
    ///
    /// # Errors
    /// [`Error::VersionGone`], [`Error::Timeout`].
    pub async fn state_hash(&self, version: u64) -> Result<String> {
        let cluster = &self.0.cluster;
        self.in_current_epoch(version, |of| async move { state::hash(cluster, &of, version).await })
            .await
    }

    /// The steps applied to each tensor, by its index, at `version`, which must be the current
    /// version. Skipped steps do not count, and neither do steps without a gradient of the tensor.
    /// Tensors that are not trained have none.
    ///
    /// # Errors
    /// [`Error::VersionGone`], [`Error::Timeout`].
    pub async fn applied_steps(&self, version: u64) -> Result<Vec<AppliedSteps>> {
        let cluster = &self.0.cluster;
        let steps = |of| async move { state::applied_steps(cluster, &of, version).await };
        self.in_current_epoch(version, steps).await
    }

    /// Reads from the servers of the current placement, and again if the placement changes
    /// meanwhile.
    async fn in_current_epoch<T, F: Future<Output = Result<T>>>(
        &self,
        version: u64,
        read: impl Fn(Description) -> F,
    ) -> Result<T> {
        let mut limit = None;
        loop {
            let described = self.described(version)?;
            let epoch = described.epoch;
            let error = match self.while_in(epoch, read(described)).await {
                Err(error @ Error::StaleEpoch { .. }) => error,
                Err(error)
                    if self.0.spec.replicas > 1
                        && (drops_job(&error) || matches!(error, Error::NotHere { .. })) =>
                {
                    error
                }
                result => return result,
            };
            // The servers and this rank do not learn of a new placement at the same time.
            let limit = limit.get_or_insert_with(|| Deadline::after(NEWS_TIMEOUT));
            if limit.left().is_zero() {
                return Err(error);
            }
            let _ = self.wait_for_news(epoch, limit.at_most(NEWS_PAUSE)).await;
        }
    }

    fn described(&self, version: u64) -> Result<Description> {
        let Membership { epoch, placement, .. } = self.current()?;
        let (spec, placement) = (JobSpec::clone(&self.0.spec), Placement::clone(&placement));
        Ok(Description { spec, id: self.0.id, epoch, placement, version: Some(version) })
    }

    /// Waits until `version`, the one that the last step has made, is saved where the policy of the
    /// job says, for up to an hour. Does nothing if it has been saved already. Returns the size of
    /// the checkpoint in bytes.
    ///
    /// # Errors
    /// [`Error::RolledBack`]: the job has returned to an earlier version, which is saved.
    /// [`Error::Invalid`] if the job has no policy or is at a later version,
    /// [`Error::UserDataLost`], [`Error::Storage`], [`Error::Timeout`].
    pub async fn save(&self, version: u64) -> Result<u64> {
        self.check_restored(version)?;
        let Member { cluster, spec, id, .. } = &*self.0;
        let (job, url) = (spec.name.clone(), String::new());
        let request = pb::SaveCheckpointRequest { job, job_id: *id, url, unless_saved: true };
        let deadline = Deadline::after(SAVE_LIMIT);
        loop {
            match cluster.save(request.clone()).await {
                Err(Error::Timeout { .. }) if !deadline.left().is_zero() => {}
                Ok((saved, _)) if saved < version => {
                    self.end_rolled_back();
                    return Err(self.rolled_back(saved));
                }
                Ok((saved, _)) if saved > version => {
                    let what = format!("version to save of job {:?}", spec.name);
                    let expected = format!("{saved}, the current version");
                    return Err(Error::invalid(what, version, expected));
                }
                saved => return saved.map(|(_, bytes)| bytes),
            }
        }
    }

    /// Sends this rank's data for checkpoints of `version`, the one that its last step has made: at
    /// most [`MAX_USER_DATA`] bytes. A step that was committed with
    /// [`Commit::user_data_follows`](crate::Commit::user_data_follows) needs it before the next
    /// commit: checkpoints of the version wait for it.
    ///
    /// # Errors
    /// [`Error::RolledBack`]: the job has returned to an earlier version. [`Error::LeaseLost`],
    /// [`Error::Invalid`], [`Error::Timeout`].
    pub async fn send_user_data(&self, version: u64, user_data: impl Into<Bytes>) -> Result<()> {
        // The epoch is read first: if the job is restored after the check, the data is older.
        let epoch = self.epoch();
        self.check_restored(version)?;
        let Member { cluster, spec, id, rank, .. } = &*self.0;
        let deadline = Deadline::after(cluster.options.timeout);
        let data = user_data.into();
        self.keep_data(epoch, version, &data);
        loop {
            let lease = self.lease();
            let request = pb::SendUserDataRequest {
                job: spec.name.clone(),
                job_id: *id,
                lease,
                rank: *rank,
                version,
                user_data: data.clone(),
            };
            let sent = cluster.retry("the receipt of the data of this rank", |mut client| {
                let request = request.clone();
                async move { client.send_user_data(request).await }
            });
            match self.unless_ended(sent).await {
                Err(Error::LeaseLost { .. }) => self.wait_for_lease_after(lease, deadline).await?,
                sent => return sent.map(|_| ()),
            }
        }
    }

    /// Keeps the data of this rank for a new coordinator, unless it will be refused.
    fn keep_data(&self, epoch: u64, version: u64, data: &Bytes) {
        if data.len() > MAX_USER_DATA {
            return;
        }
        let sent = SentData { epoch, version, data: data.clone() };
        *self.0.user_data.lock().unwrap_or_else(PoisonError::into_inner) = sent;
    }

    /// Ends the lease in order. Ranks that wait for this rank in the open step receive
    /// [`Error::RankLeft`].
    ///
    /// # Errors
    /// [`Error::Timeout`].
    pub async fn leave(&self) -> Result<()> {
        self.end_lease(false).await
    }

    /// Ends the lease like [`Self::leave`], for a rank that has no more data. In a job with
    /// [`zeroshard_model::Departure::Absent`] the other ranks continue, and the gradients of this
    /// rank count as zeros.
    ///
    /// # Errors
    /// [`Error::Timeout`].
    pub async fn leave_done(&self) -> Result<()> {
        self.end_lease(true).await
    }

    async fn end_lease(&self, done: bool) -> Result<()> {
        let Member { cluster, spec, id, .. } = &*self.0;
        let lease = self.lease();
        let request = pb::LeaveRequest { job: spec.name.clone(), lease, job_id: *id, done };
        let mut tries = 0;
        let left = cluster.retry("leave", |mut client| {
            tries += 1;
            let request = request.clone();
            async move { client.leave(request).await }
        });
        match left.await {
            // An earlier try has ended the lease, and with it the job.
            Err(Error::UnknownJob { .. } | Error::JobReplaced { .. }) if tries > 1 => Ok(()),
            left => left.map(drop),
        }
    }
}
