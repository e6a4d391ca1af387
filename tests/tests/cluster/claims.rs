//! Jobs that meet: jobs of one name in two clusters that save at one place, and two coordinators
//! that lead the same servers.
//!
//! promise: durability

use zeroshard_client::{CreateJob, Error};
use zeroshard_model::{JobSpec, Restore, RestoreVersion};
use zeroshard_tests::{Cluster, FaultProxy, Process, synthetic, training};

use crate::{
    adamw,
    checkpoints::{directory, policy, resume, saved, step_all, until_saved, url},
    connect, job, start, until,
};

/// Returns when a save in the cluster has failed.
async fn until_a_save_fails(cluster: &Cluster) {
    let none = "zeroshard_checkpoints_total{outcome=\"failed\"} 0\n";
    until("a save fails", || !cluster.coordinator.get("/metrics").contains(none)).await;
}

#[tokio::test]
async fn a_job_returns_to_its_own_checkpoint_although_a_fork_of_its_name_saves_at_its_place() {
    let directory = directory();
    let (mut one, two) = (Cluster::start(2), Cluster::start(1));
    let checkpoints = Some(policy(directory.path(), 2));
    let spec = JobSpec { checkpoints, ..job("train", 1, adamw(), synthetic::kinds(&adamw())) };
    let jobs = start(one.address(), &spec).await;
    let owner = connect(one.address()).await.describe_job("train").await.unwrap().id;
    let other = connect(two.address()).await;
    let mut create = CreateJob::new(spec.clone());
    let (place, version) = (url(directory.path()), RestoreVersion::LatestIfAny);
    create.restore =
        Some(Restore { url: place.clone(), job: "train".to_owned(), version, line: None });
    for version in [0, 2] {
        let refused = other.create_job(create.clone()).await.unwrap_err().to_string();
        assert!(refused.contains(&format!("{owner:016x}")), "at version {version}: {refused}");
        for step in 0..2 - version {
            step_all(&jobs, step).await;
        }
        until_saved(directory.path(), "train", 2).await;
    }
    let at_two = jobs[0].state_hash(2).await.unwrap();
    // The operator takes the job for over, so that another one can continue from its checkpoint.
    let release = ["checkpoint", "release", "train", "--url", &place];
    assert!(zeroshard_tests::run("zsctl", &release).status.success());
    let fork = resume(two.address(), &spec, directory.path(), "train").await;
    step_all(&fork, 2).await;
    step_all(&fork, 3).await;
    until_saved(directory.path(), "train", 4).await;
    for step in 2..6 {
        step_all(&jobs, step).await;
    }
    until_a_save_fails(&one).await;
    let refused = connect(one.address()).await.save_checkpoint("train", None).await;
    assert!(matches!(refused, Err(Error::Storage { .. })), "{refused:?}");
    assert_eq!(saved(directory.path(), "train"), [2, 4], "it has written nothing");
    one.shards[1].kill();
    one.shards[1] = Cluster::shard(one.address(), &[]);
    let lost = training::step(&jobs[0], 6).await;
    assert!(matches!(lost, Err(Error::RolledBack { version: 2, .. })), "{lost:?}");
    assert_eq!(jobs[0].state_hash(2).await.unwrap(), at_two);
    step_all(&fork, 4).await; // the fork continues
}

/// Starts the coordinator again, at the same address.
fn restart(coordinator: &mut Process) {
    let address = coordinator.address().to_owned();
    coordinator.kill();
    *coordinator = Cluster::coordinator_at(&address);
}

#[tokio::test]
async fn a_coordinator_without_an_election_that_was_replaced_exits_with_an_error() {
    let (mut first, mut second) = (Cluster::coordinator(), Cluster::coordinator());
    restart(&mut second);
    let proxy = FaultProxy::start().await.unwrap();
    proxy.forward_to(first.address());
    let _shard = Cluster::shard(proxy.address(), &[]);
    let jobs = start(proxy.address(), &job("train", 1, adamw(), synthetic::small())).await;
    step_all(&jobs, 0).await;
    proxy.forward_to(second.address());
    proxy.cut();
    step_all(&jobs, 1).await;
    assert!(first.ended().is_none(), "it does not know yet");
    proxy.forward_to(first.address());
    proxy.cut();
    let address = first.address().to_owned();
    // The proxy runs on this thread.
    let ended = tokio::task::spawn_blocking(move || first.wait()).await.unwrap();
    assert_eq!(ended.code(), Some(1));
    // It has not led after its restart, and therefore takes the next term.
    let mut first = Cluster::coordinator_at(&address);
    step_all(&jobs, 2).await;
    assert!(first.ended().is_none());
}
