//! Training steps in PyTorch: ZeroShard at every level, compared with the systems of torch and
//! DeepSpeed in the same run.
//!
//! Every system runs once in each round, in turn, in two new processes of one thread each. The
//! medians are compared.

mod floor;
mod ranks;

use std::{fmt, path::PathBuf, process::Command};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use zeroshard_client::{Options as Connection, Transport, Wire};
use zeroshard_tests::Cluster;

use crate::{Error, sample::median, step::Level, table::Table};

use floor::Rates;
use ranks::{Ranks, Sample};

/// Measure a training step in PyTorch on two ranks, compared with DDP, ZeroRedundancyOptimizer,
/// FSDP2 and DeepSpeed
///
/// The model has four inputs per rank and AdamW. The other systems communicate over gloo. A system
/// that does not run is omitted. The floor of a step is the time without synchronisation, plus the
/// time in which one TCP stream, or copies in memory, move the bytes that the step must move. The
/// rates are measured in each round.
///
/// On a GPU, FSDP2 and DeepSpeed keep optimizer state (DeepSpeed 3 also parameters) in host memory,
/// where zeroshard's servers are.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
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
    /// Number of layers of the model, unless it has a size
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    layers: u32,
    /// Number of inputs and outputs of a layer, unless the model has a size. GPT-2 has a head for
    /// every 64 of them
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=32768))]
    width: u32,
    /// Number of measured steps of a round, after three warm-up steps
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Number of ranks
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// Device of the model. Ranks on the CPU have one thread each
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    device: Device,
    /// Dtype of the computation. Optimizer state and master weights are f32 in all systems
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    /// Python interpreter that has torch and zeroshard
    #[arg(long, default_value = "python3")]
    python: PathBuf,
    /// Number of shard servers of zeroshard
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    shards: u32,
    /// Transports between the ranks and zeroshard's servers, separated by commas: shm or grpc. Each
    /// is measured in turn
    #[arg(long, value_delimiter = ',', default_values_t = [Transport::Shm, Transport::Grpc])]
    transport: Vec<Transport>,
    /// Encoding of zeroshard's gradients on the wire: f32, bf16, f16 or int8
    #[arg(long, default_value = "f32")]
    wire: Wire,
    /// Encoding of zeroshard's parameters on the wire [default: that of gradients, or f32 if these
    /// are int8]
    #[arg(long)]
    parameter_wire: Option<Wire>,
    /// Location of zeroshard's servers
    #[arg(long, value_enum, default_value_t = Servers::Processes)]
    servers: Servers,
}

const EXAMPLE: &str = "\
Example, on one GPU, beside systems that keep their optimizer state in host memory:
  for model in gpt2-1g gpt2-3g; do
    zs-bench torch --device cuda --ranks 1 --dtype bf16 --model $model --shards 4 \
--systems local,fsdp2,ds2,ds3,zeroshard;
  done";

impl Options {
    /// The layers of the model, and the width of a layer.
    fn size(&self) -> (u32, u32) {
        match self.model {
            Model::Linear | Model::Gpt2 => (self.layers, self.width),
            Model::Gpt2_1g => (18, 2048),
            Model::Gpt2_3g => (36, 2560),
        }
    }

    /// The encoding of zeroshard's parameters.
    fn parameter_wire(&self) -> Wire {
        let connection = Connection::default().wire(self.wire);
        connection.parameter_wire(self.parameter_wire).wire_of_parameters()
    }
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
    /// DeepSpeed, ZeRO stage 2
    Ds2,
    /// DeepSpeed, ZeRO stage 3
    Ds3,
    /// group_sharded_parallel, at every level
    Zeroshard,
}

impl System {
    /// Returns whether this is a system of another project. The other systems are then measured
    /// even if it does not run.
    fn is_peer(self) -> bool {
        self != Self::Zeroshard
    }

