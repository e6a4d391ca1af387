//! Measures a complete step (push, reduce, decide, apply, pull) without a model: the cost of
//! sharding if computation took no time. Every worker and every server is a process.

mod traffic;
mod worker;

use std::{
    fmt,
    process::{Child, Command, Stdio},
};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use zeroshard_client::{Options as Connection, Transport, Wire};
use zeroshard_model::{DType, JobSpec, Manifest, StateDType, TensorSpec};
use zeroshard_tests::{Cluster, binary};

use crate::{Error, sample::median, table::Table};

pub(crate) use worker::{JOB, WARM_UP, Worker, WorkerOptions, run as run_worker, spec};

/// Measure a complete step without a model, depending on workers, servers, level and tensors
///
/// Without options, the benchmark measures 67 M parameters in 64 tensors with several numbers of
/// workers and servers, with two servers for each slice and at every level, then 10 M parameters in
/// 10 tensors and in 10,000 tensors. With any of --workers, --servers, --replicas, --tensors,
/// --numel and --level, it measures only that case.
///
/// With --group, it runs no step: it counts the bytes that servers and ranks transfer in a step,
/// without groups and with groups of that size, and lists the formulas of other systems. The
/// default there is 1,000 workers, 128 servers and 7,000 M parameters in 1,000 tensors.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Number of worker processes
    #[arg(long)]
    workers: Option<u32>,
    /// Number of shard servers
    #[arg(long)]
    servers: Option<u32>,
    /// Number of servers for each slice
    #[arg(long)]
    replicas: Option<u32>,
    /// Number of tensors
    #[arg(long)]
    tensors: Option<usize>,
    /// Number of elements of each tensor
    #[arg(long)]
    numel: Option<usize>,
    /// Sharding level of the workers
    #[arg(long)]
    level: Option<Level>,
    /// Transports between workers and servers, separated by commas: shm or grpc
    #[arg(long, value_delimiter = ',', default_values_t = [Transport::Shm, Transport::Grpc])]
    transport: Vec<Transport>,
    /// Dtype of the parameters: f32, bf16 or f16
    #[arg(long, default_value = "f32")]
    dtype: DType,
    /// Dtype of the optimizer state: f32 or int8
    #[arg(long, default_value = "f32")]
    state_dtype: StateDType,
    /// Encoding of gradients on the wire: f32, bf16, f16 or int8 [default: the dtype of the
    /// parameters]
    #[arg(long)]
    wire: Option<Wire>,
    /// Encoding of parameters on the wire [default: that of gradients, or f32 if these are int8]
    #[arg(long)]
    parameter_wire: Option<Wire>,
    /// Number of measured steps, after two warm-up steps; the median is shown
    #[arg(long, default_value_t = 9)]
    steps: usize,
    /// Count the bytes of a step with groups of this many workers, without running it
    #[arg(long, conflicts_with_all = ["replicas", "steps"])]
    group: Option<u32>,
}

/// The way in which parameters and gradients are transferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Level {
    /// All gradients at once, all parameters at once
    #[value(name = "os")]
    Os,
    /// Gradients in buckets, all parameters at once
    #[value(name = "os_g")]
    OsG,
    /// Gradients in buckets, parameters in buckets and twice per step
    #[value(name = "p_g_os")]
    PGOs,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Os => "os",
            Self::OsG => "os_g",
            Self::PGOs => "p_g_os",
        })
    }
}

/// One case.
#[derive(Debug, Clone, Copy)]
struct Case {
    workers: u32,
    servers: u32,
    replicas: u32,
    tensors: usize,
    numel: usize,
    level: Level,
}

const CASE: Case =
    Case { workers: 2, servers: 2, replicas: 1, tensors: 64, numel: 1 << 20, level: Level::Os };

fn cases(options: &Options) -> Vec<Case> {
    let Options { workers, servers, replicas, tensors, numel, level, .. } = *options;
    if workers.is_some()
        || servers.is_some()
        || replicas.is_some()
        || tensors.is_some()
        || numel.is_some()
        || level.is_some()
    {
        return vec![Case {
            workers: workers.unwrap_or(CASE.workers),
            servers: servers.unwrap_or(CASE.servers),
            replicas: replicas.unwrap_or(CASE.replicas),
            tensors: tensors.unwrap_or(CASE.tensors),
            numel: numel.unwrap_or(CASE.numel),
            level: level.unwrap_or(CASE.level),
        }];
    }
    let sizes = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 4)];
    let sizes = sizes.map(|(workers, servers)| Case { workers, servers, ..CASE });
    let replicas = [Case { replicas: 2, ..CASE }];
    let levels = [Level::OsG, Level::PGOs].map(|level| Case { level, ..CASE });
    let tensors =
        [(10, 1_000_000), (10_000, 1_000)].map(|(tensors, numel)| Case { tensors, numel, ..CASE });
    [&sizes[..], &replicas, &levels, &tensors].concat()
}

