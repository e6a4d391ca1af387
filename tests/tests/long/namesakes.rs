//! Two clusters whose jobs have one name, and save at one place. `CHAOS_SEED` chooses the kills.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tempfile::TempDir;
use tokio::task::{JoinHandle, yield_now};
use zeroshard_client::{Cluster as Client, Commit, CreateJob, Error, Job, Options, StepReport};
use zeroshard_model::{
    CheckpointPolicy, JobSpec, OnLoss, OnMemoryShortage, Restore, RestoreVersion,
};
use zeroshard_tests::{Cluster, run, synthetic, training};

use crate::disturbed::{Random, seed};

const KILLS: u64 = 50;
const RANKS: u32 = 2;
const SERVERS: usize = 2;
/// The gradients of one job are those of other ranks than the gradients of the other job.
const APART: u32 = 100;
/// How long a wait for a step may take.
const PATIENCE: Duration = Duration::from_secs(180);

fn url(directory: &Path) -> String {
    format!("file://{}", directory.display())
}

fn spec(checkpoints: Option<CheckpointPolicy>) -> JobSpec {
    let optimizer = "adamw".parse().unwrap();
    let tensors = synthetic::kinds_and_large(&optimizer);
    let job = synthetic::job("train", RANKS, optimizer, tensors).unwrap();
    JobSpec { checkpoints, min_servers: SERVERS as u32, ..job }
}

async fn connect(address: &str) -> Client {
    let options = Options::default().timeout(zeroshard_tests::timeout());
    Client::connect(address, options).await.unwrap()
}

/// Makes a step with the data of the job with this number.
async fn step(job: &Job, number: u32, step: u64) -> Result<StepReport, Error> {
    let attempt = job.attempt(step)?;
    let rank = number * APART + job.rank();
    attempt.push(synthetic::gradients(&job.spec().manifest, rank, step)).await?;
    attempt.commit(Commit::default()).await
}

/// The results of the ranks of a job.
#[derive(Debug)]
struct Progress {
    number: u32,
    /// The version of the other job from which it has started.
    fork: u64,
    /// The number of steps, which is decided later.
    end: AtomicU64,
    /// The number of steps of the job's present state.
    done: AtomicU64,
    /// The number of steps that were made, with those that were made again.
    made: AtomicU64,
    /// The hashes of the versions to which the job has returned, and the number of returns.
    returns: Mutex<(BTreeMap<u64, String>, u64)>,
}

impl Progress {
    /// Notes the state to which the job has returned. It must be the same each time.
    async fn returned(&self, job: &Job, version: u64) {
        // Another return may come in between.
        let Ok(hash) = job.state_hash(version).await else { return };
        let mut returns = self.returns.lock().unwrap();
        let known = returns.0.entry(version).or_insert_with(|| hash.clone());
        assert_eq!(*known, hash, "job {} at version {version}", self.number);
        returns.1 += 1;
    }
}

/// Makes a step of a rank, or learns that it was made. Returns the next one.
async fn make(job: &Job, progress: &Progress, at: u64) -> Result<u64, Error> {
    match step(job, progress.number, at).await {
        Ok(_) => Ok(at + 1),
        Err(Error::StepAborted { .. }) => Ok(at),
        // The step was decided, and this push came too late.
        Err(Error::StepMismatch { .. }) => {
            training::commit(job, at, Commit::default()).await.map(|_| at + 1)
        }
        Err(error) => Err(error),
    }
}

/// Makes the steps of a rank.
async fn train(job: Job, progress: Arc<Progress>) {
    let mut at = progress.fork;
    while at < progress.end.load(Ordering::Acquire) {
        let next = match make(&job, &progress, at).await {
            Ok(next) => next,
            Err(Error::RolledBack { version, .. }) => {
                if job.rank() == 0 {
                    progress.returned(&job, version).await;
                }
                version
            }
            Err(error) => panic!("step {at} of job {}: {error}", progress.number),
        };
        if job.rank() == 0 {
            progress.made.fetch_add(u64::from(next > at), Ordering::AcqRel);
            progress.done.store(next, Ordering::Release);
        }
        at = next;
    }
}

/// A cluster with a job of the name that both jobs have.
struct Side {
    cluster: Cluster,
    progress: Arc<Progress>,
    jobs: Vec<Job>,
    ranks: Vec<JoinHandle<()>>,
}

impl Side {
    /// Creates the job and begins to train it.
    async fn start(number: u32, cluster: Cluster, create: &CreateJob) -> Self {
        let client = connect(cluster.address()).await;
        client.create_job(create.clone()).await.unwrap();
        let mut jobs = Vec::new();
        for rank in 0..RANKS {
            jobs.push(connect(cluster.address()).await.join("train", rank).await.unwrap());
        }
        if create.restore.is_none() {
            jobs[0].initialise(synthetic::parameters(&create.spec.manifest)).await.unwrap();
        }
        let progress = Arc::new(Progress {
            number,
            fork: jobs[0].version().unwrap_or(0),
            end: AtomicU64::new(u64::MAX),
            done: AtomicU64::new(0),
            made: AtomicU64::new(0),
            returns: Mutex::default(),
        });
        let ranks = jobs.iter().map(|job| tokio::spawn(train(job.clone(), progress.clone())));
        let ranks = ranks.collect();
        Self { cluster, progress, jobs, ranks }
    }

