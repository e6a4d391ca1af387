//! A contribution counts once, even if it is retried, duplicated or reordered.
//!
//! promise: exactly-once

use zeroshard_client::{Cluster as Client, Commit, Job, Transport};
use zeroshard_model::{JobSpec, TensorSpec};
use zeroshard_tests::{Cluster, FaultProxy, Training, stock, synthetic, training};

use crate::{adamw, job, options, start, start_over};

/// The number of elements of the job below.
const NUMEL: usize = 300_000;

fn spec(name: &str) -> JobSpec {
    job(name, 1, adamw(), vec![TensorSpec::new("w", [NUMEL as u64])])
}

/// The hash after one step without disturbances.
async fn undisturbed(address: &str) -> String {
    let training = Training { steps: 1, ..Training::new(spec("undisturbed")) };
    training.run(address).await.unwrap().hash
}

async fn commit(job: &Job) -> String {
    assert!(job.attempt(0).unwrap().commit(Commit::default()).await.unwrap().applied);
    job.state_hash(1).await.unwrap()
}

#[tokio::test]
async fn a_push_that_is_sent_twice_counts_once() {
    let cluster = Cluster::start(1);
    let job = start(cluster.address(), &spec("twice")).await.remove(0);
    for _ in 0..2 {
        job.attempt(0)
            .unwrap()
            .push(synthetic::gradients(&job.spec().manifest, 0, 0))
            .await
            .unwrap();
    }
    let duplicate = format!(
        "zeroshard_payload_bytes_total{{direction=\"duplicate\",operation=\"push\"}} {}",
        4 * NUMEL
    );
    assert!(cluster.shards[0].get("/metrics").contains(&duplicate));
    assert_eq!(commit(&job).await, undisturbed(cluster.address()).await);
}

#[tokio::test]
async fn pieces_that_overlap_in_any_order_count_once() {
    let cluster = Cluster::start(1);
    let job = start(cluster.address(), &spec("pieces")).await.remove(0);
    let values = synthetic::values(1 << 20, NUMEL);
    let pieces = [200_000..NUMEL, 50_000..120_000, 0..60_000, 100_000..250_000, 7..8, 0..NUMEL];
    let mut added = 0;
    for range in pieces {
        let messages = vec![
            stock::open(stock::begin(&job, Some(0))),
            stock::extent(0, range.start as u64, &values[range.clone()]),
        ];
        let counted = stock::push(cluster.shards[0].address(), messages).await.unwrap();
        assert_eq!(counted.added + counted.duplicates, range.len() as u64);
        added += counted.added;
    }
    assert_eq!(added, NUMEL as u64);
    assert_eq!(commit(&job).await, undisturbed(cluster.address()).await);
}

#[tokio::test]
async fn pieces_of_two_ranks_interleaved_and_repeated_count_once_each() {
    let cluster = Cluster::start(1);
    let expected = {
        let training = Training { steps: 1, ..Training::new(JobSpec { world: 2, ..spec("calm") }) };
        training.run(cluster.address()).await.unwrap().hash
    };
    let jobs = start(cluster.address(), &JobSpec { world: 2, ..spec("wild") }).await;
    let values = [0u64, 1].map(|rank| synthetic::values((rank << 48) | (1 << 20), NUMEL));
    let piece = 70_000;
    // The later rank comes first, and each piece is sent twice.
    for start in (0..NUMEL).step_by(piece).rev() {
        for rank in [1, 0, 1, 0] {
            let end = NUMEL.min(start + piece);
            let messages = vec![
                stock::open(stock::begin(&jobs[rank], Some(0))),
                stock::extent(0, start as u64, &values[rank][start..end]),
            ];
            stock::push(cluster.shards[0].address(), messages).await.unwrap();
        }
    }
    let (first, second) = tokio::join!(commit(&jobs[0]), commit(&jobs[1]));
    assert_eq!((first, second), (expected.clone(), expected));
}

#[tokio::test]
async fn a_repeated_commit_gets_the_same_report() {
    let cluster = Cluster::start(1);
    let job = start(cluster.address(), &spec("commits")).await.remove(0);
    let report = training::step(&job, 0).await.unwrap();
    assert_eq!(job.attempt(0).unwrap().commit(Commit::default()).await.unwrap(), report);
    assert_eq!(job.state_hash(1).await.unwrap(), undisturbed(cluster.address()).await);
}

