//! The settings of a run, checked: what the flags say, as the other modules use it.

use std::net::SocketAddr;
use std::time::Duration;

use zeroshard_proto::{DType, Token};

use super::batches::Sharding;
use super::error::Result;
use super::model::{Architecture, Model};
use super::parallelism::Parallelism;
use super::schedule::Schedule;
use super::text::Corpus;
use crate::parallel::Level;

/// Everything that decides a run's result, and how it travels. The same for all ranks.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Name of the job.
    pub job: String,
    /// What a worker keeps.
    pub level: Level,
    /// Steps of the whole run.
    pub steps: u64,
    /// Sizes of the model; those that the text decides, the vocabulary, are 0.
    pub architecture: Architecture,
    /// The workers, and how they have the model.
    pub parallelism: Parallelism,
    /// How the global batch is divided.
    pub sharding: Sharding,
    /// Servers to wait for.
    pub shards: u32,
    /// Optimizers by step.
    pub schedule: Schedule,
    /// Largest global norm of the gradient.
    pub clip: Option<f64>,
    /// What the loss is multiplied by before backward.
    pub loss_scale: f64,
    /// Element type of the published parameters.
    pub parameter_dtype: DType,
    /// Element type on the wire.
    pub wire: DType,
    /// Payload of one message, bytes.
    pub chunk_bytes: usize,
    /// How long one operation may wait.
    pub deadline: Duration,
    /// The cluster's secret.
    pub token: Token,
    /// Where a worker listens for those that it has a replica of the model together with.
    pub listen: SocketAddr,
    /// Decides initial parameters, windows and sample.
    pub seed: u64,
    /// Characters to generate at the end.
    pub sample_chars: usize,
}

impl Plan {
    /// The model for a text.
    ///
    /// # Errors
    /// [`Error::Flag`] if it cannot be cut as it should.
    pub fn model(&self, corpus: &Corpus) -> Result<Model> {
        let architecture =
            Architecture { vocabulary: corpus.vocabulary.size(), ..self.architecture };
        self.parallelism.check(architecture)?;
        Ok(Model::new(architecture))
    }

    /// Characters that the model sees at once.
    pub fn context(&self) -> usize {
        self.architecture.context
    }

    /// What those who have a replica together must have been told alike, beside the job.
    pub fn said(&self) -> String {
        let Self { level, seed, architecture, sharding, .. } = self;
        format!("level {level}, seed {seed}, {architecture:?}, {sharding:?}")
    }
}
