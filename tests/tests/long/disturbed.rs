//! A run of the Rust worker with replicas, whose processes are killed or stand still.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use tempfile::TempDir;
use zeroshard_tests::{Cluster, Etcd, Process, binary, run};

pub(crate) const SERVERS: usize = 3;
pub(crate) const WORKERS: u32 = 2;
/// The seconds after which a silent leader is replaced.
const ELECTION: u64 = 4;
/// How long a wait for the next kill may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// The text that the model learns: sources of this project.
const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../proto/src");

fn flags(steps: u64) -> Vec<String> {
    let flags = format!("train --json --data {TEXT} --sample-chars 0 --shards {SERVERS}");
    let flags = flags.split(' ').map(str::to_owned);
    flags.chain(["--steps".to_owned(), steps.to_string()]).collect()
}

/// What the workers of a run have printed.
#[derive(Debug, Default)]
pub(crate) struct Results {
    losses: BTreeMap<u64, String>,
    hash: Option<String>,
}

impl Results {
    /// Notes a line of output. Workers must agree.
    fn note(&mut self, line: &str) {
        let line: Value = serde_json::from_str(line).unwrap();
        match line["event"].as_str() {
            Some("step") => {
                let loss = line["loss"].to_string();
                let step = line["step"].as_u64().unwrap();
                assert_eq!(self.losses.entry(step).or_insert_with(|| loss.clone()), &loss);
            }
            Some("done") => self.hash = Some(line["state_hash"].to_string()),
            _ => {}
        }
    }
}

/// The results without any fault and without replicas.
pub(crate) fn calm(steps: u64) -> Results {
    let mut arguments = flags(steps);
    let out = tempfile::tempdir().unwrap();
    let workers = format!("--workers {WORKERS} --out {}", out.path().display());
    arguments.extend(workers.split(' ').map(str::to_owned));
    let output = run("zeroshard-worker", &arguments);
    assert!(output.status.success(), "{output:?}");
    let mut results = Results::default();
    String::from_utf8(output.stdout).unwrap().lines().for_each(|line| results.note(line));
    results
}

/// Pseudo-random numbers (xorshift64).
pub(crate) struct Random(u64);

impl Random {
    /// A number below `limit`.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// A run that is being disturbed.
pub(crate) struct Run {
    pub(crate) coordinators: Vec<Process>,
    /// The election of the coordinators, if there are several.
    pub(crate) etcd: Option<Etcd>,
    pub(crate) shards: Vec<Process>,
    pub(crate) workers: Vec<Child>,
    /// The number of workers that were killed.
    killed: usize,
    steps: u64,
    results: Arc<Mutex<Results>>,
    began: Instant,
    out: TempDir,
}

impl Run {
    /// Starts a run with one coordinator.
    pub(crate) fn start(steps: u64) -> Self {
        Self::start_with(vec![Cluster::coordinator()], None, steps)
    }

    /// Starts a run with three coordinators, of which one is the leader.
    pub(crate) fn start_elected(steps: u64) -> Self {
        let etcd = Etcd::start();
        let candidate = |_| Cluster::candidate("127.0.0.1:0", etcd.address(), ELECTION);
        Self::start_with((0..3).map(candidate).collect(), Some(etcd), steps)
    }

    fn start_with(coordinators: Vec<Process>, etcd: Option<Etcd>, steps: u64) -> Self {
        let (began, out, results) = (Instant::now(), tempfile::tempdir().unwrap(), Arc::default());
        let (shards, workers) = (Vec::new(), Vec::new());
        let killed = 0;
        let mut run =
            Self { coordinators, etcd, shards, workers, killed, steps, results, began, out };
        run.shards = (0..SERVERS).map(|_| run.shard()).collect();
        run.workers = (0..WORKERS).map(|rank| run.worker(rank)).collect();
        run
    }

    /// The addresses of all coordinators.
    fn address(&self) -> String {
        self.coordinators.iter().map(Process::address).collect::<Vec<_>>().join(",")
    }

    fn shard(&self) -> Process {
        Cluster::shard(&self.address(), &[])
    }

    /// The coordinator that leads; none during an election.
    pub(crate) fn leader(&self) -> Option<usize> {
        self.coordinators.iter().position(|one| one.get("/readyz") == "ready\n")
    }

