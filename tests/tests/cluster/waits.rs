//! Every wait has a deadline, and ends in an error that names what it waited for.
//!
//! promise: no-silent-hang

use std::{
    net::TcpListener,
    time::{Duration, Instant},
};

use zeroshard_client::{Cluster as Client, Commit, Error, Result};
use zeroshard_model::JobSpec;
use zeroshard_tests::{Cluster, FaultProxy, synthetic, training};

use crate::{connect, hasty, job, sgd, start, until};

/// The description of the missing input in a timeout, which must occur soon after the deadline.
async fn timeout<T: std::fmt::Debug>(wait: impl Future<Output = Result<T>>) -> String {
    let began = Instant::now();
    let result = wait.await;
    assert!(began.elapsed() < hasty().timeout + Duration::from_secs(5), "{:?}", began.elapsed());
    match result {
        Err(Error::Timeout { waiting_for, waited_ms }) => {
            assert!(waited_ms > 0);
            waiting_for
        }
        other => panic!("{other:?}"),
    }
}

fn assert_names(message: &str, names: &[&str]) {
    for name in names {
        assert!(message.contains(name), "{message:?} names {name:?}");
    }
}

#[tokio::test]
async fn a_commit_names_the_rank_that_has_not_committed_and_the_absent_rank() {
    let cluster = Cluster::start(2);
    let spec = job("commit", 3, sgd(1.0), synthetic::small());
    connect(cluster.address()).await.create_job(&spec).await.unwrap();
    let hasty = Client::connect(cluster.address(), hasty()).await.unwrap();
    let first = hasty.join("commit", 0).await.unwrap();
    let _second = hasty.join("commit", 1).await.unwrap();
    first.initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    let message = timeout(training::step(&first, 0)).await;
    assert_names(
        &message,
        &["step 0", "\"commit\"", "epoch", "not committed (rank 1)", "without a worker (rank 2)"],
    );
}

#[tokio::test]
async fn a_commit_without_gradients_names_the_server_that_lacks_them() {
    let cluster = Cluster::start(1);
    let spec = job("empty-handed", 1, sgd(1.0), synthetic::small());
    connect(cluster.address()).await.create_job(&spec).await.unwrap();
    let hasty = Client::connect(cluster.address(), hasty()).await.unwrap();
    let job = hasty.join("empty-handed", 0).await.unwrap();
    job.initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    let message = timeout(training::commit(&job, 0, Commit::default())).await;
    assert_names(&message, &["step 0", cluster.shards[0].address()]);
}

#[tokio::test]
async fn a_pull_of_a_missing_version_names_the_tensor_and_the_missing_rank() {
    let cluster = Cluster::start(1);
    let spec = job("pull", 2, sgd(1.0), synthetic::small());
    let mut jobs = start(cluster.address(), &spec).await;
    jobs.pop().unwrap().leave().await.unwrap();
    let hasty = Client::connect(cluster.address(), hasty()).await.unwrap();
    let job = hasty.join("pull", 1).await.unwrap();
    until("rank 0 knows", || jobs[0].epoch() == job.epoch()).await;
    jobs[0].attempt(0).unwrap().push(synthetic::gradients(&spec.manifest, 0, 0)).await.unwrap();
    let message = timeout(training::pull(&job, 1)).await;
    assert_names(&message, &["version 1", "\"w\"", "\"pull\"", "epoch", "gradient of rank 1"]);
}

#[tokio::test]
async fn a_pull_before_the_initial_parameters_names_them() {
    let cluster = Cluster::start(1);
    let spec = job("early", 1, sgd(1.0), synthetic::small());
    connect(cluster.address()).await.create_job(&spec).await.unwrap();
    let hasty = Client::connect(cluster.address(), hasty()).await.unwrap();
    let job = hasty.join("early", 0).await.unwrap();
    let message = timeout(training::pull(&job, 0)).await;
    assert_names(&message, &["version 0", "initial parameters", "\"w\""]);
}

