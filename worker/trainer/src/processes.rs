//! The implementation of `--processes`: starts the coordinator, the shard servers and the workers
//! as child processes.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::task::JoinSet;
use tokio::time::timeout;
use zeroshard_net::{
    Token,
    token::{TOKEN_FILE_VARIABLE, TOKEN_VARIABLE},
};

use super::cli::Train;
use super::error::{Error, Result};
use super::plan::Plan;

/// The time to wait for a server to shut down.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);

/// Starts the servers and the workers of `plan`, waits for the workers, and stops the servers.
/// Processes that still run when the future completes or is dropped are killed.
///
/// # Errors
/// [`Error::NoProgram`], and [`Error::Process`] for a program that does not start or fails.
pub async fn run(flags: &Train, plan: &Plan) -> Result<()> {
    let token = &plan.token;
    let program = std::env::current_exe()
        .map_err(|cause| Error::System { doing: "find this program", cause })?;
    let server =
        program.with_file_name(format!("zeroshard-server{}", std::env::consts::EXE_SUFFIX));
    if !server.is_file() {
        return Err(Error::NoProgram { program: server });
    }
    let ratio = flags.trace_ratio.to_string();
    let traces: &[&str] = match &flags.otlp_endpoint {
        Some(collector) => &["--otlp-endpoint", collector, "--trace-ratio", &ratio],
        None => &[],
    };
    let coordinator = [&["coordinator", "--admin-listen", "off"], traces].concat();
    let coordinator = Server::start(&server, &coordinator, token).await?;
    let shard = ["shard", "--admin-listen", "off", "--coordinator", &coordinator.address];
    let shard = [&shard, traces].concat();
    let mut servers = vec![];
    for _ in 0..flags.shards {
        servers.push(Server::start(&server, &shard, token).await?);
    }
    let mut workers = JoinSet::new();
    for rank in 0..plan.parallelism.workers() {
        let mut worker = worker(flags, &program, &coordinator.address, rank);
        if flags.job.is_none() {
            worker.args(["--job", &plan.job]);
        }
        if flags.credentials.token()?.reveal().is_none() {
            worker.env(TOKEN_VARIABLE, token.reveal().unwrap_or_default());
        }
        let worker = spawn(worker, rank)?;
        workers.spawn(wait(worker, rank));
    }
    servers.push(coordinator);
    let result = tokio::select! {
        result = wait_for_all(&mut workers) => result,
        error = first_exit(&mut servers) => Err(error),
        _ = tokio::signal::ctrl_c() => {
            Err(Error::Process { program: "the run".to_owned(), did: "was interrupted".to_owned() })
        }
    };
    stop(servers).await;
    result
}

/// Stops the servers in order, the shard servers before the coordinator.
async fn stop(servers: Vec<Server>) {
    for mut server in servers {
        let pid = server.child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        // A server that does not shut down in time is killed when it is dropped.
        if let Some(Ok(())) = pid.map(|pid| kill_process(pid, Signal::TERM)) {
            let _ = timeout(SHUTDOWN_TIMEOUT, server.child.wait()).await;
        }
    }
}

/// The line that a server prints when it accepts connections.
#[derive(Debug, Deserialize)]
struct Listening {
    event: String,
    address: String,
}

struct Server {
    name: String,
    address: String,
    child: Child,
    /// Kept open, because the server continues to write to it.
    _lines: Lines<BufReader<ChildStdout>>,
}

impl Server {
    /// Starts a server on a free port and waits until it accepts connections.
    async fn start(program: &Path, arguments: &[&str], token: &Token) -> Result<Self> {
        let name = format!("zeroshard-server {}", arguments[0]);
        let mut command = Command::new(program);
        command.args(arguments).args(["--listen", "127.0.0.1:0", "--json"]);
        if std::env::var_os("ZEROSHARD_LOG").is_none() {
            command.env("ZEROSHARD_LOG", "warn");
        }
        // The token is not passed as a flag, because other users can see flags.
        command.env(TOKEN_VARIABLE, token.reveal().unwrap_or_default());
        command.env_remove(TOKEN_FILE_VARIABLE);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
        let failed = |did: String| Error::Process { program: name.clone(), did };
        let mut child =
            command.spawn().map_err(|cause| failed(format!("did not start: {cause}")))?;
        let stdout =
            child.stdout.take().ok_or_else(|| failed("has no standard output".to_owned()))?;
        let mut lines = BufReader::new(stdout).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            match serde_json::from_str::<Listening>(&line) {
                Ok(Listening { event, address }) if event == "listening" => {
                    return Ok(Self { name, address, child, _lines: lines });
                }
                _ => continue,
            }
        }
        Err(failed("ended before it accepted connections; see its output above".to_owned()))
    }
}

/// This program as the worker of one rank, with the same flags.
fn worker(flags: &Train, program: &PathBuf, address: &str, rank: u32) -> Command {
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1).filter(|argument| argument != "--processes"));
    command.args(["--address", address, "--rank", &rank.to_string()]);
    command.stdin(Stdio::null()).kill_on_drop(true);
    if rank != 0 {
        command.stdout(Stdio::null());
        if !flags.json && !flags.quiet {
            // Rank 0 reports the progress of all.
            command.arg("--quiet");
        }
    }
    command
}

fn spawn(mut worker: Command, rank: u32) -> Result<Child> {
    worker.spawn().map_err(|cause| Error::Process {
        program: format!("worker {rank}"),
        did: format!("did not start: {cause}"),
    })
}

async fn wait(mut worker: Child, rank: u32) -> Result<()> {
    let program = format!("worker {rank}");
    match worker.wait().await {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => {
            Err(Error::Process { program, did: format!("failed ({status}); see its output above") })
        }
        Err(cause) => {
            Err(Error::Process { program, did: format!("cannot be waited for: {cause}") })
        }
    }
}

/// Waits for all workers. Returns the first error.
async fn wait_for_all(workers: &mut JoinSet<Result<()>>) -> Result<()> {
    while let Some(result) = workers.join_next().await {
        result.unwrap_or_else(|cause| {
            Err(Error::Process {
                program: "a worker".to_owned(),
                did: format!("was lost: {cause}"),
            })
        })?;
    }
    Ok(())
}

/// Waits until a server ends during the run. Returns the error for it.
async fn first_exit(servers: &mut [Server]) -> Error {
    let ends = servers.iter_mut().map(|server| {
        Box::pin(async {
            let did = match server.child.wait().await {
                Ok(status) => format!("ended during the run ({status})"),
                Err(cause) => format!("cannot be waited for: {cause}"),
            };
            Error::Process { program: server.name.clone(), did }
        })
    });
    futures_util::future::select_all(ends).await.0
}
