//! SIGTERM: a server ends in order and within its drain time, regardless of open calls.

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use zeroshard_client::{Cluster as Client, Commit, Error, Options};
use zeroshard_proto::pb;
use zeroshard_tests::{Cluster, Process, stock, synthetic, training};

use crate::{connect, job, sgd, start};

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
    let error = Error::from_status(&answer.unwrap_err(), "shard server");
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
async fn a_server_without_open_calls_stops_at_once() {
    let cluster = Cluster::start(1);
    for process in [cluster.shards.into_iter().next().unwrap(), cluster.coordinator] {
        let ((), took) = stop(process, async {}).await;
        assert!(took < Duration::from_secs(5), "{took:?}");
    }
}
