//! The validated settings of a run, and the specification of its job.

use std::net::SocketAddr;
use std::time::Duration;

use zeroshard_client::{CreateJob, Options, Transport, Wire};
use zeroshard_model::{
    CheckpointPolicy, DType, JobSpec, Manifest, Optimizer, Policy, Restore, RestoreVersion,
    StateDType, TensorSpec,
};
use zeroshard_net::{Token, transport::tls::Tls};
use zeroshard_worker::parallel::Level;

use super::batches::Sharding;
use super::error::Result;
use super::model::{Architecture, Model};
use super::parallelism::Parallelism;
use super::schedule::Schedule;
use super::text::Corpus;

/// The settings of a run, which must be the same for all ranks.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The name of the job.
    pub job: String,
    /// The level of ZeRO.
    pub level: Level,
    /// The number of steps of the whole run.
    pub steps: u64,
    /// The sizes of the model. The vocabulary depends on the text and is 0 here.
    pub architecture: Architecture,
    /// The degrees of parallelism.
    pub parallelism: Parallelism,
    /// The number of consecutive workers that add their gradients before they push them.
    pub group_size: u32,
    /// `true` if large messages between workers go over NCCL.
    pub nccl: bool,
    /// `true` if servers with a GPU keep the optimizer state outside of its memory.
    pub offload: bool,
    /// The dtype of the optimizer state.
    pub state_dtype: StateDType,
    /// The division of the global batch.
    pub sharding: Sharding,
    /// The number of shard servers to wait for.
    pub shards: u32,
    /// The number of servers that hold each slice.
    pub replicas: u32,
    /// The optimizers of each step.
    pub schedule: Schedule,
    /// The maximum global norm of the gradient.
    pub clip: Option<f64>,
    /// The factor by which the loss is multiplied before the backward pass.
    pub loss_scale: f64,
    /// The element type of the published parameters.
    pub parameter_dtype: DType,
    /// The encoding of gradients on the wire.
    pub wire: Wire,
    /// The encoding of parameters on the wire: see [`Options::parameter_wire`].
    pub parameter_wire: Option<Wire>,
    /// The payload of one message in bytes.
    pub chunk_bytes: usize,
    /// How parameters and gradients reach servers.
    pub transport: Option<Transport>,
    /// The deadline of one operation.
    pub deadline: Duration,
    /// The time limit for the first answer of the coordinator.
    pub connect_timeout: Duration,
    /// The token of the cluster.
    pub token: Token,
    /// The TLS configuration of the connections to the cluster and to other workers.
    pub tls: Option<Tls>,
    /// The address at which a worker listens for the other ranks of its replica or group.
    pub listen: SocketAddr,
    /// The seed of the initial parameters, the windows and the sample.
    pub seed: u64,
    /// The number of characters to generate at the end.
    pub sample_chars: usize,
    /// When and where the job is saved, if it is.
    pub checkpoints: Option<CheckpointPolicy>,
    /// `true` if the job starts from its latest checkpoint, if there is one.
    pub resume: bool,
}

impl Plan {
    /// The model for a text.
    ///
    /// # Errors
    /// [`super::error::Error::Flag`] if the model cannot be sharded over the ranks.
    pub fn model(&self, corpus: &Corpus) -> Result<Model> {
        let architecture =
            Architecture { vocabulary: corpus.vocabulary.size(), ..self.architecture };
        self.parallelism.check(architecture)?;
        Ok(Model::new(architecture))
    }

    /// The specification of the job that trains `model`. It has the optimizers with the highest
    /// learning rate, and each step has its own hyperparameters. Therefore a later run with a
    /// different number of steps or a different learning rate can continue the job.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::Invalid`] for an invalid specification.
    pub fn spec(&self, model: &Model) -> zeroshard_model::Result<JobSpec> {
        let groups = self.schedule.highest();
        let whole = groups.iter().any(Optimizer::needs_whole_tensors);
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
            replaced_by: None,
        });
        let manifest = Manifest::new(tensors.collect())?;
        let spec = JobSpec {
            world: self.parallelism.workers(),
            group_size: self.group_size,
            offload: self.offload,
            rounding_seed: self.seed,
            state_dtype: self.state_dtype,
            min_servers: self.shards,
            replicas: self.replicas,
            meshes: self.parallelism.mesh()?.into_iter().map(Into::into).collect(),
            checkpoints: self.checkpoints.clone(),
            ..JobSpec::new(self.job.clone(), manifest, groups)
        };
        spec.validate()?;
        Ok(spec)
    }

    /// The request for the job that trains `model`.
    ///
    /// # Errors
    /// Those of [`Self::spec`].
    pub fn create(&self, model: &Model) -> zeroshard_model::Result<CreateJob> {
        let mut create = CreateJob::new(self.spec(model)?);
        let policy = self.checkpoints.as_ref().filter(|_| self.resume);
        create.restore = policy.map(|policy| Restore {
            url: policy.url.clone(),
            job: self.job.clone(),
            version: RestoreVersion::LatestIfAny,
            line: None,
        });
        Ok(create)
    }

    /// The settings of the connection to the cluster.
    pub fn options(&self) -> Options {
        Options::default()
            .wire(self.wire)
            .parameter_wire(self.parameter_wire)
            .chunk_bytes(self.chunk_bytes)
            .transport(self.transport)
            .timeout(self.deadline)
            .connect_timeout(self.connect_timeout)
            .token(self.token.clone())
            .tls(self.tls.clone())
    }

    /// The number of characters in a window.
    pub fn context(&self) -> usize {
        self.architecture.context
    }

    /// A description of the settings that must be the same for all workers, and that are not part
    /// of the job's specification.
    pub fn shared_settings(&self) -> String {
        let Self { level, seed, architecture, sharding, wire, .. } = self;
        let parameter_wire = self.options().wire_of_parameters();
        format!(
            "level {level}, seed {seed}, gradients as {wire}, parameters as {parameter_wire}, \
             {architecture:?}, {sharding:?}"
        )
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    /// A small model and the specification of its job, for flags of `train`.
    fn spec(flags: &str) -> (Model, JobSpec) {
        let arguments = ["zeroshard-worker", "train"].into_iter().chain(flags.split(' '));
        let Command::Train(flags) = Cli::parse_from(arguments).command;
        let plan = flags.plan().unwrap();
        let model = Model::new(Architecture { vocabulary: 50, ..plan.architecture });
        let spec = plan.spec(&model).unwrap();
        (model, spec)
    }

    #[test]
    fn the_head_is_tied_and_biases_are_in_the_second_group() {
        let (model, spec) = spec("--optimizer adamw --param-dtype bf16 --shards 3");
        let tensors = spec.manifest.tensors();
        assert_eq!(tensors.last().unwrap().alias_of.as_deref(), Some("embedding.weight"));
        assert_eq!(spec.manifest.parameters(), model.elements() as u64);
        let no_decay = |name: &str| name.ends_with("bias") || name.contains("norm");
        assert!(tensors.iter().all(|tensor| tensor.group == u32::from(no_decay(&tensor.name))));
        assert!(spec.meshes.is_empty() && tensors.iter().all(|tensor| tensor.layout.is_none()));
        assert!(tensors.iter().all(|tensor| tensor.dtype == DType::Bf16));
    }

    #[test]
    fn tensors_are_not_split_for_lamb() {
        let (_, spec) = spec("--optimizer lamb");
        assert!(spec.manifest.tensors().iter().all(|tensor| tensor.policy == Policy::Whole));
    }
}
