//! Measures what it costs to follow a job: bytes, a step that publishes its changes, and the time
//! until many readers have a version. The trainer and the readers are processes.

mod reader;

use std::{path::PathBuf, process::Command, time::Duration};

use clap::Args;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use tempfile::TempDir;
use zeroshard_client::{Cluster as Client, Options as Connection};
use zeroshard_model::DType;
use zeroshard_tests::{Cluster, Process, binary};

use crate::{Error, sample::median, table::Table, talk::Talker};

pub(crate) use reader::{Options as ReaderOptions, run as run_reader};

/// The script of the trainer.
const SCRIPT: &str = include_str!("../torch/follow.py");
/// The time limit of an answer. Before the first one, the trainer trains with torch alone.
const ANSWER_WITHIN: Duration = Duration::from_secs(1800);
/// The room for pins on each server. Full copies by all readers at once need it.
const PINNED: u64 = 4 << 30;
/// The number of steps after a change of the learning rate that are not measured.
const SETTLE: usize = 3;

/// Measure what following a job costs: bytes per version, the step that publishes its changes, and
/// the time until many readers have a version
///
/// Two equal models train on real text, in turn: readers follow one of them, and nobody the other.
/// For each learning rate the table has a row with the medians of all pairs of steps:
///
/// - ratio_full: the bytes of a version, compared with a full copy.
///
/// - ratio_entropy: the same bytes, compared with the entropy of the changes.
///
/// - ratio_step: a step that publishes its changes, compared with one that does not.
///
/// - ratio_snapshot: the bytes, compared with those of the usual method, in which the trainer keeps
///   a second copy of its model, and sends indices of 4 bytes and values. Snapshot_seconds is what
///   this method costs the trainer.
///
/// - reader_mib: the resident memory of the reader's process, which has one copy (copy_mib).
///   Servers_mib is that of all servers before the reader and with it.
///
/// Another row has the time from the commit of a step until many readers have applied and verified
/// its version (seconds), compared with that of full copies by all of them (ratio_copies). It also
/// has the bytes that the servers have sent, compared with those of one reader. The last row is the
/// same with readers of a mirror.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Learning rates, separated by commas
    #[arg(long, value_delimiter = ',', default_values_t = [1e-6, 3e-6])]
    rates: Vec<f64>,
    /// Number of pairs of steps for each learning rate
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    pairs: u32,
    /// Number of readers that get a version at the same time; 0: do not measure them
    #[arg(long, default_value_t = 16)]
    readers: u32,
    /// Number of versions that these readers get
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    versions: u32,
    /// Dtype of the readers' parameters
    #[arg(long, default_value = "bf16")]
    dtype: DType,
    /// Number of layers of the model, a GPT
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    layers: u32,
    /// Width of the model, which has a head for every 64 of it
    #[arg(long, default_value_t = 832, value_parser = clap::value_parser!(u32).range(1..=32768))]
    width: u32,
    /// Number of texts of 128 bytes in a step
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Number of steps with torch alone before the measurement
    #[arg(long, default_value_t = 60)]
    pretrain: u32,
    /// Number of shard servers
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    shards: u32,
    /// Python interpreter that has torch and zeroshard
    #[arg(long, default_value = "python3")]
    python: PathBuf,
}

/// Seconds of the clock that all processes of this machine share.
fn now() -> f64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// The answers to one pair of steps.
struct Pair {
    followed: Value,
    alone: Value,
    version: Value,
    compared: Value,
}

/// The median of a number of the answers.
fn median_of(answers: impl Iterator<Item = f64>) -> f64 {
    median(answers.collect())
}

fn number(answer: &Value, field: &str) -> f64 {
    answer[field].as_f64().unwrap_or(f64::NAN)
}

/// The processes of the measurement.
struct Bench<'a> {
    options: &'a Options,
    cluster: Cluster,
    trainer: Talker,
    params: u64,
    /// The full name of the followed job.
    job: String,
    /// The file of the trainer's script.
    _folder: TempDir,
}

impl<'a> Bench<'a> {
    fn start(options: &'a Options) -> Result<Self, Error> {
        let pinned = PINNED.to_string();
        let cluster = Cluster::start_with(options.shards as usize, &["--pinned-bytes", &pinned]);
        let folder = TempDir::with_prefix("zs-bench-")?;
        let script = folder.path().join("follow.py");
        std::fs::write(&script, SCRIPT)?;
        let mut command = Command::new(&options.python);
        command.arg(script).args(["--address", cluster.address()]);
        let numbers = [
            ("--layers", options.layers),
            ("--width", options.width),
            ("--batch", options.batch),
            ("--pretrain", options.pretrain),
        ];
        for (flag, value) in numbers {
            command.args([flag, &value.to_string()]);
        }
        let trainer = Talker::start("the trainer", &mut command)?;
        let ready = trainer.answer(ANSWER_WITHIN)?;
        let params = ready["params"].as_u64().ok_or("the trainer has no model")?;
        let runtime = tokio::runtime::Runtime::new()?;
        let status = runtime.block_on(async {
            Client::connect(cluster.address(), Connection::default()).await?.status().await
        })?;
        // The trainer has made two jobs.
        let job = status.jobs.iter().map(|job| job.name.clone()).min().ok_or("there is no job")?;
        Ok(Self { options, cluster, trainer, params, job, _folder: folder })
    }

