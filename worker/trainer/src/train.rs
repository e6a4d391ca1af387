//! The training loop of one rank.

use std::sync::Arc;
use std::time::Instant;

use tokio::runtime::Handle;
use zeroshard_client::{Commit, Overflow, StepReport};
use zeroshard_model::Error as ClusterError;
use zeroshard_worker::{
    collectives::{self, Collectives, Listening, Peers},
    parallel::{
        self,
        remote::{Remote, Seat},
    },
};

use super::batches::{Batch, Draw};
use super::device;
use super::error::{Error, Result};
use super::evaluate::held_out_batches;
use super::levels::{self, Work};
use super::memory::Ledger;
use super::model::Model;
use super::network::{Group, Network};
use super::plan::Plan;
use super::progress::{Output, StepEvent};
use super::report::Outcome;
use super::sample;
use super::text::Corpus;
use super::transfers::Link;

/// The maximum number of held-out evaluations during a run.
const EVALUATIONS: u64 = 8;
/// The number of characters of held-out text in the prompt of a sample.
const PROMPT: usize = 24;

/// Runs one rank from the job's current version to the last step. Aborted steps are run again.
/// Returns the outcome on rank 0, and `None` on the other ranks.
///
/// # Errors
/// Those of the cluster, and [`Error::NothingToDo`].
pub fn train(
    plan: &Plan,
    corpus: &Corpus,
    runtime: &Handle,
    address: &str,
    rank: u32,
    output: &mut Output,
) -> Result<Option<Outcome>> {
    let model = plan.model(corpus)?;
    let create = plan.create(&model)?;
    let listening = listen(plan, runtime)?;
    let reached_at = listening.as_ref().map(|peers| peers.address().to_string());
    let seat = Seat { rank, coordinator: address, reached_at: reached_at.as_deref() };
    let mut remote = Remote::join(runtime, plan.options(), create, seat)?;
    let peers = listening.map(|listening| connect(plan, listening, &mut remote)).transpose()?;
    let outcome = Run::new(plan, corpus, runtime, (model, remote), peers.clone())
        .and_then(|run| run.finish(output));
    // Also after an error, so that the messages that tell the other ranks the cause are sent.
    let left = peers.map_or(Ok(()), |peers| peers.leave().map_err(parallel::Error::from));
    let outcome = outcome?;
    left?;
    Ok(outcome)
}

/// Listens for the other workers, if the model is sharded or the workers form groups.
fn listen(plan: &Plan, runtime: &Handle) -> parallel::Result<Option<Listening>> {
    if plan.parallelism.ranks == 1 && plan.group_size == 1 {
        return Ok(None);
    }
    let options = collectives::Options {
        listen: plan.listen,
        deadline: plan.deadline,
        token: plan.token.clone(),
        tls: plan.tls.clone(),
    };
    Ok(Some(Listening::bind(runtime, options)?))
}

/// Connects to the other workers of the group; to all workers if the model is sharded.
fn connect(plan: &Plan, listening: Listening, remote: &mut Remote) -> Result<Arc<Peers>> {
    let (rank, world, group) =
        (remote.rank(), remote.spec().world, remote.spec().group_of(remote.rank()));
    let is_sharded = plan.parallelism.ranks > 1;
    let ranks = if is_sharded { 0..world } else { group.clone() };
    let address = async |to| remote.peer(to).await;
    let peers = listening.connect(rank, world, ranks, address);
    let peers = Arc::new(peers.map_err(parallel::Error::from)?);
    if plan.nccl {
        peers.use_nccl(device::gpu_of_rank(rank)?).map_err(parallel::Error::from)?;
    }
    if plan.group_size > 1 {
        let group: Vec<_> = group.collect();
        let agreed = peers.agree(&group, "the run", &plan.shared_settings());
        agreed.map_err(parallel::Error::from)?;
        // The network uses the other one at the same time.
        let own = if is_sharded { Arc::new(peers.duplicate()) } else { peers.clone() };
        let started = remote.exchange_with(own);
        started.map_err(|cause| Error::System { doing: "start a thread", cause })?;
    }
    Ok(peers)
}

struct Run<'a> {
    plan: &'a Plan,
    corpus: &'a Corpus,
    held_out: Vec<Batch>,
    link: Link<Remote>,
    network: Network,
    rank: u32,
    aborted: u64,
}

