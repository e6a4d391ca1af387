//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use zeroshard_proto::{DType, Optimizer, Token};

use crate::batches::Sharding;
use crate::error::{Error, Result};
use crate::levels::Level;
use crate::model::{Architecture, Division, Model};
use crate::schedule::{Schedule, default_lr};
use crate::train::{Plan, Sizes};

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
    /// With neither --address nor --processes, coordinator, shard servers and workers all run in this process.
    /// Same options and seed: same result, bit for bit, whatever the level, the number of shards, the chunk size,
    /// and whether they are processes or threads.
    Train(Box<Train>),
}

/// Flags of `train`.
#[derive(Debug, Clone, Args)]
pub struct Train {
    /// Folder with the text to learn: UTF-8 sources and documents; what a .gitignore names is left out
    #[arg(long, value_name = "DIR", default_value = ".", help_heading = "Training")]
    pub data: PathBuf,
    /// Steps of the whole run; the learning rate rises over the first tenth and falls to a tenth
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..),
        help_heading = "Training")]
    pub steps: u64,
    /// Windows of text in a step, divided evenly among the workers
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65_536),
        help_heading = "Training")]
    pub batch: u32,
    /// Characters in a window: how far the model looks back
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..=4096),
        help_heading = "Training")]
    pub context: u32,
    /// Width of the model
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=8192),
        help_heading = "Training")]
    pub width: u32,
    /// Transformer blocks of the model
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=256),
        help_heading = "Training")]
    pub blocks: u32,
    /// Attention heads of a block
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=256),
        help_heading = "Training")]
    pub heads: u32,
    /// Parts that a worker computes its share in, one after the other; their gradients are summed before they are
    /// sent
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

    /// What a worker keeps: os (all parameters, all gradients), os_g (all parameters), p_g_os (one block's
    /// parameters at a time)
    #[arg(long, value_name = "LEVEL", default_value = "p_g_os", help_heading = "Cluster")]
    pub level: Level,
    /// Shard servers to start; with --address, to wait for
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=256),
        help_heading = "Cluster")]
    pub shards: u32,
    /// Workers, each with the whole model and a share of the batch [default: 2; --tensor-parallel x --data-parallel, if one of
    /// them is given]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256), help_heading = "Cluster")]
    pub workers: Option<u32>,
    /// Workers that have one model together: attention heads, inner layers and vocabulary are cut. Each is a process of its own
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u32).range(1..=256), help_heading = "Cluster")]
    pub tensor_parallel: Option<u32>,
    /// With --tensor-parallel: cut what lies between those layers too, by rows
    #[arg(long, requires = "tensor_parallel", help_heading = "Cluster")]
    pub sequence_parallel: bool,
    /// Such groups of workers, each with a share of the batch [default with --tensor-parallel: 1]
    #[arg(long, value_name = "D", value_parser = clap::value_parser!(u32).range(1..=256), help_heading = "Cluster")]
    pub data_parallel: Option<u32>,
    /// With --tensor-parallel: where a worker listens for the others, which reach it there; port 0: any free port
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:0", help_heading = "Cluster")]
    pub peer_listen: SocketAddr,
    /// Make each server and each worker a process of its own
    #[arg(long, conflicts_with_all = ["address", "rank"], help_heading = "Cluster")]
    pub processes: bool,
    /// Use the running cluster whose coordinator is there
    #[arg(long, value_name = "HOST:PORT", env = "ZEROSHARD_ADDRESS", help_heading = "Cluster")]
    pub address: Option<String>,
    /// The cluster's secret; servers that are started here get it too. Better said in the environment: other users
    /// of the machine see flags
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
    /// Be this one worker of --workers; the others are started elsewhere [default: be all of them]
    #[arg(long, value_name = "R", requires = "address", help_heading = "Cluster")]
    pub rank: Option<u32>,
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
    /// For a batch that cannot be divided, a rank out of range, and hyperparameters that the optimizer refuses.
    pub fn plan(&self) -> Result<Plan> {
        let (data_parallel, tensor_parallel) = self.division()?;
        let workers = data_parallel * tensor_parallel;
        if let Some(rank) = self.rank.filter(|&rank| rank >= workers) {
            let expected = format!("less than the number of workers, {workers}");
            return Err(Error::Flag { flag: "--rank", found: rank.to_string(), expected });
        }
        if tensor_parallel > 1 && self.address.is_some() && self.rank.is_none() {
            let expected =
                "given with --address and --tensor-parallel: each worker is a process of its own".to_owned();
            return Err(Error::Flag { flag: "--rank", found: "missing".to_owned(), expected });
        }
        let architecture = Architecture {
            vocabulary: 1,
            context: self.context as usize,
            width: self.width as usize,
            blocks: self.blocks as usize,
            heads: self.heads as usize,
        };
        let ranks = tensor_parallel as usize;
        Model::divided(architecture, Division { ranks, place: 0, sequence: self.sequence_parallel })?;
        let mut optimizer = self.optimizer;
        if let Optimizer::Average(_) = optimizer {
            let expected = "one that trains: the servers would only average the gradients".to_owned();
            return Err(Error::Flag { flag: "--optimizer", found: optimizer.to_string(), expected });
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
            context: self.context as usize,
            sharding: Sharding::new(
                self.batch as usize,
                data_parallel as usize,
                self.micro_batches as usize,
            )?,
            sizes: Sizes {
                width: architecture.width,
                blocks: architecture.blocks,
                heads: architecture.heads,
            },
            data_parallel: data_parallel as usize,
            tensor_parallel: ranks,
            sequence_parallel: self.sequence_parallel,
            peer_listen: self.peer_listen,
            shards: self.shards,
            schedule: Schedule::new(optimizer, self.steps),
            clip: Some(self.clip).filter(|&norm| norm > 0.0),
            loss_scale: self.loss_scale,
            parameter_dtype: self.param_dtype,
            wire: self.wire,
            chunk_bytes: self.chunk_bytes as usize,
            deadline: Duration::from_secs(self.deadline),
            token: self.token.clone(),
            seed: self.seed,
            sample_chars: self.sample_chars as usize,
        })
    }
}

