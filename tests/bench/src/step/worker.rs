//! One rank of the step benchmark.

use std::{fmt::Display, ops::Range, time::Instant};

use clap::Args;
use futures_util::{StreamExt, TryStreamExt, future, stream};
use serde_json::json;
use zeroshard_client::{
    Array, Cluster, Commit, Job, Options, Target, TensorData, TensorId, Traffic, Values, Wire,
};
use zeroshard_model::{DType, JobSpec, Manifest, Result, StateDType, TensorSpec};
use zeroshard_tests::synthetic;

use super::{Error, Level};

/// The name of the job.
pub(crate) const JOB: &str = "step";
/// The number of steps that are not measured, because memory is accessed for the first time.
pub(crate) const WARM_UP: usize = 2;
/// The number of elements of a bucket, at the levels with buckets.
const BUCKET: usize = 4 << 20;
/// The number of buckets in flight.
const AHEAD: usize = 2;

/// One rank (used by `step` itself)
#[derive(Debug, Clone, Args)]
pub(crate) struct WorkerOptions {
    #[arg(long)]
    pub(crate) address: String,
    #[arg(long)]
    pub(crate) rank: u32,
    #[arg(long)]
    pub(crate) workers: u32,
    #[arg(long)]
    pub(crate) servers: u32,
    #[arg(long)]
    pub(crate) replicas: u32,
    #[arg(long)]
    pub(crate) tensors: usize,
    #[arg(long)]
    pub(crate) numel: usize,
    #[arg(long)]
    pub(crate) level: Level,
    #[arg(long)]
    pub(crate) steps: usize,
    #[arg(long)]
    pub(crate) dtype: DType,
    #[arg(long)]
    pub(crate) state_dtype: StateDType,
    #[arg(long)]
    pub(crate) wire: Wire,
    #[arg(long)]
    pub(crate) parameter_wire: Option<Wire>,
}

impl WorkerOptions {
    /// The options of all ranks of the job.
    pub(crate) fn all(&self) -> Vec<Self> {
        (0..self.workers).map(|rank| Self { rank, ..self.clone() }).collect()
    }

    /// The command line that states these options.
    pub(super) fn to_arguments(&self) -> Vec<String> {
        let flags: [(&str, &dyn Display); 12] = [
            ("address", &self.address),
            ("rank", &self.rank),
            ("workers", &self.workers),
            ("servers", &self.servers),
            ("replicas", &self.replicas),
            ("tensors", &self.tensors),
            ("numel", &self.numel),
            ("level", &self.level),
            ("steps", &self.steps),
            ("dtype", &self.dtype),
            ("state-dtype", &self.state_dtype),
            ("wire", &self.wire),
        ];
        let wire = self.parameter_wire.iter().map(|wire| format!("--parameter-wire={wire}"));
        flags.iter().map(|(flag, value)| format!("--{flag}={value}")).chain(wire).collect()
    }
}

/// A connected rank of a job without a model.
pub(crate) struct Worker {
    level: Level,
    job: Job,
    gradient: Values,
    parameters: Vec<Array>,
    buckets: Vec<Range<usize>>,
}

#[expect(clippy::print_stdout, reason = "the parent reads it")]
pub(crate) fn run(options: &WorkerOptions) -> Result<(), Error> {
    let runtime = tokio::runtime::Runtime::new()?;
    let options = options.clone();
    // In a task, because the thread of `block_on` is not one of those that serve connections.
    let steps = runtime.spawn(async move {
        let mut worker = Worker::start(&options).await?;
        let mut phases: [Vec<f64>; 4] = Default::default();
        let mut before = worker.job.traffic();
        for step in 0..WARM_UP + options.steps {
            if step == WARM_UP {
                before = worker.job.traffic();
            }
            let times = worker.step(step as u64).await?;
            if step >= WARM_UP {
                phases.iter_mut().zip(times).for_each(|(samples, time)| samples.push(time));
            }
        }
        let after = worker.job.traffic();
        worker.job.leave().await?;
        let steps = options.steps.max(1) as u64;
        let of_step = Traffic {
            pulled_bytes: (after.pulled_bytes - before.pulled_bytes) / steps,
            pushed_bytes: (after.pushed_bytes - before.pushed_bytes) / steps,
        };
        Ok::<_, zeroshard_model::Error>((phases, of_step))
    });
    let ([seconds, push, decide, pull], Traffic { pulled_bytes, pushed_bytes }) =
        runtime.block_on(steps)??;
    println!(
        "{}",
        json!({
            "seconds": seconds, "push": push, "decide": decide, "pull": pull,
            "pulled_bytes": pulled_bytes, "pushed_bytes": pushed_bytes,
        })
    );
    Ok(())
}