/// A coordinator, and one shard server that is reached through a proxy.
async fn behind_proxy() -> (Cluster, FaultProxy) {
    let proxy = FaultProxy::start().await.unwrap();
    let coordinator = Cluster::coordinator();
    let shard = Cluster::shard(coordinator.address(), &["--advertise", proxy.address()]);
    proxy.forward_to(shard.address());
    (Cluster { coordinator, shards: vec![shard] }, proxy)
}

#[tokio::test]
async fn a_push_over_a_cut_connection_is_resumed_and_counts_once() {
    let (cluster, proxy) = behind_proxy().await;
    let expected = undisturbed(cluster.address()).await;
    let over_grpc = [1, 300, 66_000, 500_000, 1_190_000].map(|bytes| (Transport::Grpc, bytes));
    // The opening message and two places in the outbox are shorter than 200 bytes together.
    let over_shm = [1, 100, 150].map(|bytes| (Transport::Shm, bytes));
    for (index, (transport, bytes)) in over_grpc.into_iter().chain(over_shm).enumerate() {
        let name = format!("cut-{index}");
        let jobs = start_over(Some(transport), cluster.address(), &spec(&name)).await;
        let job = jobs.into_iter().next().unwrap();
        proxy.cut_after(bytes);
        job.attempt(0)
            .unwrap()
            .push(synthetic::gradients(&job.spec().manifest, 0, 0))
            .await
            .unwrap();
        assert_eq!(proxy.cuts(), index as u64 + 1, "the connection was cut");
        assert_eq!(commit(&job).await, expected, "{transport:?}, cut after {bytes} bytes");
    }
}

#[tokio::test]
async fn a_pull_over_a_cut_connection_is_resumed() {
    let (cluster, proxy) = behind_proxy().await;
    let cuts: [(_, &[u64]); 2] =
        [(Transport::Grpc, &[1, 66_000, 700_000]), (Transport::Shm, &[1, 10, 100])];
    for (index, (transport, cuts)) in cuts.into_iter().enumerate() {
        let options = options().chunk_bytes(64 << 10).transport(Some(transport));
        let client = Client::connect(cluster.address(), options).await.unwrap();
        let name = format!("pull-{index}");
        client.create_job(&spec(&name)).await.unwrap();
        let job = client.join(&name, 0).await.unwrap();
        job.initialise(synthetic::parameters(&job.spec().manifest)).await.unwrap();
        for &bytes in cuts {
            proxy.cut_after(bytes);
            let pulled = training::pull(&job, 0).await.unwrap();
            assert_eq!(pulled[0], synthetic::values(1 << 40, NUMEL));
        }
    }
    assert_eq!(proxy.cuts(), 6);
}

#[tokio::test]
async fn an_upload_over_a_cut_connection_is_resumed() {
    let (cluster, proxy) = behind_proxy().await;
    let network = options().transport(Some(Transport::Grpc));
    let client = Client::connect(cluster.address(), network).await.unwrap();
    client.create_job(&spec("upload")).await.unwrap();
    let job = client.join("upload", 0).await.unwrap();
    proxy.cut_after(600_000);
    job.initialise(synthetic::parameters(&job.spec().manifest)).await.unwrap();
    assert_eq!(proxy.cuts(), 1);
    assert_eq!(training::pull(&job, 0).await.unwrap()[0], synthetic::values(1 << 40, NUMEL));
}

#[tokio::test]
async fn two_commits_of_one_rank_at_once_count_once() {
    let cluster = Cluster::start(1);
    let job = start(cluster.address(), &spec("commits")).await.remove(0);
    job.attempt(0).unwrap().push(synthetic::gradients(&job.spec().manifest, 0, 0)).await.unwrap();
    let reports = tokio::join!(
        training::commit(&job, 0, Commit::default()),
        training::commit(&job, 0, Commit::default())
    );
    assert_eq!(reports.0.unwrap(), reports.1.unwrap());
    assert_eq!(job.state_hash(1).await.unwrap(), undisturbed(cluster.address()).await);
}
