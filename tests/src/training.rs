//! A complete run of a synthetic job, with a separate connection for each rank.

use futures_util::future::try_join_all;
use zeroshard_client::{
    Cluster, Commit, Error, Job, Options, Result, StepReport, Target, TensorId,
};
use zeroshard_model::JobSpec;

use crate::synthetic;

/// The specification of a run, except the cluster.
#[derive(Debug, Clone)]
pub struct Training {
    /// The job; it must not exist yet.
    pub spec: JobSpec,
    /// The number of steps.
    pub steps: u64,
    /// The options of every rank's connection.
    pub options: Options,
    /// The number of pushes into which each step's gradients are divided, last tensors first.
    pub buckets: usize,
    /// The commit of each step.
    pub commit: Commit,
}

/// The result of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Trained {
    /// The final state hash.
    pub hash: String,
    /// The reports of all steps that rank 0 received.
    pub reports: Vec<StepReport>,
    /// The final values of all tensors of the manifest.
    pub parameters: Vec<Vec<f32>>,
}

impl Training {
    /// A run of three steps, with the gradients in one push.
    pub fn new(spec: JobSpec) -> Self {
        let options = Options::default().timeout(crate::timeout());
        Self { spec, steps: 3, options, buckets: 1, commit: Commit::default() }
    }

    /// Creates the job and trains it. Every rank pulls all parameters before each step.
    ///
    /// # Errors
    /// The error of the first rank that fails.
    pub async fn run(&self, address: &str) -> Result<Trained> {
        let cluster = Cluster::connect(address, self.options.clone()).await?;
        cluster.create_job(&self.spec).await?;
        let ranks = try_join_all((0..self.spec.world).map(|rank| self.rank(address, rank))).await?;
        Ok(ranks.into_iter().next().expect("a world has a rank 0"))
    }

    async fn rank(&self, address: &str, rank: u32) -> Result<Trained> {
        let cluster = Cluster::connect(address, self.options.clone()).await?;
        let job = cluster.join(&self.spec.name, rank).await?;
        if rank == 0 {
            job.initialise(synthetic::parameters(&self.spec.manifest)).await?;
        }
        let mut reports = Vec::new();
        for step in 0..self.steps {
            pull(&job, step).await?;
            let mut gradients = synthetic::gradients(&self.spec.manifest, rank, step);
            let a_bucket = gradients.len().div_ceil(self.buckets.max(1));
            while !gradients.is_empty() {
                let bucket = gradients.split_off(gradients.len().saturating_sub(a_bucket));
                job.attempt(step)?.push(bucket).await?;
            }
            reports.push(commit(&job, step, self.commit.clone()).await?);
        }
        let parameters = pull(&job, self.steps).await?;
        let hash = job.state_hash(self.steps).await?;
        job.leave().await?;
        Ok(Trained { hash, reports, parameters })
    }
}

/// Pulls all tensors of the job at `version`.
///
/// # Errors
/// Those of [`Job::pull`].
pub async fn pull(job: &Job, version: u64) -> Result<Vec<Vec<f32>>> {
    let tensors = job.spec().manifest.tensors();
    let mut parameters: Vec<Vec<f32>> =
        tensors.iter().map(|t| vec![0.0; t.numel() as usize]).collect();
    let targets = parameters
        .iter_mut()
        .enumerate()
        .map(|(tensor, data)| Target::new(TensorId::new(tensor), data));
    job.pull(version, targets.collect()).await?;
    Ok(parameters)
}

/// Commits the open attempt at `step`.
///
/// # Errors
/// Those of [`Job::attempt`] and [`zeroshard_client::Attempt::commit`].
pub async fn commit(job: &Job, step: u64, commit: Commit) -> Result<StepReport> {
    job.attempt(step)?.commit(commit).await
}

/// Pushes all gradients of the job's rank for `step`, and commits them. It uses the
/// batch that is next on the job's line.
///
/// # Errors
/// Those of [`zeroshard_client::Attempt::push`] and [`commit`].
pub async fn step(job: &Job, step: u64) -> Result<StepReport> {
    step_with(job, step, job.line().batch(step)).await
}

/// The same, with this batch.
///
/// # Errors
/// Those of [`step`].
pub async fn step_with(job: &Job, step: u64, batch: u64) -> Result<StepReport> {
    let attempt = job.attempt(step)?;
    attempt.push(synthetic::gradients(&job.spec().manifest, job.rank(), batch)).await?;
    attempt.commit(Commit::default()).await
}

/// Makes a step of one rank, and repeats it if a server was lost or drained meanwhile.
///
/// # Panics
/// If the step fails for another reason.
pub async fn step_despite_losses(job: &Job, number: u64) {
    loop {
        match step(job, number).await {
            Ok(_) => return,
            Err(Error::StepAborted { .. }) => {}
            // The other rank's commit was decided, and this one's push came too late.
            Err(Error::StepMismatch { .. }) => {
                let made = commit(job, number, Commit::default()).await;
                made.expect("a decided step is committed");
                return;
            }
            Err(error) => panic!("step {number}: {error}"),
        }
    }
}
