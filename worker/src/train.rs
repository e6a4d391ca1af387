//! The training loop of one rank.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use zeroshard_client::{Commit, Options, StepReport};
use zeroshard_proto::{DType, Error as ClusterError, Token};

use crate::batches::{Batch, Draw, Sharding};
use crate::collectives::{self, Peers};
use crate::error::{Error, Result};
use crate::evaluate::held_out_batches;
use crate::levels::{self, Level, Work};
use crate::memory::Ledger;
use crate::model::{Architecture, Division, Model};
use crate::parallel::{self, World};
use crate::progress::{Output, StepEvent};
use crate::remote::{self, Description, Remote};
use crate::sample;
use crate::schedule::Schedule;
use crate::tensor_parallel::Group;
use crate::text::Corpus;
use crate::travel::Link;

/// Held-out evaluations during a run, at most.
const EVALUATIONS: u64 = 8;
/// Characters of held-out text that a sample goes on from.
const PROMPT: usize = 24;

/// Sizes of a model that do not follow from the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Width of the residual stream.
    pub width: usize,
    /// Transformer blocks.
    pub blocks: usize,
    /// Attention heads of a block.
    pub heads: usize,
}

/// Everything that decides a run's result, and how it travels. The same for all ranks.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Name of the job.
    pub job: String,
    /// What a worker keeps.
    pub level: Level,
    /// Steps of the whole run.
    pub steps: u64,
    /// Characters that the model sees at once.
    pub context: usize,
    /// How the global batch is divided.
    pub sharding: Sharding,
    /// Width, blocks and heads of the model.
    pub sizes: Sizes,
    /// Groups of workers that have the whole model each, and a share of the batch.
    pub data_parallel: usize,
    /// Workers of a group, each with a part of the model.
    pub tensor_parallel: usize,
    /// Whether these have a part of the residual stream each, too.
    pub sequence_parallel: bool,
    /// Where a worker of several that have one model listens for the others.
    pub peer_listen: SocketAddr,
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
    /// Decides initial parameters, windows and sample.
    pub seed: u64,
    /// Characters to generate at the end.
    pub sample_chars: usize,
}

/// What a run came to, as rank 0 saw it.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Steps that the job has taken.
    pub steps: u64,
    /// Loss of each step of this run (mean over the ranks), nats per character.
    pub train: Vec<(u64, f64)>,
    /// Held-out loss after so many steps.
    pub held_out: Vec<(u64, f64)>,
    /// Steps that were skipped because of inf or NaN.
    pub skipped: u64,
    /// Times that a step was run again.
    pub aborted: u64,
    /// Parameters of the model.
    pub parameters: usize,
    /// Loss of knowing only how common each character is.
    pub unigram_entropy: f64,
    /// Hash of the job's state.
    pub state_hash: String,
    /// The most parameter and gradient bytes held at once, by this worker.
    pub peak_bytes: usize,
    /// Parameter bytes received by this worker.
    pub pulled_bytes: u64,
    /// Gradient bytes sent by this worker.
    pub pushed_bytes: u64,
    /// Time from the first step to the last evaluation.
    pub elapsed: Duration,
    /// Characters that all workers trained on in that time.
    pub tokens: u64,
    /// Where the sample goes on from.
    pub prompt: String,
    /// Generated text.
    pub sample: String,
}