#[tokio::test]
async fn a_job_without_enough_servers_reports_the_numbers() {
    let cluster = Cluster::start(1);
    let spec = JobSpec { min_servers: 3, ..job("many", 1, sgd(1.0), synthetic::small()) };
    let hasty = Client::connect(cluster.address(), hasty()).await.unwrap();
    let message = timeout(hasty.create_job(&spec)).await;
    assert_names(&message, &["\"many\"", "1 of 3"]);
}

#[tokio::test]
async fn an_unreachable_coordinator_is_named() {
    // The port was free a moment ago, and no other process knows it.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let error = Client::connect(&address, hasty()).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
    assert_names(&error.to_string(), &[&address, "Connection refused"]);
}

#[tokio::test]
async fn a_silent_server_is_named_by_push_and_pull() {
    let proxy = FaultProxy::start().await.unwrap();
    let coordinator = Cluster::coordinator();
    let shard = Cluster::shard(coordinator.address(), &["--advertise", proxy.address()]);
    proxy.forward_to(shard.address());
    let spec = job("silent", 1, sgd(1.0), synthetic::small());
    connect(coordinator.address()).await.create_job(&spec).await.unwrap();
    let client = Client::connect(coordinator.address(), hasty()).await.unwrap();
    let job = client.join("silent", 0).await.unwrap();
    job.initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    training::pull(&job, 0).await.unwrap();
    proxy.stall(true);
    let push =
        timeout(job.attempt(0).unwrap().push(synthetic::gradients(&spec.manifest, 0, 0))).await;
    assert_names(&push, &[proxy.address(), "rank 0", "epoch"]);
    let pull = timeout(training::pull(&job, 0)).await;
    assert_names(&pull, &[proxy.address(), "version 0"]);
    let hash = timeout(job.state_hash(0)).await;
    assert_names(&hash, &[proxy.address()]);
    // When the network recovers, the calls continue.
    proxy.stall(false);
    assert!(training::step(&job, 0).await.unwrap().applied);
}

#[tokio::test]
async fn a_silent_coordinator_is_named() {
    let proxy = FaultProxy::start().await.unwrap();
    let cluster = Cluster::start(1);
    proxy.forward_to(cluster.address());
    let client = Client::connect(proxy.address(), hasty()).await.unwrap();
    proxy.stall(true);
    assert_names(&timeout(client.status()).await, &[proxy.address()]);
    assert_names(&timeout(client.join("any", 0)).await, &[proxy.address()]);
}

#[tokio::test]
async fn a_rank_on_a_silent_host_is_lost_after_the_keepalive_time_and_replaced() {
    let coordinator = Cluster::coordinator_with(&["--keepalive-seconds", "1"]);
    let shards = vec![Cluster::shard(coordinator.address(), &[])];
    let cluster = Cluster { coordinator, shards };
    let proxy = FaultProxy::start().await.unwrap();
    proxy.forward_to(cluster.address());
    let spec = job("vanished", 2, sgd(1.0), synthetic::small());
    connect(cluster.address()).await.create_job(&spec).await.unwrap();
    let first = connect(cluster.address()).await.join("vanished", 0).await.unwrap();
    let vanished = connect(proxy.address()).await.join("vanished", 1).await.unwrap();
    first.initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    let (one, other) = tokio::join!(training::step(&first, 0), training::step(&vanished, 0));
    assert_eq!(one.unwrap(), other.unwrap());
    proxy.stall(true);
    let client = connect(cluster.address()).await;
    let (aborted, second) = tokio::join!(training::step(&first, 1), client.join("vanished", 1));
    assert!(matches!(aborted, Err(Error::StepAborted { step: 1, .. })), "{aborted:?}");
    let second = second.unwrap();
    let (one, other) = tokio::join!(training::step(&first, 1), training::step(&second, 1));
    assert_eq!(one.unwrap(), other.unwrap());
}