impl Options {
    /// The encoding of gradients.
    fn wire(&self) -> Wire {
        self.wire.unwrap_or(self.dtype.into())
    }

    /// The options of the first rank of a case in the cluster at `address`.
    fn of_rank_0(&self, case: Case, address: &str) -> WorkerOptions {
        WorkerOptions {
            address: address.to_owned(),
            rank: 0,
            workers: case.workers,
            servers: case.servers,
            replicas: case.replicas,
            tensors: case.tensors,
            numel: case.numel,
            level: case.level,
            steps: self.steps,
            dtype: self.dtype,
            state_dtype: self.state_dtype,
            wire: self.wire(),
            parameter_wire: self.parameter_wire,
        }
    }
}

/// Counts the bytes of a step with groups: see [`traffic`].
fn count(options: &Options, group_size: u32, json: bool) -> Result<(), Error> {
    let numel = options.numel.unwrap_or(7_000_000) as u64;
    let tensor = |i| TensorSpec::new(format!("tensor.{i}"), [numel]);
    let manifest = Manifest::new((0..options.tensors.unwrap_or(1000)).map(tensor).collect())?;
    let world = options.workers.unwrap_or(1000);
    let spec = JobSpec { world, group_size, ..JobSpec::new(JOB, manifest, vec!["adamw".parse()?]) };
    let level = options.level.unwrap_or(CASE.level);
    traffic::run(&spec, options.servers.unwrap_or(128), level, json)
}

pub(crate) fn run(options: &Options, json: bool) -> Result<(), Error> {
    if let Some(group_size) = options.group {
        return count(options, group_size, json);
    }
    let fields = [
        "bench",
        "params",
        "tensors",
        "workers",
        "servers",
        "replicas",
        "dtype",
        "state_dtype",
        "level",
        "transport",
        "wire",
        "parameter_wire",
        "seconds",
        "pushed_mb",
        "pulled_mb",
        "gparams_per_s",
        "phases",
        "server_peak_bytes",
        "ratio_server_floor",
    ];
    let mut table = Table::new(json, &fields);
    for case in cases(options) {
        for &transport in &options.transport {
            table.row(measure(case, transport, options)?);
        }
    }
    table.finish();
    Ok(())
}

fn measure(case: Case, transport: Transport, options: &Options) -> Result<Value, Error> {
    let cluster = Cluster::start(case.servers as usize);
    let first = options.of_rank_0(case, cluster.address());
    let ranks = first.all();
    let children = ranks.iter().map(|rank| start_worker(transport, rank));
    let children = children.collect::<Result<Vec<_>, _>>()?;
    let mut results = Vec::new();
    for child in children {
        let output = child.wait_with_output()?;
        if !output.status.success() {
            return Err(format!("a worker ended with {}", output.status).into());
        }
        results.push(serde_json::from_slice::<Value>(&output.stdout)?);
    }
    let phase = |name: &str| -> f64 {
        let samples = results[0][name].as_array().into_iter().flatten();
        median(samples.filter_map(Value::as_f64).collect())
    };
    let params = (case.tensors * case.numel) as u64;
    let seconds = phase("seconds");
    let bytes = |name: &str| results[0][name].as_f64().unwrap_or_default() / 1e6;
    let wire = Connection::default().wire(options.wire()).parameter_wire(options.parameter_wire);
    let peak: u64 = cluster.shards.iter().map(|shard| shard.peak_memory()).sum();
    let floor = spec(&first)?.required_with_replicas().bytes;
    Ok(json!({
        "bench": "step", "params": params, "tensors": case.tensors, "workers": case.workers,
        "servers": case.servers, "replicas": case.replicas, "level": case.level.to_string(),
        "dtype": options.dtype.to_string(), "state_dtype": options.state_dtype.to_string(),
        "transport": transport.to_string(), "wire": wire.wire.to_string(),
        "parameter_wire": wire.wire_of_parameters().to_string(), "seconds": seconds,
        "pushed_mb": bytes("pushed_bytes"), "pulled_mb": bytes("pulled_bytes"),
        "gparams_per_s": params as f64 / seconds / 1e9,
        "phases": {"push": phase("push"), "decide": phase("decide"), "pull": phase("pull")},
        "server_peak_bytes": peak,
        "ratio_server_floor": peak as f64 / floor as f64,
    }))
}

fn start_worker(transport: Transport, rank: &WorkerOptions) -> Result<Child, Error> {
    let mut command = Command::new(binary("zs-bench"));
    command.env("ZEROSHARD_TRANSPORT", transport.to_string());
    command.arg("step-worker").args(rank.to_arguments());
    Ok(command.stdout(Stdio::piped()).spawn()?)
}
