//! Jobs that return to their last checkpoint because a server was lost.
//!
//! promise: durability

use std::{
    ops::Range,
    path::{Path, PathBuf},
    process::Command,
};

use zeroshard_client::{Error, Job, Result, StepReport};
use zeroshard_model::JobSpec;
use zeroshard_tests::{Cluster, Training, synthetic, training};

use crate::{
    adamw,
    checkpoints::{directory, policy, step_all, until_saved},
    job, start, until,
};

const STEPS: u64 = 30;

fn spec(name: &str) -> JobSpec {
    JobSpec { min_servers: 3, ..job(name, 2, adamw(), synthetic::kinds(&adamw())) }
}

async fn calm() -> String {
    let cluster = Cluster::start(3);
    let run = Training { steps: STEPS, ..Training::new(spec("calm")) };
    run.run(cluster.address()).await.unwrap().hash
}

/// Makes steps until `end`, and goes back where the job was restored. Returns the versions to which
/// it was restored.
pub(crate) async fn train(job: &Job, step: u64, end: u64) -> Vec<u64> {
    let restored = train_by(job, step..end, training::step).await;
    restored.unwrap_or_else(|(step, error)| panic!("rank {} at step {step}: {error}", job.rank()))
}

/// Makes these steps with `make`, and goes back where the job was restored. Returns the versions to
/// which it was restored.
///
/// # Errors
/// The first other error, with its step.
pub(crate) async fn train_by(
    job: &Job,
    steps: Range<u64>,
    make: impl AsyncFn(&Job, u64) -> Result<StepReport>,
) -> Result<Vec<u64>, (u64, Error)> {
    let Range { start: mut step, end } = steps;
    let mut restored = Vec::new();
    while step < end {
        match make(job, step).await {
            Ok(report) => step = report.version,
            Err(Error::RolledBack { version, .. }) => {
                restored.push(version);
                step = version;
            }
            Err(error) => return Err((step, error)),
        }
    }
    Ok(restored)
}

#[tokio::test]
async fn a_run_returns_to_its_last_checkpoint_when_a_server_is_killed() {
    let expected = calm().await;
    let directory = directory();
    let mut cluster = Cluster::start(3);
    let checkpoints = Some(policy(directory.path(), 10));
    let jobs = start(cluster.address(), &JobSpec { checkpoints, ..spec("killed") }).await;
    let (epoch, lease) = (jobs[0].epoch(), jobs[0].lease());
    for step in 0..10 {
        step_all(&jobs, step).await;
    }
    until_saved(directory.path(), "killed", 10).await;
    for step in 10..15 {
        step_all(&jobs, step).await;
    }
    cluster.shards[1].kill();
    let (one, other) = tokio::join!(train(&jobs[0], 15, STEPS), train(&jobs[1], 15, STEPS));
    assert_eq!((one, other), (vec![10], vec![10]));
    assert_eq!(jobs[0].state_hash(STEPS).await.unwrap(), expected);
    assert!(jobs[0].epoch() > epoch);
    assert_eq!(jobs[0].lease(), lease, "ranks keep their leases");
}

/// Replaces the files with slices of a checkpoint by pipes, from which nothing can be read. Returns
/// the pipes, and where the files are.
fn block(checkpoint: &Path) -> Vec<(PathBuf, PathBuf)> {
    let files = std::fs::read_dir(checkpoint).unwrap().map(|file| file.unwrap().path());
    let slices = files.filter(|file| file.extension().is_some_and(|of| of == "safetensors"));
    let block = |file: PathBuf| {
        let away = file.with_extension("away");
        std::fs::rename(&file, &away).unwrap();
        assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
        (file, away)
    };
    slices.map(block).collect()
}

#[tokio::test]
async fn a_job_is_restored_although_the_coordinator_is_killed_meanwhile() {
    let expected = calm().await;
    let directory = directory();
    let mut cluster = Cluster::start(3);
    let checkpoints = Some(policy(directory.path(), 4));
    let jobs = start(cluster.address(), &JobSpec { checkpoints, ..spec("twice") }).await;
    for step in 0..6 {
        step_all(&jobs, step).await;
    }
    until_saved(directory.path(), "twice", 4).await;
    let blocked = block(&directory.path().join("twice").join(format!("{:020}", 4)));
    assert!(!blocked.is_empty());
    cluster.shards[1].kill();
    until("the servers are told to read the checkpoint", || {
        let metrics = cluster.coordinator.get("/metrics");
        metrics.contains("zeroshard_steps_total{outcome=\"aborted\"} 1\n")
    })
    .await;
    let address = cluster.address().to_owned();
    cluster.coordinator.kill();
    for (pipe, away) in blocked {
        std::fs::rename(away, pipe).unwrap();
    }
    cluster.coordinator = Cluster::coordinator_at(&address);
    let (one, other) = tokio::join!(train(&jobs[0], 6, STEPS), train(&jobs[1], 6, STEPS));
    assert_eq!((one, other), (vec![4], vec![4]));
    assert_eq!(jobs[0].state_hash(STEPS).await.unwrap(), expected);
}

