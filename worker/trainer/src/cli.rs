//! The flags of the command line, and their conversion into a [`Plan`].

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use zeroshard_client::{CredentialFlags, Transport, Wire};
use zeroshard_model::{CheckpointPolicy, DType, OnLoss, OnMemoryShortage, Optimizer, StateDType};
use zeroshard_worker::parallel::Level;

use super::batches::Sharding;
use super::error::{Error, Result};
use super::model::Architecture;
use super::parallelism::Parallelism;
use super::plan::Plan;
use super::schedule::{Schedule, default_lr};

/// ZeroShard's trainer: trains a small transformer whose optimizer is on shard servers
#[derive(Debug, Parser)]
#[command(name = "zeroshard-worker", version, max_term_width = 100)]
pub struct Cli {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a character-level transformer on the text files of a folder
    ///
    /// Without --address and --processes, the coordinator, the shard servers and the workers run in
    /// this process, except that --tensor-parallel starts a process for each of them. The same
    /// options and seed give the same result, bit for bit, for every level, number of shard servers
    /// and chunk size, in processes and in threads.
    Train(Box<Train>),
}

/// Whether a new job starts from a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Resume {
    /// If there is one.
    Auto,
    /// There must be none.
    Never,
}

/// The reaction to the loss of a shard server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ServerLoss {
    /// The job returns to its latest checkpoint.
    Restore,
    /// The job fails.
    Fail,
}

/// The reaction of a shard server without memory for second copies of slices that are being saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MemoryShortage {
    /// The step waits until the slices are written.
    Wait,
    /// The save is given up, and the step continues.
    GiveUp,
}