    fn worker(&self, rank: u32) -> Child {
        let mut command = Command::new(binary("zeroshard-worker"));
        let out = self.out.path().join(rank.to_string());
        command.args(flags(self.steps)).args(["--replicas", "2", "--address"]);
        command.args([&self.address(), "--rank", &rank.to_string(), "--out"]).arg(out);
        let mut worker = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let lines = BufReader::new(worker.stdout.take().unwrap()).lines();
        let results = self.results.clone();
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                results.lock().unwrap().note(&line);
            }
        });
        worker
    }

    /// Prints an event with its time and step.
    pub(crate) fn say(&self, what: &str) {
        let step = self.step().unwrap_or_default();
        eprintln!("{:7.2} s  step {step:4}  {what}", self.began.elapsed().as_secs_f64());
    }

    /// The last step that was made.
    pub(crate) fn step(&self) -> Option<u64> {
        self.results.lock().unwrap().losses.last_key_value().map(|last| *last.0)
    }

    /// Returns whether all slices have their replicas.
    fn is_whole(&self) -> bool {
        let metrics = self.leader().map(|leader| self.coordinators[leader].get("/metrics"));
        metrics
            .unwrap_or_default()
            .lines()
            .any(|line| line.starts_with("zeroshard_job_degraded_slices") && line.ends_with(" 0"))
    }

    /// Waits until a step has been made, and all slices have their replicas.
    pub(crate) fn until_step(&self, step: u64) {
        let deadline = Instant::now() + PATIENCE;
        while self.step() < Some(step) || !self.is_whole() {
            assert!(Instant::now() < deadline, "step {step} is not made, or slices lack replicas");
            thread::yield_now();
        }
    }

    pub(crate) fn kill_server(&mut self, server: usize) {
        self.shards[server].kill();
        self.say(&format!("server {server} is killed, and comes back empty"));
        self.shards[server] = self.shard();
    }

    /// Kills a coordinator, and a server with it, and starts them again.
    pub(crate) fn kill_coordinator(&mut self, coordinator: usize, with: Option<usize>) {
        let address = self.coordinators[coordinator].address().to_owned();
        self.coordinators[coordinator].kill();
        let mut what = format!("coordinator {coordinator} is killed, and started again");
        if let Some(server) = with {
            self.shards[server].kill();
            what = format!("the coordinator and server {server} are killed, and started again");
        }
        self.say(&what);
        self.coordinators[coordinator] = match &self.etcd {
            None => Cluster::coordinator_at(&address),
            Some(etcd) => Cluster::candidate(&address, etcd.address(), ELECTION),
        };
        if let Some(server) = with {
            self.shards[server] = self.shard();
        }
    }

    pub(crate) fn kill_worker(&mut self, rank: u32) {
        self.workers[rank as usize].kill().unwrap();
        self.workers[rank as usize].wait().unwrap();
        self.killed += 1;
        self.say(&format!("worker {rank} is killed, and started again"));
        self.workers[rank as usize] = self.worker(rank);
    }

    /// Waits for the end of the run, and compares its results with those of an undisturbed run. A
    /// worker may be killed before it has printed the loss of the step that it has just made.
    pub(crate) fn end(mut self, expected: &Results) {
        for worker in &mut self.workers {
            assert!(worker.wait().unwrap().success());
        }
        self.say("all workers have ended");
        let deadline = Instant::now() + PATIENCE;
        while self.results.lock().unwrap().hash.is_none() {
            assert!(Instant::now() < deadline, "no worker has printed the hash");
            thread::yield_now();
        }
        let found = self.results.lock().unwrap();
        assert_eq!(found.hash, expected.hash);
        for (step, loss) in &found.losses {
            assert_eq!(Some(loss), expected.losses.get(step), "the loss of step {step}");
        }
        let missing = expected.losses.len() - found.losses.len();
        assert!(missing <= self.killed, "{missing} losses of {} killed workers", self.killed);
    }
}

/// The random numbers of `CHAOS_SEED`.
pub(crate) fn seed() -> Random {
    let seed = std::env::var("CHAOS_SEED").map_or(1, |seed| seed.parse().unwrap());
    eprintln!("CHAOS_SEED={seed}");
    Random(seed)
}
