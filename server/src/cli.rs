//! The command line of `zeroshard-server`.

use std::{ffi::OsString, path::PathBuf};

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::{
    config::{self, All, Config, Coordinator, Error, Flags, Shard},
    dev_certs::DevCerts,
    probe::Probe,
};

/// ZeroShard server: holds optimizer state, gradients and parameters for training jobs
///
/// A cluster is one coordinator and any number of shard servers, started in any order:
///
///   zeroshard-server coordinator --listen 127.0.0.1:7400
///   zeroshard-server shard --coordinator 127.0.0.1:7400 --listen 127.0.0.1:7401
///   zeroshard-server shard --coordinator 127.0.0.1:7400 --listen 127.0.0.1:7402 --admin-listen off
///
/// With --election etcd://HOST:PORT several coordinators can run, and one of them is the leader.
///
/// Workers connect to the coordinator. SIGTERM or SIGINT shuts a server down gracefully.
#[derive(Debug, Parser)]
#[command(name = "zeroshard-server", version, verbatim_doc_comment)]
struct Cli {
    #[command(subcommand)]
    role: Roles,
}

#[derive(Debug, Subcommand)]
enum Roles {
    /// Run the coordinator, which decides about membership, placement and steps
    Coordinator(Flags<Coordinator>),
    /// Run a shard server, which holds slices of jobs and serves them to workers
    Shard(Flags<Shard>),
    /// Run a coordinator and one shard server in one process
    All(Flags<All>),
    /// Ask a server whether it is ready, for health checks. Succeeds if it is
    Probe(Probe),
    /// Make certificates for servers, operators and jobs to try out TLS, signed by a new
    /// certificate authority. They are valid for localhost and the names in --host. The key of the
    /// authority is discarded. In production, use the authority of your organisation
    DevCerts(DevCerts),
}

/// The task of a process.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// To run a server.
    Serve(Box<Config>),
    /// To ask another process whether it is ready.
    Probe(Probe),
    /// To make certificates.
    DevCerts(DevCerts),
}

/// Reads what a process is to do that was started with `arguments` (the first is its name).
///
/// # Errors
/// [`Error`]; [`Error::CommandLine`] also for `--help` and `--version`.
pub fn read(
    arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
) -> Result<Command, Error> {
    let mut arguments: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
    let mut command = Cli::command();
    let mut matches = command.try_get_matches_from_mut(&arguments)?;
    let (section, mut own) = matches.remove_subcommand().expect("clap requires a subcommand");
    match section.as_str() {
        "probe" => return Ok(Command::Probe(Probe::from_arg_matches(&own)?)),
        "dev-certs" => return Ok(Command::DevCerts(DevCerts::from_arg_matches(&own)?)),
        _ => {}
    }
    if let Some(file) = own.get_one::<PathBuf>("config") {
        // The first arguments are the name of the program and the role.
        arguments.splice(2..2, config::file::flags(file, &section, &own)?);
        matches = command.try_get_matches_from(arguments)?;
        own = matches.remove_subcommand().expect("as before").1;
    }
    Ok(Command::Serve(Box::new(config::load(&section, &own)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