#[tokio::test]
async fn a_rank_without_a_call_learns_of_the_restoration_from_its_next_one() {
    let directory = directory();
    let mut cluster = Cluster::start(3);
    let checkpoints = Some(policy(directory.path(), 2));
    let jobs = start(cluster.address(), &JobSpec { checkpoints, ..spec("idle") }).await;
    for step in 0..3 {
        step_all(&jobs, step).await;
    }
    until_saved(directory.path(), "idle", 2).await;
    cluster.shards[1].kill();
    until("the job is restored", || jobs.iter().all(|job| job.restored().is_some())).await;
    let rolled_back = Error::RolledBack { job: "idle".into(), version: 2 };
    assert_eq!(jobs[0].attempt(3).err(), Some(rolled_back.clone()));
    assert_eq!(training::pull(&jobs[1], 3).await, Err(rolled_back));
    for step in 2..5 {
        step_all(&jobs, step).await;
    }
}

#[tokio::test]
async fn a_save_of_a_version_that_was_lost_is_an_error() {
    let directory = directory();
    let mut cluster = Cluster::start(3);
    let checkpoints = Some(policy(directory.path(), 2));
    let jobs = start(cluster.address(), &JobSpec { checkpoints, ..spec("lost") }).await;
    for step in 0..3 {
        step_all(&jobs, step).await;
    }
    until_saved(directory.path(), "lost", 2).await;
    cluster.shards[1].kill();
    let rolled_back = Err(Error::RolledBack { job: "lost".into(), version: 2 });
    assert_eq!(jobs[0].save(3).await, rolled_back);
    until("the job is restored", || jobs[1].restored().is_some()).await;
    assert_eq!(jobs[1].save(3).await, rolled_back);
    step_all(&jobs, 2).await;
    assert!(matches!(jobs[0].save(2).await, Err(Error::Invalid { .. })));
    assert!(jobs[0].save(3).await.unwrap() > 0);
}

#[tokio::test]
async fn servers_are_killed_and_replaced_during_a_run() {
    let expected = calm().await;
    let directory = directory();
    let mut cluster = Cluster::start(3);
    let checkpoints = Some(policy(directory.path(), 1));
    let jobs = start(cluster.address(), &JobSpec { checkpoints, ..spec("replaced") }).await;
    step_all(&jobs, 0).await;
    until_saved(directory.path(), "replaced", 1).await;
    let mut reached = 1;
    for victim in [1, 2, 0] {
        // The server is killed while the ranks make steps, which cannot continue without it.
        let kill = async {
            cluster.shards[victim].kill();
            cluster.shards[victim] = Cluster::shard(cluster.coordinator.address(), &[]);
        };
        let end = reached + 7;
        let [one, other] = [&jobs[0], &jobs[1]].map(|job| train(job, reached, end));
        let (one, other, ()) = tokio::join!(one, other, kill);
        assert!(!one.is_empty() && one == other, "{one:?}, {other:?}");
        reached = end;
    }
    tokio::join!(train(&jobs[0], reached, STEPS), train(&jobs[1], reached, STEPS));
    assert_eq!(jobs[0].state_hash(STEPS).await.unwrap(), expected);
}

#[tokio::test]
async fn a_job_without_a_checkpoint_fails_when_a_server_is_killed() {
    let directory = directory();
    let mut cluster = Cluster::start(3);
    let checkpoints = Some(policy(directory.path(), 10));
    let jobs = start(cluster.address(), &JobSpec { checkpoints, ..spec("early") }).await;
    step_all(&jobs, 0).await;
    cluster.shards[1].kill();
    let failed = training::step(&jobs[0], 1).await;
    assert!(matches!(failed, Err(Error::JobFailed { .. })), "{failed:?}");
}