    /// How the ranks of another system communicate.
    fn backend(self, device: Device) -> Option<&'static str> {
        match (self, device) {
            (Self::Local | Self::Zeroshard, _) => None,
            (_, Device::Cpu) => Some("gloo"),
            (_, Device::Cuda) => Some("nccl"),
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
    /// The same with 1.0 G parameters: 18 layers of 2048
    #[value(name = "gpt2-1g")]
    Gpt2_1g,
    /// The same with 3.0 G parameters: 36 layers of 2560
    #[value(name = "gpt2-3g")]
    Gpt2_3g,
}

impl Model {
    /// The model of any size.
    fn family(self) -> Self {
        match self {
            Self::Linear => Self::Linear,
            Self::Gpt2 | Self::Gpt2_1g | Self::Gpt2_3g => Self::Gpt2,
        }
    }
}

/// Where the model is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    /// The host
    Cpu,
    /// The first GPU, which all ranks share
    Cuda,
}

/// The dtype in which the model computes.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Dtype {
    F32,
    Bf16,
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
    /// The level and the transport, for zeroshard.
    level: Option<Level>,
    transport: Option<Transport>,
    clip: Clip,
    samples: Vec<Sample>,
}

impl Subject {
    fn all(options: &Options) -> Vec<Self> {
        let each = |&transport: &Transport| {
            let levels = Level::value_variants().iter();
            levels.map(move |&level| (Some(level), Some(transport)))
        };
        let variants = |system| match system {
            System::Zeroshard => options.transport.iter().flat_map(each).collect(),
            _ => vec![(None, None)],
        };
        let subjects = options.systems.iter().flat_map(|&system| {
            variants(system).into_iter().flat_map(move |(level, transport)| {
                let subject =
                    move |&clip| Self { system, level, transport, clip, samples: Vec::new() };
                options.clip.iter().map(subject)
            })
        });
        subjects.filter(|it| it.clip != Clip::Own || !it.system.is_peer()).collect()
    }

    fn transport(&self, options: &Options) -> Option<String> {
        let backend = self.system.backend(options.device).map(str::to_owned);
        self.transport.map(|transport| transport.to_string()).or(backend)
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
        let (layers, width) = options.size();
        let mut arguments = vec![
            ("--system", name(&self.system)),
            ("--layers", layers.to_string()),
            ("--width", width.to_string()),
            ("--steps", options.steps.to_string()),
            ("--shards", options.shards.to_string()),
            ("--segment-size", self.segment_size(options).unwrap_or(0).to_string()),
            ("--model", name(&options.model.family())),
            ("--device", name(&options.device)),
            ("--dtype", name(&options.dtype)),
            ("--wire", options.wire.to_string()),
            ("--parameter-wire", options.parameter_wire().to_string()),
        ];
        if self.clip != Clip::None {
            arguments.push(("--clip", name(&self.clip)));
        }
        arguments.extend(self.level.map(|level| ("--level", level.to_string())));
        arguments
            .extend(cluster.as_ref().map(|cluster| ("--address", cluster.address().to_owned())));
        let transport = self.transport.map(|transport| transport.to_string());
        let mut env = vec![("ZEROSHARD_TRANSPORT", transport.as_deref().unwrap_or("auto"))];
        if options.device == Device::Cpu {
            env.push(("OMP_NUM_THREADS", "1"));
        }
        let ranks = Ranks::start(&options.python, &arguments, &env, options.ranks as usize)?;
        let sample = ranks.finish()?;
        let servers =
            cluster.map(|cluster| cluster.shards.iter().map(|shard| shard.peak_memory()).sum());
        Ok(Sample { server_peak_bytes: servers, ..sample })
    }

    /// The median of the seconds of a step; `None` if it was never measured.
    fn seconds(&self) -> Option<f64> {
        let samples: Vec<_> = self.samples.iter().map(|sample| sample.seconds).collect();
        (!samples.is_empty()).then(|| median(samples))
    }

    /// The floor of a step, if the time without synchronisation was measured.
    fn floor(&self, options: &Options, to: &Baselines<'_>) -> Option<f64> {
        let (level, transport) = (self.level?, self.transport?);
        let params = self.samples.last()?.params;
        let wires = (options.wire, options.parameter_wire());
        let bytes = u64::from(options.ranks) * floor::bytes(level, transport, wires, params);
        Some(to.local? + to.rates.seconds(bytes, transport)?)
    }