    /// Waits until further steps have been made.
    async fn until_steps(&self, steps: u64) {
        let (began, until) = (Instant::now(), self.progress.made.load(Ordering::Acquire) + steps);
        while self.progress.made.load(Ordering::Acquire) < until {
            let number = self.progress.number;
            assert!(began.elapsed() < PATIENCE, "job {number} makes no step");
            assert!(!self.ranks.iter().any(JoinHandle::is_finished), "job {number} has failed");
            yield_now().await;
        }
    }

    /// Kills the coordinator, a server, or both, and starts them again.
    async fn kill(&mut self, random: &mut Random) {
        self.until_steps(1 + random.below(4)).await;
        tokio::time::sleep(Duration::from_millis(random.below(100))).await;
        let kills = [(true, false), (false, true), (false, true), (true, true)];
        let (coordinator, server) = kills[random.below(4) as usize];
        let index = random.below(SERVERS as u64) as usize;
        let address = self.cluster.address().to_owned();
        if server {
            self.cluster.shards[index].kill();
        }
        if coordinator {
            self.cluster.coordinator.kill();
            self.cluster.coordinator = Cluster::coordinator_at(&address);
        }
        if server {
            self.cluster.shards[index] = Cluster::shard(&address, &[]);
        }
        let Self { progress, .. } = self;
        let done = progress.done.load(Ordering::Acquire);
        eprintln!("job {} at {done}: {coordinator} {server}", progress.number);
    }

    /// Ends the run after some more steps. Every state that was seen must be one of an undisturbed
    /// run. Returns the number of returns, and the final hash.
    async fn end(self) -> (u64, String) {
        self.until_steps(5).await;
        let Self { progress, jobs, ranks, .. } = self;
        let end = progress.done.load(Ordering::Acquire) + 20;
        progress.end.store(end, Ordering::Release);
        for rank in ranks {
            rank.await.unwrap();
        }
        let (mut seen, number) = progress.returns.lock().unwrap().clone();
        let last = jobs[0].state_hash(end).await.unwrap();
        seen.insert(end, last.clone());
        let expected = calm(&progress, &seen).await;
        assert_eq!(seen, expected, "job {}", progress.number);
        (number, last)
    }
}

/// The hashes of an undisturbed run at the versions of `seen`.
async fn calm(progress: &Progress, seen: &BTreeMap<u64, String>) -> BTreeMap<u64, String> {
    let (cluster, spec) = (Cluster::start(SERVERS), spec(None));
    let client = connect(cluster.address()).await;
    client.create_job(CreateJob::new(spec.clone())).await.unwrap();
    let (one, other) = tokio::join!(client.join("train", 0), client.join("train", 1));
    let (one, other) = (one.unwrap(), other.unwrap());
    one.initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    let mut hashes = BTreeMap::new();
    for at in 0..=*seen.last_key_value().unwrap().0 {
        if seen.contains_key(&at) {
            hashes.insert(at, one.state_hash(at).await.unwrap());
        }
        let number = if at < progress.fork { 0 } else { progress.number };
        tokio::try_join!(step(&one, number, at), step(&other, number, at)).unwrap();
    }
    hashes
}

#[tokio::test(flavor = "multi_thread")]
async fn chaos_in_two_clusters_with_one_job_name_and_one_url_never_mixes_their_states() {
    let (directory, began, mut random) = (TempDir::new().unwrap(), Instant::now(), seed());
    let policy = CheckpointPolicy {
        url: url(directory.path()),
        every_steps: Some(5),
        every: None,
        keep: 2,
        on_loss: OnLoss::Restore,
        on_memory_shortage: OnMemoryShortage::Wait,
    };
    let spec = spec(Some(policy.clone()));
    let (one, two) = (Cluster::start(SERVERS), Cluster::start(SERVERS));
    let client = connect(one.address()).await;
    let mut create = CreateJob::new(spec.clone());
    let mut one = Side::start(0, one, &create).await;
    one.until_steps(20).await;
    let owner = client.describe_job("train").await.unwrap().id;
    let other = connect(two.address()).await;
    let version = RestoreVersion::LatestIfAny;
    create.restore =
        Some(Restore { url: policy.url.clone(), job: "train".to_owned(), version, line: None });
    // The owner lives, although its processes are killed.
    for _ in 0..KILLS / 5 {
        one.kill(&mut random).await;
        let refused = other.create_job(create.clone()).await.unwrap_err().to_string();
        assert!(refused.contains(&format!("{owner:016x}")), "{refused}");
    }
    // An operator takes the owner for over, but it goes on, and another job continues from its
    // checkpoint with other data.
    let release = ["checkpoint", "release", "train", "--url", &policy.url];
    assert!(run("zsctl", &release).status.success());
    let mut sides = [one, Side::start(1, two, &create).await];
    sides[1].until_steps(20).await;
    for _ in KILLS / 5..KILLS {
        sides[random.below(2) as usize].kill(&mut random).await;
    }
    let [one, two] = sides.map(Side::end);
    let ((first, one), (second, two)) = (one.await, two.await);
    assert_ne!(one, two);
    assert!(first > 0 && second > 0, "{first} and {second} returns");
    let took = began.elapsed().as_secs_f64();
    eprintln!("{KILLS} kills, {first} and {second} returns to a checkpoint in {took:.0} s");
}
