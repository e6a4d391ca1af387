//! The jobs of the test: the targets of the calls, and one job that must not be disturbed.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::future::{join_all, try_join_all};
use tokio::{sync::Mutex, time::sleep};
use tokio_util::sync::CancellationToken;
use zeroshard_client::{Cluster as Client, Job, Options, Result};
use zeroshard_model::{CheckpointPolicy, JobSpec, OnLoss, OnMemoryShortage, TensorSpec};
use zeroshard_tests::{Training, synthetic, training};

use crate::{
    facts::{Facts, Member},
    guarded::{BYSTANDER, owner},
};

/// The lifetime of a job that is a target of the calls.
const LIFE: Duration = Duration::from_secs(6);
/// The time limit of each call for such a job.
const PATIENCE: Duration = Duration::from_secs(2);
/// The number of such jobs.
pub(crate) const JOBS: usize = 3;

fn tensors() -> Vec<TensorSpec> {
    vec![
        TensorSpec::new("w", [10, 100]),
        TensorSpec { frozen: true, ..TensorSpec::new("frozen", [7]) },
        TensorSpec { buffer: true, ..TensorSpec::new("mean", [3]) },
        TensorSpec::new("b", [3]),
    ]
}

/// The specifications of these jobs: one worker with checkpoints, two workers with replicas, and a
/// group.
fn spec(number: usize, url: &str) -> JobSpec {
    let name = format!("fuzz/job{number}");
    let optimizer = ["adamw", "sgd", "average"][number % 3].parse().unwrap();
    let world = if number == 0 { 1 } else { 2 };
    let spec = synthetic::job(&name, world, optimizer, tensors()).unwrap();
    match number {
        0 => JobSpec {
            checkpoints: Some(CheckpointPolicy {
                url: url.to_owned(),
                every_steps: Some(5),
                every: None,
                keep: 2,
                on_loss: OnLoss::Fail,
                on_memory_shortage: OnMemoryShortage::Wait,
            }),
            ..spec
        },
        1 => JobSpec { replicas: 2, min_servers: 2, compare_every: 3, ..spec },
        _ => JobSpec { group_size: 2, ..spec },
    }
}

/// Creates a job repeatedly until `stop`, and adds its ranks to the facts. Calls can end the job at
/// any time, so errors are expected.
pub(crate) async fn keep(
    number: usize,
    address: String,
    shards: Vec<String>,
    facts: Arc<Facts>,
    stop: CancellationToken,
) {
    let spec = spec(number, &facts.url);
    while !stop.is_cancelled() {
        let life = live(&spec, &address, &shards, &facts);
        let lived = stop.run_until_cancelled(tokio::time::timeout(LIFE, life)).await;
        if let Some(Ok(Err(_))) = lived {
            sleep(Duration::from_millis(50)).await;
        }
        facts.remove(&spec.name);
    }
}

async fn live(spec: &JobSpec, address: &str, shards: &[String], facts: &Facts) -> Result<()> {
    let client = Client::connect(address, owner(PATIENCE)).await?;
    // The previous job may still exist.
    let _ = client.delete_job(&spec.name).await;
    client.create_job(spec).await?;
    let ranks = (0..spec.world).map(|rank| client.join(&spec.name, rank));
    let ranks: Vec<Job> = try_join_all(ranks).await?;
    ranks[0].initialise(synthetic::parameters(&spec.manifest)).await?;
    let placed = client.describe_job(&spec.name).await?;
    ranks.iter().for_each(|rank| facts.insert(Member::of(rank, &placed, shards)));
    loop {
        for _ in 0..8 {
            let found = client.describe_job(&spec.name).await?;
            let version = found.version.unwrap_or_default();
            facts.update(&spec.name, |member| {
                if (member.version, member.epoch) != (version, found.epoch) {
                    (member.version, member.epoch, member.attempt) = (version, found.epoch, 0);
                }
            });
            sleep(Duration::from_millis(50)).await;
        }
        if spec.group_size == 1 {
            // A call may have committed in place of this rank.
            let step = client.describe_job(&spec.name).await?.version.unwrap_or_default();
            let _ = join_all(ranks.iter().map(|rank| training::step(rank, step))).await;
        }
    }
}

/// The job that must not be disturbed.
pub(crate) struct Bystander {
    ranks: Vec<Job>,
    pause: Duration,
    /// The number of steps that have ended.
    pub(crate) version: Arc<AtomicU64>,
    /// The number of the next step. A holder of the lock prevents further steps.
    pub(crate) step: Mutex<u64>,
}

/// The options of the bystander.
pub(crate) fn options() -> Options {
    let token = "token-of-the-bystander".to_owned().into();
    Options::default().timeout(zeroshard_tests::timeout()).token(token)
}

fn bystander() -> JobSpec {
    let adamw: zeroshard_model::Optimizer = "adamw".parse().unwrap();
    let tensors = synthetic::kinds(&adamw);
    JobSpec { min_servers: 2, ..synthetic::job(BYSTANDER, 2, adamw, tensors).unwrap() }
}

/// The number of slices of the bystander's job.
pub(crate) fn slices_of_bystander() -> u32 {
    bystander().manifest.slices().len() as u32
}

impl Bystander {
    /// Creates the job, which pauses for `pause` after each step.
    pub(crate) async fn start(address: &str, pause: Duration) -> Self {
        let spec = bystander();
        let client = Client::connect(address, options()).await.unwrap();
        client.create_job(&spec).await.unwrap();
        let mut ranks = Vec::new();
        for rank in 0..spec.world {
            let client = Client::connect(address, options()).await.unwrap();
            ranks.push(client.join(&spec.name, rank).await.unwrap());
        }
        ranks[0].initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
        for rank in &ranks {
            rank.initialised().await.unwrap();
        }
        Self { ranks, pause, version: Arc::default(), step: Mutex::new(0) }
    }

    pub(crate) fn member(&self) -> Member {
        Member {
            job: BYSTANDER.to_owned(),
            job_id: self.ranks[0].id(),
            lease: self.ranks[0].lease(),
            world: 2,
            epoch: self.ranks[0].epoch(),
            ..Member::default()
        }
    }

    /// Makes steps until `stop`.
    ///
    /// # Panics
    /// If a step fails.
    pub(crate) async fn train(&self, stop: &CancellationToken) {
        while !stop.is_cancelled() {
            let mut step = self.step.lock().await;
            let steps = self.ranks.iter().map(|rank| training::step(rank, *step));
            for report in join_all(steps).await {
                assert!(report.expect("the bystander's steps succeed").applied);
            }
            *step += 1;
            self.version.store(*step, Ordering::Relaxed);
            drop(step);
            sleep(self.pause).await;
        }
    }

    /// Asserts that the job has the same values as an undisturbed job.
    pub(crate) async fn check(self, address: &str) {
        let steps = self.step.into_inner();
        let found = self.ranks[0].state_hash(steps).await.unwrap();
        let client = Client::connect(address, options()).await.unwrap();
        drop(self.ranks);
        client.delete_job(BYSTANDER).await.unwrap();
        let began = Instant::now();
        let calm = Training { steps, options: options(), ..Training::new(bystander()) };
        let calm = calm.run(address).await.unwrap();
        eprintln!(
            "the bystander has made {steps} steps; a repetition without calls took {:?}",
            began.elapsed()
        );
        assert_eq!(found, calm.hash, "the bystander's job was disturbed");
    }
}
