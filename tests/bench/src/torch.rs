//! Training steps in PyTorch: ZeroShard at every level, compared with the systems of torch and
//! DeepSpeed in the same run.
//!
//! Every system runs once in each round, in turn, in two new processes of one thread each. The
//! medians are compared.

mod ranks;

use std::{fmt, path::PathBuf, process::Command};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use zeroshard_tests::Cluster;

use crate::{Error, sample::median, step::Level, table::Table};

use ranks::{Ranks, Sample};

/// Measure a training step in PyTorch on two ranks, compared with DDP, ZeroRedundancyOptimizer,
/// FSDP2 and DeepSpeed
///
/// The model has four inputs per rank and AdamW. The other systems communicate over gloo. A system
/// that does not run is omitted.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Systems to measure, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = System::value_variants().to_vec())]
    systems: Vec<System>,
    /// Number of repetitions; the median is shown
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Model
    #[arg(long, value_enum, default_value_t = Model::Linear)]
    model: Model,
    /// Clip gradients to a global norm of 1, in one of these ways or in each of them, separated by
    /// commas
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Clip::None])]
    clip: Vec<Clip>,
    /// Number of layers of the model
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    layers: u32,
    /// Number of inputs and outputs of a layer. GPT-2 has a head for every 64 of them
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=32768))]
    width: u32,
    /// Number of measured steps of a round, after three warm-up steps
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Python interpreter that has torch and zeroshard
    #[arg(long, default_value = "python3")]
    python: PathBuf,
    /// Number of shard servers of zeroshard
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    shards: u32,
    /// Location of zeroshard's servers
    #[arg(long, value_enum, default_value_t = Servers::Processes)]
    servers: Servers,
}

/// A measured system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum System {
    /// No synchronisation
    Local,
    /// DistributedDataParallel
    Ddp,
    /// DistributedDataParallel with ZeroRedundancyOptimizer
    Zero1,
    /// fully_shard, applied to each layer
    Fsdp2,
    /// DeepSpeed, ZeRO stage 1
    Ds1,
    /// DeepSpeed, ZeRO stage 3
    Ds3,
    /// group_sharded_parallel, at every level
    Zeroshard,
}

impl fmt::Display for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Local => "local",
            Self::Ddp => "ddp",
            Self::Zero1 => "zero1",
            Self::Fsdp2 => "fsdp2",
            Self::Ds1 => "ds1",
            Self::Ds3 => "ds3",
            Self::Zeroshard => "zeroshard",
        })
    }
}

impl System {
    /// Returns whether this is a system of another project. The other systems are then measured
    /// even if it does not run.
    fn is_peer(self) -> bool {
        self != Self::Zeroshard
    }

    fn transport(self) -> Option<&'static str> {
        match self {
            Self::Local => None,
            Self::Ddp | Self::Zero1 | Self::Fsdp2 | Self::Ds1 | Self::Ds3 => Some("gloo"),
            Self::Zeroshard => Some("grpc"),
        }
    }
}

/// The trained model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Model {
    /// Linear layers without bias. At p_g_os the segment size is half a layer, so that every layer
    /// is sharded
    Linear,
    /// GPT-2 of Transformers, with 128 tokens per input
    Gpt2,
}

/// How gradients are clipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Clip {
    /// They are not clipped
    None,
    /// By torch.nn.utils.clip_grad_norm_
    Torch,
    /// By the clip_grad_norm_ of zeroshard's optimizer; the other systems are not measured
    Own,
}

/// The name of a value on the command line.
fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// The location of zeroshard's servers.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Servers {
    /// A separate process for each
    Processes,
    /// Inside rank 0
    Embedded,
}

/// A row of the table during the measurement.
#[derive(Debug)]
struct Subject {
    system: System,
    /// The level, for zeroshard.
    level: Option<Level>,
    clip: Clip,
    samples: Vec<Sample>,
}

impl Subject {
    fn all(options: &Options) -> Vec<Self> {
        let levels = |system| match system {
            System::Zeroshard => Level::value_variants().iter().copied().map(Some).collect(),
            _ => vec![None],
        };
        let subjects = options.systems.iter().flat_map(|&system| {
            levels(system).into_iter().flat_map(move |level| {
                let subject = move |&clip| Self { system, level, clip, samples: Vec::new() };
                options.clip.iter().map(subject)
            })
        });
        subjects.filter(|it| it.clip != Clip::Own || !it.system.is_peer()).collect()
    }

    /// Parameters with more elements than this are sharded; `None` for the default.
    fn segment_size(&self, options: &Options) -> Option<u64> {
        (self.level? == Level::PGOs && options.model == Model::Linear)
            .then(|| u64::from(options.width).pow(2) / 2)
    }

