//! The coordinator is killed and started again at the same address, while jobs train.
//!
//! promise: no-silent-hang, durability

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use zeroshard_client::{Commit, Error, Job};
use zeroshard_model::JobSpec;
use zeroshard_tests::{Cluster, Process, Training, synthetic, training};

use crate::{adamw, connect, job, start, until, until_calls_wait, until_commits_wait};

fn spec(name: &str, world: u32) -> JobSpec {
    JobSpec { min_servers: 3, ..job(name, world, adamw(), synthetic::kinds(&adamw())) }
}

/// The hash after `steps` undisturbed steps, and the bytes that the servers have received.
async fn calm(steps: u64) -> (String, u64) {
    let cluster = Cluster::start(3);
    let run = Training { steps, ..Training::new(spec("calm", 2)) };
    let hash = run.run(cluster.address()).await.unwrap().hash;
    (hash, cluster.payload()[1])
}

/// Kills the coordinator, and starts another one at the same address.
fn restart(coordinator: &mut Process) {
    let address = coordinator.address().to_owned();
    coordinator.kill();
    *coordinator = Cluster::coordinator_at(&address);
}

async fn train(job: &Job, steps: std::ops::Range<u64>, done: &AtomicU64) {
    for step in steps {
        training::step(job, step).await.unwrap();
        done.fetch_max(step, Ordering::Relaxed);
    }
}

#[tokio::test]
async fn a_run_survives_the_death_of_the_coordinator_at_any_time() {
    const STEPS: u64 = 60;
    let (expected, payload) = calm(STEPS).await;
    let mut cluster = Cluster::start(3);
    let jobs = start(cluster.address(), &spec("headless", 2)).await;
    let (epoch, done) = (jobs[0].epoch(), AtomicU64::new(0));
    let kills = async {
        for kill in 1..6 {
            until("the next kill is due", || done.load(Ordering::Relaxed) >= kill * 10).await;
            restart(&mut cluster.coordinator);
        }
    };
    tokio::join!(train(&jobs[0], 0..STEPS, &done), train(&jobs[1], 0..STEPS, &done), kills);
    assert_eq!(jobs[0].state_hash(STEPS).await.unwrap(), expected);
    // No rank was lost, and no gradient was sent again.
    assert_eq!((jobs[0].epoch(), cluster.payload()[1]), (epoch, payload));
}

#[tokio::test]
async fn ranks_that_wait_for_a_decision_vote_again() {
    let (expected, _) = calm(2).await;
    let mut cluster = Cluster::start(3);
    let mut jobs = start(cluster.address(), &spec("voting", 2)).await;
    let (second, first) = (jobs.pop().unwrap(), jobs.pop().unwrap());
    let done = AtomicU64::new(0);
    tokio::join!(train(&first, 0..1, &done), train(&second, 0..1, &done));
    let gradients = |rank| synthetic::gradients(&first.spec().manifest, rank, 1);
    first.attempt(1).unwrap().push(gradients(0)).await.unwrap();
    let voted = training::commit(&first, 1, Commit::default());
    let late = async {
        until_commits_wait(&cluster, 1).await;
        restart(&mut cluster.coordinator);
        second.attempt(1).unwrap().push(gradients(1)).await.unwrap();
        training::commit(&second, 1, Commit::default()).await
    };
    let (one, other) = tokio::join!(voted, late);
    assert_eq!(one.unwrap(), other.unwrap());
    assert_eq!(first.state_hash(2).await.unwrap(), expected);
}

