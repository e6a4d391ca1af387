//! Measures pull and push between two processes in GB/s. In the same run it measures, in turn, one
//! raw TCP stream and generated tonic code with default settings. Afterwards it measures boxes of a
//! matrix.

mod boxes;
mod plain;
mod raw;

use std::{process::Command, time::Instant};

use clap::Args;
use serde_json::json;
use zeroshard_client::{Cluster, Commit, Job, Target, TensorData, TensorId, Values};
use zeroshard_proto::{JobSpec, Manifest, Optimizer, TensorSpec, optimizer::Sgd};
use zeroshard_tests::{Process, binary};

use crate::{sample::median, table::Table};

pub(crate) use plain::serve as serve_plain;
pub(crate) use raw::serve as serve_raw;

type Error = Box<dyn std::error::Error>;

/// The minimum number of bytes of a sample, so that the resolution of the clock does not affect
/// small transfers.
const SAMPLE_BYTES: usize = 8 << 20;

/// Measure pull and push in GB/s between two processes, compared with raw TCP and generated tonic
/// code
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Number of bytes of a transfer; several sizes are separated by commas
    #[arg(long, value_delimiter = ',', default_values_t = [64 << 10, 1 << 20, 16 << 20, 256 << 20])]
    bytes: Vec<usize>,
    /// Number of repetitions; the median is shown
    #[arg(long, default_value_t = 7)]
    repeat: usize,
    /// Number of rows and columns of the matrix for the measurement of boxes; 0 disables it
    #[arg(long, default_value_t = 4096)]
    boxes: usize,
}

/// The times of a transfer in seconds, for each method.
#[derive(Default)]
struct Samples {
    ours: Vec<f64>,
    raw: Vec<f64>,
    plain: Vec<f64>,
}

pub(crate) fn run(options: &Options, json: bool) -> Result<(), Error> {
    let runtime = tokio::runtime::Runtime::new()?;
    let mut table = Table::new(
        json,
        &[
            "bench",
            "bytes",
            "gbps",
            "raw_tcp_gbps",
            "plain_tonic_gbps",
            "ratio_raw_tcp",
            "ratio_plain_tonic",
        ],
    );
    for &bytes in &options.bytes {
        let (pull, push) = runtime.block_on(measure(bytes, options.repeat))?;
        for (bench, samples) in [("pull", pull), ("push", push)] {
            let gbps = |seconds: Vec<f64>| bytes as f64 / median(seconds) / 1e9;
            let (ours, raw, plain) = (gbps(samples.ours), gbps(samples.raw), gbps(samples.plain));
            table.row(json!({
                "bench": bench, "bytes": bytes, "gbps": ours, "raw_tcp_gbps": raw, "plain_tonic_gbps": plain,
                "ratio_raw_tcp": ours / raw, "ratio_plain_tonic": ours / plain,
            }));
        }
    }
    table.finish();
    match options.boxes {
        0 => Ok(()),
        side => runtime.block_on(boxes::run(side, options.repeat, json)),
    }
}

/// Starts a process of this program that serves a baseline.
fn baseline(role: &str) -> Process {
    let mut command = Command::new(binary("zs-bench"));
    command.arg(role);
    Process::start(command)
}

async fn measure(bytes: usize, repeat: usize) -> Result<(Samples, Samples), Error> {
    let servers = zeroshard_tests::Cluster::start(1);
    let (raw_server, plain_server) = (baseline("serve-raw"), baseline("serve-plain"));
    let mut ours = Ours::start(servers.address(), bytes / 4).await?;
    let mut raw = raw::Client::connect(raw_server.address(), bytes)?;
    let mut plain = plain::Client::connect(plain_server.address(), bytes).await?;
    let times = SAMPLE_BYTES.div_ceil(bytes);
    let (mut pull, mut push) = (Samples::default(), Samples::default());
    for round in 0..=repeat {
        let (mut pulled, mut pushed) = ([0.0; 3], [0.0; 3]);
        for _ in 0..times {
            pulled[0] += timed(async || raw.pull()).await?;
            pulled[1] += timed(async || plain.pull().await).await?;
            pulled[2] += timed(async || ours.pull().await).await?;
            pushed[0] += timed(async || raw.push()).await?;
            pushed[1] += timed(async || plain.push().await).await?;
            pushed[2] += timed(async || ours.push().await).await?;
            ours.commit().await?;
        }
        if round == 0 {
            continue; // warm-up: first memory access, growing windows
        }
        for (samples, seconds) in [(&mut pull, pulled), (&mut push, pushed)] {
            let [raw, plain, ours] = seconds.map(|seconds| seconds / times as f64);
            samples.raw.push(raw);
            samples.plain.push(plain);
            samples.ours.push(ours);
        }
    }
    Ok((pull, push))
}

async fn timed(work: impl AsyncFnOnce() -> Result<(), Error>) -> Result<f64, Error> {
    let began = Instant::now();
    work().await?;
    Ok(began.elapsed().as_secs_f64())
}

/// A job of one tensor, as a worker uses it.
struct Ours {
    job: Job,
    version: u64,
    gradient: Values,
    parameters: Vec<f32>,
}

impl Ours {
    async fn start(address: &str, numel: usize) -> Result<Self, Error> {
        let cluster = Cluster::connect(address, Default::default()).await?;
        let manifest = Manifest::new(vec![TensorSpec::new("tensor", [numel as u64])])?;
        let spec = JobSpec::new("transfer", manifest, vec![Optimizer::Sgd(Sgd::default())]);
        cluster.create_job(&spec).await?;
        let job = cluster.join("transfer", 0).await?;
        let gradient = Values::from(vec![0.5f32; numel]);
        job.initialise(vec![TensorData::new(TensorId::new(0), gradient.clone())]).await?;
        Ok(Self { job, version: 0, gradient, parameters: vec![0.0; numel] })
    }

    async fn pull(&mut self) -> Result<(), Error> {
        let target = Target::new(TensorId::new(0), &mut self.parameters);
        Ok(self.job.pull(self.version, vec![target]).await?)
    }

    async fn push(&self) -> Result<(), Error> {
        let gradient = TensorData::new(TensorId::new(0), self.gradient.clone());
        Ok(self.job.attempt(self.version)?.push(vec![gradient]).await?)
    }

    async fn commit(&mut self) -> Result<(), Error> {
        self.version = self.job.attempt(self.version)?.commit(Commit::default()).await?.version;
        // Wait for the step, so that it does not take time from the next measurement.
        self.pull().await
    }
}
