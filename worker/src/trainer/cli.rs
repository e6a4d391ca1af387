//! The command line: flags, and their conversion to a [`Plan`].

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use zeroshard_proto::{DType, Optimizer, Token};

use super::batches::Sharding;
use super::error::{Error, Result};
use super::model::Architecture;
use super::parallelism::Parallelism;
use super::plan::Plan;
use super::schedule::{Schedule, default_lr};
use crate::parallel::Level;

/// ZeroShard's trainer: trains a small transformer with its optimizer on shard servers
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
    /// With neither --address nor --processes, coordinator, shard servers and workers all run in
    /// this process; with --tensor-parallel each is a process of its own. The same options and seed
    /// give the same result, bit for bit, for every level, number of shard servers and chunk size,
    /// in processes and in threads.
    Train(Box<Train>),
}

/// Flags of `train`.
#[derive(Debug, Clone, Args)]
pub struct Train {
    /// Folder with the training text: UTF-8 sources and documents, except those that a .gitignore
    /// excludes
    #[arg(long, value_name = "DIR", default_value = ".", help_heading = "Training")]
    pub data: PathBuf,
    /// Steps of the whole run. The learning rate rises over the first tenth of them, and then falls
    /// to a tenth of its maximum
    #[arg(long, value_name = "N", default_value_t = 300,
        value_parser = clap::value_parser!(u64).range(1..), help_heading = "Training")]
    pub steps: u64,
    /// Windows of text in a step, divided evenly among the replicas of the model
    #[arg(long, value_name = "N", default_value_t = 16,
        value_parser = clap::value_parser!(u32).range(1..=65_536), help_heading = "Training")]
    pub batch: u32,
    /// Characters in a window: the context length of the model
    #[arg(long, value_name = "N", default_value_t = 64,
        value_parser = clap::value_parser!(u32).range(2..=4096), help_heading = "Training")]
    pub context: u32,
    /// Micro-batches of a replica in a step. They are computed one after the other, and their
    /// gradients are summed before they are sent
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=65_536), help_heading = "Training")]
    pub micro_batches: u32,
    /// sgd, adam, adamw, adagrad, adadelta, rmsprop, lion or lamb
    #[arg(long, value_name = "NAME", default_value = "adamw", help_heading = "Training")]
    pub optimizer: Optimizer,
    /// Highest learning rate [default: by optimizer; 0.004 for adamw]
    #[arg(long, value_name = "RATE", value_parser = positive, allow_negative_numbers = true,
        help_heading = "Training")]
    pub lr: Option<f64>,
    /// Weight decay of matrices; biases and norms are not decayed [default: the optimizer's own]
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

    /// Width of the model
    #[arg(long, value_name = "N", default_value_t = 128,
        value_parser = clap::value_parser!(u32).range(1..=65_536), help_heading = "Model")]
    pub width: u32,
    /// Transformer blocks
    #[arg(long, value_name = "N", default_value_t = 5,
        value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Model")]
    pub blocks: u32,
    /// Attention heads of a block; must divide --width
    #[arg(long, value_name = "N", default_value_t = 4,
        value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Model")]
    pub heads: u32,
    /// Hidden width of the MLP in a block [default: 4 x --width]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20),
        help_heading = "Model")]
    pub hidden: Option<u32>,

    /// Tensor-parallel ranks of each replica of the model. Each rank computes, holds, pulls and
    /// pushes 1/T of every large matrix, and the ranks exchange activations in every block. T must
    /// divide --heads
    #[arg(long, value_name = "T", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=256), help_heading = "Parallelism")]
    pub tensor_parallel: u32,
    /// With --tensor-parallel: each rank computes the layers that are not cut (norms, residual
    /// stream) on 1/T of each window, which makes activations smaller too. T must divide --context
    #[arg(long, requires = "tensor_parallel", help_heading = "Parallelism")]
    pub sequence_parallel: bool,
    /// Replicas of the model, each with its share of the batch; gradients are averaged over them
    /// [default: --workers divided by --tensor-parallel; without --workers: 2, or 1 with
    /// --tensor-parallel]
    #[arg(long, value_name = "D", value_parser = clap::value_parser!(u32).range(1..=256),
        help_heading = "Parallelism")]
    pub data_parallel: Option<u32>,
    /// Total number of workers [default: --data-parallel times --tensor-parallel]. Worker d T + t
    /// is rank t of replica d
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256),
        help_heading = "Parallelism")]
    pub workers: Option<u32>,

    /// ZeRO level. os: a worker holds all parameters and gradients; os_g: all parameters; p_g_os:
    /// the parameters of one block at a time
    #[arg(long, value_name = "LEVEL", default_value = "p_g_os", help_heading = "Cluster")]
    pub level: Level,
    /// Number of shard servers to start; with --address, to wait for
    #[arg(long, value_name = "N", default_value_t = 3,
        value_parser = clap::value_parser!(u32).range(1..=256), help_heading = "Cluster")]
    pub shards: u32,
    /// Run each server and each worker in a process of its own
    #[arg(long, conflicts_with_all = ["address", "rank"], help_heading = "Cluster")]
    pub processes: bool,
    /// Address of the coordinator of a running cluster
    #[arg(long, value_name = "HOST:PORT", env = "ZEROSHARD_ADDRESS", help_heading = "Cluster")]
    pub address: Option<String>,
    /// The cluster's token; servers that this command starts get it too. Prefer the environment
    /// variable: other users of the machine can see flags
    #[arg(
        long,
        value_name = "TOKEN",
        env = "ZEROSHARD_TOKEN",
        hide_env_values = true,
        default_value = "",
        hide_default_value = true,
        help_heading = "Cluster"
    )]
    pub token: Token,
    /// Run only the worker of this rank; the others are started elsewhere [default: run all]
    #[arg(long, value_name = "R", requires = "address", help_heading = "Cluster")]
    pub rank: Option<u32>,
    /// With --tensor-parallel: the address on which this worker listens for the others. They must
    /// be able to reach it, and learn it from the coordinator
    #[arg(
        long,
        value_name = "IP:PORT",
        default_value = "127.0.0.1:0",
        requires = "rank",
        help_heading = "Cluster"
    )]
    pub listen: SocketAddr,
    /// Name of the job; a job that exists is continued
    #[arg(long, value_name = "NAME", default_value = "train", help_heading = "Cluster")]
    pub job: String,
    /// Element type of parameters and gradients on the wire: f32, bf16 or f16
    #[arg(long, value_name = "DTYPE", default_value = "f32", help_heading = "Cluster")]
    pub wire: DType,
    /// Element type of the published parameters; master weights are always f32
    #[arg(long, value_name = "DTYPE", default_value = "f32", help_heading = "Cluster")]
    pub param_dtype: DType,
    /// Payload of one message; does not change the result
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 20,
        value_parser = clap::value_parser!(u32).range(4096..=32 << 20), help_heading = "Cluster")]
    pub chunk_bytes: u32,
    /// How long to wait for servers, other workers and every call
    #[arg(long, alias = "deadline", value_name = "SECONDS", default_value_t = 120,
        value_parser = clap::value_parser!(u64).range(1..=600), help_heading = "Cluster")]
    pub timeout: u64,

    /// Output folder for the loss curve and the sample
    #[arg(long, value_name = "DIR", default_value = "zeroshard-run", help_heading = "Output")]
    pub out: PathBuf,
    /// Characters to generate at the end
    #[arg(long, value_name = "N", default_value_t = 400,
        value_parser = clap::value_parser!(u32).range(..=100_000), help_heading = "Output")]
    pub sample_chars: u32,
    /// Print one JSON object per line on standard output, and nothing else there
    #[arg(long, conflicts_with = "quiet", help_heading = "Output")]
    pub json: bool,
    /// Print errors only; the files in --out are written
    #[arg(long, help_heading = "Output")]
    pub quiet: bool,
}

