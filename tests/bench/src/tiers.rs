//! Measures a step of a job whose slices are partly on disk.
//!
//! The floor is the time in which as many threads as the server has for its disk read and write the
//! same bytes in a file in the same directory, with requests of the same size, after each step.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Instant,
};

use clap::Args;
use serde_json::{Value, json};
use zeroshard_model::{
    DType, StateDType,
    direct::{Pages, open},
};
use zeroshard_tests::Cluster;

use crate::{
    Error,
    sample::median,
    step::{Level, WARM_UP, Worker, WorkerOptions},
    table::Table,
};

/// The threads of a server for its disk, and the bytes of a request.
const THREADS: usize = 8;
const REQUEST: usize = 1 << 20;

/// The arrays of f32 of a parameter: master weights, two AdamW moments and a sum of gradients.
const STATE: u64 = 16;

/// Measure steps of a job of which all, half, a quarter and nothing of the state fits in memory
///
/// One worker and one server, AdamW. Each case prints the bytes that a step has moved to and from
/// the disk, beside the formula, and the time of the step beside the time that the raw disk needs
/// for the same bytes and beside a step with all of the state in memory.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Number of tensors
    #[arg(long, default_value_t = 64)]
    tensors: usize,
    /// Number of elements of each tensor
    #[arg(long, default_value_t = 1 << 20)]
    numel: usize,
    /// Number of measured steps, after two warm-up steps; the median is shown
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// Directory for the slices, on the disk that is measured; by default that of the program
    #[arg(long)]
    disk: Option<PathBuf>,
    /// Measure only one case, in which this number of bytes of each parameter (of 16) fits in
    /// memory, without a comparison with a job that is entirely in memory
    #[arg(long)]
    memory: Option<u64>,
}

/// The bytes that a step moves for each parameter, with `memory` of its 16 bytes in memory.
fn formula(memory: u64) -> u64 {
    // Moments are read and written. A sum is written when it is complete, and read by the step.
    // Master weights are read and written by the step, and read by the pull of the worker.
    let moments = (STATE - memory).min(8) * 2;
    let sum = (12 - memory.clamp(4, 8) - 4) * 2;
    let master = (4 - memory.min(4)) * 3;
    moments + sum + master
}

pub(crate) fn run(options: &Options, json: bool) -> Result<(), Error> {
    let fields = [
        "bench",
        "params",
        "memory",
        "read_bytes",
        "written_bytes",
        "ratio_formula",
        "seconds",
        "phases",
        "disk_gbps",
        "floor_seconds",
        "ratio_floor",
        "ratio_memory",
        "server_peak_bytes",
    ];
    let program = std::env::current_exe()?;
    let parent = options.disk.as_deref().or(program.parent()).ok_or("no directory")?;
    fs::create_dir_all(parent)?;
    let directory = tempfile::tempdir_in(parent)?;
    let mut table = Table::new(json, &fields);
    if let Some(memory) = options.memory {
        table.row(measure(options, memory, directory.path(), None)?);
    } else {
        let in_memory = measure(options, STATE, directory.path(), None)?;
        let seconds = in_memory["seconds"].as_f64();
        table.row(in_memory);
        for memory in [8, 4, 0] {
            table.row(measure(options, memory, directory.path(), seconds)?);
        }
    }
    table.finish();
    Ok(())
}

