//! `zsctl`, the tool for operators. It calls a cluster's coordinator and prints tables or JSON.

mod checkpoint;
mod plan;
mod shapes;
mod status;
mod table;
mod token;

use std::{process::ExitCode, time::Duration};

use clap::{Parser, Subcommand};
use serde_json::json;
use zeroshard_client::{Cluster, CredentialFlags, Options, Result};

/// Inspect a ZeroShard cluster and manage its jobs
#[derive(Debug, Parser)]
#[command(name = "zsctl", version)]
struct Arguments {
    /// The address of the coordinator; several coordinators, of which one is the leader, are
    /// separated by commas
    #[arg(
        long,
        env = "ZEROSHARD_ADDRESS",
        value_name = "HOST:PORT[,HOST:PORT...]",
        default_value = "127.0.0.1:7400",
        global = true
    )]
    address: String,
    #[command(flatten)]
    credentials: CredentialFlags,
    /// Number of seconds after which to give up
    #[arg(long, value_name = "SECONDS", default_value_t = 10, global = true)]
    timeout: u64,
    /// Print one JSON object per line and nothing else
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show servers, jobs, versions and memory
    Status,
    /// Print the hash of a job's whole state (master weights and optimizer state) at its current
    /// version. Equal hashes mean equal bits; the hash does not depend on the number of servers
    Hash {
        /// Name of the job; `zsctl status` lists the jobs
        job: String,
    },
    /// Save jobs, and inspect, verify, export and remove their checkpoints
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
    /// Compute the memory and the traffic of a job before it is created
    #[command(name = "plan")]
    Estimate(plan::Estimate),
    /// Make tokens with roles
    #[command(subcommand)]
    Token(token::Command),
    /// Delete a job and free its memory on the servers; its state is lost
    Delete {
        /// Name of the job; `zsctl status` lists the jobs
        job: String,
    },
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("zsctl: {error}");
            ExitCode::FAILURE
        }
    }
}

#[expect(clippy::print_stdout, reason = "the program's output")]
async fn run(arguments: &Arguments) -> Result<()> {
    let timeout = Duration::from_secs(arguments.timeout.max(1));
    if let Command::Checkpoint(command) = &arguments.command
        && let Some(result) = checkpoint::offline(command, arguments.json).await
    {
        return result;
    }
    match &arguments.command {
        Command::Token(command) => return token::run(command, arguments.json),
        Command::Estimate(plan) => return plan::run(plan, arguments.json),
        _ => {}
    }
    let (token, tls) = (arguments.credentials.token()?, arguments.credentials.tls()?);
    let options = Options::default().timeout(timeout).token(token).tls(tls);
    let cluster = Cluster::connect(&arguments.address, options).await?;
    match &arguments.command {
        Command::Status => status::print(&cluster.status().await?, arguments.json),
        Command::Hash { job } => {
            let hash = cluster.state_hash(job).await?;
            match arguments.json {
                true => println!("{}", json!({"event": "hash", "job": job, "state_hash": hash})),
                false => println!("{hash}"),
            }
        }
        // They have been run above, without a cluster.
        Command::Token(_) | Command::Estimate(_) => {}
        Command::Checkpoint(command) => {
            checkpoint::online(command, &cluster, arguments.json).await?;
        }
        Command::Delete { job } => {
            cluster.delete_job(job).await?;
            match arguments.json {
                true => println!("{}", json!({"event": "deleted", "job": job})),
                false => println!("job {job:?} is deleted"),
            }
        }
    }
    Ok(())
}
