//! The coordinator waits for ranks and servers that are gone, which takes most of a minute.

use std::time::{Duration, Instant};

use zeroshard_client::{Cluster as Client, Commit, Error, Job, Options};
use zeroshard_model::{JobSpec, Optimizer};
use zeroshard_tests::{Cluster, FaultProxy, Training, synthetic, training};

fn options() -> Options {
    Options::default().timeout(Duration::from_secs(150))
}

fn spec(name: &str) -> JobSpec {
    let adamw: Optimizer = "adamw".parse().unwrap();
    let tensors = synthetic::kinds(&adamw);
    JobSpec { min_servers: 2, ..synthetic::job(name, 2, adamw, tensors).unwrap() }
}

async fn connect(address: &str) -> Client {
    Client::connect(address, options()).await.unwrap()
}

/// Starts a job at version 1.
async fn start(address: &str, name: &str) -> (Job, Job) {
    connect(address).await.create_job(&spec(name)).await.unwrap();
    let first = connect(address).await.join(name, 0).await.unwrap();
    let second = connect(address).await.join(name, 1).await.unwrap();
    first.initialise(synthetic::parameters(&first.spec().manifest)).await.unwrap();
    step(&first, &second, 0).await;
    (first, second)
}

async fn step(first: &Job, second: &Job, step: u64) {
    let (one, other) = tokio::join!(training::step(first, step), training::step(second, step));
    assert_eq!(one.unwrap(), other.unwrap());
}

/// The hash after `steps` undisturbed steps.
async fn calm(address: &str, steps: u64) -> String {
    Training { steps, ..Training::new(spec("calm")) }.run(address).await.unwrap().hash
}

#[tokio::test]
async fn a_rank_that_dies_with_the_coordinator_is_replaced() {
    let mut cluster = Cluster::start(2);
    let expected = calm(cluster.address(), 2).await;
    let (first, second) = start(cluster.address(), "both").await;
    let address = cluster.address().to_owned();
    cluster.coordinator.kill();
    drop(second);
    cluster.coordinator = Cluster::coordinator_at(&address);
    // Its replacement waits until the lease of the dead one has ended.
    let second = connect(&address).await.join("both", 1).await.unwrap();
    step(&first, &second, 1).await;
    assert_eq!(first.state_hash(2).await.unwrap(), expected);
}

#[tokio::test]
async fn a_silent_partition_delays_a_step() {
    let coordinator = Cluster::coordinator();
    let proxy = FaultProxy::start().await.unwrap();
    proxy.forward_to(coordinator.address());
    let shards = [proxy.address(), coordinator.address()];
    let shards = shards.map(|address| Cluster::shard(address, &[])).into();
    let cluster = Cluster { coordinator, shards };
    let expected = calm(cluster.address(), 3).await;
    let payload = cluster.payload()[1];
    let (first, second) = start(cluster.address(), "partition").await;
    let epoch = first.epoch();
    proxy.stall(true);
    let ends = async {
        let deadline = Instant::now() + Duration::from_secs(60);
        let notices = |text: String| text.contains("zeroshard_coordinator_connected 0");
        while !notices(cluster.shards[0].get("/metrics")) {
            assert!(Instant::now() < deadline, "the server does not notice the partition");
            tokio::task::yield_now().await;
        }
        proxy.stall(false);
    };
    tokio::join!(step(&first, &second, 1), ends);
    step(&first, &second, 2).await;
    assert_eq!(first.state_hash(3).await.unwrap(), expected);
    // No rank was lost, and no gradient was sent again.
    assert_eq!((first.epoch(), cluster.payload()[1]), (epoch, 2 * payload));
}

// promise: no-silent-hang
#[tokio::test]
async fn a_partition_that_does_not_end_fails_the_job_and_names_the_server() {
    let coordinator = Cluster::coordinator();
    let proxy = FaultProxy::start().await.unwrap();
    proxy.forward_to(coordinator.address());
    let shards = [proxy.address(), coordinator.address()];
    let shards = shards.map(|address| Cluster::shard(address, &[])).into();
    let cluster = Cluster { coordinator, shards };
    let (first, second) = start(cluster.address(), "partition").await;
    proxy.stall(true);
    proxy.cut();
    let commits = [&first, &second].map(|job| training::commit(job, 1, Commit::default()));
    for failed in futures_util::future::join_all(commits).await {
        let failed = failed.unwrap_err();
        let text = failed.to_string();
        assert!(matches!(failed, Error::JobFailed { .. }), "{text}");
        assert!(text.contains(cluster.shards[0].address()), "{text}");
        assert!(text.contains("it did not connect again within 45s"), "{text}");
    }
}

#[tokio::test]
async fn ranks_join_again_after_the_coordinator_stood_still_for_longer_than_connections_last() {
    let cluster = Cluster::start(2);
    let expected = calm(cluster.address(), 2).await;
    let (first, second) = start(cluster.address(), "still").await;
    cluster.coordinator.stand_still(Duration::from_secs(40));
    let repeated = async |job: &Job| loop {
        match training::step(job, 1).await {
            Err(Error::StepAborted { .. }) => {}
            result => break result.unwrap(),
        }
    };
    let (one, other) = tokio::join!(repeated(&first), repeated(&second));
    assert_eq!(one, other);
    assert_eq!(first.state_hash(2).await.unwrap(), expected);
}