/// Flags of `train`.
#[derive(Debug, Clone, Args)]
pub struct Train {
    /// Folder with the training text: UTF-8 source files and documents. Files that a .gitignore
    /// excludes are skipped
    #[arg(long, value_name = "DIR", default_value = ".", help_heading = "Training")]
    pub data: PathBuf,
    /// Number of steps of the whole run. The learning rate rises during the first tenth of the
    /// steps, and then falls to a tenth of its maximum
    #[arg(long, value_name = "N", default_value_t = 300,
        value_parser = clap::value_parser!(u64).range(1..), help_heading = "Training")]
    pub steps: u64,
    /// Number of windows of text in a step, divided evenly among the replicas of the model
    #[arg(long, value_name = "N", default_value_t = 16,
        value_parser = clap::value_parser!(u32).range(1..=65_536), help_heading = "Training")]
    pub batch: u32,
    /// Context length of the model: the number of characters in a window
    #[arg(long, value_name = "N", default_value_t = 64,
        value_parser = clap::value_parser!(u32).range(2..=4096), help_heading = "Training")]
    pub context: u32,
    /// Number of micro-batches of a replica in a step. The gradients of the micro-batches are
    /// summed before they are sent
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=65_536), help_heading = "Training")]
    pub micro_batches: u32,
    /// The optimizer that the servers apply.
    #[arg(long, value_name = "NAME", default_value = "adamw", help = optimizer_help(),
        help_heading = "Training")]
    pub optimizer: Optimizer,
    /// Highest learning rate [default: depends on the optimizer; 0.004 for adamw]
    #[arg(long, value_name = "RATE", value_parser = positive, allow_negative_numbers = true,
        help_heading = "Training")]
    pub lr: Option<f64>,
    /// Weight decay of matrices; biases and norms have none [default: that of the optimizer]
    #[arg(long, value_name = "DECAY", value_parser = not_negative, allow_negative_numbers = true,
        help_heading = "Training")]
    pub weight_decay: Option<f64>,
    /// Maximum global norm of the gradient; 0 disables clipping
    #[arg(long, value_name = "NORM", default_value = "1", value_parser = not_negative,
        allow_negative_numbers = true, help_heading = "Training")]
    pub clip: f64,
    /// Loss scale: the loss is multiplied by it before the backward pass, and the gradients are
    /// divided by it on the servers. Keeps small gradients representable in f16
    #[arg(long, value_name = "SCALE", default_value = "1", value_parser = positive,
        allow_negative_numbers = true, help_heading = "Training")]
    pub loss_scale: f64,
    /// Seed of the initial parameters, the windows and the sample
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Training")]
    pub seed: u64,

    /// Save the job at this URL: a directory (file:///checkpoints) or a prefix of an object store
    /// (s3://bucket/prefix, gs://, az://) that all servers can reach. Training continues meanwhile
    #[arg(long, value_name = "URL", help_heading = "Checkpoints")]
    pub checkpoint: Option<String>,
    /// Number of steps from one checkpoint to the next
    #[arg(long, value_name = "N", default_value_t = 50, requires = "checkpoint",
        value_parser = clap::value_parser!(u64).range(1..), help_heading = "Checkpoints")]
    pub checkpoint_every: u64,
    /// Number of checkpoints to keep; 0 keeps all
    #[arg(
        long,
        value_name = "N",
        default_value_t = 3,
        requires = "checkpoint",
        help_heading = "Checkpoints"
    )]
    pub checkpoint_keep: u32,
    /// Whether a new job starts from the latest checkpoint of its name. With never, there must be
    /// none
    #[arg(
        long,
        value_name = "WHEN",
        default_value = "auto",
        requires = "checkpoint",
        help_heading = "Checkpoints"
    )]
    pub resume: Resume,
    /// What happens when a shard server is lost: the job returns to its latest checkpoint on the
    /// servers that are left, and its workers run the steps since then again; or it fails
    #[arg(
        long,
        value_name = "ACTION",
        default_value = "restore",
        requires = "checkpoint",
        help_heading = "Checkpoints"
    )]
    pub on_server_loss: ServerLoss,
    /// What happens when a shard server has no memory for second copies of slices that are being
    /// saved (see its --snapshot-bytes): the step waits until the slices are written, at most for
    /// 30 s; or the save is given up, and the step continues
    #[arg(
        long,
        value_name = "ACTION",
        default_value = "wait",
        requires = "checkpoint",
        help_heading = "Checkpoints"
    )]
    pub on_memory_shortage: MemoryShortage,

    /// Width of the model
    #[arg(long, value_name = "N", default_value_t = 128,
        value_parser = clap::value_parser!(u32).range(1..=65_536), help_heading = "Model")]
    pub width: u32,
    /// Number of transformer blocks
    #[arg(long, value_name = "N", default_value_t = 5,
        value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Model")]
    pub blocks: u32,
    /// Number of attention heads in a block; must divide --width
    #[arg(long, value_name = "N", default_value_t = 4,
        value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Model")]
    pub heads: u32,
    /// Hidden width of the MLP in a block [default: 4 x --width]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20),
        help_heading = "Model")]
    pub hidden: Option<u32>,

    /// Number of tensor-parallel ranks of each replica of the model. Each rank computes, holds,
    /// pulls and pushes 1/T of every large matrix, and the ranks exchange activations in every
    /// block. T must divide --heads
    #[arg(long, value_name = "T", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=256), help_heading = "Parallelism")]
    pub tensor_parallel: u32,
    /// Also shard the activations along the sequence: each tensor-parallel rank computes the layers
    /// that are not sharded (norms, residual stream) on 1/T of each window. T must divide --context
    #[arg(long, requires = "tensor_parallel", help_heading = "Parallelism")]
    pub sequence_parallel: bool,
    /// Number of replicas of the model. Each trains on a part of the batch, and gradients are
    /// averaged over the replicas [default: --workers divided by --tensor-parallel; without
    /// --workers: 2, or 1 with --tensor-parallel]
    #[arg(long, value_name = "D", value_parser = clap::value_parser!(u32).range(1..=256),
        help_heading = "Parallelism")]
    pub data_parallel: Option<u32>,
    /// Total number of workers [default: --data-parallel times --tensor-parallel]. Worker d * T + t
    /// is rank t of replica d
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256),
        help_heading = "Parallelism")]
    pub workers: Option<u32>,

    /// Number of consecutive workers that form a group, usually those of a host. They add their
    /// gradients before they push them, and pull parameters in parts, so the shard servers transfer
    /// 1/N of the bytes. Must divide the number of workers
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=256), help_heading = "Parallelism")]
    pub group: u32,

    /// With --tensor-parallel or --group: transfer large messages between workers over NCCL, from
    /// GPU to GPU; with both, only those of --tensor-parallel. Needs a GPU for each worker, its
    /// driver, and libnccl.so. Results do not change
    #[arg(long, help_heading = "Parallelism")]
    pub nccl: bool,

    /// Have servers with GPUs keep the optimizer state in host memory or on disk, as in
    /// ZeRO-Offload, except that of LAMB and Adafactor. Servers without a GPU always do. Results
    /// do not change
    #[arg(long, help_heading = "Cluster")]
    pub offload: bool,
    /// Dtype in which the shard servers keep the optimizer state: f32, or int8, which takes 1 byte
    /// per element and works with adam, adamw, lion and sgd. Results with int8 differ from those
    /// with f32, but not between runs
    #[arg(long, value_name = "DTYPE", default_value = "f32", help_heading = "Cluster")]
    pub state_dtype: StateDType,
    /// ZeRO level. At os a worker holds all parameters and gradients, at os_g all parameters, at
    /// p_g_os the parameters of one block at a time
    #[arg(long, value_name = "LEVEL", default_value = "p_g_os", help_heading = "Cluster")]
    pub level: Level,
    /// Number of shard servers to start, or with --address to wait for
    #[arg(long, value_name = "N", default_value_t = 3,
        value_parser = clap::value_parser!(u32).range(1..=256), help_heading = "Cluster")]
    pub shards: u32,
    /// Number of servers that hold each slice. With 2 or more, training goes on when a server is
    /// lost
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=64), help_heading = "Cluster")]
    pub replicas: u32,
    /// Run each server and each worker in a separate process
    #[arg(long, conflicts_with_all = ["address", "rank"], help_heading = "Cluster")]
    pub processes: bool,
    /// Address of the coordinator of a running cluster; several coordinators, of which one is the
    /// leader, are separated by commas
    #[arg(
        long,
        value_name = "HOST:PORT[,HOST:PORT...]",
        env = "ZEROSHARD_ADDRESS",
        help_heading = "Cluster"
    )]
    pub address: Option<String>,
    /// The credentials, also for servers that this command starts.
    #[command(flatten, next_help_heading = "Cluster")]
    pub credentials: CredentialFlags,
    /// URL of an OpenTelemetry collector, such as http://localhost:4317, to which the workers, and
    /// the servers that this command starts, send the traces of steps
    #[arg(long, env = "ZEROSHARD_OTLP_ENDPOINT", value_name = "URL", help_heading = "Cluster")]
    pub otlp_endpoint: Option<String>,
    /// Fraction of the steps whose traces are sent, from 0 to 1; the servers need the same value
    #[arg(
        long,
        env = "ZEROSHARD_TRACE_RATIO",
        value_name = "RATIO",
        default_value_t = 1.0,
        help_heading = "Cluster"
    )]
    pub trace_ratio: f64,
    /// Run only the worker of this rank; the others must be started separately [default: run all]
    #[arg(long, value_name = "R", requires = "address", help_heading = "Cluster")]
    pub rank: Option<u32>,
    /// With --tensor-parallel or --group: address at which this worker listens for the others. They
    /// must be able to connect to it; the coordinator tells them the address
    #[arg(
        long,
        value_name = "IP:PORT",
        default_value = "127.0.0.1:0",
        requires = "rank",
        help_heading = "Cluster"
    )]
    pub listen: SocketAddr,
    /// Name of the job, required with --address. If the job exists, training continues from its
    /// version [default: train]
    #[arg(long, value_name = "NAME", help_heading = "Cluster")]
    pub job: Option<String>,
    /// Encoding of gradients on the wire: f32, bf16, f16 or int8 (rounded stochastically, as --seed
    /// says)
    #[arg(long, value_name = "ENCODING", default_value = "f32", help_heading = "Cluster")]
    pub wire: Wire,
    /// Encoding of parameters on the wire [default: that of gradients, or f32 if these are int8]
    #[arg(long, value_name = "ENCODING", help_heading = "Cluster")]
    pub parameter_wire: Option<Wire>,
    /// Element type of the published parameters; master weights are always f32
    #[arg(long, value_name = "DTYPE", default_value = "f32", help_heading = "Cluster")]
    pub param_dtype: DType,
    /// Payload of one message in bytes. It does not change the result
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 20,
        value_parser = clap::value_parser!(u32).range(4096..=32 << 20), help_heading = "Cluster")]
    pub chunk_bytes: u32,
    /// Transport of parameters and gradients: shared memory with servers on this host (auto), gRPC
    /// (grpc), or shared memory only (shm). It does not change the result [default: auto]
    #[arg(long, value_name = "TRANSPORT", env = "ZEROSHARD_TRANSPORT", help_heading = "Cluster")]
    pub transport: Option<Transport>,
    /// Number of seconds to wait for shard servers, for other workers and for each call
    #[arg(long, alias = "deadline", value_name = "SECONDS", default_value_t = 120,
        value_parser = clap::value_parser!(u64).range(1..=600), help_heading = "Cluster")]
    pub timeout: u64,
    /// Number of seconds to wait for the coordinator to answer
    #[arg(long, value_name = "SECONDS", default_value_t = 10,
        value_parser = clap::value_parser!(u64).range(1..=600), help_heading = "Cluster")]
    pub connect_timeout: u64,

    /// Output folder for the loss curve and the sample
    #[arg(long, value_name = "DIR", default_value = "zeroshard-run", help_heading = "Output")]
    pub out: PathBuf,
    /// Number of characters to generate at the end
    #[arg(long, value_name = "N", default_value_t = 400,
        value_parser = clap::value_parser!(u32).range(..=100_000), help_heading = "Output")]
    pub sample_chars: u32,
    /// Print one JSON object per line on standard output and nothing else
    #[arg(long, conflicts_with = "quiet", help_heading = "Output")]
    pub json: bool,
    /// Print only errors, and no progress. The files in --out are still written
    #[arg(long, help_heading = "Output")]
    pub quiet: bool,
}

