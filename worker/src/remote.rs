//! The job on the cluster, for a thread that computes: the only file that knows the client.

use std::sync::Arc;

use tokio::runtime::Handle;
use zeroshard_client::{Cluster, Commit, Gradient, Job, Options, StepReport, Target, Traffic};
use zeroshard_proto::{
    DType, DimPlacement, JobSpec, Manifest, Optimizer, Policy, ProcessMesh, Reduction, Result, TensorLayout,
    TensorSpec,
};

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
    /// Groups of workers that have the whole model each, and a share of the batch.
    pub data_parallel: usize,
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
        let ranks = model.division().ranks;
        let mean = DimPlacement::Partial(Reduction::Avg);
        let layout = |tensor| TensorLayout { mesh: 0, placements: vec![mean, model.placement(tensor)] };
        let tensors = model.parameters().iter().enumerate().map(|(tensor, parameter)| TensorSpec {
            name: parameter.name.clone(),
            shape: parameter.shape.iter().map(|&size| size as u64).collect(),
            dtype: self.parameter_dtype,
            frozen: false,
            buffer: false,
            alias_of: parameter.alias_of.map(|owner| model.parameters()[owner].name.clone()),
            group: parameter.group as u32,
            policy: if whole { Policy::Whole } else { Policy::Elementwise },
            no_clip: false,
            // What every worker has all of needs none.
            layout: (ranks > 1 && parameter.alias_of.is_none()).then(|| layout(tensor)),
        });
        let spec = JobSpec {
            name: self.job,
            manifest: Manifest::new(tensors.collect())?,
            groups: self.groups,
            world: (self.data_parallel * ranks) as u32,
            min_servers: self.min_servers,
            replicas: 1,
            meshes: if ranks > 1 { vec![Arc::new(mesh(self.data_parallel, ranks)?)] } else { Vec::new() },
        };
        spec.validate()?;
        Ok(spec)
    }
}

/// The workers: rank d x `tensor_parallel` + t has part t of the model, and share d of the batch.
///
/// # Errors
/// `Error::Invalid` for more ranks than a job can have.
pub fn mesh(data_parallel: usize, tensor_parallel: usize) -> Result<ProcessMesh> {
    ProcessMesh::dense([data_parallel, tensor_parallel], ["dp", "tp"])
}

/// A rank's place in a job. Its methods block, and must not be called on a thread of the runtime.
pub struct Remote {
    runtime: Handle,
    job: Job,
}

impl Remote {
    /// Connects, makes the job unless it is there, and joins it; tells the others that this worker is reached at `here`, if that is
    /// not empty.
    ///
    /// # Errors
    /// Those of the cluster; waits for coordinator and servers until the deadline of `options`.
    pub fn join(
        runtime: &Handle,
        address: &str,
        options: Options,
        spec: &JobSpec,
        rank: u32,
        here: &str,
    ) -> Result<Self> {
        let job = runtime.block_on(async {
            let cluster = Cluster::connect(address, options).await?;
            cluster.create_job(spec).await?;
            cluster.join_at(&spec.name, rank, here).await
        })?;
        Ok(Self { runtime: runtime.clone(), job })
    }

    /// Where each rank's worker is reached; waits until all have said so.
    ///
    /// # Errors
    /// Those of the cluster.
    pub fn peers(&self) -> Result<Vec<String>> {
        self.runtime.block_on(self.job.peers())
    }

    /// The version to start from. Where there is none yet, the ranks upload the initial parameters, each box once and one tensor at
    /// a time, and all begin with version 0.
    ///
    /// # Errors
    /// Those of the upload.
    pub fn start(&self, model: &Model, seed: u64, ledger: &Ledger) -> Result<u64> {
        if let Some(version) = self.job.version() {
            return Ok(version);
        }
        for (tensor, parameter) in model.parameters().iter().enumerate() {
            if parameter.alias_of.is_none() && self.job.uploads(tensor)? {
                let _lease = ledger.hold(model.elements_of(tensor));
                let data = model.initial_part(seed, tensor).into();
                self.runtime.block_on(self.job.initialise(vec![Gradient { tensor, data }]))?;
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
    use crate::model::{Architecture, Division};

    fn description(optimizer: &str) -> Description {
        let groups = vec![optimizer.parse().unwrap(); 2];
        let job = "job".to_owned();
        Description { job, groups, parameter_dtype: DType::Bf16, data_parallel: 2, min_servers: 3 }
    }

    #[test]
    fn the_head_is_tied_and_biases_are_in_the_second_group() {
        let model = Model::new(Architecture::small(50, 16)).unwrap();
        let spec = description("adamw").spec(&model).unwrap();
        let tensors = spec.manifest.tensors();
        assert_eq!(tensors.last().unwrap().alias_of.as_deref(), Some("embedding.weight"));
        assert_eq!(spec.manifest.parameters(), model.elements() as u64);
        assert!(tensors.iter().all(|tensor| tensor.group == u32::from(tensor.shape.len() == 1)));
        assert!(tensors.iter().all(|tensor| tensor.dtype == DType::Bf16));
    }

    #[test]
    fn lamb_gets_whole_tensors() {
        let model = Model::new(Architecture::small(50, 16)).unwrap();
        assert!(description("lamb").spec(&model).is_ok());
    }

    #[test]
    fn each_tensor_parallel_rank_has_its_part_of_what_is_cut() {
        let division = Division { ranks: 2, place: 1, sequence: false };
        let model = Model::divided(Architecture::small(51, 16), division).unwrap();
        let spec = description("adamw").spec(&model).unwrap();
        assert_eq!(spec.world, 4);
        for (tensor, parameter) in model.parameters().iter().enumerate() {
            assert_eq!(spec.local_box(tensor, 3), model.area(tensor), "{}", parameter.name);
            let all = spec.contributions(tensor);
            let ranks: Vec<u32> = all.lanes.iter().flat_map(|lane| lane.ranks.clone()).collect();
            let expected = if parameter.cut.is_some() { vec![0, 2, 1, 3] } else { vec![0, 2] };
            assert_eq!((ranks, all.divisor), (expected, 2), "{}", parameter.name);
        }
    }

    #[test]
    fn where_rows_are_cut_all_ranks_add_to_what_they_have_all_of() {
        let division = Division { ranks: 2, place: 0, sequence: true };
        let model = Model::divided(Architecture::small(51, 16), division).unwrap();
        let spec = description("adamw").spec(&model).unwrap();
        let norm = model.parameters().iter().position(|parameter| parameter.name == "norm.weight").unwrap();
        let all = spec.contributions(norm);
        assert_eq!((all.lanes[0].ranks.as_slice(), all.divisor), ([0, 1, 2, 3].as_slice(), 2));
    }
}
