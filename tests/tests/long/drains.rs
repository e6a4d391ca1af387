//! Servers are drained while others are killed. `CHAOS_SEED` chooses the moments.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use zeroshard_client::{Cluster as Client, Commit, Error, Job, Options};
use zeroshard_model::JobSpec;
use zeroshard_tests::{Cluster, Training, synthetic, training};

use crate::disturbed::seed;

const DRAINS: u64 = 50;
/// How long a drain may take.
const PATIENCE: Duration = Duration::from_secs(120);

fn spec(name: &str, replicas: u32) -> JobSpec {
    let optimizer = "adamw".parse().unwrap();
    let tensors = synthetic::kinds_and_large(&optimizer);
    JobSpec { replicas, min_servers: 3, ..synthetic::job(name, 2, optimizer, tensors).unwrap() }
}

async fn connect(address: &str) -> Client {
    let options = Options::default().timeout(zeroshard_tests::timeout());
    Client::connect(address, options).await.unwrap()
}

/// The steps of a run.
#[derive(Debug)]
struct Steps {
    /// The number of steps, which is decided later.
    end: AtomicU64,
    /// The number of steps that have been made.
    done: AtomicU64,
}

/// Makes the steps of a rank.
async fn train(job: Job, steps: Arc<Steps>) {
    let mut step = 0;
    while step < steps.end.load(Ordering::Acquire) {
        match training::step(&job, step).await {
            Ok(_) => {}
            Err(Error::StepAborted { .. }) => continue,
            // The step was decided, and this push came too late.
            Err(Error::StepMismatch { .. }) => {
                training::commit(&job, step, Commit::default()).await.unwrap();
            }
            Err(error) => panic!("step {step}: {error}"),
        }
        step += 1;
        steps.done.fetch_max(step, Ordering::AcqRel);
    }
}

/// Drains servers of the cluster, and kills another one during each drain.
async fn disturb(cluster: &mut Cluster) {
    let mut random = seed();
    let client = connect(cluster.address()).await;
    for drain in 0..DRAINS {
        recovered(cluster, &client).await;
        let leaves = random.below(3) as usize;
        let dies = (leaves + 1 + random.below(2) as usize) % 3;
        let address = cluster.shards[leaves].address().to_owned();
        let began = Instant::now();
        client.drain_server(&address, false).await.unwrap();
        tokio::time::sleep(Duration::from_millis(random.below(150))).await;
        cluster.shards[dies].kill();
        cluster.shards[dies] = Cluster::shard(cluster.coordinator.address(), &[]);
        loop {
            let stays = client.drain_server(&address, false).await.unwrap().stays;
            if stays.is_empty() {
                break;
            }
            assert!(began.elapsed() < PATIENCE, "drain {drain}: {stays:?}");
        }
        cluster.shards[leaves].kill();
        cluster.shards[leaves] = Cluster::shard(cluster.coordinator.address(), &[]);
        eprintln!(
            "drain {drain} of {leaves} without {dies}: {:.1} s",
            began.elapsed().as_secs_f64()
        );
    }
}

/// Waits until the servers that run now, and no killed ones, are connected, and then until all
/// slices have their replicas. A kill before that could take the second of two replicas.
async fn recovered(cluster: &Cluster, client: &Client) {
    let deadline = Instant::now() + PATIENCE;
    let running: BTreeSet<_> = cluster.shards.iter().map(|shard| shard.address()).collect();
    loop {
        let status = client.status().await.unwrap();
        let connected: BTreeSet<_> = status.servers.iter().map(|of| &*of.server.address).collect();
        let is_whole = status.jobs.iter().all(|job| job.degraded_slices == 0);
        if connected == running && is_whole {
            return;
        }
        assert!(Instant::now() < deadline, "{connected:?} of {running:?} are connected");
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn chaos_drains_a_server_and_kills_another_fifty_times_in_a_run() {
    let mut cluster = Cluster::start(3);
    let address = cluster.address().to_owned();
    let fire = spec("fire", 2);
    connect(&address).await.create_job(&fire).await.unwrap();
    let mut jobs = Vec::new();
    for rank in 0..2 {
        jobs.push(connect(&address).await.join("fire", rank).await.unwrap());
    }
    jobs[0].initialise(synthetic::parameters(&fire.manifest)).await.unwrap();
    let steps = Arc::new(Steps { end: AtomicU64::new(u64::MAX), done: AtomicU64::new(0) });
    let ranks = jobs.iter().map(|job| tokio::spawn(train(job.clone(), steps.clone())));
    let ranks: Vec<_> = ranks.collect();
    disturb(&mut cluster).await;
    // Later than any step that a rank has begun.
    steps.end.store(steps.done.load(Ordering::Acquire) + 20, Ordering::Release);
    for rank in ranks {
        rank.await.unwrap();
    }
    let steps = steps.end.load(Ordering::Acquire);
    let found = jobs[0].state_hash(steps).await.unwrap();
    let calm = Training { steps, ..Training::new(spec("calm", 1)) };
    assert_eq!(found, calm.run(&address).await.unwrap().hash, "after {steps} steps");
}