/// Runs one rank from where the job is to the end. Gives an outcome for rank 0, and `None` for the others.
///
/// # Errors
/// Those of the cluster, and [`Error::NothingToDo`]. Aborted steps are run again.
pub fn train(
    plan: &Plan,
    corpus: &Corpus,
    runtime: &Handle,
    address: &str,
    rank: u32,
    output: &mut Output,
) -> Result<Option<Outcome>> {
    let model = plan.model(corpus, rank)?;
    let spec = Description {
        job: plan.job.clone(),
        // The job's own are its first step's: a later run with other steps or rates is still the same job.
        groups: plan.schedule.highest(),
        parameter_dtype: plan.parameter_dtype,
        data_parallel: plan.data_parallel,
        min_servers: plan.shards,
    }
    .spec(&model)?;
    let options = Options {
        wire: plan.wire,
        chunk_bytes: plan.chunk_bytes,
        deadline: plan.deadline,
        token: plan.token.reveal().map(str::to_owned),
    };
    let listening = match plan.tensor_parallel {
        1 => None,
        _ => {
            let (listen, deadline, token) = (plan.peer_listen, plan.deadline, plan.token.clone());
            Some(
                Peers::bind(runtime, collectives::Options { listen, deadline, token })
                    .map_err(parallel::Error::from)?,
            )
        }
    };
    let here = listening.as_ref().map(|listening| listening.address().to_string()).unwrap_or_default();
    let remote = Remote::join(runtime, address, options, &spec, rank, &here)?;
    let peers = match listening {
        Some(listening) => {
            let peers = listening.connect(rank, &remote.peers()?).map_err(parallel::Error::from)?;
            Some(Arc::new(peers))
        }
        None => None,
    };
    let group = peers.as_ref().map(|peers| plan.group(peers)).transpose()?;
    let ledger = Ledger::default();
    let version = remote.start(&model, plan.seed, &ledger)?;
    if version >= plan.steps {
        return Err(Error::NothingToDo { job: plan.job.clone(), version, steps: plan.steps });
    }
    let mut run = Run {
        plan,
        corpus,
        held_out: held_out_batches(&corpus.held_out, plan.context),
        link: Link { exchange: Arc::new(remote), runtime: runtime.clone(), ledger, group },
        model,
        rank,
        aborted: 0,
    };
    let outcome = run.steps(version, output)?;
    if let Some(peers) = peers {
        peers.leave().map_err(parallel::Error::from)?;
    }
    if let Ok(remote) = Arc::try_unwrap(run.link.exchange) {
        remote.leave()?;
    }
    Ok(outcome)
}

impl Plan {
    /// Number of workers.
    pub fn workers(&self) -> u32 {
        (self.data_parallel * self.tensor_parallel) as u32
    }

    /// A rank's part of the model.
    fn model(&self, corpus: &Corpus, rank: u32) -> Result<Model> {
        let Sizes { width, blocks, heads } = self.sizes;
        let vocabulary = corpus.vocabulary.size();
        let architecture = Architecture { vocabulary, context: self.context, width, blocks, heads };
        let place = rank as usize % self.tensor_parallel;
        let sequence = self.sequence_parallel && self.tensor_parallel > 1;
        Ok(Model::divided(architecture, Division { ranks: self.tensor_parallel, place, sequence })?)
    }

    /// The ranks that have the other parts of a rank's model.
    fn group(&self, peers: &Arc<Peers>) -> Result<Group> {
        let world = World::new(Arc::<Peers>::clone(peers));
        let mesh = world.mesh(remote::mesh(self.data_parallel, self.tensor_parallel)?)?;
        Ok(Group::new(mesh.sub_mesh(&["tp"])?, self.sequence_parallel))
    }
}

struct Run<'a> {
    plan: &'a Plan,
    corpus: &'a Corpus,
    held_out: Vec<Batch>,
    link: Link<Remote>,
    model: Model,
    rank: u32,
    aborted: u64,
}

