//! Jobs and readers do not affect each other.
//!
//! promise: isolation

use futures_util::{StreamExt, stream};
use zeroshard_client::{Error, TensorData, TensorId};
use zeroshard_model::{JobSpec, TensorSpec};
use zeroshard_proto::pb;
use zeroshard_tests::{Cluster, Training, stock, synthetic};

use crate::{connect, job, sgd, start, until};

#[tokio::test]
async fn a_job_steps_while_the_servers_open_a_large_one() {
    // 2 GiB of master weights and accumulators, of which every page is accessed.
    const NUMEL: u64 = 1 << 28;
    let cluster = Cluster::start(1);
    let large = job("large", 1, sgd(1.0), vec![TensorSpec::new("w", [NUMEL])]);
    let client = connect(cluster.address()).await;
    let small = Training::new(job("small", 1, sgd(1.0), synthetic::small()));
    let opening = client.create_job(&large);
    let stepping = async {
        until("the large job is being opened", || {
            cluster.coordinator.get("/metrics").contains("job=\"large\"")
        })
        .await;
        small.run(cluster.address()).await.unwrap()
    };
    tokio::pin!(opening, stepping);
    tokio::select! {
        opened = &mut opening => panic!("the large job was opened first: {opened:?}"),
        trained = &mut stepping => assert_eq!(trained.reports.len(), 3),
    }
    opening.await.unwrap();
}

#[tokio::test]
async fn deleting_a_job_ends_its_pushes_and_pulls_and_frees_its_memory() {
    let cluster = Cluster::start(1);
    let spec = job("deleted", 1, sgd(1.0), vec![TensorSpec::new("w", [1 << 20])]);
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let address = cluster.shards[0].address();
    // A push that has begun and does not continue, and a pull of a version that does not arrive.
    let messages =
        [stock::open(stock::begin(&trainer, Some(0))), stock::extent(0, 0, &[1.0; 1000])];
    let push = stock::push_stream(address, stream::iter(messages).chain(stream::pending()));
    let pull = stock::pull(address, stock::read("deleted", 5, [0]));
    let delete = async {
        until("both are open", || {
            let metrics = cluster.shards[0].get("/metrics");
            ["Push", "Pull"].iter().all(|method| {
                metrics.contains(&format!(
                    "in_flight{{method=\"/zeroshard.v1.DataService/{method}\"}} 1\n"
                ))
            })
        })
        .await;
        connect(cluster.address()).await.delete_job("deleted").await.unwrap();
    };
    let (pushed, pulled, ()) = tokio::join!(push, pull, delete);
    assert!(matches!(pushed, Err(Error::JobFailed { .. })), "{pushed:?}");
    assert!(matches!(pulled, Err(Error::JobFailed { .. })), "{pulled:?}");
    until("its memory is free", || {
        cluster.shards[0].get("/metrics").contains("zeroshard_memory_bytes{kind=\"master\"} 0\n")
    })
    .await;
}

#[tokio::test]
async fn a_call_for_a_job_that_was_deleted_and_created_again_is_refused() {
    let cluster = Cluster::start(1);
    let spec: JobSpec = job("again", 1, sgd(1.0), synthetic::small());
    let old = start(cluster.address(), &spec).await.remove(0);
    let begin = stock::begin(&old, Some(0));
    let client = connect(cluster.address()).await;
    let before = client.describe_job("again").await.unwrap();
    client.delete_job("again").await.unwrap();
    let new = start(cluster.address(), &spec).await.remove(0);
    assert_ne!(old.id(), new.id());
    let address = cluster.shards[0].address();
    let pushed = stock::push(address, vec![stock::open(begin), stock::extent(0, 0, &[1.0])]).await;
    assert!(matches!(pushed, Err(Error::JobReplaced { .. })), "{pushed:?}");
    let reader = pb::PullRequest { job_id: before.id, ..stock::read("again", 0, [0]) };
    let pulled = stock::pull(address, reader).await;
    assert!(matches!(pulled, Err(Error::JobReplaced { .. })), "{pulled:?}");
    let gradients = vec![TensorData::new(TensorId::new(0), vec![1.0; 1000])];
    let late = match old.attempt(0) {
        Ok(attempt) => attempt.push(gradients).await,
        Err(error) => Err(error),
    };
    assert!(late.is_err());
    new.attempt(0).unwrap().push_absent(&synthetic::tensor_ids([0])).await.unwrap();
}
