//! Measures what the death of a server costs a job with replicas. Every server is a process.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use clap::Args;
use futures_util::future::try_join_all;
use serde_json::json;
use tokio::task::spawn_blocking;
use zeroshard_client::Error as ClusterError;
use zeroshard_model::{DType, StateDType};
use zeroshard_tests::Cluster;

use crate::{
    Error,
    sample::median,
    step::{JOB, Level, WARM_UP, Worker, WorkerOptions},
    table::Table,
};

/// The pause between two looks at a metric.
const PAUSE: Duration = Duration::from_millis(50);
/// How long all replicas may take to be there again.
const REDUNDANT_WITHIN: Duration = Duration::from_secs(300);

/// Measure the time from the death of a server to the next step, and to all replicas
///
/// Servers are processes; the ranks are in this process. In each round, the server that has been
/// running for the longest time is killed (SIGKILL) during a step, and an empty one is started.
/// Rounds kill at different times of the step. The steps continue until all replicas are there:
///
/// - step: an undisturbed step (push, reduce, decide, apply, pull).
///
/// - noticed: from the signal until the ranks know that a server was lost.
///
/// - committed: from the signal until the step that was under way has been committed.
///
/// - step-beside-copy: a step that is made while slices are copied.
///
/// - redundant: from the signal until all replicas are there.
///
/// The table shows the median of all rounds, and the largest value.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Number of ranks
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    workers: u32,
    /// Number of shard servers
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(2..))]
    servers: u32,
    /// Number of servers for each slice
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..))]
    replicas: u32,
    /// Number of tensors
    #[arg(long, default_value_t = 64)]
    tensors: usize,
    /// Number of elements of each tensor
    #[arg(long, default_value_t = 1 << 20)]
    numel: usize,
    /// Number of rounds
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Number of undisturbed steps in each round
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
}

/// The seconds of all measurements.
#[derive(Debug, Default)]
struct Samples {
    step: Vec<f64>,
    noticed: Vec<f64>,
    committed: Vec<f64>,
    step_beside_copy: Vec<f64>,
    redundant: Vec<f64>,
}

pub(crate) fn run(options: &Options, json: bool) -> Result<(), Error> {
    let fields = ["operation", "seconds", "largest_seconds", "ratio_step"];
    let samples = tokio::runtime::Runtime::new()?.block_on(measure(options))?;
    let Samples { step, noticed, committed, step_beside_copy, redundant } = samples;
    let undisturbed = median(step.clone());
    let operations = [
        ("step", step),
        ("noticed", noticed),
        ("committed", committed),
        ("step-beside-copy", step_beside_copy),
        ("redundant", redundant),
    ];
    let mut table = Table::new(json, &fields);
    for (operation, samples) in operations {
        let (seconds, largest) = (median(samples.clone()), samples.into_iter().fold(0.0, f64::max));
        table.row(json!({
            "bench": "recovery", "params": options.tensors * options.numel,
            "workers": options.workers, "servers": options.servers, "replicas": options.replicas,
            "operation": operation, "seconds": seconds, "largest_seconds": largest,
            "ratio_step": seconds / undisturbed,
        }));
    }
    table.finish();
    Ok(())
}

async fn measure(options: &Options) -> Result<Samples, Error> {
    let mut cluster = Cluster::start(options.servers as usize);
    let mut ranks = Ranks::start(options, cluster.address()).await?;
    let mut samples = Samples::default();
    for round in 0..options.rounds {
        for _ in 0..options.steps {
            samples.step.push(ranks.step().await?.seconds);
        }
        let part = f64::from(round) / f64::from(options.rounds);
        let after = Duration::from_secs_f64(part * median(samples.step.clone()));
        lose_server(&mut cluster, &mut ranks, after, &mut samples).await?;
    }
    Ok(samples)
}