impl Train {
    /// Validates the flags and converts them into a plan.
    ///
    /// # Errors
    /// [`Error::Flag`] for numbers of workers that contradict each other, a rank out of range, and
    /// invalid hyperparameters; [`Error::Batch`] for a batch that cannot be divided.
    pub fn plan(&self) -> Result<Plan> {
        let parallelism = self.parallelism()?;
        let architecture = self.architecture()?;
        let workers = parallelism.workers();
        if let Some(rank) = self.rank.filter(|&rank| rank >= workers) {
            let expected = format!("less than the number of workers, {workers}");
            return Err(Error::Flag { flag: "--rank", found: rank.to_string(), expected });
        }
        if self.rank.is_none() && self.address.is_some() && parallelism.ranks > 1 {
            let expected = format!(
                "a rank below {workers}: with --address and --tensor-parallel, each worker is a \
                 separate process"
            );
            return Err(Error::Flag { flag: "--rank", found: "missing".to_owned(), expected });
        }
        if self.nccl && self.group == 1 && parallelism.ranks == 1 {
            let expected = "absent: without --tensor-parallel or --group, workers send each other \
                            nothing"
                .to_owned();
            return Err(Error::Flag { flag: "--nccl", found: "present".to_owned(), expected });
        }
        if self.makes_processes() && self.credentials.tls_files()?.is_some() {
            let expected = "absent with --processes, whose servers are on this machine; a cluster \
                            with TLS needs --address"
                .to_owned();
            return Err(Error::Flag { flag: "--tls-ca", found: "present".to_owned(), expected });
        }
        if !workers.is_multiple_of(self.group) {
            let expected = format!("a divisor of the number of workers, {workers}");
            return Err(Error::Flag { flag: "--group", found: self.group.to_string(), expected });
        }
        let mut optimizer = self.optimizer;
        if let Optimizer::Average(_) = optimizer {
            let expected =
                "an optimizer that updates parameters: average only averages gradients".to_owned();
            return Err(Error::Flag {
                flag: "--optimizer",
                found: optimizer.to_string(),
                expected,
            });
        }
        optimizer.set_lr(self.lr.unwrap_or_else(|| default_lr(&optimizer)));
        if let Some(weight_decay) = self.weight_decay {
            optimizer.set_weight_decay(weight_decay);
        }
        optimizer.validate().map_err(|wrong| Error::Flag {
            flag: if wrong.field == "weight_decay" { "--weight-decay" } else { "--lr" },
            found: wrong.value.to_string(),
            expected: wrong.expected.to_string(),
        })?;
        Ok(Plan {
            job: self.job()?,
            level: self.level,
            steps: self.steps,
            architecture,
            parallelism,
            group_size: self.group,
            nccl: self.nccl,
            offload: self.offload,
            state_dtype: self.state_dtype,
            sharding: Sharding::new(
                self.batch as usize,
                parallelism.replicas as usize,
                self.micro_batches as usize,
            )?,
            shards: self.shards,
            replicas: self.replicas,
            schedule: Schedule::new(optimizer, self.steps),
            clip: Some(self.clip).filter(|&norm| norm > 0.0),
            loss_scale: self.loss_scale,
            parameter_dtype: self.param_dtype,
            wire: self.wire,
            parameter_wire: self.parameter_wire,
            chunk_bytes: self.chunk_bytes as usize,
            transport: self.transport,
            deadline: Duration::from_secs(self.timeout),
            connect_timeout: Duration::from_secs(self.connect_timeout),
            token: self.credentials.token()?,
            tls: self.credentials.tls()?,
            listen: self.listen,
            seed: self.seed,
            sample_chars: self.sample_chars as usize,
            checkpoints: self.checkpoints()?,
            resume: self.resume == Resume::Auto,
        })
    }