    fn reader(&self, number: u32, mirror: Option<&str>) -> Result<Talker, Error> {
        let mut command = Command::new(binary("zs-bench"));
        command.args(["follow-reader", "--address", self.cluster.address(), "--job", &self.job]);
        command.args(["--dtype", &self.options.dtype.to_string()]);
        command.args(mirror.iter().flat_map(|address| ["--mirror", address]));
        Talker::start(&format!("reader {number}"), &mut command)
    }

    fn train(&mut self, name: &str) -> Result<Value, Error> {
        self.trainer.ask(&format!("step {name}"), ANSWER_WITHIN)
    }

    /// Makes a step of the followed model. Returns it with the versions of the readers.
    fn publish(&mut self, readers: &mut [Talker]) -> Result<(Value, Vec<Value>), Error> {
        readers.iter_mut().try_for_each(|reader| reader.tell("next"))?;
        let step = self.train("followed")?;
        let versions = readers.iter().map(|reader| reader.answer(ANSWER_WITHIN));
        Ok((step, versions.collect::<Result<_, _>>()?))
    }

    fn pair(&mut self, is_first: bool, reader: &mut [Talker]) -> Result<Pair, Error> {
        let mut alone = None;
        if !is_first {
            alone = Some(self.train("alone")?);
        }
        let (followed, mut versions) = self.publish(reader)?;
        let alone = alone.map_or_else(|| self.train("alone"), Ok)?;
        let compared = self.trainer.ask("compare", ANSWER_WITHIN)?;
        let version = versions.pop().ok_or("there is no reader")?;
        Ok(Pair { followed, alone, version, compared })
    }

    fn set_rate(&mut self, rate: f64, readers: &mut [Talker]) -> Result<(), Error> {
        self.trainer.ask(&format!("rate {rate}"), ANSWER_WITHIN)?;
        for _ in 0..SETTLE {
            self.pair(true, readers)?;
        }
        Ok(())
    }

    /// The resident memory of all servers in MiB.
    fn servers_mib(&self) -> u64 {
        self.cluster.shards.iter().map(Process::memory).sum::<u64>() >> 20
    }

    /// Measures pairs of steps for a learning rate.
    fn pairs(&mut self, rate: f64) -> Result<Value, Error> {
        let before = self.servers_mib();
        let mut reader = [self.reader(0, None)?];
        reader[0].ask("next", ANSWER_WITHIN)?;
        self.set_rate(rate, &mut reader)?;
        let pairs = (0..self.options.pairs).map(|pair| self.pair(pair % 2 == 0, &mut reader));
        let pairs = pairs.collect::<Result<Vec<_>, _>>()?;
        let reader_mib = Process::memory_of(reader[0].id()) >> 20;
        let is_change = |pair: &&Pair| pair.version["copied"].is_null();
        let copies = pairs.len() - pairs.iter().filter(is_change).count();
        if copies > 0 {
            eprintln!("{copies} of {} versions were full copies", pairs.len());
        }
        let of = |value: fn(&Pair) -> f64| median_of(pairs.iter().map(value));
        let bytes = of(|pair| number(&pair.version, "bytes"));
        let seconds = |step| number(step, "seconds");
        Ok(json!({
            "operation": "step", "learning_rate": rate, "pairs": pairs.len(), "copies": copies,
            "changed_fraction": of(|pair| number(&pair.version, "changed_fraction")),
            "bytes": bytes,
            "ratio_full": of(|pair| number(&pair.version, "bytes") / number(&pair.version, "copy_bytes")),
            "ratio_entropy": of(|pair| number(&pair.version, "bytes") * 8.0 / number(&pair.compared, "entropy_bits")),
            "seconds": median_of(pairs.iter().map(|pair| seconds(&pair.followed))),
            "alone_seconds": median_of(pairs.iter().map(|pair| seconds(&pair.alone))),
            "ratio_step": median_of(pairs.iter().map(|pair| seconds(&pair.followed) / seconds(&pair.alone))),
            "lag_seconds": of(|pair| number(&pair.version, "applied") - number(&pair.followed, "committed")),
            "snapshot_seconds": of(|pair| number(&pair.compared, "snapshot_seconds")),
            "ratio_snapshot": of(|pair| number(&pair.version, "bytes") / number(&pair.compared, "snapshot_bytes")),
            "reader_mib": reader_mib,
            "copy_mib": of(|pair| number(&pair.version, "copy_bytes")) / f64::from(1 << 20),
            "servers_mib": [before, self.servers_mib()],
        }))
    }