    fn row(&self, options: &Options, to: &Baselines<'_>) -> Option<Value> {
        let seconds = self.seconds()?;
        let last = self.samples.last()?;
        let (layers, width) = options.size();
        let tokens = last.tokens * u64::from(options.ranks);
        let ratio = |baseline: Option<f64>| baseline.map(|baseline| seconds / baseline);
        let floor = self.floor(options, to);
        let mib = |bytes: u64| bytes >> 20;
        let peak = |rank| {
            self.samples
                .iter()
                .filter_map(|it| it.peak_bytes.get::<usize>(rank))
                .max()
                .copied()
                .map(mib)
        };
        let servers = self.samples.iter().filter_map(|sample| sample.server_peak_bytes).max();
        Some(json!({
            "bench": "torch", "model": name(&options.model.family()), "layers": layers, "width": width,
            "ranks": options.ranks, "device": name(&options.device), "dtype": name(&options.dtype),
            "rounds": self.samples.len(), "system": name(&self.system), "level": self.level.map(|it| it.to_string()),
            "clip": (self.clip != Clip::None).then(|| name(&self.clip)), "transport": self.transport(options),
            "wire": (!self.system.is_peer()).then(|| options.wire.to_string()),
            "parameter_wire": (!self.system.is_peer()).then(|| options.parameter_wire().to_string()), "params": last.params,
            "segment_size": self.segment_size(options), "seconds": seconds,
            "tokens_per_s": (tokens > 0).then(|| tokens as f64 / seconds), "ratio_local": ratio(to.local),
            "ratio_ddp": ratio(to.ddp), "ratio_fsdp2": ratio(to.fsdp2), "floor_seconds": floor, "ratio_floor": ratio(floor),
            "loss": last.loss, "rank0_peak_mib": peak(0), "rank1_peak_mib": peak(1),
            "gpu_peak_mib": (options.device == Device::Cuda).then(|| mib(last.gpu_peak_bytes)), "servers_peak_mib": servers.map(mib),
        }))
    }
}

/// What a row is compared with: the seconds of steps of other systems, and the machine's rates.
struct Baselines<'a> {
    local: Option<f64>,
    ddp: Option<f64>,
    fsdp2: Option<f64>,
    rates: &'a Rates,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&name(&self.system))?;
        self.level.map_or(Ok(()), |level| write!(f, " {level}"))?;
        self.transport.map_or(Ok(()), |transport| write!(f, " over {transport}"))?;
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
    let (mut subjects, mut rates) = (Subject::all(options), Rates::default());
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
        if options.device == Device::Cpu && options.systems.contains(&System::Zeroshard) {
            rates.measure(options.ranks as usize)?;
        }
    }
    print(&subjects, &rates, options, json);
    Ok(())
}

fn print(subjects: &[Subject], rates: &Rates, options: &Options, json: bool) {
    let peer = |system, subject: &Subject| {
        let clip = if subject.clip == Clip::Own { Clip::Torch } else { subject.clip };
        let peer = subjects.iter().find(|it| it.system == system && it.clip == clip);
        peer.and_then(Subject::seconds)
    };
    let row = |subject: &Subject| {
        let [local, ddp, fsdp2] =
            [System::Local, System::Ddp, System::Fsdp2].map(|system| peer(system, subject));
        subject.row(options, &Baselines { local, ddp, fsdp2, rates })
    };
    let fields = [
        "system",
        "level",
        "clip",
        "transport",
        "wire",
        "parameter_wire",
        "params",
        "segment_size",
        "seconds",
        "tokens_per_s",
        "ratio_local",
        "ratio_ddp",
        "ratio_fsdp2",
        "floor_seconds",
        "ratio_floor",
        "loss",
        "rank0_peak_mib",
        "rank1_peak_mib",
        "gpu_peak_mib",
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