impl Train {
    /// How many groups of workers, and how many workers in each.
    fn division(&self) -> Result<(u32, u32)> {
        let (data, tensor) = match (self.data_parallel, self.tensor_parallel) {
            (None, None) => return Ok((self.workers.unwrap_or(2), 1)),
            (data, tensor) => (data.unwrap_or(1), tensor.unwrap_or(1)),
        };
        match self.workers.filter(|&workers| workers != data * tensor) {
            None => Ok((data, tensor)),
            Some(workers) => {
                let expected =
                    format!("--data-parallel x --tensor-parallel, {}, or not given", data * tensor);
                Err(Error::Flag { flag: "--workers", found: workers.to_string(), expected })
            }
        }
    }

    /// Whether each worker is to be a process of its own.
    pub fn in_processes(&self) -> bool {
        let alone = self.address.is_none() && self.rank.is_none();
        self.processes || alone && self.tensor_parallel.is_some_and(|ranks| ranks > 1)
    }
}

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
        assert_eq!((plan.level, plan.workers(), plan.shards), (Level::PGOs, 2, 3));
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
        assert!(refusal("--rank 1").contains("--address"));
        assert!(refusal("--processes --address a:1").contains("cannot be used with"));
        assert!(refusal("--tensor-parallel 3").contains("one of 1, 2 or 4"));
        assert!(refusal("--width 90").contains("such as 92"));
        assert!(
            refusal("--tensor-parallel 2 --workers 3").contains("--data-parallel x --tensor-parallel, 2")
        );
        assert!(refusal("--tensor-parallel 2 --address a:1").contains("process of its own"));
        assert!(refusal("--sequence-parallel").contains("--tensor-parallel"));
    }

    #[test]
    fn workers_are_groups_of_tensor_parallel_ones() {
        let division = |flags: &str| {
            let plan = parse(flags).unwrap().plan().unwrap();
            (plan.data_parallel, plan.tensor_parallel, plan.workers())
        };
        assert_eq!(division("--workers 4"), (4, 1, 4));
        assert_eq!(division("--tensor-parallel 2"), (1, 2, 2));
        assert_eq!(division("--tensor-parallel 4 --data-parallel 2"), (2, 4, 8));
        assert_eq!(division("--data-parallel 2 --workers 2"), (2, 1, 2));
        assert!(parse("--tensor-parallel 2").unwrap().in_processes());
        assert!(!parse("--data-parallel 2").unwrap().in_processes());
        assert!(!parse("--tensor-parallel 2 --address a:1 --rank 0").unwrap().in_processes());
    }
}