#[tokio::test]
async fn a_commit_that_lost_its_answer_receives_the_report_of_the_last_coordinator() {
    let mut cluster = Cluster::start(3);
    let jobs = start(cluster.address(), &spec("answered", 2)).await;
    let mut reports = Vec::new();
    for job in &jobs {
        let gradients = synthetic::gradients(&job.spec().manifest, job.rank(), 0);
        job.attempt(0).unwrap().push(gradients).await.unwrap();
    }
    let commit = || Commit::default().loss(2.5).max_norm(Some(0.1));
    let attempts = [jobs[0].attempt(0).unwrap(), jobs[1].attempt(0).unwrap()];
    let (one, other) = tokio::join!(attempts[0].commit(commit()), attempts[1].commit(commit()));
    reports.extend([one.unwrap(), other.unwrap()]);
    restart(&mut cluster.coordinator);
    let again = attempts[0].commit(commit()).await.unwrap();
    assert!(again.clip_coefficient < 1.0 && again.loss == Some(2.5));
    assert_eq!([&again, &again], [&reports[0], &reports[1]]);
}

#[tokio::test]
async fn an_upload_continues_with_another_coordinator() {
    let mut cluster = Cluster::start(3);
    let spec = spec("uploading", 2);
    connect(cluster.address()).await.create_job(&spec).await.unwrap();
    let client = connect(cluster.address()).await;
    let first = client.join("uploading", 0).await.unwrap();
    let mut parameters = synthetic::parameters(&spec.manifest);
    let rest = parameters.split_off(parameters.len() / 2);
    first.initialise(parameters).await.unwrap();
    restart(&mut cluster.coordinator);
    first.initialise(rest).await.unwrap();
    // Another restart when the upload is complete.
    restart(&mut cluster.coordinator);
    let second = client.join("uploading", 1).await.unwrap();
    let done = AtomicU64::new(0);
    tokio::join!(train(&first, 0..2, &done), train(&second, 0..2, &done));
    assert_eq!(first.state_hash(2).await.unwrap(), calm(2).await.0);
}

#[tokio::test]
async fn a_resting_rank_rests_on() {
    let mut cluster = Cluster::start(3);
    let mut jobs = start(cluster.address(), &spec("resting", 2)).await;
    let (second, first) = (jobs.pop().unwrap(), jobs.pop().unwrap());
    let done = AtomicU64::new(0);
    let attempt = second.attempt(0).unwrap();
    let others = async {
        until_calls_wait(&cluster.coordinator, "CoordinatorService/Rest", 1).await;
        train(&first, 0..2, &done).await;
        restart(&mut cluster.coordinator);
        train(&first, 2..4, &done).await;
        first.attempt(4).unwrap().rest(false).await
    };
    let (one, other) = tokio::join!(attempt.rest(false), others);
    assert_eq!(one.unwrap(), other.unwrap());
    tokio::join!(train(&first, 4..6, &done), train(&second, 4..6, &done));
    assert_eq!(first.state_hash(6).await.unwrap(), second.state_hash(6).await.unwrap());
}

#[tokio::test]
async fn a_server_that_dies_with_the_coordinator_fails_the_job_and_is_named() {
    let mut cluster = Cluster::start(3);
    let jobs = start(cluster.address(), &spec("shardless", 2)).await;
    let done = AtomicU64::new(0);
    tokio::join!(train(&jobs[0], 0..1, &done), train(&jobs[1], 0..1, &done));
    let address = cluster.address().to_owned();
    cluster.coordinator.kill();
    let dead = cluster.shards.remove(1).address().to_owned();
    cluster.coordinator = Cluster::coordinator_at(&address);
    let failed = training::commit(&jobs[0], 1, Commit::default()).await.unwrap_err();
    let text = failed.to_string();
    assert!(matches!(failed, Error::JobFailed { .. }) && text.contains(&dead), "{text}");
    assert!(text.contains("its address refuses connections"), "{text}");
}

#[tokio::test]
async fn a_job_that_was_deleted_stays_deleted() {
    let mut cluster = Cluster::start(3);
    let jobs = start(cluster.address(), &spec("deleted", 1)).await;
    connect(cluster.address()).await.delete_job("deleted").await.unwrap();
    restart(&mut cluster.coordinator);
    drop(jobs);
    let client = connect(cluster.address()).await;
    let connected = async {
        while client.status().await.unwrap().servers.len() < 3 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), connected).await.unwrap();
    assert!(client.status().await.unwrap().jobs.is_empty());
}
