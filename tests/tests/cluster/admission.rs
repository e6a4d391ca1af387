//! A job that does not fit is refused before anything is allocated, and the others go on.
//!
//! promise: isolation

use zeroshard_client::Error;
use zeroshard_model::{JobSpec, TensorSpec};
use zeroshard_tests::{Bystander, Cluster, synthetic, training};

use crate::{adamw, connect, job, sgd, start, tiers::find_metric, until};

/// A job of this number of parameters, which need 16 bytes each.
fn sized(name: &str, numel: u64) -> JobSpec {
    job(name, 1, adamw(), vec![TensorSpec::new("w", [numel])])
}

#[tokio::test]
async fn a_job_of_2_to_the_44_elements_is_refused_with_the_numbers_and_costs_no_memory() {
    // A server with a GPU has no limit by default.
    let cluster = Cluster::start_with(2, &["--device", "cpu"]);
    let client = connect(cluster.address()).await;
    let small = job("small", 1, sgd(1.0), synthetic::small());
    let rank = start(cluster.address(), &JobSpec { min_servers: 2, ..small }).await;
    let before = cluster.shards[0].memory();
    let bystander = Bystander::start(cluster.address());
    for numel in [1 << 44, 1 << 40] {
        match client.create_job(&sized("huge", numel)).await {
            Err(Error::InsufficientMemory { job, bytes, free, servers }) => {
                assert_eq!((job.as_str(), bytes), ("huge", 16 * numel));
                assert!(free < bytes);
                let mut shards = cluster.shards.iter();
                assert!(shards.all(|shard| servers.contains(shard.address())), "{servers}");
            }
            other => panic!("{other:?}"),
        }
    }
    bystander.finish("jobs of 2^44 and 2^40 elements");
    assert!(cluster.coordinator.peak_memory() < 200 << 20);
    assert!(cluster.shards[0].memory() < before + (32 << 20));
    assert!(training::step(&rank[0], 0).await.unwrap().applied);
}

#[tokio::test]
async fn memory_is_counted_until_a_job_is_deleted_and_is_free_at_once() {
    let budgets = ["--parked-bytes", "--pinned-bytes", "--snapshot-bytes", "--history-bytes"];
    let budgets = budgets.map(|budget| [budget, "0"]).concat();
    // A sixteenth each is for pulls, for the steps beside them, and for outboxes.
    let flags = [&budgets[..], &["--memory", "172MiB"]].concat();
    let cluster = Cluster::start_with(1, &flags);
    let client = connect(cluster.address()).await;
    // It waits until the server has registered.
    client.create_job(&sized("first", 1)).await.unwrap();
    client.delete_job("first").await.unwrap();
    let status = client.status().await.unwrap();
    assert_eq!(status.servers[0].capacity_bytes, Some((172 << 20) / 16 * 13));
    let (large, small) = (sized("large", 7 << 20), sized("small", 3 << 20));
    for _ in 0..3 {
        client.create_job(&large).await.unwrap();
        match client.create_job(&small).await {
            Err(Error::InsufficientMemory { bytes, free, .. }) => {
                assert_eq!((bytes, free), (48 << 20, (172 << 20) / 16 * 13 - (112 << 20)));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(client.status().await.unwrap().servers[0].assigned_bytes, 112 << 20);
        client.delete_job("large").await.unwrap();
    }
    client.create_job(&small).await.unwrap();
    assert_eq!(client.status().await.unwrap().servers[0].assigned_bytes, 48 << 20);
    // The series appears with the server's next report.
    let host = || find_metric(&cluster.shards[0], "tier_bytes{tier=\"host\"}");
    until("the metrics show it", || host().is_some_and(|bytes| bytes > 0.0)).await;
}

#[tokio::test]
async fn a_new_coordinator_counts_the_jobs_of_the_last_one() {
    let mut cluster = Cluster::start_with(1, &["--memory", "400MiB"]);
    let address = cluster.address().to_owned();
    let rank = start(&address, &sized("first", 8 << 20)).await.remove(0);
    cluster.coordinator.kill();
    cluster.coordinator = Cluster::coordinator_at(&address);
    assert!(training::step(&rank, 0).await.unwrap().applied);
    let refused = connect(&address).await.create_job(&sized("second", 16 << 20)).await;
    assert!(matches!(refused, Err(Error::InsufficientMemory { .. })), "{refused:?}");
    assert!(training::step(&rank, 1).await.unwrap().applied);
}

#[tokio::test]
async fn a_failed_allocation_ends_the_job_and_not_the_server() {
    let coordinator = Cluster::coordinator();
    // The server believes that it has more memory than the system gives it.
    let flags = ["--memory", "64GiB", "--pinned-bytes", "0", "--snapshot-bytes", "0"];
    let shard = Cluster::limited_shard(coordinator.address(), &flags, 2 << 30);
    let cluster = Cluster { coordinator, shards: vec![shard] };
    let small = job("small", 1, sgd(1.0), synthetic::small());
    let rank = start(cluster.address(), &small).await.remove(0);
    let client = connect(cluster.address()).await;
    for step in 0..2 {
        let refused = client.create_job(&sized("large", 1 << 28)).await.unwrap_err();
        assert!(matches!(refused, Error::JobFailed { .. }), "{refused:?}");
        assert!(refused.to_string().contains("out of memory"), "{refused}");
        assert!(training::step(&rank, step).await.unwrap().applied);
    }
    // What the job had got was returned.
    client.create_job(&sized("medium", 1 << 24)).await.unwrap();
}
