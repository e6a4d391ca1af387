//! `zsctl`, the tool for operators. It calls a cluster's coordinator and prints tables or JSON.

/// Prints a line on standard output. Ends the process if its reader has gone.
macro_rules! say {
    ($($text:tt)*) => {
        $crate::write_line(format_args!($($text)*))
    };
}

mod capture;
mod checkpoint;
mod completion;
mod delete;
mod doctor;
mod follow;
mod mirror;
mod operate;
mod path;
mod plan;
mod replay;
mod rewind;
mod shapes;
mod status;
mod steps;
mod table;
mod tensors;
mod token;
mod top;
mod transport;
mod why;

use std::{
    fmt,
    io::{self, Write},
    process::ExitCode,
    time::Duration,
};

use clap::{Parser, Subcommand};
use serde_json::{Value, json};
use zeroshard_client::{Cluster, CredentialFlags, Options, Result};

/// The exit code of a command that has found a problem. 1 stands for an error, and 2 for invalid
/// flags.
const PROBLEM: u8 = 3;

/// Inspect a ZeroShard cluster and manage its jobs
#[derive(Debug, Parser)]
#[command(
    name = "zsctl",
    version,
    after_help = "Exit codes: 0 success, 1 error, 2 invalid flags, 3 a problem was found (status, \
                  doctor, plan, replay)"
)]
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
    /// Show the leader, servers, jobs, versions and memory, and what jobs wait for
    ///
    /// The exit code is 3 if the leader is recovering; if a server is missing, or none is
    /// connected; or if a job has failed, cannot continue because workers or servers are missing,
    /// has slices with too few replicas, or could not be saved the last time
    Status(status::Arguments),
    /// Explain the state of the cluster and of a job: missing servers, the cause and the duration
    /// of a wait, failed saves, the last error, and the recommended action
    Why {
        /// Name of the job; `zsctl status` lists the jobs [default: the cluster and all jobs]
        job: Option<String>,
    },
    /// Show the speed of jobs and the memory of servers, refreshed every second until Ctrl-C
    Top(top::Arguments),
    /// Show the tensors of a job: names, shapes, dtypes, layouts and sizes
    Tensors {
        /// Name of the job; `zsctl status` lists the jobs
        job: String,
    },
    /// Print the hash of a job's whole state (master weights and optimizer state) at its current
    /// version. Equal hashes mean equal bits; the hash does not depend on the number of servers
    Hash {
        /// Name of the job; `zsctl status` lists the jobs
        job: String,
    },
    /// Show how large each rank's gradient of each tensor was at a step, and when it arrived
    ///
    /// Use it to find the rank and the tensor that spoiled a step. Each norm is that of a gradient
    /// as the rank sent it, with the loss scale and before the mean over the ranks
    Steps(steps::Arguments),
    /// Write the next step of a job to a directory: the state before it, the gradients of all
    /// ranks, and the hashes after it
    ///
    /// Training goes on, and the servers keep nothing afterwards. Until you have the step, it
    /// counts in their --pinned-bytes. If it does not fit, capture single tensors with --tensor
    Capture(capture::Arguments),
    /// Apply a captured step again on this machine, and compare the hashes with those of the
    /// servers
    ///
    /// Equal hashes prove that the state before the step, the gradients of the ranks and the
    /// decision lead to the state after it, bit for bit. A difference is named: the state, or the
    /// gradient of a rank. The exit code is 3 if anything differs
    Replay(replay::Arguments),
    /// Save jobs, and inspect, verify, export and remove their checkpoints
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
    /// Return a job to a checkpoint of an earlier version, while its workers keep running
    ///
    /// The workers repeat the steps after that version. The job abandons the versions that it had
    /// made with them: no server serves them, and it never returns to them
    Rewind(rewind::Arguments),
    /// Write the newest parameters of a running job to files, again and again
    ///
    /// After one full copy, the servers send only what each step has changed. Each version becomes
    /// a directory with safetensors files, such as DIR/120, or DIR/120@1 after the job has returned
    /// to a checkpoint once. The link DIR/latest leads to the newest one. A directory gets its name
    /// when its files are complete and on the disk, and they never change. If you read several
    /// files, resolve the link once (`realpath DIR/latest`), and read all of them there.
    ///
    /// If zsctl is killed, start it again with the same flags: it removes what is incomplete, and
    /// continues. Training does not wait for it. If steps are faster than the disk, it skips
    /// versions. It needs memory for one copy of the parameters and for the changes of one version,
    /// and a token with the role `job:NAME:read`
    Follow(follow::Arguments),
    /// Serve the readers of a job, so that its servers send each version only once
    ///
    /// Start one mirror for each host or rack with many readers, and give them its address:
    /// `mirror` of `zeroshard.torch.follow`, or `zsctl follow --mirror`. The mirror keeps one copy
    /// of the parameters, and the changes of the last versions. Readers compare what it sends with
    /// hashes from the servers. The mirror asks the coordinator whether a reader's token may read
    /// the job. In a cluster with TLS, the mirror needs a certificate with its address (--tls-cert)
    Mirror(mirror::Arguments),
    /// Compute the memory and the traffic of a job before it is created
    #[command(name = "plan")]
    Estimate(plan::Estimate),
    /// Make tokens with roles
    #[command(subcommand)]
    Token(token::Command),
    /// Delete a job and free its memory on the servers; its state is lost
    Delete(delete::Arguments),
    /// Exclude a shard server from new slices. The server keeps its current slices
    Cordon(operate::Server),
    /// Let a cordoned shard server receive new slices again
    Uncordon(operate::Server),
    /// Cordon a shard server, copy its slices to other servers, and release it, so that it can be
    /// stopped. Waits until no job needs it, and aborts no step. A server that is lost for good is
    /// removed from the list
    Drain(operate::Drain),
    /// End the lease of a rank whose worker hangs, so that another worker can take the rank
    Evict(operate::Evict),
    /// Check the connections from this machine to the coordinator and to every shard server:
    /// versions, clocks, latency, packet size, and the throughput of one stream. The exit code is 3
    /// if there is a problem
    Doctor(doctor::Arguments),
    /// Print a completion script for a shell
    Completion(completion::Arguments),
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments).await {
        Ok(code) => code,
        Err(error) => {
            let event = json!({
                "event": "error", "error": error.name(), "message": error.to_string(),
            });
            match arguments.json {
                true => eprintln!("{event}"),
                false => eprintln!("zsctl: {error}"),
            }
            ExitCode::FAILURE
        }
    }
}