impl Run<'_> {
    fn steps(&mut self, first: u64, output: &mut Output) -> Result<Option<Outcome>> {
        let begin = Instant::now();
        let plan = self.plan;
        let every = plan.steps.div_ceil(EVALUATIONS);
        let (mut train, mut held_out, mut skipped) = (Vec::new(), Vec::new(), 0);
        let mut version = first;
        while version < plan.steps {
            let step = version;
            let report = self.step(step)?;
            version = report.version;
            skipped += u64::from(!report.applied);
            // Those that have one model with rank 0 evaluate with it.
            if self.rank as usize >= plan.tensor_parallel {
                continue;
            }
            if self.rank == 0 {
                let loss = report.loss.unwrap_or(f64::NAN);
                train.push((step, loss));
                output.step(&StepEvent {
                    step,
                    loss,
                    gradient_norm: report.gradient_norm,
                    applied: report.applied,
                    overflow: self.overflow(&report),
                    tokens: self.tokens(version - first),
                    traffic: self.link.exchange.traffic(),
                })?;
            }
            if version.is_multiple_of(every) || version >= plan.steps {
                let loss = levels::evaluate(&self.link, &self.model, version, &self.held_out)?;
                held_out.push((version, loss));
                if self.rank == 0 {
                    output.evaluation(version, loss)?;
                }
            }
        }
        if self.rank as usize >= plan.tensor_parallel {
            return Ok(None);
        }
        let elapsed = begin.elapsed();
        let traffic = self.link.exchange.traffic();
        // Before the sample, which holds all parameters whatever the level.
        let peak_bytes = self.link.ledger.peak();
        let (prompt, sample) = self.sample(version)?;
        if self.rank != 0 {
            return Ok(None);
        }
        Ok(Some(Outcome {
            steps: version,
            train,
            held_out,
            skipped,
            aborted: self.aborted,
            parameters: self.model.elements(),
            unigram_entropy: self.corpus.unigram_entropy(),
            state_hash: self.link.exchange.state_hash(version)?,
            peak_bytes,
            pulled_bytes: traffic.pulled_bytes,
            pushed_bytes: traffic.pushed_bytes,
            elapsed,
            tokens: self.tokens(version - first),
            prompt,
            sample,
        }))
    }

    /// Runs a step until it is decided. An aborted step is run again from the same data.
    fn step(&mut self, step: u64) -> Result<StepReport> {
        let share = self.rank as usize / self.plan.tensor_parallel;
        let draw = Draw { seed: self.plan.seed, step, rank: share };
        let micro_batches = self.plan.sharding.draw(&self.corpus.train, self.plan.context, draw);
        loop {
            match self.try_step(step, &micro_batches) {
                // Of several that have one model some may wait for each other in the middle of the step.
                Err(Error::Cluster(ClusterError::StepAborted { .. })) if self.link.group.is_none() => {
                    self.aborted += 1;
                }
                other => return other,
            }
        }
    }

    fn try_step(&self, step: u64, micro_batches: &[Batch]) -> Result<StepReport> {
        let plan = self.plan;
        let work = Work { step, micro_batches, loss_scale: plan.loss_scale as f32 };
        let loss = levels::run(plan.level, &self.link, &self.model, work)?;
        Ok(self.link.exchange.commit(Commit {
            step,
            groups: plan.schedule.at(step),
            loss_scale: plan.loss_scale,
            max_norm: plan.clip,
            loss: Some(loss),
            discard: false,
        })?)
    }

    fn overflow(&self, report: &StepReport) -> Option<String> {
        let (tensor, rank) = report.overflow?;
        let name = self.model.parameters().get(tensor).map_or("?", |parameter| &parameter.name);
        Some(match rank {
            Some(rank) => format!("{name} of rank {rank}"),
            None => format!("the sum of {name}"),
        })
    }

    fn tokens(&self, steps: u64) -> u64 {
        steps * (self.plan.sharding.batch() * self.plan.context) as u64
    }

    fn sample(&self, version: u64) -> Result<(String, String)> {
        let vocabulary = &self.corpus.vocabulary;
        let prompt = &self.corpus.held_out[..PROMPT.min(self.plan.context)];
        let request =
            sample::Request { version, prompt, count: self.plan.sample_chars, seed: self.plan.seed };
        let sample = sample::generate(&self.link, &self.model, request)?;
        Ok((vocabulary.decode(prompt), vocabulary.decode(&sample)))
    }
}
