//! The connection of one rank to a job on the shard servers. This is the only file of the crate
//! that calls the client.
//!
//! The trainer, [`super::ServerOptimizer`] and [`super::DataParallel`] use it. They decide when
//! parameters are pulled and gradients are pushed.

use std::{future::Future, sync::Arc, time::Duration};

use futures_util::future::Either;
use tokio::runtime::Handle;
use zeroshard_client::{
    Cluster, Commit, CreateJob, Job, Options, StepReport, TensorData, TensorId, Traffic,
};
#[cfg(doc)]
use zeroshard_model::Error;
use zeroshard_model::{JobSpec, Result, successor_name};

use super::background::{start, wait};
use super::buffers::{targets, tensor_ids};
use super::error;
use super::exchanges::Exchanges;
use crate::collectives::Collectives;

pub use super::buffers::{Buffer, Gradient};

/// The name of a job on the shard servers and the settings for connecting to it.
#[derive(Debug, Clone)]
pub struct JobOptions {
    /// The coordinator's address.
    pub address: String,
    /// The job's name.
    pub name: String,
    /// The number of shard servers to wait for before the job is created.
    pub min_servers: u32,
    /// The coordinator deletes the job when all ranks have left it in order, or when no rank has
    /// held a lease for this long. `None`: the job is kept until somebody deletes it; the job of a
    /// `DataParallel` then has an idle timeout of 60 s.
    pub idle_timeout: Option<Duration>,
    /// Settings of the connection.
    pub options: Options,
}

/// The rank of a worker, its own address and that of the coordinator.
#[derive(Debug, Clone, Copy)]
pub struct Seat<'a> {
    /// The rank.
    pub rank: u32,
    /// The coordinator's address.
    pub coordinator: &'a str,
    /// The address at which other workers reach this worker; `None` if they do not connect to it.
    pub reached_at: Option<&'a str>,
}

/// The source of parameters and the destination of gradients: a job on the shard servers, or a
/// table in memory in tests.
///
/// Transfers among the ranks of a group begin in the order of the calls, which must be the same on
/// all of them, and not when the results are awaited.
pub trait ParameterServer: Send + Sync + 'static {
    /// Fills the buffers with the parameters of exactly `version`. Waits until it exists.
    fn pull(
        self: Arc<Self>,
        version: u64,
        buffers: Vec<Buffer>,
        by: PullBy,
    ) -> impl Future<Output = error::Result<Vec<Buffer>>> + Send;

    /// Sends gradients of `step`. Each tensor is sent once per step. The values are freed before
    /// the result is there.
    fn push(
        self: Arc<Self>,
        step: u64,
        gradients: Vec<Gradient>,
    ) -> impl Future<Output = error::Result<()>> + Send;
}

/// The ranks that pull parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PullBy {
    /// This rank alone.
    Rank,
    /// All ranks of the group, of which each pulls a part. Without groups, this rank alone.
    Group,
}

/// The connection of one rank to a job. Cheap to clone.
///
/// Methods that are not `async` block, and must not be called on a thread of the runtime.
#[derive(Debug, Clone)]
pub struct Remote {
    runtime: Handle,
    cluster: Cluster,
    job: Job,
    /// The exchanges in the group, in a job with groups.
    exchanges: Option<Arc<Exchanges>>,
}

