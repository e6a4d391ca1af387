//! A rank's membership in a job: its lease, and what it knows of the job. Calls outside a step are
//! in `calls`, transfers in `transfer`, gradients and votes in `attempt`.

use std::{
    sync::{Arc, Mutex, atomic::AtomicU64},
    time::Duration,
};

use tokio::{sync::watch, task::JoinHandle};
#[cfg(doc)]
use zeroshard_model::Error;
use zeroshard_model::{DType, JobSpec, JobVersion, Line, Result, TensorId, local::LocalTensor};
use zeroshard_net::Deadline;
use zeroshard_proto::Wire;

use crate::{Cluster, Traffic, local::local, pull, windows::Windows};
use attempts::Attempts;
use membership::{Membership, SentData};

mod attempt;
mod attempts;
mod calls;
mod join;
mod links;
mod membership;
mod membership_changes;
mod transfer;
mod watcher;

pub use attempt::Attempt;

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
    /// The shared memory with servers on this host.
    windows: Windows,
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

    /// The encoding of gradients on the wire.
    pub fn wire(&self) -> Wire {
        self.0.cluster.options.wire
    }

    /// The encoding of parameters on the wire.
    pub fn parameter_wire(&self) -> Wire {
        self.0.cluster.options.wire_of_parameters()
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

    /// Returns the current line: how often the job has returned to a checkpoint, and which batches
    /// its steps skip.
    pub fn line(&self) -> Arc<Line> {
        self.0.membership.borrow().line.clone()
    }

    /// Returns the job's last return to a checkpoint, after a loss or a rewind: the first epoch
    /// after it, and the version of the checkpoint. `None` if the job has never returned.
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

    /// Returns whether this rank pushes new values of its box of a tensor:
    /// [`crate::Attempt::push_values`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown tensor.
    pub fn replaces(&self, tensor: TensorId) -> Result<bool> {
        Ok(local("replaced", &self.0.spec.manifest, &self.0.locals, tensor)?.replaces())
    }

    /// Returns whether a pull rounds the parameters of a tensor.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown tensor.
    pub fn rounds(&self, tensor: TensorId) -> Result<bool> {
        let manifest = &self.0.spec.manifest;
        local("pulled", manifest, &self.0.locals, tensor)?;
        let published = manifest.tensors()[tensor.index()].dtype;
        Ok(match pull::wire_of(manifest, self.parameter_wire(), tensor.index()) {
            Wire::Plain(dtype) => dtype != DType::F32 && dtype != published,
            Wire::Int8 => true,
        })
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
        self.0.windows.release_unused();
        Ok(self.current()?.version.unwrap_or_default())
    }

    /// The number of payload bytes that all jobs of this cluster connection have transferred.
    pub fn traffic(&self) -> Traffic {
        self.0.cluster.shards.traffic()
    }

    /// The membership.
    ///
    /// # Errors
    /// The reason for its end.
    fn current(&self) -> Result<Membership> {
        let membership = self.0.membership.borrow().clone();
        match membership.ended {
            Some(error) => Err(error),
            None => Ok(membership),
        }
    }
}
