//! Servers, workers and the coordinator are killed at random moments of a run with replicas. It
//! ends with the losses and the hash of an undisturbed run. `CHAOS_SEED` chooses the moments.

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
use zeroshard_tests::{Cluster, binary, run};

const SERVERS: usize = 3;
const WORKERS: u32 = 2;
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
#[derive(Debug, Default, PartialEq)]
struct Results {
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
fn calm(steps: u64) -> Results {
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
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// A run that is being disturbed.
struct Run {
    cluster: Cluster,
    workers: Vec<Child>,
    steps: u64,
    results: Arc<Mutex<Results>>,
    began: Instant,
    out: TempDir,
}

impl Run {
    fn start(steps: u64) -> Self {
        let (cluster, results) = (Cluster::start(SERVERS), Arc::default());
        let began = Instant::now();
        let out = tempfile::tempdir().unwrap();
        let mut run = Self { cluster, workers: Vec::new(), steps, results, began, out };
        run.workers = (0..WORKERS).map(|rank| run.worker(rank)).collect();
        run
    }

    fn worker(&self, rank: u32) -> Child {
        let mut command = Command::new(binary("zeroshard-worker"));
        let out = self.out.path().join(rank.to_string());
        command.args(flags(self.steps)).args(["--replicas", "2", "--address"]);
        command.args([self.cluster.address(), "--rank", &rank.to_string(), "--out"]).arg(out);
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

    fn say(&self, what: &str) {
        let step = self.results.lock().unwrap().losses.last_key_value().map_or(0, |last| *last.0);
        eprintln!("{:7.2} s  step {step:4}  {what}", self.began.elapsed().as_secs_f64());
    }

    /// Waits until a step has been made, and all slices have their replicas.
    fn until_step(&self, step: u64) {
        let deadline = Instant::now() + PATIENCE;
        let done = || self.results.lock().unwrap().losses.last_key_value().map(|last| *last.0);
        let whole = |text: String| {
            text.lines().any(|line| {
                line.starts_with("zeroshard_job_degraded_slices") && line.ends_with(" 0")
            })
        };
        while done() < Some(step) || !whole(self.cluster.coordinator.get("/metrics")) {
            assert!(Instant::now() < deadline, "step {step} is not made, or slices lack replicas");
            thread::yield_now();
        }
    }

    fn kill_server(&mut self, server: usize) {
        self.cluster.shards[server].kill();
        self.say(&format!("server {server} is killed, and comes back empty"));
        self.cluster.shards[server] = Cluster::shard(self.cluster.coordinator.address(), &[]);
    }

    fn kill_coordinator(&mut self, with: Option<usize>) {
        let address = self.cluster.coordinator.address().to_owned();
        self.cluster.coordinator.kill();
        let mut what = "the coordinator is killed, and started again".to_owned();
        if let Some(server) = with {
            self.cluster.shards[server].kill();
            what = format!("the coordinator and server {server} are killed, and started again");
        }
        self.say(&what);
        self.cluster.coordinator = Cluster::coordinator_at(&address);
        if let Some(server) = with {
            self.cluster.shards[server] = Cluster::shard(&address, &[]);
        }
    }

    fn kill_worker(&mut self, rank: u32) {
        self.workers[rank as usize].kill().unwrap();
        self.workers[rank as usize].wait().unwrap();
        self.say(&format!("worker {rank} is killed, and started again"));
        self.workers[rank as usize] = self.worker(rank);
    }

    fn end(mut self) -> Results {
        for worker in &mut self.workers {
            assert!(worker.wait().unwrap().success());
        }
        self.say("all workers have ended");
        let deadline = Instant::now() + PATIENCE;
        while self.results.lock().unwrap().hash.is_none() {
            assert!(Instant::now() < deadline, "no worker has printed the hash");
            thread::yield_now();
        }
        std::mem::take(&mut self.results.lock().unwrap())
    }
}

fn seed() -> Random {
    let seed = std::env::var("CHAOS_SEED").map_or(1, |seed| seed.parse().unwrap());
    eprintln!("CHAOS_SEED={seed}");
    Random(seed)
}

#[test]
fn chaos_kills_any_process_ten_times_in_a_run() {
    const STEPS: u64 = 300;
    let (expected, mut random) = (calm(STEPS), seed());
    let mut run = Run::start(STEPS);
    for kill in 0..10 {
        run.until_step(kill * 28 + 1 + random.below(25));
        // Within a step or between two.
        thread::sleep(Duration::from_millis(random.below(200)));
        match random.below(6) {
            0 => run.kill_coordinator(None),
            rank @ 1..=2 => run.kill_worker(rank as u32 - 1),
            server => run.kill_server(server as usize - 3),
        }
    }
    assert!(run.end() == expected, "the losses or the hash differ");
}

#[test]
fn chaos_kills_the_coordinator_and_a_server_at_the_same_instant_in_twenty_runs() {
    const STEPS: u64 = 20;
    let (expected, mut random) = (calm(STEPS), seed());
    for _ in 0..20 {
        let mut run = Run::start(STEPS);
        run.until_step(random.below(15));
        thread::sleep(Duration::from_millis(random.below(200)));
        run.kill_coordinator(Some(random.below(SERVERS as u64) as usize));
        assert!(run.end() == expected, "the losses or the hash differ");
    }
}