    fn checkpoints(&self) -> Result<Option<CheckpointPolicy>> {
        let Some(url) = self.checkpoint.clone() else { return Ok(None) };
        let policy = CheckpointPolicy {
            url,
            every_steps: Some(self.checkpoint_every),
            every: None,
            keep: self.checkpoint_keep,
            on_loss: match self.on_server_loss {
                ServerLoss::Restore => OnLoss::Restore,
                ServerLoss::Fail => OnLoss::Fail,
            },
            on_memory_shortage: match self.on_memory_shortage {
                MemoryShortage::Wait => OnMemoryShortage::Wait,
                MemoryShortage::GiveUp => OnMemoryShortage::GiveUp,
            },
        };
        policy.validate()?;
        Ok(Some(policy))
    }

    /// Returns whether this process starts the servers and workers as separate processes.
    pub fn makes_processes(&self) -> bool {
        self.processes || (self.tensor_parallel > 1 && self.address.is_none())
    }

    /// The name of the job. A cluster that this program starts has no other job. In one that runs
    /// already, a default would make two people's runs one job.
    fn job(&self) -> Result<String> {
        match (&self.job, &self.address) {
            (Some(job), _) => Ok(job.clone()),
            (None, None) => Ok("train".to_owned()),
            (None, Some(address)) => Err(Error::Flag {
                flag: "--job",
                found: "missing".to_owned(),
                expected: format!("the name of your run, which no other run at {address} has"),
            }),
        }
    }

