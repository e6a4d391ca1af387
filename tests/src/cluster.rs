//! A coordinator and shard servers.

use std::process::Command;

use crate::{Process, binary};

/// A running cluster. Killed when dropped.
#[derive(Debug)]
pub struct Cluster {
    /// The coordinator.
    pub coordinator: Process,
    /// The shard servers.
    pub shards: Vec<Process>,
}

impl Cluster {
    /// Starts a coordinator and so many shard servers.
    ///
    /// # Panics
    /// If one of them does not start.
    pub fn start(shards: usize) -> Self {
        Self::start_with(shards, &[])
    }

    /// The same, with further flags for the shard servers.
    ///
    /// # Panics
    /// If one of them does not start.
    pub fn start_with(shards: usize, flags: &[&str]) -> Self {
        let coordinator = Self::coordinator();
        let shards = (0..shards).map(|_| Self::shard(coordinator.address(), flags)).collect();
        Self { coordinator, shards }
    }

    /// A coordinator alone.
    ///
    /// # Panics
    /// If it does not start.
    pub fn coordinator() -> Process {
        Process::start(server(&["coordinator", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]))
    }

    /// A shard server that registers with the coordinator at `address`.
    ///
    /// # Panics
    /// If it does not start.
    pub fn shard(address: &str, flags: &[&str]) -> Process {
        let mut command = server(&["shard", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]);
        command.args(["--coordinator", address]).args(flags);
        Process::start(command)
    }

    /// Where workers connect.
    pub fn address(&self) -> &str {
        self.coordinator.address()
    }
}

fn server(arguments: &[&str]) -> Command {
    let mut command = Command::new(binary("zeroshard-server"));
    command.args(arguments).args(["--json", "--log", "error"]);
    command
}