impl Remote {
    /// Connects, creates the job unless it exists, and joins it. Waits for the coordinator for
    /// `connect_timeout` of `options`, and for the shard servers until their `timeout`.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn join(
        runtime: &Handle,
        options: Options,
        create: impl Into<CreateJob>,
        seat: Seat<'_>,
    ) -> Result<Self> {
        let cluster = runtime.block_on(Cluster::connect(seat.coordinator, options))?;
        Self::enter(runtime, cluster, create.into(), (seat.rank, seat.reached_at))
    }

    /// Joins the successor, a job that continues from `version` of this one, with the same rank.
    /// Creates the successor unless another rank has created it.
    ///
    /// # Errors
    /// [`Error::JobExists`] if a different job has the successor's name; those of the cluster.
    pub fn join_successor(&self, version: u64) -> Result<Self> {
        let name = successor_name(&self.spec().name);
        let mut create = CreateJob::new(JobSpec { name, ..self.spec().clone() });
        create.from = Some(self.job.at(version));
        Self::enter(&self.runtime, self.cluster.clone(), create, (self.rank(), None))
    }

    fn enter(
        runtime: &Handle,
        cluster: Cluster,
        create: CreateJob,
        (rank, reached_at): (u32, Option<&str>),
    ) -> Result<Self> {
        let name = create.spec.name.clone();
        let job = runtime.block_on(async {
            cluster.create_job(create).await?;
            match reached_at {
                Some(address) => cluster.join_at(&name, rank, address).await,
                None => cluster.join(&name, rank).await,
            }
        })?;
        Ok(Self { runtime: runtime.clone(), cluster, job, exchanges: None })
    }

    /// The runtime that executes the transfers.
    pub fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// The specification of the job.
    pub fn spec(&self) -> &JobSpec {
        self.job.spec()
    }

    /// This worker's rank.
    pub fn rank(&self) -> u32 {
        self.job.rank()
    }

    /// The job's version; `None` until the initial parameters are complete.
    pub fn version(&self) -> Option<u64> {
        self.job.version()
    }

    /// Returns the number of the batch that a step uses.
    pub fn batch(&self, step: u64) -> u64 {
        self.job.line().batch(step)
    }

    /// The number of bytes that this worker has transferred.
    pub fn traffic(&self) -> Traffic {
        self.job.traffic()
    }

    /// The address of a worker. Waits until it has joined.
    ///
    /// # Errors
    /// Those of the cluster.
    pub async fn peer(&self, rank: u32) -> Result<String> {
        self.job.peer(rank).await
    }

    /// From now on, exchanges gradients and parameters with the ranks of its group
    /// ([`JobSpec::group_size`]). `collectives` connects them, and is used by nobody else.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn exchange_with(&mut self, collectives: Arc<dyn Collectives>) -> std::io::Result<()> {
        let exchanges = Exchanges::start(&self.job, &self.runtime, collectives)?;
        self.exchanges = Some(Arc::new(exchanges));
        Ok(())
    }

    /// Uploads the initial parameters that this rank is responsible for, one tensor at a time.
    /// `values` returns the part of a tensor that this rank holds. A rank that uploads waits for
    /// version 0, because the servers drop the upload of a rank that leaves earlier.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn upload(&self, mut values: impl FnMut(usize) -> Vec<f32>) -> Result<()> {
        self.runtime.block_on(async {
            let mut uploads = false;
            let manifest = &self.spec().manifest;
            for tensor in 0..manifest.tensors().len() {
                let id = TensorId::new(tensor);
                if manifest.owner(tensor) == tensor && self.job.uploads(id)? {
                    self.job.initialise(vec![TensorData::new(id, values(tensor))]).await?;
                    uploads = true;
                }
            }
            if uploads {
                self.job.initialised().await?;
            }
            Ok(())
        })
    }

    /// Fills the buffers with the parameters of exactly `version`. Waits until it exists.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn read(&self, version: u64, buffers: Vec<Buffer>) -> Result<Vec<Buffer>> {
        let job = self.job.clone();
        let pulled = start(&self.runtime, async move { pull(&job, version, buffers).await });
        wait(&self.runtime, pulled)
    }

    /// Commits `step` and waits for the decision. Must be called after all gradients of this rank
    /// have been pushed. `absent` are the tensors for which this rank has no gradient.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn commit(&self, step: u64, absent: &[usize], commit: Commit) -> Result<StepReport> {
        let attempt = self.job.attempt(step)?;
        self.runtime.block_on(async {
            if !absent.is_empty() {
                attempt.push_absent(&tensor_ids(absent)).await?;
            }
            attempt.commit(commit).await
        })
    }

    /// Commits like [`Self::commit`], and pulls the parameters of the next version into `buffers`.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn commit_and_read(
        &self,
        step: u64,
        absent: &[usize],
        commit: Commit,
        mut buffers: Vec<Buffer>,
    ) -> Result<(StepReport, Vec<Buffer>)> {
        let (attempt, absent) = (self.job.attempt(step)?, tensor_ids(absent));
        let committed = start(&self.runtime, async move {
            if !absent.is_empty() {
                attempt.push_absent(&absent).await?;
            }
            let report = attempt.commit_and_pull(commit, targets(&mut buffers)).await?;
            Ok((report, buffers))
        });
        wait(&self.runtime, committed)
    }

    /// The hash of the job's state at `version`, which must be the current version.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn state_hash(&self, version: u64) -> Result<String> {
        self.runtime.block_on(self.job.state_hash(version))
    }

    /// Waits until `version`, the one that the last step has made, is saved, if the job has a
    /// policy for checkpoints.
    ///
    /// # Errors
    /// [`Error::RolledBack`], [`Error::Storage`], [`Error::Timeout`].
    pub fn save(&self, version: u64) -> Result<()> {
        if self.spec().checkpoints.is_some() {
            self.runtime.block_on(self.job.save(version))?;
        }
        Ok(())
    }

    /// Leaves the job in order: the other ranks are notified at once.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn leave(&self) -> Result<()> {
        self.runtime.block_on(self.job.leave())
    }
}

impl ParameterServer for Remote {
    fn pull(
        self: Arc<Self>,
        version: u64,
        buffers: Vec<Buffer>,
        by: PullBy,
    ) -> impl Future<Output = error::Result<Vec<Buffer>>> + Send {
        match self.exchanges.as_ref().filter(|_| by == PullBy::Group) {
            Some(exchanges) => Either::Left(exchanges.pull(version, buffers)),
            None => Either::Right(async move { Ok(pull(&self.job, version, buffers).await?) }),
        }
    }

    fn push(
        self: Arc<Self>,
        step: u64,
        gradients: Vec<Gradient>,
    ) -> impl Future<Output = error::Result<()>> + Send {
        match &self.exchanges {
            Some(exchanges) => Either::Left(exchanges.push(step, gradients)),
            None => Either::Right(async move { Ok(push(&self.job, step, gradients).await?) }),
        }
    }
}

async fn pull(job: &Job, version: u64, mut buffers: Vec<Buffer>) -> Result<Vec<Buffer>> {
    job.pull(version, targets(&mut buffers)).await?;
    Ok(buffers)
}

async fn push(job: &Job, step: u64, gradients: Vec<Gradient>) -> Result<()> {
    let data = |(tensor, values): Gradient| TensorData::new(TensorId::new(tensor), values);
    job.attempt(step)?.push(gradients.into_iter().map(data).collect()).await
}
