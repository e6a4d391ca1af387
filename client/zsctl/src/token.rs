//! `zsctl token`: tokens with roles.

use std::num::NonZero;

use clap::{Args, Subcommand};
use serde_json::json;
use zeroshard_client::Result;
use zeroshard_model::size;
use zeroshard_model::{
    Role,
    quota::{Quota, WEIGHTS},
};
use zeroshard_net::{Token, Tokens};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make a token, and the line for the file that servers read with --tokens. The line has a
    /// hash, so only the user of the token has the token itself
    New {
        /// Role of the token: server (register a shard server), admin (all jobs), job:NAME (create,
        /// train and delete this job) or job:NAME:read
        role: Role,
        #[command(flatten)]
        limits: Limits,
    },
}

/// The limits of a token, which servers enforce.
#[derive(Debug, Args)]
pub(crate) struct Limits {
    /// Total memory that the jobs of the token may need on all servers, such as 8GiB
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    memory: Option<u64>,
    /// Maximum number of jobs of the token
    #[arg(long, value_name = "N")]
    jobs: Option<u32>,
    /// Calls per second to each server. Further calls wait up to a second, and are refused beyond
    /// that
    #[arg(long, value_name = "N")]
    requests: Option<NonZero<u32>>,
    /// Weight of each job of the token in sharing the time of a server with other jobs
    #[arg(long, value_name = "WEIGHT", default_value_t = 1, value_parser = weight())]
    weight: u32,
}

fn bytes(text: &str) -> std::result::Result<u64, &'static str> {
    size::parse(text).ok_or(size::EXPECTED)
}

fn weight() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(i64::from(*WEIGHTS.start())..=i64::from(*WEIGHTS.end()))
}

/// Runs a command, which needs no cluster.
///
/// # Errors
/// [`zeroshard_model::Error::Internal`] if the system cannot provide random numbers.
pub(crate) fn run(command: &Command, json: bool) -> Result<()> {
    let Command::New { role, limits: Limits { memory, jobs, requests, weight } } = command;
    let quota = Quota { memory: *memory, jobs: *jobs, requests: *requests, weight: *weight };
    let token = Token::random()?;
    let line = format!("{} {quota}", Tokens::line(role, &token));
    let (line, text) = (line.trim_end(), token.reveal().unwrap_or_default());
    if json {
        say!("{}", json!({"event": "token", "token": text, "line": line}));
    } else {
        say!("token, for ZEROSHARD_TOKEN or a file of its user:\n{text}\n");
        say!("line for the file of tokens:\n{line}");
    }
    Ok(())
}