    fn parallelism(&self) -> Result<Parallelism> {
        let ranks = self.tensor_parallel;
        let replicas = match (self.data_parallel, self.workers) {
            (Some(replicas), None) => replicas,
            (None, None) if ranks > 1 => 1,
            (None, None) => DATA_PARALLEL,
            (None, Some(workers)) if workers.is_multiple_of(ranks) => workers / ranks,
            (Some(replicas), Some(workers)) if workers == replicas * ranks => replicas,
            (replicas, Some(workers)) => {
                let expected = match replicas {
                    Some(replicas) => {
                        format!(
                            "--data-parallel {replicas} x --tensor-parallel {ranks} = {}, or no \
                             --workers",
                            replicas * ranks
                        )
                    }
                    None => format!(
                        "a multiple of --tensor-parallel {ranks}, such as {}",
                        workers.next_multiple_of(ranks)
                    ),
                };
                return Err(Error::Flag {
                    flag: "--workers",
                    found: workers.to_string(),
                    expected,
                });
            }
        };
        Ok(Parallelism { replicas, ranks, sequence: self.sequence_parallel && ranks > 1 })
    }

    fn architecture(&self) -> Result<Architecture> {
        let [context, width, blocks, heads] =
            [self.context, self.width, self.blocks, self.heads].map(|size| size as usize);
        if !width.is_multiple_of(heads) {
            let expected = format!(
                "a divisor of --width {width}; or use --width {}",
                width.next_multiple_of(heads)
            );
            return Err(Error::Flag { flag: "--heads", found: heads.to_string(), expected });
        }
        let hidden = self.hidden.map_or(4 * width, |hidden| hidden as usize);
        Ok(Architecture { vocabulary: 0, context, width, blocks, heads, hidden })
    }
}