impl Worker {
    /// Joins the job, which the first rank creates, and pulls its parameters.
    pub(crate) async fn start(options: &WorkerOptions) -> Result<Self> {
        let connection =
            Options::default().wire(options.wire).parameter_wire(options.parameter_wire);
        let cluster = Cluster::connect(&options.address, connection).await?;
        cluster.create_job(&spec(options)?).await?;
        let job = cluster.join(JOB, options.rank).await?;
        let gradient = Values::from(synthetic::values(0, options.numel));
        let all = 0..options.tensors;
        if options.rank == 0 {
            job.initialise(
                all.clone()
                    .map(|tensor| TensorData::new(TensorId::new(tensor), gradient.clone()))
                    .collect(),
            )
            .await?;
        }
        let parameters = all.clone().map(|_| Array::zeros(options.numel, options.dtype)).collect();
        let per_bucket = (BUCKET / options.numel).max(1);
        let buckets =
            all.clone().step_by(per_bucket).map(|first| first..all.end.min(first + per_bucket));
        let buckets = match options.level {
            Level::Os => vec![all.clone()],
            Level::OsG | Level::PGOs => buckets.collect(),
        };
        let mut worker = Self { level: options.level, job, gradient, parameters, buckets };
        worker.pull(0).await?;
        Ok(worker)
    }

    /// The membership generation of the job.
    pub(crate) fn epoch(&self) -> u64 {
        self.job.epoch()
    }

    /// Returns the seconds of the step, its push, its decision and its pull.
    pub(crate) async fn step(&mut self, step: u64) -> Result<[f64; 4]> {
        let began = Instant::now();
        if let Level::PGOs = self.level {
            // Backward needs the parameters a second time.
            self.pull(step).await?;
        }
        self.push(step).await?;
        let push = began.elapsed().as_secs_f64();
        let [decide, pull] = self.commit(step).await?;
        Ok([began.elapsed().as_secs_f64(), push, decide, pull])
    }

    /// Commits a step whose gradients have been pushed, and pulls the next version. Returns the
    /// seconds of the decision and of the pull.
    pub(crate) async fn commit(&mut self, step: u64) -> Result<[f64; 2]> {
        let began = Instant::now();
        self.job.attempt(step)?.commit(Commit::default()).await?;
        let decided = Instant::now();
        self.pull(step + 1).await?;
        Ok([(decided - began).as_secs_f64(), decided.elapsed().as_secs_f64()])
    }

    async fn push(&self, step: u64) -> Result<()> {
        let attempt = self.job.attempt(step)?;
        let pushes = self.buckets.iter().rev().map(|bucket| {
            let gradient = |tensor| TensorData::new(TensorId::new(tensor), self.gradient.clone());
            attempt.push(bucket.clone().map(gradient).collect())
        });
        // Collected, because an iterator over closures is not known to be `Send`.
        stream::iter(pushes.collect::<Vec<_>>())
            .buffer_unordered(AHEAD)
            .try_for_each(|()| future::ok(()))
            .await
    }

    async fn pull(&mut self, version: u64) -> Result<()> {
        let ahead = match self.level {
            Level::Os | Level::OsG => {
                return pull_into(&self.job, version, 0, &mut self.parameters).await;
            }
            Level::PGOs => AHEAD,
        };
        let size = self.buckets[0].len();
        let buckets = self.parameters.chunks_mut(size).enumerate();
        let pulls = buckets.map(|(i, arrays)| pull_into(&self.job, version, i * size, arrays));
        stream::iter(pulls.collect::<Vec<_>>())
            .buffered(ahead)
            .try_for_each(|()| future::ok(()))
            .await
    }
}

/// The job of the ranks with these options.
pub(crate) fn spec(options: &WorkerOptions) -> Result<JobSpec> {
    let tensor = |i| TensorSpec {
        dtype: options.dtype,
        ..TensorSpec::new(format!("tensor.{i}"), [options.numel as u64])
    };
    let manifest = Manifest::new((0..options.tensors).map(tensor).collect())?;
    let adamw = "adamw".parse().expect("a known optimizer");
    Ok(JobSpec {
        world: options.workers,
        min_servers: options.servers,
        replicas: options.replicas,
        state_dtype: options.state_dtype,
        ..JobSpec::new(JOB, manifest, vec![adamw])
    })
}

async fn pull_into(job: &Job, version: u64, first: usize, arrays: &mut [Array]) -> Result<()> {
    let targets = arrays.iter_mut().enumerate();
    job.pull(
        version,
        targets.map(|(i, data)| Target::new(TensorId::new(first + i), data)).collect(),
    )
    .await
}