    /// The bytes of changes that all servers have sent.
    fn sent_bytes(&self) -> f64 {
        let name = "job_change_bytes_total{";
        let texts = self.cluster.shards.iter().map(|shard| shard.get("/metrics"));
        let sum = |text: String| -> f64 {
            let lines = text.lines().filter(|line| line.contains(name));
            lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
        };
        texts.map(sum).sum()
    }

    /// Measures versions for many readers.
    fn fan_out(&mut self, rate: f64, mirror: Option<&str>) -> Result<Value, Error> {
        let readers = (0..self.options.readers).map(|number| self.reader(number, mirror));
        let mut readers = readers.collect::<Result<Vec<_>, _>>()?;
        readers.iter_mut().try_for_each(|reader| reader.ask("next", ANSWER_WITHIN).map(drop))?;
        let (mut seconds, mut sent, mut copies) = (Vec::new(), Vec::new(), Vec::new());
        let last = |answers: &[Value]| {
            answers.iter().map(|of| number(of, "applied")).fold(f64::NAN, f64::max)
        };
        let mut bytes = Vec::new();
        for _ in 0..self.options.versions {
            let before = self.sent_bytes();
            let (step, versions) = self.publish(&mut readers)?;
            seconds.push(last(&versions) - number(&step, "committed"));
            sent.push(self.sent_bytes() - before);
            bytes.extend(versions.iter().map(|version| number(version, "bytes")));
            let began = now();
            readers.iter_mut().try_for_each(|reader| reader.tell("pull"))?;
            let pulls = readers.iter().map(|reader| reader.answer(ANSWER_WITHIN));
            copies.push(last(&pulls.collect::<Result<Vec<_>, _>>()?) - began);
        }
        let ratio = median_of(seconds.iter().zip(&copies).map(|(one, other)| one / other));
        let (sent, bytes) = (median(sent), median(bytes));
        Ok(json!({
            "operation": if mirror.is_some() { "readers-of-mirror" } else { "readers" },
            "learning_rate": rate, "readers": readers.len(), "bytes": bytes,
            "servers_bytes": sent, "ratio_one_reader": sent / bytes, "seconds": median(seconds),
            "copies_seconds": median(copies), "ratio_copies": ratio,
        }))
    }

    /// Starts a mirror. Returns it, and its address.
    fn mirror(&self) -> Result<(Talker, String), Error> {
        let mut command = Command::new(binary("zsctl"));
        command.args(["--json", "--address", self.cluster.address(), "mirror", &self.job]);
        command.args(["--dtype", &self.options.dtype.to_string(), "--listen", "127.0.0.1:0"]);
        let mirror = Talker::start("the mirror", &mut command)?;
        let listening = mirror.answer(ANSWER_WITHIN)?;
        let address = listening["address"].as_str().ok_or("the mirror has no address")?.to_owned();
        Ok((mirror, address))
    }
}

pub(crate) fn run(options: &Options, json: bool) -> Result<(), Error> {
    let fields = [
        "operation",
        "learning_rate",
        "changed_fraction",
        "bytes",
        "ratio_full",
        "ratio_entropy",
        "seconds",
        "alone_seconds",
        "ratio_step",
        "lag_seconds",
        "snapshot_seconds",
        "ratio_snapshot",
        "reader_mib",
        "copy_mib",
        "servers_mib",
        "readers",
        "servers_bytes",
        "ratio_one_reader",
        "copies_seconds",
        "ratio_copies",
    ];
    let mut bench = Bench::start(options)?;
    let mut table = Table::new(json, &fields);
    for &rate in &options.rates {
        let mut add = |mut row: Value, params: u64| {
            row["bench"] = json!("follow");
            row["params"] = json!(params);
            row["dtype"] = json!(options.dtype.to_string());
            // A number that is missing in an answer is NaN, which JSON does not have.
            if let Some((field, _)) =
                row.as_object().into_iter().flatten().find(|of| of.1.is_null())
            {
                return Err(Error::from(format!("an answer lacks a number for {field:?}")));
            }
            table.row(row);
            Ok(())
        };
        add(bench.pairs(rate)?, bench.params)?;
        if options.readers > 0 {
            add(bench.fan_out(rate, None)?, bench.params)?;
            let (_mirror, address) = bench.mirror()?;
            add(bench.fan_out(rate, Some(&address))?, bench.params)?;
        }
    }
    table.finish();
    Ok(())
}
