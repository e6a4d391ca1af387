//! SIGTERM: a server ends in order and within its drain time, regardless of open calls.
//!
//! promise: no-silent-hang

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use zeroshard_client::{Cluster as Client, Commit, Error, Options};
use zeroshard_model::JobSpec;
use zeroshard_proto::{pb, status::from_status};
use zeroshard_tests::{Cluster, Process, Training, stock, synthetic, training};

use crate::{
    adamw,
    checkpoints::{directory, policy},
    connect, job, sgd, start, until,
};

/// Stops `process` while `call` is open. Returns the result of the call, and the duration of the
/// shutdown.
async fn stop<T>(process: Process, call: impl Future<Output = T>) -> (T, Duration) {
    let stopping = async {
        let began = Instant::now();
        let status = tokio::task::spawn_blocking(move || process.stop()).await.unwrap();
        assert!(status.success(), "{status}");
        began.elapsed()
    };
    tokio::join!(call, stopping)
}

const DRAIN: &[&str] = &["--drain-seconds", "5"];

#[tokio::test]
async fn a_shard_server_stops_while_pulls_wait() {
    let mut cluster = Cluster::start_with(1, DRAIN);
    let _jobs = start(cluster.address(), &job("pull", 1, sgd(1.0), synthetic::small())).await;
    let shard = cluster.shards.remove(0);
    let request = stock::read("pull", 9, [0, 1]);
    let mut waiting = stock::open_pull(shard.address(), request).await.unwrap();
    let (answer, took) = stop(shard, waiting.message()).await;
    let error = from_status(&answer.unwrap_err(), "shard server");
    assert!(matches!(error, Error::Unavailable { .. } | Error::JobFailed { .. }), "{error}");
    assert!(took < Duration::from_secs(5), "{took:?}: nothing was left to wait for");
}

#[tokio::test]
async fn a_shard_server_stops_during_a_stalled_push() {
    let mut cluster = Cluster::start_with(1, DRAIN);
    let jobs = start(cluster.address(), &job("push", 1, sgd(1.0), synthetic::small())).await;
    let shard = cluster.shards.remove(0);
    // A push without an end.
    let begin = futures_util::stream::iter([stock::open(stock::begin(&jobs[0], Some(0)))]);
    let messages = begin.chain(futures_util::stream::pending());
    let address = format!("http://{}", shard.address());
    let mut client = pb::data_service_client::DataServiceClient::connect(address).await.unwrap();
    let (answer, took) = stop(shard, client.push(messages)).await;
    assert!(answer.is_err());
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[tokio::test]
async fn a_coordinator_stops_while_commits_wait() {
    let cluster = Cluster::start(1);
    let spec = job("commit", 2, sgd(1.0), synthetic::small());
    connect(cluster.address()).await.create_job(&spec).await.unwrap();
    let Cluster { coordinator, shards: _shards } = cluster;
    let options = Options::default().timeout(Duration::from_secs(3));
    let client = Client::connect(coordinator.address(), options).await.unwrap();
    let job = client.join("commit", 0).await.unwrap();
    job.initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    job.attempt(0).unwrap().push(synthetic::gradients(&spec.manifest, 0, 0)).await.unwrap();
    let (answer, took) = stop(coordinator, training::commit(&job, 0, Commit::default())).await;
    assert!(answer.is_err(), "{answer:?}");
    assert!(took < Duration::from_secs(12), "{took:?}");
}

#[tokio::test]
async fn a_second_signal_ends_a_server_at_once() {
    let mut cluster = Cluster::start_with(1, &["--drain-seconds", "600"]);
    let _jobs = start(cluster.address(), &job("push", 1, sgd(1.0), synthetic::small())).await;
    let shard = cluster.shards.remove(0);
    until("the server is ready", || shard.get("/readyz") == "ready\n").await;
    // The server hands its job over before it ends, but the coordinator does not answer.
    cluster.coordinator.stand_still(Duration::from_secs(10));
    shard.terminate();
    until("the server is not ready", || shard.get("/readyz") == "not ready\n").await;
    shard.terminate();
    let status = tokio::task::spawn_blocking(move || shard.wait()).await.unwrap();
    assert_eq!(status.code(), Some(143));
}

#[tokio::test]
async fn a_job_is_saved_before_a_server_with_its_only_copy_stops_and_then_continues() {
    let (spec, directory) = (|name| job(name, 1, adamw(), synthetic::kinds(&adamw())), directory());
    let mut cluster = Cluster::start(2);
    let calm = Training { steps: 6, ..Training::new(spec("calm")) };
    let expected = calm.run(cluster.address()).await.unwrap().hash;
    let checkpoints = Some(policy(directory.path(), 1000));
    let spec = JobSpec { checkpoints, min_servers: 2, ..spec("saved") };
    let rank = start(cluster.address(), &spec).await.remove(0);
    for step in 0..3 {
        training::step(&rank, step).await.unwrap();
    }
    let ((), took) = stop(cluster.shards.remove(0), async {}).await;
    assert!(took < Duration::from_secs(10), "{took:?}");
    let mut step = 3;
    while step < 6 {
        match training::step(&rank, step).await {
            Ok(report) => step = report.version,
            Err(Error::RolledBack { version, .. }) => assert_eq!(version, 3, "it was saved"),
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(rank.state_hash(6).await.unwrap(), expected);
}

#[tokio::test]
async fn a_job_with_replicas_continues_when_a_server_is_stopped_during_training() {
    let spec = |name| job(name, 1, adamw(), synthetic::kinds(&adamw()));
    let mut cluster = Cluster::start(3);
    let calm = Training { steps: 6, ..Training::new(spec("calm")) };
    let expected = calm.run(cluster.address()).await.unwrap().hash;
    let spec = JobSpec { replicas: 2, min_servers: 3, ..spec("replicated") };
    let rank = start(cluster.address(), &spec).await.remove(0);
    let shard = cluster.shards.remove(0);
    let train = async {
        let mut step = 0;
        while step < 6 {
            match training::step(&rank, step).await {
                Ok(report) => step = report.version,
                Err(Error::StepAborted { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    };
    let ((), took) = stop(shard, train).await;
    assert!(took < Duration::from_secs(10), "{took:?}");
    assert_eq!(rank.state_hash(6).await.unwrap(), expected);
}

#[tokio::test]
async fn all_processes_of_a_cluster_are_stopped_at_once_and_its_jobs_are_saved() {
    let directory = directory();
    let cluster = Cluster::start(2);
    let checkpoints = Some(policy(directory.path(), 1000));
    let spec = job("all", 1, adamw(), synthetic::kinds(&adamw()));
    let spec = JobSpec { checkpoints, min_servers: 2, ..spec };
    let rank = start(cluster.address(), &spec).await.remove(0);
    for step in 0..2 {
        training::step(&rank, step).await.unwrap();
    }
    let Cluster { coordinator, shards } = cluster;
    let processes: Vec<_> = [coordinator].into_iter().chain(shards).collect();
    processes.iter().for_each(Process::terminate);
    for process in processes {
        let status = tokio::task::spawn_blocking(move || process.wait()).await.unwrap();
        assert!(status.success(), "{status}");
    }
    let saved = directory.path().join("all").join(format!("{:020}", 2)).join("manifest.json");
    assert!(saved.exists(), "{}", saved.display());
}

#[tokio::test]
async fn a_server_without_open_calls_stops_at_once() {
    let cluster = Cluster::start(1);
    for process in [cluster.shards.into_iter().next().unwrap(), cluster.coordinator] {
        let ((), took) = stop(process, async {}).await;
        assert!(took < Duration::from_secs(5), "{took:?}");
    }
}