/// Measures a case. `in_memory`: the seconds of a step with all of the state in memory.
fn measure(
    options: &Options,
    memory: u64,
    directory: &Path,
    in_memory: Option<f64>,
) -> Result<Value, Error> {
    let params = (options.tensors * options.numel) as u64;
    let (budget, room) = ((memory * params).to_string(), (STATE * params + (1 << 30)).to_string());
    let disk = directory.to_str().ok_or("the directory is not UTF-8")?;
    let flags = ["--host-memory", &budget, "--disk", disk, "--disk-bytes", &room];
    let cluster = Cluster::start_with(1, &flags);
    let worker = WorkerOptions {
        address: cluster.address().to_owned(),
        rank: 0,
        workers: 1,
        servers: 1,
        replicas: 1,
        tensors: options.tensors,
        numel: options.numel,
        level: Level::Os,
        steps: options.steps,
        dtype: DType::F32,
        state_dtype: StateDType::F32,
        wire: DType::F32.into(),
        parameter_wire: None,
    };
    let moved = || ["read", "written"].map(|direction| counter(&cluster, direction));
    let raw = Raw::create(directory)?;
    let runtime = tokio::runtime::Runtime::new()?;
    let mut worker = runtime.block_on(Worker::start(&worker))?;
    let (mut times, mut floors) = (<[Vec<f64>; 4]>::default(), Vec::new());
    let (mut read, mut written) = (0, 0);
    for step in 0..WARM_UP + options.steps {
        let before = moved();
        let took = runtime.block_on(worker.step(step as u64))?;
        let after = moved();
        if step < WARM_UP {
            continue;
        }
        times.iter_mut().zip(took).for_each(|(samples, time)| samples.push(time));
        (read, written) = (after[0] - before[0], after[1] - before[1]);
        floors.push(raw.transfer(read, written)?);
    }
    let [seconds, push, decide, pull] = times.map(median);
    let floor = median(floors);
    let (bytes, expected) = (read + written, formula(memory) * params);
    let ratio = |of: f64| if of > 0.0 { json!(seconds / of) } else { Value::Null };
    let bound = floor.max(in_memory.unwrap_or(0.0));
    Ok(json!({
        "bench": "tiers", "params": params, "memory": memory as f64 / STATE as f64,
        "read_bytes": read, "written_bytes": written,
        "ratio_formula": if expected > 0 { json!(bytes as f64 / expected as f64) } else { Value::Null },
        "seconds": seconds, "phases": {"push": push, "decide": decide, "pull": pull},
        "disk_gbps": if floor > 0.0 { json!(bytes as f64 / floor / 1e9) } else { Value::Null },
        "floor_seconds": floor, "ratio_floor": if bytes > 0 { ratio(bound) } else { Value::Null },
        "ratio_memory": in_memory.map(ratio), "server_peak_bytes": cluster.shards[0].peak_memory(),
    }))
}

fn counter(cluster: &Cluster, direction: &str) -> u64 {
    let metrics = cluster.shards[0].get("/metrics");
    let name = format!(
        "zeroshard_tier_transferred_bytes_total{{direction=\"{direction}\",tier=\"disk\"}} "
    );
    let value = metrics.lines().find_map(|line| line.strip_prefix(&name));
    value.and_then(|value| value.parse().ok()).unwrap_or(0)
}

/// A file that is read and written directly.
struct Raw(fs::File);

/// The size of the file.
const RAW: u64 = 1 << 30;

impl Raw {
    fn create(directory: &Path) -> Result<Self, Error> {
        let path = directory.join("raw");
        let mut options = OpenOptions::new();
        let file = open(&path, options.read(true).write(true).create(true).truncate(false))?;
        fs::remove_file(&path)?;
        let raw = Self(file);
        raw.transfer(0, RAW)?;
        Ok(raw)
    }

    /// Reads and writes this number of bytes, with the two directions mixed as in a step. Returns
    /// the seconds.
    fn transfer(&self, read: u64, written: u64) -> Result<f64, Error> {
        let requests = |bytes: u64, thread: usize| {
            let all = bytes.div_ceil(REQUEST as u64) as usize;
            (thread..all).step_by(THREADS)
        };
        let began = Instant::now();
        let work = |thread: usize| {
            let mut pages = Pages::new(REQUEST);
            let at = |request: usize| (request * REQUEST) as u64 % RAW;
            let (mut reads, mut writes) = (requests(read, thread), requests(written, thread));
            loop {
                // As many of each as a piece of a slice needs.
                let (some, more) = (reads.by_ref().take(3), writes.by_ref().take(3));
                let mut any = false;
                for request in some {
                    self.0.read_exact_at(pages.bytes(0..REQUEST), at(request))?;
                    any = true;
                }
                for request in more {
                    self.0.write_all_at(pages.bytes(0..REQUEST), at(request))?;
                    any = true;
                }
                if !any {
                    return Ok::<_, std::io::Error>(());
                }
            }
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..THREADS).map(|thread| scope.spawn(move || work(thread))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("it does not panic"))
        })?;
        Ok(began.elapsed().as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_formula_counts_moments_then_sums_then_master_weights() {
        assert_eq!([16, 8, 4, 0].map(formula), [0, 16, 24, 36]);
        assert_eq!([12, 6, 2].map(formula), [8, 20, 30]);
    }
}
