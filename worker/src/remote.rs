//! The job on the cluster, for a thread that computes: the only file that knows the client.

use tokio::runtime::Handle;
use zeroshard_client::{Cluster, Commit, Job, Options, StepReport, Target, TensorData, Traffic};
use zeroshard_proto::{DType, Departure, JobSpec, Manifest, Optimizer, Policy, Result, TensorSpec};

use crate::memory::Ledger;
use crate::model::Model;
use crate::tensor_parallel::{Network, Parallelism};
use crate::travel::{Buffer, Exchange};

/// What the servers must know of a model.
#[derive(Debug, Clone)]
pub struct Description {
    /// Name of the job.
    pub job: String,
    /// Optimizers of the first step, one for each parameter group.
    pub groups: Vec<Optimizer>,
    /// Element type of the parameters that the servers give out.
    pub parameter_dtype: DType,
    /// The workers, and how they have the model.
    pub parallelism: Parallelism,
    /// Servers to wait for.
    pub min_servers: u32,
}

impl Description {
    /// The job's spec for a model.
    ///
    /// # Errors
    /// `Error::Invalid` for what no job can have.
    pub fn spec(self, model: &Model) -> Result<JobSpec> {
        let whole = self.groups.iter().any(Optimizer::needs_whole_tensors);
        let tensors = model.parameters().iter().map(|parameter| TensorSpec {
            name: parameter.name.clone(),
            shape: parameter.sizes(),
            dtype: self.parameter_dtype,
            frozen: false,
            buffer: false,
            alias_of: parameter.alias_of.map(|owner| model.parameters()[owner].name.clone()),
            group: parameter.group as u32,
            policy: if whole { Policy::Whole } else { Policy::Elementwise },
            no_clip: false,
            layout: self.parallelism.layout(parameter),
        });
        let spec = JobSpec {
            name: self.job,
            manifest: Manifest::new(tensors.collect())?,
            groups: self.groups,
            world: self.parallelism.workers(),
            min_servers: self.min_servers,
            replicas: 1,
            meshes: self.parallelism.mesh()?.into_iter().map(Into::into).collect(),
            departure: Departure::Error,
            idle_timeout: None,
        };
        spec.validate()?;
        Ok(spec)
    }
}

/// Who a worker is.
#[derive(Debug, Clone, Copy)]
pub struct Seat<'a> {
    /// Its rank.
    pub rank: u32,
    /// The coordinator's address.
    pub coordinator: &'a str,
    /// Where the other workers reach it; empty if they need not.
    pub reached_at: &'a str,
}

/// A rank's place in a job. Its methods block, and must not be called on a thread of the runtime.
pub struct Remote {
    runtime: Handle,
    job: Job,
}

impl Remote {
    /// Connects, makes the job unless it is there, and joins it.
    ///
    /// # Errors
    /// Those of the cluster; waits for coordinator and servers until the deadline of `options`.
    pub fn join(
        runtime: &Handle,
        options: Options,
        spec: &JobSpec,
        seat: Seat<'_>,
    ) -> Result<Self> {
        let job = runtime.block_on(async {
            let cluster = Cluster::connect(seat.coordinator, options).await?;
            cluster.create_job(spec).await?;
            cluster.join_at(&spec.name, seat.rank, seat.reached_at).await
        })?;
        Ok(Self { runtime: runtime.clone(), job })
    }

    /// This worker's rank.
    pub fn rank(&self) -> u32 {
        self.job.rank()
    }

    /// Where the workers are reached, by rank. Waits until all have joined.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn peers(&self) -> Result<Vec<String>> {
        self.runtime.block_on(self.job.peers())
    }

    /// The version to start from. Where there is none yet, the initial parameters are uploaded,
    /// each by the first rank that has it, one tensor at a time, and all begin with version 0.
    ///
    /// # Errors
    /// Those of the upload.
    pub fn start(&self, network: &Network, seed: u64, ledger: &Ledger) -> Result<u64> {
        if let Some(version) = self.job.version() {
            return Ok(version);
        }
        for (tensor, parameter) in network.model().parameters().iter().enumerate() {
            if parameter.alias_of.is_none() && self.job.uploads(tensor)? {
                let area = network.area(tensor);
                let _lease = ledger.hold(area.numel() as usize);
                let data = network.model().initial_part(seed, tensor, area).into();
                self.runtime.block_on(self.job.initialise(vec![TensorData { tensor, data }]))?;
            }
        }
        Ok(0)
    }

    /// Says that this rank has pushed all of `step`, and waits for the decision.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn commit(&self, step: u64, commit: Commit) -> Result<StepReport> {
        let attempt = self.job.attempt(step)?;
        self.runtime.block_on(attempt.commit(commit))
    }

    /// The hash of the job's state at its current version.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn state_hash(&self, version: u64) -> Result<String> {
        self.runtime.block_on(self.job.state_hash(version))
    }

    /// Bytes moved by this worker.
    pub fn traffic(&self) -> Traffic {
        self.job.traffic()
    }

    /// Ends the lease in order.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn leave(self) -> Result<()> {
        self.runtime.block_on(self.job.leave())
    }
}

impl Exchange for Remote {
    async fn pull(&self, version: u64, mut buffers: Vec<Buffer>) -> Result<Vec<Buffer>> {
        let targets = buffers.iter_mut().map(|Buffer { tensor, area, values }| Target {
            area: Some(area.clone()),
            ..Target::new(*tensor, values)
        });
        self.job.pull(version, targets.collect()).await?;
        Ok(buffers)
    }

    async fn push(&self, step: u64, gradients: Vec<Buffer>) -> Result<()> {
        let gradients = gradients
            .into_iter()
            .map(|Buffer { tensor, values, .. }| TensorData { tensor, data: values.into() });
        self.job.attempt(step)?.push(gradients.collect()).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Architecture;

    fn description(optimizer: &str) -> Description {
        let groups = vec![optimizer.parse().unwrap(); 2];
        let job = "job".to_owned();
        let parallelism = Parallelism { replicas: 2, ranks: 1, sequence: false };
        Description { job, groups, parameter_dtype: DType::Bf16, parallelism, min_servers: 3 }
    }

    #[test]
    fn the_head_is_tied_and_biases_are_in_the_second_group() {
        let model = Model::new(Architecture::small(50, 16));
        let spec = description("adamw").spec(&model).unwrap();
        let tensors = spec.manifest.tensors();
        assert_eq!(tensors.last().unwrap().alias_of.as_deref(), Some("embedding.weight"));
        assert_eq!(spec.manifest.parameters(), model.elements() as u64);
        let no_decay = |name: &str| name.ends_with("bias") || name.contains("norm");
        assert!(tensors.iter().all(|tensor| tensor.group == u32::from(no_decay(&tensor.name))));
        assert!(spec.meshes.is_empty() && tensors.iter().all(|tensor| tensor.layout.is_none()));
        assert!(tensors.iter().all(|tensor| tensor.dtype == DType::Bf16));
    }

    #[test]
    fn lamb_gets_whole_tensors() {
        let model = Model::new(Architecture::small(50, 16));
        assert!(description("lamb").spec(&model).is_ok());
    }
}