/// Kills the oldest server at the time `after` of a step, and makes steps until all replicas are
/// there.
async fn lose_server(
    cluster: &mut Cluster,
    ranks: &mut Ranks,
    after: Duration,
    samples: &mut Samples,
) -> Result<(), Error> {
    let mut victim = cluster.shards.remove(0);
    let killed = spawn_blocking(move || {
        std::thread::sleep(after);
        let at = Instant::now();
        victim.kill();
        at
    });
    let epoch = ranks.ranks[0].epoch();
    let (committed, noticed) = loop {
        let (began, is_later) = (Instant::now(), ranks.ranks[0].epoch() > epoch);
        let Step { committed, aborted, .. } = ranks.step().await?;
        // Steps that were committed before the signal are not aborted. Between two steps, a loss
        // aborts none.
        if let Some(noticed) = aborted.or(is_later.then_some(began)) {
            break (committed, noticed);
        }
    };
    let killed = killed.await?;
    cluster.shards.push(Cluster::shard(cluster.address(), &[]));
    samples.noticed.push((noticed - killed).as_secs_f64());
    samples.committed.push((committed - killed).as_secs_f64());
    let redundant = Cell::new(None);
    let until_redundant = async {
        while !is_redundant(cluster) {
            if killed.elapsed() > REDUNDANT_WITHIN {
                return Err(format!("not all replicas are there after {REDUNDANT_WITHIN:?}").into());
            }
            tokio::time::sleep(PAUSE).await;
        }
        redundant.set(Some(killed.elapsed().as_secs_f64()));
        Ok::<_, Error>(())
    };
    let steps = async {
        loop {
            samples.step_beside_copy.push(ranks.step().await?.seconds);
            if redundant.get().is_some() {
                return Ok(());
            }
        }
    };
    tokio::try_join!(until_redundant, steps)?;
    samples.redundant.extend(redundant.get());
    Ok(())
}

/// Returns whether all slices of the job have their replicas, according to the coordinator.
fn is_redundant(cluster: &Cluster) -> bool {
    let whole = format!("zeroshard_job_degraded_slices{{job={JOB:?}}} 0");
    cluster.coordinator.get("/metrics").lines().any(|line| line == whole)
}

/// The ranks of a job.
struct Ranks {
    ranks: Vec<Worker>,
    version: u64,
}

/// A step that all ranks have made.
struct Step {
    /// From the beginning until the last rank has the next version.
    seconds: f64,
    /// When the first rank knew that a server was lost, if one was.
    aborted: Option<Instant>,
    /// When the last rank knew that it is committed.
    committed: Instant,
}

impl Ranks {
    /// Starts all ranks and makes the warm-up steps.
    async fn start(options: &Options, address: &str) -> Result<Self, Error> {
        let first = WorkerOptions {
            address: address.to_owned(),
            rank: 0,
            workers: options.workers,
            servers: options.servers,
            replicas: options.replicas,
            tensors: options.tensors,
            numel: options.numel,
            level: Level::Os,
            steps: 0, // not read: the steps are made here
            dtype: DType::F32,
            state_dtype: StateDType::F32,
            wire: DType::F32.into(),
            parameter_wire: None,
        };
        let ranks = try_join_all(first.all().iter().map(Worker::start)).await?;
        let mut ranks = Self { ranks, version: 0 };
        for _ in 0..WARM_UP {
            ranks.step().await?;
        }
        Ok(ranks)
    }

    /// Makes a step, again if a server is lost.
    async fn step(&mut self) -> Result<Step, Error> {
        let (began, step) = (Instant::now(), self.version);
        let ends = try_join_all(self.ranks.iter_mut().map(|rank| make(rank, step))).await?;
        self.version += 1;
        let aborted = ends.iter().filter_map(|end| end.0).min();
        let committed = ends.iter().map(|end| end.1).max().unwrap_or(began);
        Ok(Step { seconds: began.elapsed().as_secs_f64(), aborted, committed })
    }
}

/// Makes a step of one rank. Returns when it was aborted, if it was, and when it was committed.
async fn make(rank: &mut Worker, step: u64) -> Result<(Option<Instant>, Instant), Error> {
    let mut aborted = None;
    let pull = loop {
        match rank.step(step).await {
            Ok([.., pull]) => break pull,
            Err(ClusterError::StepAborted { .. }) => {
                aborted.get_or_insert_with(Instant::now);
            }
            // The step was decided before, and this rank had not received the report.
            Err(ClusterError::StepMismatch { .. }) => break rank.commit(step).await?[1],
            Err(error) => return Err(error.into()),
        }
    };
    Ok((aborted, Instant::now() - Duration::from_secs_f64(pull)))
}