/// The exit code of a process whose reader has closed the pipe, as for other tools.
const BROKEN_PIPE: i32 = 141;

/// Writes a line of output; `say!` calls this.
fn write_line(line: fmt::Arguments<'_>) {
    if let Err(error) = writeln!(io::stdout().lock(), "{line}") {
        if error.kind() == io::ErrorKind::BrokenPipe {
            std::process::exit(BROKEN_PIPE);
        }
        eprintln!("zsctl: cannot write the output: {error}");
        std::process::exit(1);
    }
}

async fn run(arguments: &Arguments) -> Result<ExitCode> {
    let is_json = arguments.json;
    let seconds = match &arguments.command {
        Command::Rewind(rewind) => rewind.within,
        Command::Follow(follow) => follow.within,
        Command::Capture(capture) => capture.within,
        _ => arguments.timeout,
    };
    let timeout = Duration::from_secs(seconds.max(1));
    if let Command::Checkpoint(command) = &arguments.command
        && let Some(result) = checkpoint::offline(command, is_json).await
    {
        return result.map(|()| ExitCode::SUCCESS);
    }
    match &arguments.command {
        Command::Token(command) => {
            return token::run(command, is_json).map(|()| ExitCode::SUCCESS);
        }
        Command::Estimate(plan) => return plan::run(plan, is_json),
        Command::Replay(replay) => return replay::run(replay, is_json),
        Command::Completion(shell) => {
            completion::run(shell);
            return Ok(ExitCode::SUCCESS);
        }
        _ => {}
    }
    let (token, tls) = (arguments.credentials.token()?, arguments.credentials.tls()?);
    let options = Options::default().timeout(timeout).token(token).tls(tls);
    if let Command::Doctor(doctor) = &arguments.command {
        return doctor::run(doctor, &arguments.address, options, is_json).await;
    }
    if let Command::Mirror(mirror) = &arguments.command {
        mirror::run(mirror, &arguments.address, options, is_json).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let cluster = Cluster::connect(&arguments.address, options).await?;
    match &arguments.command {
        Command::Status(status) => return status::run(status, &cluster, is_json).await,
        Command::Why { job } => why::run(job.as_deref(), &cluster, is_json).await?,
        Command::Top(top) => top::run(top, &cluster, is_json).await?,
        Command::Tensors { job } => tensors::run(job, &cluster, is_json).await?,
        Command::Hash { job } => {
            let hash = cluster.state_hash(job).await?;
            let event = json!({"event": "hash", "job": job, "state_hash": hash});
            print(is_json, &event, &hash);
        }
        Command::Steps(steps) => steps::run(steps, &cluster, is_json).await?,
        Command::Capture(capture) => capture::run(capture, &cluster, is_json).await?,
        // These commands do not need a cluster, and have been handled above.
        Command::Token(_)
        | Command::Estimate(_)
        | Command::Replay(_)
        | Command::Completion(_)
        | Command::Doctor(_)
        | Command::Mirror(_) => {}
        Command::Checkpoint(command) => checkpoint::online(command, &cluster, is_json).await?,
        Command::Rewind(rewind) => rewind::run(rewind, &cluster, is_json).await?,
        Command::Follow(follow) => follow::run(follow, &cluster, is_json).await?,
        Command::Delete(delete) => delete::run(delete, &cluster, is_json).await?,
        Command::Cordon(server) => operate::cordon(server, true, &cluster, is_json).await?,
        Command::Uncordon(server) => operate::cordon(server, false, &cluster, is_json).await?,
        Command::Drain(drain) => operate::drain(drain, &cluster, is_json).await?,
        Command::Evict(evict) => operate::evict(evict, &cluster, is_json).await?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the event as JSON, or the text.
fn print(json: bool, event: &Value, text: &str) {
    match json {
        true => say!("{event}"),
        false => say!("{text}"),
    }
}
