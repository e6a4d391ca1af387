//! The command line.

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

/// ZeroShard's trainer: a small transformer whose optimizer lives on shard servers
#[derive(Debug, Parser)]
#[command(name = "zeroshard-worker", version, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a character-level transformer on the text files of a folder
    ///
    /// With neither --address nor --processes, coordinator, shard servers and workers all run in
    /// this process; with --tensor-parallel each is a process of its own. Same options and seed:
    /// same result, bit for bit, whatever the level, the number of shards, the chunk size, and
    /// whether they are processes or threads.
    Train(Box<Train>),
}

/// Flags of `train`.
#[derive(Debug, Clone, Args)]
pub struct Train {
    /// Folder with the text to learn: UTF-8 sources and documents; what a .gitignore names is left
    /// out
    #[arg(long, value_name = "DIR", default_value = ".", help_heading = "Training")]
    pub data: PathBuf,
    /// Steps of the whole run; the learning rate rises over the first tenth and falls to a tenth
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..),
        help_heading = "Training")]
    pub steps: u64,
    /// Windows of text in a step, divided evenly among the replicas of the model
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65_536),
        help_heading = "Training")]
    pub batch: u32,
    /// Characters in a window: how far the model looks back
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..=4096),
        help_heading = "Training")]
    pub context: u32,
    /// Parts that a replica's share is computed in, one after the other; their gradients are summed
    /// before they are sent
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_536),
        help_heading = "Training")]
    pub micro_batches: u32,
    /// sgd, adam, adamw, adagrad, adadelta, rmsprop, lion or lamb
    #[arg(long, value_name = "NAME", default_value = "adamw", help_heading = "Training")]
    pub optimizer: Optimizer,
    /// Highest learning rate [default: what suits the optimizer; 0.004 for adamw]
    #[arg(long, value_name = "RATE", value_parser = positive, allow_negative_numbers = true, help_heading = "Training")]
    pub lr: Option<f64>,
    /// Weight decay of matrices; biases and norms have none [default: the optimizer's own]
    #[arg(long, value_name = "DECAY", value_parser = not_negative, allow_negative_numbers = true, help_heading = "Training")]
    pub weight_decay: Option<f64>,
    /// Largest global norm of the gradient; 0: no clipping
    #[arg(long, value_name = "NORM", default_value = "1", value_parser = not_negative, allow_negative_numbers = true, help_heading = "Training")]
    pub clip: f64,
    /// What the loss is multiplied by before the backward pass (helps small gradients through f16)
    #[arg(long, value_name = "SCALE", default_value = "1", value_parser = positive, allow_negative_numbers = true, help_heading = "Training")]
    pub loss_scale: f64,
    /// Decides initial parameters, windows and sample
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Training")]
    pub seed: u64,

    /// Width of the model
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65_536),
        help_heading = "Model")]
    pub width: u32,
    /// Transformer blocks
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1024),
        help_heading = "Model")]
    pub blocks: u32,
    /// Attention heads of a block; they divide --width
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024),
        help_heading = "Model")]
    pub heads: u32,
    /// Width of the MLP in a block [default: 4 x --width]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20), help_heading = "Model")]
    pub hidden: Option<u32>,

    /// Workers that have one replica of the model together: each computes, holds, pulls and pushes
    /// 1/T of every large matrix, and they exchange activations in every block. T divides --heads
    #[arg(long, value_name = "T", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256),
        help_heading = "Parallelism")]
    pub tensor_parallel: u32,
    /// With --tensor-parallel: what is not cut (norms, residual stream) runs on 1/T of each window,
    /// so that activations are smaller too. T divides --context
    #[arg(long, requires = "tensor_parallel", help_heading = "Parallelism")]
    pub sequence_parallel: bool,
    /// Replicas of the model, each with its share of the batch; gradients are averaged over them
    /// [default: --workers divided by --tensor-parallel; without --workers 2, or 1 with
    /// --tensor-parallel]
    #[arg(long, value_name = "D", value_parser = clap::value_parser!(u32).range(1..=256), help_heading = "Parallelism")]
    pub data_parallel: Option<u32>,
    /// Workers in all [default: --data-parallel times --tensor-parallel]. Worker d T + t is number
    /// t of replica d
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256), help_heading = "Parallelism")]
    pub workers: Option<u32>,

    /// What a worker keeps: os (all parameters, all gradients), os_g (all parameters), p_g_os (one
    /// block's parameters at a time)
    #[arg(long, value_name = "LEVEL", default_value = "p_g_os", help_heading = "Cluster")]
    pub level: Level,
    /// Shard servers to start; with --address, to wait for
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=256),
        help_heading = "Cluster")]
    pub shards: u32,
    /// Make each server and each worker a process of its own
    #[arg(long, conflicts_with_all = ["address", "rank"], help_heading = "Cluster")]
    pub processes: bool,
    /// Use the running cluster whose coordinator is there
    #[arg(long, value_name = "HOST:PORT", env = "ZEROSHARD_ADDRESS", help_heading = "Cluster")]
    pub address: Option<String>,
    /// The cluster's secret; servers that are started here get it too. Better said in the
    /// environment: other users of the machine see flags
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
    /// Be this one of the workers; the others are started elsewhere [default: be all of them]
    #[arg(long, value_name = "R", requires = "address", help_heading = "Cluster")]
    pub rank: Option<u32>,
    /// With --tensor-parallel: where this worker listens for the others. An address of this machine
    /// that they can reach; they learn it from the coordinator
    #[arg(
        long,
        value_name = "IP:PORT",
        default_value = "127.0.0.1:0",
        requires = "rank",
        help_heading = "Cluster"
    )]
    pub listen: SocketAddr,
    /// Name of the job; one that exists is continued
    #[arg(long, value_name = "NAME", default_value = "train", help_heading = "Cluster")]
    pub job: String,
    /// Element type of parameters and gradients on the wire: f32, bf16 or f16
    #[arg(long, value_name = "DTYPE", default_value = "f32", help_heading = "Cluster")]
    pub wire: DType,
    /// Element type of the parameters that the servers give out; master weights are always f32
    #[arg(long, value_name = "DTYPE", default_value = "f32", help_heading = "Cluster")]
    pub param_dtype: DType,
    /// Payload of one message; changes no result
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 20,
        value_parser = clap::value_parser!(u32).range(4096..=32 << 20), help_heading = "Cluster")]
    pub chunk_bytes: u32,
    /// How long to wait for servers, other workers and answers before giving up
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=600),
        help_heading = "Cluster")]
    pub deadline: u64,

    /// Folder for loss curve and sample
    #[arg(long, value_name = "DIR", default_value = "zeroshard-run", help_heading = "Output")]
    pub out: PathBuf,
    /// Characters to generate at the end
    #[arg(long, value_name = "N", default_value_t = 400, value_parser = clap::value_parser!(u32).range(..=100_000),
        help_heading = "Output")]
    pub sample_chars: u32,
    /// One JSON object a line on standard output, and nothing else there
    #[arg(long, conflicts_with = "quiet", help_heading = "Output")]
    pub json: bool,
    /// No output but errors, and the files in --out
    #[arg(long, help_heading = "Output")]
    pub quiet: bool,
}