impl Train {
    /// Checks the flags against each other.
    ///
    /// # Errors
    /// [`Error::Flag`] for numbers of workers that contradict each other, a rank out of range, and
    /// hyperparameters that the optimizer refuses; [`Error::Batch`] for a batch that cannot be
    /// divided.
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
                "given with --address and --tensor-parallel: each of the {workers} workers is a \
                 process of its own"
            );
            return Err(Error::Flag { flag: "--rank", found: "missing".to_owned(), expected });
        }
        let mut optimizer = self.optimizer;
        if let Optimizer::Average(_) = optimizer {
            let expected =
                "an optimizer that trains: average only averages the gradients".to_owned();
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
            job: self.job.clone(),
            level: self.level,
            steps: self.steps,
            architecture,
            parallelism,
            sharding: Sharding::new(
                self.batch as usize,
                parallelism.replicas as usize,
                self.micro_batches as usize,
            )?,
            shards: self.shards,
            schedule: Schedule::new(optimizer, self.steps),
            clip: Some(self.clip).filter(|&norm| norm > 0.0),
            loss_scale: self.loss_scale,
            parameter_dtype: self.param_dtype,
            wire: self.wire,
            chunk_bytes: self.chunk_bytes as usize,
            deadline: Duration::from_secs(self.timeout),
            token: self.token.clone(),
            listen: self.listen,
            seed: self.seed,
            sample_chars: self.sample_chars as usize,
        })
    }

    /// Whether this process starts servers and workers as processes of their own.
    pub fn makes_processes(&self) -> bool {
        self.processes || (self.tensor_parallel > 1 && self.address.is_none())
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
                            "--data-parallel {replicas} x --tensor-parallel {ranks} = {}, or \
                             left out",
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
                "a divisor of --width {width}; or take --width {}",
                width.next_multiple_of(heads)
            );
            return Err(Error::Flag { flag: "--heads", found: heads.to_string(), expected });
        }
        let hidden = self.hidden.map_or(4 * width, |hidden| hidden as usize);
        Ok(Architecture { vocabulary: 0, context, width, blocks, heads, hidden })
    }
}

/// Default number of replicas of a model that is not cut.
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
    fn the_plan_has_the_token_and_debug_does_not_show_it() {
        let train = parse("--token s3cret").unwrap();
        let plan = train.plan().unwrap();
        assert_eq!(plan.token.reveal(), Some("s3cret"));
        assert!(!format!("{train:?} {plan:?}").contains("s3cret"));
    }

    #[test]
    fn workers_are_replicas_times_the_ranks_of_each() {
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
    fn clip_of_zero_is_none() {
        assert_eq!(parse("--clip 0").unwrap().plan().unwrap().clip, None);
    }

    #[test]
    fn bad_values_say_what_would_be_right() {
        assert!(refusal("--level zero3").contains("one of os, os_g, p_g_os"));
        assert!(refusal("--wire float16").contains("one of f32, bf16, f16"));
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
