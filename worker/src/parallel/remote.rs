//! A rank's part in a job on the shard servers: the only file of the crate that knows the client.
//!
//! The trainer, [`super::ServerOptimizer`] and [`super::DataParallel`] use it alike. When
//! parameters are pulled and gradients are pushed is their decision.

use std::future::Future;

use tokio::runtime::Handle;
use zeroshard_client::{
    Cluster, Commit, CreateJob, Job, Options, StepReport, Target, TensorData, Traffic,
};
use zeroshard_proto::{Error, JobSpec, Result, TensorBox, successor_name};

/// A job on the shard servers, and how to reach it.
#[derive(Debug, Clone)]
pub struct JobOptions {
    /// The coordinator's address.
    pub address: String,
    /// The job's name.
    pub name: String,
    /// Servers to wait for.
    pub min_servers: u32,
    /// Settings of the connection.
    pub options: Options,
}

/// The address and the rank of a worker.
#[derive(Debug, Clone, Copy)]
pub struct Seat<'a> {
    /// Its rank.
    pub rank: u32,
    /// The coordinator's address.
    pub coordinator: &'a str,
    /// The address at which other workers reach it, if it has one.
    pub reached_at: Option<&'a str>,
}

/// The values of a box of a tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Buffer {
    /// Index in the manifest.
    pub tensor: usize,
    /// The box.
    pub bounds: TensorBox,
    /// Its elements, row-major.
    pub values: Vec<f32>,
}

impl Buffer {
    /// Room for a box of a tensor.
    pub fn zeros(tensor: usize, bounds: TensorBox) -> Self {
        let values = vec![0.0; bounds.numel() as usize];
        Self { tensor, bounds, values }
    }
}

/// The gradient of this rank's part of a tensor, by the tensor's index in the manifest.
pub type Gradient = (usize, Vec<f32>);

/// The source of parameters and the destination of gradients: a job on the shard servers, or in
/// tests a table.
pub trait ParameterServer: Send + Sync + 'static {
    /// Fills the buffers with the parameters of exactly `version`; waits for it.
    fn pull(
        &self,
        version: u64,
        buffers: Vec<Buffer>,
    ) -> impl Future<Output = Result<Vec<Buffer>>> + Send;

    /// Sends gradients of `step`. Each tensor is sent once per step. The values are freed on return
    /// at the latest.
    fn push(&self, step: u64, gradients: Vec<Gradient>) -> impl Future<Output = Result<()>> + Send;
}

/// A rank's part in a job. Cheap to clone.
///
/// Methods that are not `async` block, and must not be called on a thread of the runtime.
#[derive(Debug, Clone)]
pub struct Remote {
    runtime: Handle,
    cluster: Cluster,
    job: Job,
}

impl Remote {
    /// Connects, creates the job unless it exists, and joins it.
    ///
    /// # Errors
    /// Those of the cluster; waits for coordinator and servers until the deadline of `options`.
    pub fn join(
        runtime: &Handle,
        options: Options,
        spec: &JobSpec,
        seat: Seat<'_>,
    ) -> Result<Self> {
        let cluster = runtime.block_on(Cluster::connect(seat.coordinator, options))?;
        Self::enter(runtime, cluster, spec.into(), (seat.rank, seat.reached_at))
    }

    /// Joins, as the same rank, the job that continues from this one at `version`. Creates that job
    /// unless another rank has created it.
    ///
    /// # Errors
    /// [`Error::JobExists`] if another job has its name; others of the cluster.
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
        Ok(Self { runtime: runtime.clone(), cluster, job })
    }

    /// The runtime that moves the bytes.
    pub fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// The job's spec.
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

    /// Bytes moved by this worker.
    pub fn traffic(&self) -> Traffic {
        self.job.traffic()
    }

    /// The addresses of the workers, by rank. Waits until all have joined.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn peers(&self) -> Result<Vec<String>> {
        self.runtime.block_on(self.job.peers())
    }

    /// Uploads the initial parameters that this rank is responsible for, one tensor at a time;
    /// `own` returns this rank's part of a tensor. A rank that uploads waits for version 0, because
    /// the servers drop the upload of a rank that leaves earlier.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn upload(&self, mut own: impl FnMut(usize) -> Vec<f32>) -> Result<()> {
        self.runtime.block_on(async {
            let mut uploads = false;
            let manifest = &self.spec().manifest;
            for tensor in 0..manifest.tensors().len() {
                if manifest.owner(tensor) == tensor && self.job.uploads(tensor)? {
                    let data = own(tensor).into();
                    self.job.initialise(vec![TensorData { tensor, data }]).await?;
                    uploads = true;
                }
            }
            if uploads {
                self.job.initialised().await?;
            }
            Ok(())
        })
    }

    /// Reads the parameters of exactly `version`; waits for it.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn read(&self, version: u64, buffers: Vec<Buffer>) -> Result<Vec<Buffer>> {
        self.runtime.block_on(self.pull(version, buffers))
    }

    /// Votes for `step`, after all gradients of this rank have been pushed, and waits for the
    /// decision. `absent`: the tensors that this rank has no gradient of.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn commit(&self, step: u64, absent: &[usize], commit: Commit) -> Result<StepReport> {
        let attempt = self.job.attempt(step)?;
        self.runtime.block_on(async {
            if !absent.is_empty() {
                attempt.push_absent(absent).await?;
            }
            attempt.commit(commit).await
        })
    }

    /// Commits like [`Self::commit`], and reads the parameters of the next version into `buffers`.
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
        let attempt = self.job.attempt(step)?;
        let report = self.runtime.block_on(async {
            if !absent.is_empty() {
                attempt.push_absent(absent).await?;
            }
            attempt.commit_and_pull(commit, targets(&mut buffers)).await
        })?;
        Ok((report, buffers))
    }

    /// The hash of the job's state at its current version.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn state_hash(&self, version: u64) -> Result<String> {
        self.runtime.block_on(self.job.state_hash(version))
    }

    /// Ends the lease in order.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn leave(&self) -> Result<()> {
        self.runtime.block_on(self.job.leave())
    }

    /// Leaves the job; the last of its ranks deletes it.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn retire(&self) -> Result<()> {
        self.runtime.block_on(async {
            self.job.leave().await?;
            let name = &self.spec().name;
            let jobs = self.cluster.status().await?.jobs;
            if jobs.iter().any(|other| other.name == *name && other.joined.is_empty()) {
                match self.cluster.delete_job(name).await {
                    // Two ranks left at the same time, and the other one deleted it.
                    Err(Error::UnknownJob { .. }) => {}
                    result => result?,
                }
            }
            Ok(())
        })
    }
}

impl ParameterServer for Remote {
    async fn pull(&self, version: u64, mut buffers: Vec<Buffer>) -> Result<Vec<Buffer>> {
        self.job.pull(version, targets(&mut buffers)).await?;
        Ok(buffers)
    }

    async fn push(&self, step: u64, gradients: Vec<Gradient>) -> Result<()> {
        let data = |(tensor, values): Gradient| TensorData { tensor, data: values.into() };
        self.job.attempt(step)?.push(gradients.into_iter().map(data).collect()).await
    }
}

fn targets(buffers: &mut [Buffer]) -> Vec<Target<'_>> {
    let mut targets = Vec::with_capacity(buffers.len());
    for Buffer { tensor, bounds, values } in buffers {
        targets.push(Target { bounds: Some(bounds.clone()), ..Target::new(*tensor, values) });
    }
    targets
}