impl Train {
    /// Checks the flags against each other.
    ///
    /// # Errors
    /// For numbers of workers that contradict each other, a batch that cannot be divided, a rank
    /// out of range, and hyperparameters that the optimizer refuses.
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
                "said with --address and --tensor-parallel, for each of the {workers} workers: they are processes of \
                 their own"
            );
            return Err(Error::Flag { flag: "--rank", found: "missing".to_owned(), expected });
        }
        let mut optimizer = self.optimizer;
        if let Optimizer::Average(_) = optimizer {
            let expected =
                "one that trains: the servers would only average the gradients".to_owned();
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
            deadline: Duration::from_secs(self.deadline),
            token: self.token.clone(),
            listen: self.listen,
            seed: self.seed,
            sample_chars: self.sample_chars as usize,
        })
    }

    /// Whether servers and workers become processes of their own, started here.
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
                            "--data-parallel {replicas} x --tensor-parallel {ranks} = {}, or left out",
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

/// Replicas of a model that is not cut, unless something else is said.
const DATA_PARALLEL: u32 = 2;

fn positive(text: &str) -> Result<f64, String> {
    number(text, |value| value > 0.0, "a number above 0")
}

fn not_negative(text: &str) -> Result<f64, String> {
    number(text, |value| value >= 0.0, "a number, 0 or above")
}

fn number(text: &str, fits: impl Fn(f64) -> bool, expected: &str) -> Result<f64, String> {
    match f64::from_str(text) {
        Ok(value) if value.is_finite() && fits(value) => Ok(value),
        _ => Err(format!("it must be {expected}")),
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
