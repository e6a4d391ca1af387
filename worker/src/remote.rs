//! The job on the cluster, for a thread that computes: the only file that knows the client.

use tokio::runtime::Handle;
use zeroshard_client::{Cluster, Commit, Gradient, Job, Options, StepReport, Target, Traffic};
use zeroshard_proto::{DType, JobSpec, Manifest, Optimizer, Policy, Result, TensorSpec};

use crate::memory::Ledger;
use crate::model::Model;
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
    /// Number of workers.
    pub world: u32,
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
            shape: parameter.shape.iter().map(|&size| size as u64).collect(),
            dtype: self.parameter_dtype,
            frozen: false,
            buffer: false,
            alias_of: parameter.alias_of.map(|owner| model.parameters()[owner].name.clone()),
            group: parameter.group as u32,
            policy: if whole { Policy::Whole } else { Policy::Elementwise },
            no_clip: false,
            layout: None,
        });
        let spec = JobSpec {
            name: self.job,
            manifest: Manifest::new(tensors.collect())?,
            groups: self.groups,
            world: self.world,
            min_servers: self.min_servers,
            replicas: 1,
            meshes: Vec::new(),
        };
        spec.validate()?;
        Ok(spec)
    }
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
        address: &str,
        options: Options,
        spec: &JobSpec,
        rank: u32,
    ) -> Result<Self> {
        let job = runtime.block_on(async {
            let cluster = Cluster::connect(address, options).await?;
            cluster.create_job(spec).await?;
            cluster.join(&spec.name, rank).await
        })?;
        Ok(Self { runtime: runtime.clone(), job })
    }

    /// The version to start from. Where there is none yet, rank 0 uploads the initial parameters, one tensor at
    /// a time, and all begin with version 0.
    ///
    /// # Errors
    /// Those of the upload.
    pub fn start(&self, model: &Model, seed: u64, ledger: &Ledger) -> Result<u64> {
        if let Some(version) = self.job.version() {
            return Ok(version);
        }
        if self.job.rank() == 0 {
            for (tensor, parameter) in model.parameters().iter().enumerate() {
                if parameter.alias_of.is_none() {
                    let _lease = ledger.hold(parameter.elements());
                    let data = model.initial_values(seed, tensor).into();
                    self.runtime.block_on(self.job.initialise(vec![Gradient { tensor, data }]))?;
                }
            }
        }
        Ok(0)
    }

    /// Says that this rank has pushed all of a step, and waits for the decision.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn commit(&self, commit: Commit) -> Result<StepReport> {
        self.runtime.block_on(self.job.commit(commit))
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
        let targets = buffers.iter_mut().map(|buffer| Target::new(buffer.tensor, &mut buffer.values));
        self.job.pull(version, targets.collect()).await?;
        Ok(buffers)
    }

    async fn push(&self, step: u64, gradients: Vec<Buffer>) -> Result<()> {
        let gradients = gradients
            .into_iter()
            .map(|buffer| Gradient { tensor: buffer.tensor, data: buffer.values.into() });
        self.job.push(step, gradients.collect()).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Architecture;

    fn description(optimizer: &str) -> Description {
        let groups = vec![optimizer.parse().unwrap(); 2];
        let job = "job".to_owned();
        Description { job, groups, parameter_dtype: DType::Bf16, world: 2, min_servers: 3 }
    }

    #[test]
    fn the_head_is_tied_and_biases_are_in_the_second_group() {
        let model = Model::new(Architecture::small(50, 16));
        let spec = description("adamw").spec(&model).unwrap();
        let tensors = spec.manifest.tensors();
        assert_eq!(tensors.last().unwrap().alias_of.as_deref(), Some("embedding.weight"));
        assert_eq!(spec.manifest.parameters(), model.elements() as u64);
        assert!(tensors.iter().all(|tensor| tensor.group == u32::from(tensor.shape.len() == 1)));
        assert!(tensors.iter().all(|tensor| tensor.dtype == DType::Bf16));
    }

    #[test]
    fn lamb_gets_whole_tensors() {
        let model = Model::new(Architecture::small(50, 16));
        assert!(description("lamb").spec(&model).is_ok());
    }
}