/// The default number of replicas of a model that is not sharded.
const DATA_PARALLEL: u32 = 2;

fn positive(text: &str) -> Result<f64, String> {
    number(text, |value| value > 0.0, "a finite number above 0")
}

fn not_negative(text: &str) -> Result<f64, String> {
    number(text, |value| value >= 0.0, "a finite number, 0 or above")
}

fn number(text: &str, fits: impl Fn(f64) -> bool, expected: &str) -> Result<f64, String> {
    match f64::from_str(text) {
        Ok(value) if value.is_finite() && fits(value) => Ok(value),
        _ => Err(format!("expected {expected}")),
    }
}

fn optimizer_help() -> String {
    let names = Optimizer::NAMES.iter().filter(|&&name| name != "average");
    format!("Optimizer: {}", names.copied().collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(flags: &str) -> Result<Train, clap::Error> {
        let words = ["zeroshard-worker", "train"].into_iter().chain(flags.split_whitespace());
        let Command::Train(train) = Cli::try_parse_from(words)?.command;
        Ok(*train)
    }

    fn refusal(flags: &str) -> String {
        match parse(flags) {
            Err(error) => error.to_string(),
            Ok(train) => train.plan().unwrap_err().to_string(),
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn defaults_make_a_plan() {
        let plan = parse("").unwrap().plan().unwrap();
        assert_eq!((plan.level, plan.parallelism.workers(), plan.shards), (Level::PGOs, 2, 3));
        assert_eq!(plan.architecture, Architecture::small(0, 64));
        assert_eq!(plan.clip, Some(1.0));
    }

    #[test]
    fn the_plan_has_the_token_and_debug_output_hides_it() {
        let train = parse("--token s3cret").unwrap();
        let plan = train.plan().unwrap();
        assert_eq!(plan.token.reveal(), Some("s3cret"));
        assert!(!format!("{train:?} {plan:?}").contains("s3cret"));
    }

    #[test]
    fn the_number_of_workers_is_replicas_times_ranks() {
        let parallelism = |flags: &str| {
            let plan = parse(flags).unwrap().plan().unwrap();
            (plan.parallelism.replicas, plan.parallelism.ranks)
        };
        assert_eq!(parallelism("--workers 4"), (4, 1));
        assert_eq!(parallelism("--data-parallel 4"), (4, 1));
        assert_eq!(parallelism("--tensor-parallel 2"), (1, 2));
        assert_eq!(parallelism("--tensor-parallel 2 --workers 4"), (2, 2));
        assert_eq!(parallelism("--tensor-parallel 2 --data-parallel 4 --workers 8"), (4, 2));
        assert!(parse("--tensor-parallel 2").unwrap().makes_processes());
        assert!(!parse("").unwrap().makes_processes());
    }

    #[test]
    fn clip_0_disables_clipping() {
        assert_eq!(parse("--clip 0").unwrap().plan().unwrap().clip, None);
    }

    #[test]
    fn errors_for_invalid_flags_name_valid_values() {
        assert!(refusal("--level zero3").contains("one of os, os_g, p_g_os"));
        assert!(refusal("--wire float16").contains("f32, bf16, f16 or int8"));
        assert!(refusal("--optimizer adamx").contains("adamw"));
        assert!(refusal("--lr -1").contains("above 0"));
        assert!(refusal("--clip nan").contains("0 or above"));
        assert!(refusal("--steps 0").contains("1.."));
        assert!(refusal("--batch 10 --micro-batches 4").contains("such as 16"));
        assert!(refusal("--address a:1 --rank 2").contains("less than the number of workers, 2"));
        assert!(refusal("--workers 3 --tensor-parallel 2").contains("such as 4"));
        assert!(refusal("--workers 4 --tensor-parallel 2 --data-parallel 1").contains("= 2"));
        assert!(refusal("--tensor-parallel 2 --address a:1").contains("--rank is missing"));
        assert!(refusal("--sequence-parallel").contains("--tensor-parallel"));
        assert!(refusal("--heads 3").contains("--width 129"));
        assert!(refusal("--rank 1").contains("--address"));
        assert!(refusal("--processes --address a:1").contains("cannot be used with"));
    }
}