    fn measure(&self, options: &Options) -> Result<Sample, Error> {
        let cluster = match (self.system, options.servers) {
            (System::Zeroshard, Servers::Processes) => {
                Some(Cluster::start(options.shards as usize))
            }
            _ => None,
        };
        let mut arguments = vec![
            ("--system", self.system.to_string()),
            ("--layers", options.layers.to_string()),
            ("--width", options.width.to_string()),
            ("--steps", options.steps.to_string()),
            ("--shards", options.shards.to_string()),
            ("--segment-size", self.segment_size(options).unwrap_or(0).to_string()),
            ("--model", name(&options.model)),
        ];
        if self.clip != Clip::None {
            arguments.push(("--clip", name(&self.clip)));
        }
        arguments.extend(self.level.map(|level| ("--level", level.to_string())));
        arguments
            .extend(cluster.as_ref().map(|cluster| ("--address", cluster.address().to_owned())));
        let sample = Ranks::start(&options.python, &arguments)?.finish()?;
        let servers =
            cluster.map(|cluster| cluster.shards.iter().map(|shard| shard.peak_memory()).sum());
        Ok(Sample { server_peak_bytes: servers, ..sample })
    }

    /// The median of the seconds of a step; `None` if it was never measured.
    fn seconds(&self) -> Option<f64> {
        let samples: Vec<_> = self.samples.iter().map(|sample| sample.seconds).collect();
        (!samples.is_empty()).then(|| median(samples))
    }

    fn row(&self, options: &Options, ddp: Option<f64>, fsdp2: Option<f64>) -> Option<Value> {
        let seconds = self.seconds()?;
        let last = self.samples.last()?;
        let ratio = |baseline: Option<f64>| baseline.map(|baseline| seconds / baseline);
        let mib = |bytes: u64| bytes >> 20;
        let peak =
            |rank: usize| self.samples.iter().map(|sample| sample.peak_bytes[rank]).max().map(mib);
        let servers = self.samples.iter().filter_map(|sample| sample.server_peak_bytes).max();
        Some(json!({
            "bench": "torch", "system": self.system.to_string(), "level": self.level.map(|it| it.to_string()),
            "clip": (self.clip != Clip::None).then(|| name(&self.clip)), "transport": self.system.transport(), "params": last.params,
            "segment_size": self.segment_size(options), "seconds": seconds, "ratio_ddp": ratio(ddp),
            "ratio_fsdp2": ratio(fsdp2), "loss": last.loss, "rank0_peak_mib": peak(0), "rank1_peak_mib": peak(1),
            "servers_peak_mib": servers.map(mib),
        }))
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.system.fmt(f)?;
        self.level.map_or(Ok(()), |level| write!(f, " {level}"))?;
        match self.clip {
            Clip::None => Ok(()),
            clip => write!(f, ", clip {}", name(&clip)),
        }
    }
}

pub(crate) fn run(options: &Options, json: bool) -> Result<(), Error> {
    let python = &options.python;
    import(python, "torch", "pip install torch")?;
    if options.systems.contains(&System::Zeroshard) {
        import(python, "zeroshard.torch", "pip install client/python, in ZeroShard's repository")?;
    }
    let mut subjects = Subject::all(options);
    for round in 1..=options.rounds {
        let mut skipped = Vec::new();
        for (i, subject) in subjects.iter_mut().enumerate() {
            match subject.measure(options) {
                Ok(sample) => {
                    eprintln!(
                        "round {round}/{}: {subject}: {:.3} s",
                        options.rounds, sample.seconds
                    );
                    subject.samples.push(sample);
                }
                Err(error) if subject.system.is_peer() => {
                    let error = error.to_string();
                    eprintln!("{subject} is skipped: {}", error.lines().last().unwrap_or(&error));
                    skipped.push(i);
                }
                Err(error) => return Err(format!("{subject}: {error}").into()),
            }
        }
        for i in skipped.into_iter().rev() {
            subjects.remove(i);
        }
    }
    print(&subjects, options, json);
    Ok(())
}

fn print(subjects: &[Subject], options: &Options, json: bool) {
    let peer = |system, subject: &Subject| {
        let clip = if subject.clip == Clip::Own { Clip::Torch } else { subject.clip };
        let peer = subjects.iter().find(|it| it.system == system && it.clip == clip);
        peer.and_then(Subject::seconds)
    };
    let row = |subject: &Subject| {
        subject.row(options, peer(System::Ddp, subject), peer(System::Fsdp2, subject))
    };
    let fields = [
        "system",
        "level",
        "clip",
        "transport",
        "params",
        "segment_size",
        "seconds",
        "ratio_ddp",
        "ratio_fsdp2",
        "loss",
        "rank0_peak_mib",
        "rank1_peak_mib",
        "servers_peak_mib",
    ];
    let mut table = Table::new(json, &fields);
    for row in subjects.iter().filter_map(row) {
        table.row(row);
    }
    table.finish();
}

/// Checks that the interpreter has a module.
fn import(python: &PathBuf, module: &str, remedy: &str) -> Result<(), Error> {
    let advice = format!("{remedy}; or select an interpreter that has it with --python");
    let output = Command::new(python).args(["-c", &format!("import {module}")]).output();
    let output = output.map_err(|e| format!("cannot start {}: {e}", python.display()))?;
    if output.status.success() {
        return Ok(());
    }
    let log = String::from_utf8_lossy(&output.stderr);
    let reason = log.lines().last().unwrap_or("no output");
    Err(format!("{} cannot import {module} ({reason}): {advice}", python.display()).into())
}
