//! Measures pull and push between two processes in GB/s. In the same run it measures, in turn, one
//! raw TCP stream and generated tonic code with default settings; with TLS one raw TLS stream and
//! one raw TCP stream. Afterwards it measures boxes of a matrix.

mod boxes;
mod plain;
mod raw;

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use clap::Args;
use serde_json::json;
use tempfile::TempDir;
use zeroshard_client::{Cluster, Commit, Job, Target, TensorData, TensorId, Values};
use zeroshard_proto::{
    JobSpec, Manifest, Optimizer, TensorSpec,
    optimizer::Sgd,
    transport::tls::{Tls, TlsFiles},
};
use zeroshard_tests::{Process, binary};

use crate::{sample::median, table::Table};

pub(crate) use plain::serve as serve_plain;
pub(crate) use raw::{Options as RawOptions, serve as serve_raw};

type Error = Box<dyn std::error::Error + Send + Sync>;

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
    /// Encrypt the transfers, and compare them with a raw TLS stream; boxes are not measured
    #[arg(long)]
    tls: bool,
}

/// The durations of transfers in seconds: with ZeroShard, and with the two baselines.
type Samples = [Vec<f64>; 3];

pub(crate) fn run(options: &Options, json: bool) -> Result<(), Error> {
    let runtime = tokio::runtime::Runtime::new()?;
    let certificates = options.tls.then(certificates).transpose()?;
    let fields = match options.tls {
        true => ["raw_tls_gbps", "raw_tcp_gbps", "ratio_raw_tls", "ratio_raw_tcp"],
        false => ["raw_tcp_gbps", "plain_tonic_gbps", "ratio_raw_tcp", "ratio_plain_tonic"],
    };
    let mut table = Table::new(json, &[&["bench", "bytes", "gbps"], &fields[..]].concat());
    for &bytes in &options.bytes {
        // In a task, because the thread of `block_on` is not one of those that serve connections:
        // each message would wake another thread.
        let directory = certificates.as_ref().map(|directory| directory.path().to_owned());
        let measured = runtime.spawn(measure(bytes, options.repeat, directory));
        let (pull, push) = runtime.block_on(measured)??;
        for (bench, samples) in [("pull", pull), ("push", push)] {
            let [ours, first, second] = samples.map(|seconds| bytes as f64 / median(seconds) / 1e9);
            table.row(json!({
                "bench": bench, "bytes": bytes, "gbps": ours, (fields[0]): first,
                (fields[1]): second, (fields[2]): ours / first, (fields[3]): ours / second,
            }));
        }
    }
    table.finish();
    match options.boxes {
        side if side > 0 && !options.tls => {
            runtime.block_on(boxes::run(side, options.repeat, json))
        }
        _ => Ok(()),
    }
}

/// Creates a directory with certificates.
fn certificates() -> Result<TempDir, Error> {
    let directory = tempfile::tempdir()?;
    let mut command = Command::new(binary("zeroshard-server"));
    let made = command.arg("dev-certs").arg(directory.path()).output()?;
    match made.status.success() {
        true => Ok(directory),
        false => Err(String::from_utf8_lossy(&made.stderr).into()),
    }
}

/// A baseline for the transfers of ZeroShard.
enum Baseline {
    Raw(raw::Client),
    Plain(plain::Client),
}

impl Baseline {
    /// Starts another process of this program that serves a raw stream, and connects to it.
    fn raw(bytes: usize, certificates: Option<&Path>) -> Result<(Self, Process), Error> {
        let mut command = Command::new(binary("zs-bench"));
        command.arg("serve-raw");
        if let Some(directory) = certificates {
            command.arg("--certificates").arg(directory);
        }
        let process = Process::start(command);
        let tls = certificates.map(raw::tls).transpose()?;
        let client = raw::Client::connect(process.address(), bytes, tls.as_ref())?;
        Ok((Self::Raw(client), process))
    }

    /// Starts another process of this program that serves generated code, and connects to it.
    async fn plain(bytes: usize) -> Result<(Self, Process), Error> {
        let mut command = Command::new(binary("zs-bench"));
        command.arg("serve-plain");
        let process = Process::start(command);
        let client = plain::Client::connect(process.address(), bytes).await?;
        Ok((Self::Plain(client), process))
    }

    async fn pull(&mut self) -> Result<(), Error> {
        match self {
            Self::Raw(client) => client.pull(),
            Self::Plain(client) => client.pull().await,
        }
    }

    async fn push(&mut self) -> Result<(), Error> {
        match self {
            Self::Raw(client) => client.push(),
            Self::Plain(client) => client.push().await,
        }
    }
}

async fn measure(
    bytes: usize,
    repeat: usize,
    directory: Option<PathBuf>,
) -> Result<(Samples, Samples), Error> {
    let directory = directory.as_deref();
    let (servers, options) = servers(directory)?;
    let mut ours = Ours::start(servers.address(), options, bytes / 4).await?;
    let (mut first, _first_server) = Baseline::raw(bytes, directory)?;
    let (mut second, _second_server) = match directory {
        Some(_) => Baseline::raw(bytes, None)?,
        None => Baseline::plain(bytes).await?,
    };
    let times = SAMPLE_BYTES.div_ceil(bytes);
    let (mut pull, mut push) = (Samples::default(), Samples::default());
    for round in 0..=repeat {
        let (mut pulled, mut pushed) = ([0.0; 3], [0.0; 3]);
        for _ in 0..times {
            pulled[1] += timed(first.pull()).await?;
            pulled[2] += timed(second.pull()).await?;
            pulled[0] += timed(ours.pull()).await?;
            pushed[1] += timed(first.push()).await?;
            pushed[2] += timed(second.push()).await?;
            pushed[0] += timed(ours.push()).await?;
            ours.commit().await?;
        }
        if round == 0 {
            continue; // warm-up: first memory access, growing windows
        }
        for (samples, seconds) in [(&mut pull, pulled), (&mut push, pushed)] {
            for (samples, seconds) in samples.iter_mut().zip(seconds) {
                samples.push(seconds / times as f64);
            }
        }
    }
    Ok((pull, push))
}

/// Starts a coordinator and a shard server, and returns the options for clients.
fn servers(
    certificates: Option<&Path>,
) -> Result<(zeroshard_tests::Cluster, zeroshard_client::Options), Error> {
    let Some(directory) = certificates else {
        return Ok((zeroshard_tests::Cluster::start(1), Default::default()));
    };
    let file = |flag: &str, name: &str| format!("--tls-{flag}={}", directory.join(name).display());
    let flags = [file("ca", "ca.pem"), file("cert", "server.pem"), file("key", "server-key.pem")];
    let flags = [&*flags[0], &*flags[1], &*flags[2]];
    let coordinator = zeroshard_tests::Cluster::coordinator_with(&flags);
    let shards = vec![zeroshard_tests::Cluster::shard(coordinator.address(), &flags)];
    let admin = [directory.join("admin.pem"), directory.join("admin-key.pem")];
    let identity = Some(admin.into());
    let tls = Tls::open(TlsFiles { ca: directory.join("ca.pem"), identity, crl: None })?;
    let options = zeroshard_client::Options::default().tls(Some(tls));
    Ok((zeroshard_tests::Cluster { coordinator, shards }, options))
}

async fn timed(work: impl Future<Output = Result<(), Error>>) -> Result<f64, Error> {
    let began = Instant::now();
    work.await?;
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
    async fn start(
        address: &str,
        options: zeroshard_client::Options,
        numel: usize,
    ) -> Result<Self, Error> {
        let cluster = Cluster::connect(address, options).await?;
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