/// The progress of a run.
struct Progress {
    begin: Instant,
    /// The version with which the run began, or a lower one to which the job has returned since.
    first: u64,
    version: u64,
    /// The loss of each step.
    train: Vec<(u64, f64)>,
    /// The loss of each evaluation, by version.
    held_out: Vec<(u64, f64)>,
    skipped: Vec<u64>,
}

impl Progress {
    fn new(first: u64) -> Self {
        let (train, held_out, skipped) = (Vec::new(), Vec::new(), Vec::new());
        Self { begin: Instant::now(), first, version: first, train, held_out, skipped }
    }

    /// The steps from this version on are run again, with the same data.
    fn return_to(&mut self, version: u64) {
        self.train.retain(|(step, _)| *step < version);
        self.held_out.retain(|(at, _)| *at <= version);
        self.skipped.retain(|step| *step < version);
        self.first = self.first.min(version);
        self.version = version;
    }

    fn steps(&self) -> u64 {
        self.version - self.first
    }
}

impl<'a> Run<'a> {
    /// Prepares this rank's part of the model, together with the other ranks of the replica.
    fn new(
        plan: &'a Plan,
        corpus: &'a Corpus,
        runtime: &Handle,
        (model, remote): (Model, Remote),
        peers: Option<Arc<Peers>>,
    ) -> Result<Self> {
        let group = match (peers, plan.parallelism.mesh()?) {
            (Some(peers), Some(mesh)) => {
                Some(Group::new(peers, mesh, plan.parallelism, &plan.shared_settings())?)
            }
            _ => None,
        };
        let device = device::of_rank(remote.rank())?;
        Ok(Self {
            plan,
            corpus,
            held_out: held_out_batches(&corpus.held_out, plan.context()),
            rank: remote.rank(),
            link: Link {
                server: Arc::new(remote),
                runtime: runtime.clone(),
                ledger: Ledger::default(),
            },
            network: Network::new(model, group, device),
            aborted: 0,
        })
    }

    /// Runs from the job's current version to the last step.
    fn finish(mut self, output: &mut Output) -> Result<Option<Outcome>> {
        let plan = self.plan;
        let version = self.start()?;
        if version >= plan.steps {
            return Err(Error::NothingToDo { job: plan.job.clone(), version, steps: plan.steps });
        }
        let mut progress = Progress::new(version);
        let outcome = loop {
            match self.rest(&mut progress, output) {
                Err(Error::Cluster(ClusterError::RolledBack { version, .. })) => {
                    output.restored(progress.version, version)?;
                    progress.return_to(version);
                }
                outcome => break outcome?,
            }
        };
        self.link.server.leave()?;
        Ok(outcome)
    }

    /// Returns the version to start from. In a new job, uploads the initial parameters that this
    /// rank is responsible for and returns 0.
    fn start(&self) -> Result<u64> {
        if let Some(version) = self.link.server.version() {
            return Ok(version);
        }
        let (model, seed) = (self.network.model(), self.plan.seed);
        let values = |tensor| model.initial_part(seed, tensor, self.network.bounds(tensor));
        self.link.server.upload(values)?;
        Ok(0)
    }

    /// Runs the steps that are left, and saves the result.
    ///
    /// # Errors
    /// [`ClusterError::RolledBack`]: some of the steps were lost and have to be run again.
    fn rest(&mut self, progress: &mut Progress, output: &mut Output) -> Result<Option<Outcome>> {
        self.steps(progress, output)?;
        let outcome = if self.rank == 0 { Some(self.outcome(progress)?) } else { None };
        self.link.server.save(progress.version)?;
        Ok(outcome)
    }

    fn steps(&mut self, progress: &mut Progress, output: &mut Output) -> Result<()> {
        let plan = self.plan;
        let every = plan.steps.div_ceil(EVALUATIONS);
        while progress.version < plan.steps {
            let step = progress.version;
            let report = self.step(step)?;
            let loss = report.loss.unwrap_or(f64::NAN);
            progress.version = report.version;
            progress.train.push((step, loss));
            if !report.applied {
                progress.skipped.push(step);
            }
            output.step(&StepEvent {
                step,
                loss,
                gradient_norm: report.gradient_norm,
                applied: report.applied,
                overflow: self.overflow(&report),
                tokens: self.tokens(progress.steps()),
                traffic: self.link.server.traffic(),
            })?;
            let version = progress.version;
            let due = version.is_multiple_of(every) || version >= plan.steps;
            // The ranks of the first replica evaluate.
            if due && plan.parallelism.replica(self.rank) == 0 {
                let loss = levels::evaluate(&self.link, &self.network, version, &self.held_out)?;
                progress.held_out.push((version, loss));
                output.evaluation(version, loss)?;
            }
        }
        Ok(())
    }

