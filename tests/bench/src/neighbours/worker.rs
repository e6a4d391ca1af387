//! The worker of a job. It reads its manner from standard input, and reports its steps on standard
//! output.

use std::{
    io::BufRead,
    sync::Arc,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use clap::Args;
use serde_json::json;
use tokio::sync::mpsc;
use zeroshard_client::{Cluster, Commit, Job, Options, Target, TensorData, TensorId, Values};
use zeroshard_model::{JobSpec, Manifest, Result, TensorSpec};
use zeroshard_net::Token;
use zeroshard_tests::synthetic;

use super::{Error, Manner, SERVERS, hostile::Hostile, now};
use crate::talk::say;

/// The time limit of a call.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The worker of one job (used by `neighbours` itself)
#[derive(Debug, Clone, Args)]
pub(crate) struct WorkerOptions {
    #[arg(long)]
    pub(super) address: String,
    #[arg(long)]
    pub(super) job: String,
    #[arg(long)]
    pub(super) token: Token,
    #[arg(long)]
    pub(super) tensors: usize,
    #[arg(long)]
    pub(super) numel: usize,
    #[arg(long)]
    pub(super) large: u64,
    #[arg(long)]
    pub(super) hostile: bool,
}

impl WorkerOptions {
    pub(super) async fn connect(&self) -> Result<Cluster> {
        let options = Options::default().timeout(TIMEOUT).token(self.token.clone());
        Cluster::connect(&self.address, options).await
    }

    /// The specification of a job of the token, with this number of elements in each tensor.
    pub(super) fn spec(&self, name: &str, tensors: usize, numel: u64) -> Result<JobSpec> {
        let tensor = |i| TensorSpec::new(format!("tensor.{i}"), [numel]);
        let manifest = Manifest::new((0..tensors).map(tensor).collect())?;
        let adamw = "adamw".parse().expect("a known optimizer");
        let min_servers = SERVERS as u32;
        Ok(JobSpec { min_servers, ..JobSpec::new(name, manifest, vec![adamw]) })
    }
}

/// Set when the job must end its current manner.
pub(super) type Stop = Arc<AtomicBool>;

pub(crate) fn run(options: &WorkerOptions) -> std::result::Result<(), Error> {
    tokio::runtime::Runtime::new()?.block_on(behave(options))
}

async fn behave(options: &WorkerOptions) -> std::result::Result<(), Error> {
    let cluster = options.connect().await?;
    let spec = options.spec(&options.job, options.tensors, options.numel as u64)?;
    cluster.create_job(&spec).await?;
    let mut rank = Rank::join(&cluster, &options.job, 0).await?;
    let mut hostile = match options.hostile {
        true => Some(Hostile::start(options).await?),
        false => None,
    };
    say(&json!({"event": "ready"}));
    let mut orders = orders();
    while let Some((manner, stop)) = orders.recv().await {
        match (manner, &mut hostile) {
            (Manner::WellBehaved, _) | (_, None) => {
                while !stop.load(Ordering::Relaxed) {
                    rank.report_step().await?;
                }
            }
            (manner, Some(hostile)) => hostile.behave(manner, &mut rank, &stop).await?,
        }
        say(&json!({"event": "stopped"}));
    }
    Ok(())
}

/// Reads orders from standard input. Each consists of a manner, and a flag that the order `stop`
/// sets.
fn orders() -> mpsc::UnboundedReceiver<(Manner, Stop)> {
    let (sender, orders) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        let mut current = Stop::default();
        for line in std::io::stdin().lock().lines().map_while(std::result::Result::ok) {
            match Manner::named(&line) {
                Ok(manner) => {
                    current = Stop::default();
                    // The receiver is dropped after an error.
                    let _ = sender.send((manner, current.clone()));
                }
                Err(_) => current.store(true, Ordering::Relaxed),
            }
        }
    });
    orders
}

/// A rank of a job without a model.
pub(super) struct Rank {
    pub(super) job: Job,
    gradient: Values,
    parameters: Vec<Vec<f32>>,
    /// The current version.
    pub(super) version: u64,
}

impl Rank {
    /// Joins a job, and uploads its parameters as rank 0.
    pub(super) async fn join(cluster: &Cluster, job: &str, rank: u32) -> Result<Self> {
        let job = cluster.join(job, rank).await?;
        let tensors = job.spec().manifest.tensors();
        let numel = tensors[0].numel() as usize;
        let gradient = Values::from(synthetic::values(0, numel));
        let parameters = vec![vec![0.0; numel]; tensors.len()];
        if rank == 0 {
            let of = |tensor| TensorData::new(TensorId::new(tensor), gradient.clone());
            job.initialise((0..parameters.len()).map(of).collect()).await?;
        }
        Ok(Self { job, gradient, parameters, version: 0 })
    }

    /// The gradient of a tensor.
    pub(super) fn gradient(&self, tensor: usize) -> TensorData {
        TensorData::new(TensorId::new(tensor), self.gradient.clone())
    }

    /// Makes a step, and reports its duration.
    pub(super) async fn report_step(&mut self) -> Result<()> {
        let (began, clock) = (now(), Instant::now());
        let all = (0..self.parameters.len()).map(|tensor| self.gradient(tensor)).collect();
        self.job.attempt(self.version)?.push(all).await?;
        self.commit().await?;
        self.pull().await?;
        say(&json!({"began": began, "seconds": clock.elapsed().as_secs_f64()}));
        Ok(())
    }

    /// Commits a step whose gradients have been pushed.
    pub(super) async fn commit(&mut self) -> Result<()> {
        self.job.attempt(self.version)?.commit(Commit::default()).await?;
        self.version += 1;
        Ok(())
    }

    /// Pulls all tensors.
    pub(super) async fn pull(&mut self) -> Result<()> {
        let targets = self.parameters.iter_mut().enumerate();
        let targets = targets.map(|(i, data)| Target::new(TensorId::new(i), data)).collect();
        self.job.pull(self.version, targets).await
    }
}
