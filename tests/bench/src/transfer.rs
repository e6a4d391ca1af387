//! Measures pull and push between two processes in GB/s. In the same run it measures, in turn, one
//! raw TCP stream and generated tonic code with default settings; with TLS one raw TLS stream and
//! one raw TCP stream. Afterwards it measures boxes of a matrix.

mod boxes;
mod peers;
mod plain;
mod raw;

use std::{path::PathBuf, process::Command};

use clap::Args;
use serde_json::json;
use tempfile::TempDir;
use zeroshard_client::Transport;
use zeroshard_tests::binary;

use crate::{Error, sample::median, table::Table};

use peers::{Peers, Transfer};

pub(crate) use plain::serve as serve_plain;
pub(crate) use raw::{Options as RawOptions, rate as raw_rate, serve as serve_raw};

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
    /// Number of connections that transfer at the same time, each of a job of its own and each
    /// `--bytes`; several numbers are separated by commas. The rate is that of all of them together
    #[arg(long, value_delimiter = ',', default_value = "1", value_parser = connections)]
    connections: Vec<usize>,
    /// Transport of ZeroShard: grpc, or shm to use shared memory. The baselines use TCP
    #[arg(long, default_value_t = Transport::Grpc)]
    transport: Transport,
    /// Encrypt the transfers, and compare them with a raw TLS stream; boxes are not measured
    #[arg(long)]
    tls: bool,
}

fn connections(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number @ 1..=64) => Ok(number),
        _ => Err("expected a number from 1 to 64".to_owned()),
    }
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
    let mut table =
        Table::new(json, &[&["bench", "bytes", "connections", "gbps"], &fields[..]].concat());
    let cases =
        options.connections.iter().flat_map(|&n| options.bytes.iter().map(move |&b| (n, b)));
    for (connections, bytes) in cases {
        // In a task, because the thread of `block_on` is not one of those that serve connections:
        // each message would wake another thread.
        let directory = certificates.as_ref().map(|directory| directory.path().to_owned());
        let of = Of { bytes, connections, transport: options.transport };
        let measured = runtime.spawn(measure(of, options.repeat, directory));
        let (pull, push) = runtime.block_on(measured)??;
        for (bench, samples) in [("pull", pull), ("push", push)] {
            let all = (bytes * connections) as f64;
            let [ours, first, second] = samples.map(|seconds| all / median(seconds) / 1e9);
            table.row(json!({
                "bench": bench, "bytes": bytes, "connections": connections,
                "transport": options.transport.to_string(), "gbps": ours,
                (fields[0]): first, (fields[1]): second,
                (fields[2]): ours / first, (fields[3]): ours / second,
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

/// What is transferred.
#[derive(Debug, Clone, Copy)]
struct Of {
    bytes: usize,
    connections: usize,
    transport: Transport,
}

async fn measure(
    Of { bytes, connections, transport }: Of,
    repeat: usize,
    directory: Option<PathBuf>,
) -> Result<(Samples, Samples), Error> {
    let directory = directory.as_deref();
    let mut ours = Peers::ours(bytes, connections, transport, directory).await?;
    let mut first = Peers::raw(bytes, connections, directory)?;
    let mut second = match directory {
        Some(_) => Peers::raw(bytes, connections, None)?,
        None => Peers::plain(bytes, connections).await?,
    };
    let times = SAMPLE_BYTES.div_ceil(bytes);
    let (mut pull, mut push) = (Samples::default(), Samples::default());
    for round in 0..=repeat {
        let (mut pulled, mut pushed) = ([0.0; 3], [0.0; 3]);
        for _ in 0..times {
            for (transfer, seconds) in
                [(Transfer::Pull, &mut pulled), (Transfer::Push, &mut pushed)]
            {
                seconds[1] += first.timed(transfer).await?;
                seconds[2] += second.timed(transfer).await?;
                seconds[0] += ours.timed(transfer).await?;
            }
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