    fn outcome(&self, progress: &Progress) -> Result<Outcome> {
        let version = progress.version;
        let elapsed = progress.begin.elapsed();
        let traffic = self.link.server.traffic();
        // Read before sampling, which holds all parameters at every level.
        let peak_bytes = self.link.ledger.peak();
        let (prompt, sample) = self.sample(version)?;
        Ok(Outcome {
            steps: version,
            train: progress.train.clone(),
            held_out: progress.held_out.clone(),
            skipped: progress.skipped.len() as u64,
            aborted: self.aborted,
            parameters: self.network.model().elements(),
            unigram_entropy: self.corpus.unigram_entropy(),
            state_hash: self.link.server.state_hash(version)?,
            peak_bytes,
            pulled_bytes: traffic.pulled_bytes,
            pushed_bytes: traffic.pushed_bytes,
            elapsed,
            tokens: self.tokens(progress.steps()),
            prompt,
            sample,
        })
    }

    /// Runs a step until it is decided. An aborted step is run again with the same data, unless the
    /// model is sharded: then other ranks of the replica may wait in the middle of the step for a
    /// rank that is lost.
    fn step(&mut self, step: u64) -> Result<StepReport> {
        let replica = self.plan.parallelism.replica(self.rank) as usize;
        // A rewound job may skip batches.
        let draw = Draw { seed: self.plan.seed, step: self.link.server.batch(step), replica };
        let micro_batches = self.plan.sharding.draw(&self.corpus.train, self.plan.context(), draw);
        loop {
            let error = match self.try_step(step, &micro_batches) {
                Ok(report) => return Ok(report),
                Err(error) => error,
            };
            match (&error, self.network.group()) {
                (Error::Cluster(ClusterError::StepAborted { .. }), None) => self.aborted += 1,
                (Error::Cluster(ClusterError::StepAborted { .. }), Some(_))
                | (
                    Error::Parallel(parallel::Error::Collective(collectives::Error::Lost {
                        ..
                    })),
                    _,
                ) => {
                    let (job, cause) = (self.plan.job.clone(), error.to_string());
                    return Err(Error::Incomplete { job, step, cause });
                }
                _ => return Err(error),
            }
        }
    }

    fn try_step(&self, step: u64, micro_batches: &[Batch]) -> Result<StepReport> {
        let plan = self.plan;
        let work = Work { step, micro_batches, loss_scale: plan.loss_scale as f32 };
        let loss = levels::run(plan.level, &self.link, &self.network, work)?;
        let groups = plan.schedule.at(step);
        let commit = Commit::default().groups(groups).loss_scale(plan.loss_scale);
        let commit = commit.max_norm(plan.clip).loss(loss);
        Ok(self.link.server.commit(step, &[], commit)?)
    }

    fn overflow(&self, report: &StepReport) -> Option<String> {
        let Overflow { tensor, rank } = report.overflow?;
        let name = self
            .network
            .model()
            .parameters()
            .get(tensor.index())
            .map_or("?", |parameter| &parameter.name);
        Some(match rank {
            Some(rank) => format!("{name} of rank {rank}"),
            None => format!("the sum of {name}"),
        })
    }

    fn tokens(&self, steps: u64) -> u64 {
        steps * (self.plan.sharding.batch() * self.plan.context()) as u64
    }

    fn sample(&self, version: u64) -> Result<(String, String)> {
        let vocabulary = &self.corpus.vocabulary;
        let prompt = &self.corpus.held_out[..PROMPT.min(self.plan.context())];
        let request = sample::Request {
            version,
            prompt,
            count: self.plan.sample_chars,
            seed: self.plan.seed,
        };
        // This worker generates the sample alone, with the whole model.
        let (model, device) = (self.network.model().clone(), Clone::clone(self.network.device()));
        let network = Network::whole(model, device);
        let sample = sample::generate(&self.link, &network, request)?;
        Ok((vocabulary.decode(prompt), vocabulary.decode(&sample)))
    }
}
