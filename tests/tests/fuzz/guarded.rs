//! A cluster with a token for each identity, and measurements of its processes.

use std::{
    collections::BTreeMap,
    fs,
    process::Command,
    time::{Duration, Instant},
};

use tempfile::TempDir;
use zeroshard_client::{Cluster as Client, Options};
use zeroshard_net::{Token, Tokens};
use zeroshard_tests::{Cluster, Process, binary};

use crate::input::Identity;

/// The job that must not be disturbed.
pub(crate) const BYSTANDER: &str = "bystander";
/// The time limit for all calls to end after the last one was sent.
const SETTLE: Duration = Duration::from_secs(60);

const ROLES: [(&str, &str); 6] = [
    ("server", "token-of-a-server"),
    ("admin", "token-of-an-admin"),
    ("job:fuzz", "token-of-the-owner"),
    ("job:fuzz:read", "token-of-a-reader"),
    ("job:bystander", "token-of-the-bystander"),
    ("job:bystander:read", "token-of-a-spectator"),
];

/// A coordinator, two shard servers, and a mirror of the bystander's job.
pub(crate) struct Guarded {
    pub(crate) cluster: Cluster,
    /// It starts after the job.
    mirror: Option<Process>,
    pub(crate) directory: TempDir,
}

impl Guarded {
    pub(crate) fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("tokens");
        let line = |(role, token): &(&str, &str)| {
            Tokens::line(&role.parse().unwrap(), &Token::from((*token).to_owned()))
        };
        fs::write(&file, ROLES.iter().map(line).collect::<Vec<_>>().join("\n")).unwrap();
        let tokens = ["--tokens", file.to_str().unwrap()];
        let own = ["--token", token(Identity::Server), "--wait-seconds", "2"];
        let coordinator = [&tokens[..], &own, &["--max-jobs", "40"]].concat();
        let coordinator = Cluster::coordinator_with(&coordinator);
        let shard = [&tokens[..], &own, &["--memory", "512MiB", "--parked-bytes", "33554432"]];
        let shard = shard.concat();
        let shards = (0..2).map(|_| Cluster::shard(coordinator.address(), &shard)).collect();
        Self { cluster: Cluster { coordinator, shards }, mirror: None, directory }
    }

    /// Starts a mirror of the bystander's job. Returns its address.
    pub(crate) fn mirror(&mut self) -> String {
        let mut command = Command::new(binary("zsctl"));
        command.env("ZEROSHARD_TOKEN", token(Identity::Spectator));
        command.args(["--json", "--address", self.cluster.address(), "mirror", BYSTANDER]);
        command.args(["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]);
        command.args(["--history-bytes", "1000000"]);
        self.mirror.insert(Process::start(command)).address().to_owned()
    }

    pub(crate) fn processes(&self) -> impl Iterator<Item = (&'static str, &Process)> {
        let Cluster { coordinator, shards } = &self.cluster;
        let servers =
            [("coordinator", coordinator), ("shard 0", &shards[0]), ("shard 1", &shards[1])];
        servers.into_iter().chain(self.mirror.iter().map(|mirror| ("the mirror", mirror)))
    }

    /// Asserts that no process has ended.
    pub(crate) fn assert_alive(&mut self) {
        let Cluster { coordinator, shards } = &mut self.cluster;
        for process in shards.iter_mut().chain([coordinator]).chain(&mut self.mirror) {
            assert_eq!(process.ended(), None, "a server has ended: see its output above");
        }
    }

    /// Measures the resources that each process uses.
    pub(crate) fn usage(&self) -> Vec<Usage> {
        self.processes().map(|(name, of)| Usage::of(name, of)).collect()
    }

    /// Waits until the metrics of all shard servers show the job of the bystander, and measures the
    /// resources.
    pub(crate) async fn usage_with_a_job(&self) -> Vec<Usage> {
        let deadline = Instant::now() + SETTLE;
        loop {
            let usage = self.usage();
            if usage.iter().filter(|of| of.holds_a_job()).count() == self.cluster.shards.len() {
                return usage;
            }
            assert!(Instant::now() < deadline, "the servers do not hold the job: {usage:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Deletes all jobs except the bystander's, and waits until all calls of the test have ended
    /// and the servers hold as many bytes as at the `beginning`. No call may be sent meanwhile.
    /// Returns the resources that each process uses.
    pub(crate) async fn rest(&self, beginning: &[Usage]) -> Vec<Usage> {
        let options = Options::default().token(Token::from("token-of-an-admin".to_owned()));
        let admin = Client::connect(self.cluster.address(), options).await.unwrap();
        let deadline = Instant::now() + SETTLE;
        loop {
            let jobs = admin.status().await.unwrap().jobs;
            let others: Vec<_> = jobs.iter().filter(|job| job.name != BYSTANDER).collect();
            for job in &others {
                // The deletion may fail while a server opens the job, and is repeated.
                let _ = admin.delete_job(&job.name).await;
            }
            let usage = self.usage();
            let changed = |(of, begun): (&Usage, &Usage)| of.changes(begun);
            let changes: Vec<String> = usage.iter().zip(beginning).flat_map(changed).collect();
            if others.is_empty() && changes.is_empty() {
                return usage;
            }
            assert!(Instant::now() < deadline, "jobs {others:?} are left, or {changes:#?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// The token of an identity.
pub(crate) fn token(identity: Identity) -> &'static str {
    match identity {
        Identity::Owner => "token-of-the-owner",
        Identity::Reader => "token-of-a-reader",
        Identity::Server => "token-of-a-server",
        Identity::Spectator => "token-of-a-spectator",
        Identity::Stranger => "token-of-nobody",
        Identity::Nobody => "",
    }
}

/// The options of a client of the jobs that may be disturbed.
pub(crate) fn owner(timeout: Duration) -> Options {
    Options::default().timeout(timeout).token(token(Identity::Owner).to_owned().into())
}

/// The metrics that must return to their initial values.
const KEPT: [&str; 4] = [
    "zeroshard_requests_in_flight",
    "zeroshard_memory_bytes",
    "zeroshard_tier_bytes",
    "zeroshard_mirror_readers",
];

/// The resources that a process uses.
#[derive(Debug, Clone)]
pub(crate) struct Usage {
    pub(crate) process: &'static str,
    pub(crate) memory: u64,
    pub(crate) files: usize,
    /// The metric series that must return to their initial values.
    pub(crate) series: BTreeMap<String, String>,
}

impl Usage {
    fn of(process: &'static str, of: &Process) -> Self {
        let kept = |line: &&str| {
            // The changes that the mirror may ask for have a budget of their own, and fill it.
            !line.contains("kind=\"history\"") && KEPT.iter().any(|name| line.starts_with(name))
        };
        let text = of.get("/metrics");
        let pair = |line: &str| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            (name.to_owned(), value.to_owned())
        };
        let files = fs::read_dir(format!("/proc/{}/fd", of.id())).unwrap().count();
        let series = text.lines().filter(kept).map(pair).collect();
        Self { process, memory: of.memory(), files, series }
    }

    /// Returns whether the process holds the arrays of a job.
    fn holds_a_job(&self) -> bool {
        ["master", "state", "accumulator"].iter().all(|kind| {
            let bytes = self.series.get(&format!("zeroshard_memory_bytes{{kind=\"{kind}\"}}"));
            bytes.is_some_and(|bytes| bytes != "0")
        })
    }

    /// Describes the differences from the `beginning`: open calls, except those of the cluster
    /// itself, of the bystander (two control streams, and the streams of two ranks) and of the
    /// mirror (one at each shard server), and other numbers of bytes.
    fn changes(&self, beginning: &Self) -> Vec<String> {
        let expected = |name: &String| match name {
            name if !name.starts_with("zeroshard_requests_in_flight") => {
                beginning.series.get(name).map_or("0", String::as_str)
            }
            name if name.contains("/Serve\"") || name.contains("/Join\"") => "2",
            name if name.contains("ShardService/Changes\"") => "1",
            _ => "0",
        };
        let changed = self.series.iter().filter(|(name, value)| *value != expected(name));
        let text = |(name, value): (&String, &String)| {
            format!("{}: {name} is {value}, not {}", self.process, expected(name))
        };
        changed.map(text).collect()
    }
}
