//! A coordinator and shard servers.

use std::{
    net::{Ipv4Addr, SocketAddr},
    process::{self, Command},
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

use zeroshard_net::token::TOKEN_VARIABLE;

use crate::{Process, binary, gpu};

/// A running cluster, which is killed when dropped.
#[derive(Debug)]
pub struct Cluster {
    /// The coordinator.
    pub coordinator: Process,
    /// The shard servers.
    pub shards: Vec<Process>,
}

impl Cluster {
    /// Starts a coordinator and this number of shard servers.
    ///
    /// # Panics
    /// If one of them does not start.
    pub fn start(shards: usize) -> Self {
        Self::start_with(shards, &[])
    }

    /// Starts a cluster with additional flags for the shard servers.
    ///
    /// # Panics
    /// If one of them does not start.
    pub fn start_with(shards: usize, flags: &[&str]) -> Self {
        let coordinator = Self::coordinator();
        let shards = (0..shards).map(|_| Self::shard(coordinator.address(), flags)).collect();
        Self { coordinator, shards }
    }

    /// Starts a coordinator and this number of shard servers with `token`.
    ///
    /// # Panics
    /// If one of them does not start.
    pub fn start_guarded(shards: usize, token: &str) -> Self {
        let mut command = coordinator();
        command.env(TOKEN_VARIABLE, token);
        let coordinator = Process::start(command);
        let shards =
            (0..shards).map(|_| Self::guarded_shard(coordinator.address(), token)).collect();
        Self { coordinator, shards }
    }

    /// Starts a shard server with `token` that registers with the coordinator at `address`.
    ///
    /// # Panics
    /// If it does not start.
    pub fn guarded_shard(address: &str, token: &str) -> Process {
        let mut command = shard(address, &[]);
        command.env(TOKEN_VARIABLE, token);
        Process::start(command)
    }

    /// Starts only a coordinator.
    ///
    /// # Panics
    /// If it does not start.
    pub fn coordinator() -> Process {
        Process::start(coordinator())
    }

    /// Starts only a coordinator, with additional flags.
    ///
    /// # Panics
    /// If it does not start.
    pub fn coordinator_with(flags: &[&str]) -> Process {
        // Certificates name this address.
        let has_certificate = flags.iter().any(|flag| flag.starts_with("--tls-cert"));
        let host = if has_certificate { Ipv4Addr::LOCALHOST } else { unique_loopback() };
        let mut command = coordinator_on(host);
        command.args(flags);
        Process::start(command)
    }

    /// Starts only a coordinator, which listens at `address`.
    ///
    /// # Panics
    /// If it does not start.
    pub fn coordinator_at(address: &str) -> Process {
        Process::start(server(&[
            "coordinator",
            "--listen",
            address,
            "--admin-listen",
            "127.0.0.1:0",
        ]))
    }

    /// Starts only a coordinator that takes part in the election of the etcd at `etcd`. Another one
    /// is elected when the leader has been silent for `seconds`.
    ///
    /// # Panics
    /// If it does not start.
    pub fn candidate(address: &str, etcd: SocketAddr, seconds: u64) -> Process {
        // Another member of etcd does not answer.
        let election = format!("etcd://127.0.0.1:9,{etcd}");
        let seconds = seconds.to_string();
        let flags = ["--election", &election, "--election-seconds", &seconds];
        Self::candidate_with(address, &flags)
    }

    /// Starts only a coordinator that takes part in the election that the flags name.
    ///
    /// # Panics
    /// If it does not start.
    pub fn candidate_with(address: &str, flags: &[&str]) -> Process {
        let mut command =
            server(&["coordinator", "--listen", address, "--admin-listen", "127.0.0.1:0"]);
        command.args(flags);
        Process::start(command)
    }

    /// Starts a shard server that registers with the coordinator at `address`.
    ///
    /// # Panics
    /// If it does not start.
    pub fn shard(address: &str, flags: &[&str]) -> Process {
        Process::start(shard(address, flags))
    }

    /// Starts a shard server whose address space is limited to this number of bytes.
    ///
    /// # Panics
    /// If it does not start.
    pub fn limited_shard(address: &str, flags: &[&str], bytes: u64) -> Process {
        let server = shard(address, flags);
        let mut command = Command::new("sh");
        let script = format!("ulimit -v {} && exec \"$@\"", bytes / 1024);
        command.args(["-c", &script, "sh"]).arg(server.get_program()).args(server.get_args());
        command.env_remove(TOKEN_VARIABLE);
        // With many cores, the arenas of malloc would exhaust the address space.
        command.env("MALLOC_ARENA_MAX", "1");
        Process::start(command)
    }

    /// Starts a shard server with these flags on a GPU of the fake driver, whose environment
    /// `settings` choose. It registers with the coordinator at `address`.
    ///
    /// # Panics
    /// If it does not start.
    pub fn shard_on_gpu(address: &str, flags: &[&str], settings: &[(&str, &str)]) -> Process {
        let device: &[&str] =
            if flags.contains(&"--device") { &[] } else { &["--device", "cuda:0"] };
        let mut command = shard(address, &[device, flags].concat());
        gpu::with_fake_driver(&mut command);
        command.envs(settings.iter().copied());
        Process::start(command)
    }

    /// The payload bytes that the shard servers have sent to pulls and received in pushes,
    /// according to their metrics.
    ///
    /// # Panics
    /// If a metric is missing.
    pub fn payload(&self) -> [u64; 2] {
        let counter = |text: &str, labels: &str| -> u64 {
            let line = text.lines().find_map(|line| {
                line.strip_prefix(&format!("zeroshard_payload_bytes_total{{{labels}}} "))
            });
            line.expect("the counter exists").parse().expect("a number")
        };
        let metrics: Vec<String> = self.shards.iter().map(|shard| shard.get("/metrics")).collect();
        let sum = |labels: &str| metrics.iter().map(|text| counter(text, labels)).sum();
        [
            sum("direction=\"sent\",operation=\"pull\""),
            sum("direction=\"received\",operation=\"push\""),
        ]
    }

    /// The address to which workers connect.
    pub fn address(&self) -> &str {
        self.coordinator.address()
    }
}

fn coordinator() -> Command {
    coordinator_on(unique_loopback())
}

fn coordinator_on(host: Ipv4Addr) -> Command {
    let listen = format!("{host}:0");
    server(&["coordinator", "--listen", &listen, "--admin-listen", "127.0.0.1:0"])
}

/// A loopback address that no other process uses. The port of a coordinator there stays free until
/// another one starts at the same address.
fn unique_loopback() -> Ipv4Addr {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = process::id().wrapping_mul(251).wrapping_add(COUNT.fetch_add(1, Relaxed));
    let [_, a, b, c] = number.to_be_bytes();
    // 127.0.0.0 and 127.255.255.255 are not addresses of hosts.
    Ipv4Addr::new(127, a.clamp(1, 254), b, c)
}

fn shard(coordinator: &str, flags: &[&str]) -> Command {
    let mut command =
        server(&["shard", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]);
    command.args(["--coordinator", coordinator]).args(flags);
    gpu::choose_device(&mut command, flags);
    command
}

fn server(arguments: &[&str]) -> Command {
    let mut command = Command::new(binary("zeroshard-server"));
    command.args(arguments).args(["--json", "--log", "error"]);
    // The environment of the tests may name another cluster.
    command.env_remove(TOKEN_VARIABLE);
    // A busy machine may stand still for longer than a worker may.
    command.env("ZEROSHARD_KEEPALIVE_SECONDS", "20");
    command
}
