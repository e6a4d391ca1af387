//! Rewinds of running jobs, with servers as processes.
//!
//! promise: durability

#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges of batches")]

use std::path::Path;

use futures_util::future::join_all;
use zeroshard_client::{Error, Job};
use zeroshard_model::{CheckpointPolicy, JobSpec, OnLoss};
use zeroshard_proto::pb::{self, shard_service_client::ShardServiceClient};
use zeroshard_proto::status::from_status;
use zeroshard_tests::{Cluster, synthetic, training};

use crate::{
    adamw,
    checkpoints::{directory, policy, resume, saved, step_all, until_saved, url},
    connect, job,
    restored::train,
    start, until,
};

fn spec_of(name: &str) -> JobSpec {
    JobSpec { min_servers: 3, ..job(name, 2, adamw(), synthetic::kinds_and_large(&adamw())) }
}

/// Returns a job that saves every second version.
pub(crate) fn saved_often(name: &str, directory: &Path, keep: u32) -> JobSpec {
    let checkpoints = CheckpointPolicy { keep, ..policy(directory, 2) };
    JobSpec { checkpoints: Some(checkpoints), ..spec_of(name) }
}

/// Trains an undisturbed job with these batches. Returns its state hash before and after each step.
pub(crate) async fn hashes(batches: impl IntoIterator<Item = u64>) -> Vec<String> {
    let cluster = Cluster::start(2);
    let jobs =
        start(cluster.address(), &JobSpec { min_servers: 2, ..spec_of("undisturbed") }).await;
    let mut hashes = vec![jobs[0].state_hash(0).await.unwrap()];
    for (step, batch) in (0..).zip(batches) {
        let ranks = jobs.iter().map(|job| training::step_with(job, step, batch));
        join_all(ranks).await.into_iter().for_each(|report| drop(report.unwrap()));
        hashes.push(jobs[0].state_hash(step + 1).await.unwrap());
    }
    hashes
}

/// Waits until a version on a line other than 0 is saved.
async fn until_saved_on(directory: &Path, name: &str, version: u64, line: u64) {
    let checkpoint = directory.join(name).join(format!("{version:020}-{line}/manifest.json"));
    until(&format!("version {version}@{line} is saved"), || checkpoint.exists()).await;
}

/// Trains from step 0, and waits for each save: a job skips a save that is due during another one.
pub(crate) async fn begin(jobs: &[Job], directory: &Path, steps: u64) {
    for step in 0..steps {
        step_all(jobs, step).await;
        if step % 2 == 1 {
            until_saved(directory, &jobs[0].spec().name, step + 1).await;
        }
    }
}

/// Trains all ranks until `end`. Returns the versions to which rank 0 has returned. If the job
/// returns twice in a row, a rank may only see the second return.
async fn train_all(jobs: &[Job], step: u64, end: u64) -> Vec<u64> {
    let returned = join_all(jobs.iter().map(|job| train(job, step, end))).await;
    assert!(returned.iter().all(|of| of.last() == returned[0].last()), "{returned:?}");
    returned.into_iter().next().unwrap()
}

pub(crate) fn zsctl(cluster: &Cluster, arguments: &[&str]) -> std::process::Output {
    zeroshard_tests::run("zsctl", &[&["--address", cluster.address()], arguments].concat())
}

#[tokio::test]
async fn a_rewound_job_has_the_state_of_one_that_has_stopped_there_and_leaves_out_batches() {
    // The reference skips batches 4 and 5, as the job does after the rewind.
    let expected = hashes([0, 1, 2, 3, 6, 7, 8]).await;
    let directory = directory();
    let cluster = Cluster::start(3);
    // A rewind works even if the policy fails the job when it loses a server.
    let mut spec = saved_often("rewound", directory.path(), 0);
    spec.checkpoints.as_mut().unwrap().on_loss = OnLoss::Fail;
    let jobs = start(cluster.address(), &spec).await;
    begin(&jobs, directory.path(), 6).await;
    assert_ne!(jobs[0].state_hash(6).await.unwrap(), expected[6]);
    let rewound = zsctl(&cluster, &["rewind", "rewound", "--to", "4", "--skip", "4..6"]);
    assert!(rewound.status.success(), "{rewound:?}");
    let said = String::from_utf8(rewound.stdout).unwrap();
    assert_eq!(said, "job \"rewound\" continues from version 4@1\n");
    let client = connect(cluster.address()).await;
    assert_eq!(client.state_hash("rewound").await.unwrap(), expected[4]);
    assert_eq!(train_all(&jobs, 6, 7).await, [4]);
    assert_eq!((jobs[0].line().number, jobs[0].line().skips()), (1, &[4..6][..]));
    assert_eq!(jobs[0].state_hash(7).await.unwrap(), expected[7]);
    until_saved_on(directory.path(), "rewound", 6, 1).await;
    let status = client.status().await.unwrap();
    assert_eq!((status.jobs[0].version, status.jobs[0].line), (Some(7), 1));
    // Both versions 6 exist, and 6@0 is abandoned.
    let place = url(directory.path());
    let listed = zsctl(&cluster, &["--json", "checkpoint", "ls", "rewound", "--url", &place]);
    let listed = String::from_utf8(listed.stdout).unwrap();
    let found = listed.lines().map(|line| {
        let event: serde_json::Value = serde_json::from_str(line).unwrap();
        let number = |key: &str| event[key].as_u64().unwrap();
        (number("version"), number("line"), event["current"].as_bool().unwrap())
    });
    let all = [(2, 0, true), (4, 0, true), (6, 0, false), (6, 1, true)];
    assert_eq!(found.collect::<Vec<_>>(), all);
    for version in ["6", "6@0"] {
        let verified = ["checkpoint", "verify", "rewound", version, "--url", &place];
        assert!(zsctl(&cluster, &verified).status.success(), "{version}");
    }
}

#[tokio::test]
async fn an_abandoned_version_is_never_restored_or_kept() {
    let expected = hashes([0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15]).await;
    let directory = directory();
    let mut cluster = Cluster::start(3);
    let spec = saved_often("train", directory.path(), 3);
    let jobs = start(cluster.address(), &spec).await;
    begin(&jobs, directory.path(), 8).await;
    until("version 2 is removed", || saved(directory.path(), "train") == [4, 6, 8]).await;
    let client = connect(cluster.address()).await;
    assert_eq!(client.rewind("train", 4, None, &[4..8]).await.unwrap(), 1);
    // The new line has saved nothing yet, so losing a server returns the job to where it began.
    cluster.shards[1].kill();
    cluster.shards[1] = Cluster::shard(cluster.address(), &[]);
    // Ranks see the rewind and the restoration, or only the latter.
    let returned = train_all(&jobs, 8, 9).await;
    assert!(!returned.is_empty() && returned.iter().all(|version| *version == 4), "{returned:?}");
    assert_eq!(jobs[0].state_hash(9).await.unwrap(), expected[9]);
    // The job skips a save that is due during another one, so the test asks for its saves.
    assert_eq!(client.save_checkpoint("train", None).await.unwrap().0, 9);
    // The next coordinator learns the line from the servers.
    let address = cluster.address().to_owned();
    cluster.coordinator.kill();
    cluster.coordinator = Cluster::coordinator_at(&address);
    assert_eq!(train_all(&jobs, 9, 10).await, [0; 0]);
    let client = connect(cluster.address()).await;
    assert_eq!(client.save_checkpoint("train", None).await.unwrap().0, 10);
    // Line 2 has passed the abandoned versions 6 and 8.
    let abandoned = [6, 8].map(|of| directory.path().join("train").join(format!("{of:020}")));
    until("they are removed", || !abandoned.iter().any(|of| of.exists())).await;
    cluster.shards[0].kill();
    cluster.shards[0] = Cluster::shard(cluster.address(), &[]);
    assert_eq!(train_all(&jobs, 10, 11).await, [10]);
    assert_eq!(jobs[0].line().number, 3);
    assert_eq!(jobs[0].state_hash(11).await.unwrap(), expected[11]);
    // A new job of the same name continues the line, and skips the same batches.
    client.delete_job("train").await.unwrap();
    let jobs = resume(cluster.address(), &spec, directory.path(), "train").await;
    assert_eq!((jobs[0].version(), jobs[0].line().number), (Some(10), 3));
    assert_eq!(jobs[0].state_hash(10).await.unwrap(), expected[10]);
    step_all(&jobs, 10).await;
    step_all(&jobs, 11).await;
    assert_eq!(jobs[0].state_hash(12).await.unwrap(), expected[12]);
    assert_eq!(client.save_checkpoint("train", None).await.unwrap().0, 12);
    until_saved_on(directory.path(), "train", 12, 3).await;
    // A job of another name begins with line 0, and skips the same batches.
    let other = spec_of("other");
    let jobs = resume(cluster.address(), &other, directory.path(), "train").await;
    assert_eq!((jobs[0].line().number, jobs[0].line().skips()), (0, &[4..8][..]));
}

#[tokio::test]
async fn a_job_that_is_rewound_to_a_version_saved_elsewhere_keeps_its_own_checkpoints() {
    let (directory, elsewhere) = (directory(), crate::checkpoints::directory());
    let mut cluster = Cluster::start(3);
    let jobs = start(cluster.address(), &saved_often("moved", directory.path(), 2)).await;
    begin(&jobs, directory.path(), 3).await;
    let client = connect(cluster.address()).await;
    let place = url(elsewhere.path());
    assert_eq!(client.save_checkpoint("moved", Some(&place)).await.unwrap().0, 3);
    let at_three = client.state_hash("moved").await.unwrap();
    step_all(&jobs, 3).await;
    until_saved(directory.path(), "moved", 4).await;
    assert_eq!(client.rewind("moved", 3, Some(&place), &[]).await.unwrap(), 1);
    assert_eq!(client.state_hash("moved").await.unwrap(), at_three);
    // The job has abandoned version 4. Version 2 is still its latest at the place of its policy.
    cluster.shards[1].kill();
    cluster.shards[1] = Cluster::shard(cluster.address(), &[]);
    assert_eq!(train_all(&jobs, 4, 5).await.last(), Some(&2));
    assert_eq!(client.save_checkpoint("moved", None).await.unwrap().0, 5);
    let refused = client.rewind("moved", 3, Some(&place), &[]).await.unwrap_err().to_string();
    assert!(refused.contains("3 on an abandoned one"), "{refused}");
}

#[tokio::test]
async fn a_version_of_a_line_that_the_job_has_left_is_not_served() {
    let directory = directory();
    let cluster = Cluster::start(3);
    let jobs = start(cluster.address(), &saved_often("read", directory.path(), 0)).await;
    begin(&jobs, directory.path(), 3).await;
    let client = connect(cluster.address()).await;
    client.rewind("read", 2, None, &[]).await.unwrap();
    assert_eq!(train_all(&jobs, 3, 4).await, [2]);
    let address = format!("http://{}", cluster.shards[0].address());
    let mut shard = ShardServiceClient::connect(address).await.unwrap();
    for (line, is_served) in [(None, true), (Some(1), true), (Some(0), false), (Some(2), false)] {
        let job = "read".to_owned();
        let request = pb::DigestRequest { job, job_id: jobs[0].id(), version: 4, line };
        let answer = shard.digest(request).await.map_err(|status| from_status(&status, "it"));
        let is_gone = matches!(answer, Err(Error::VersionGone { version: 4, current: 4, .. }));
        assert_eq!((answer.is_ok(), is_gone), (is_served, !is_served), "{line:?}");
    }
}

// promise: invalid-input
#[tokio::test]
async fn a_rewind_that_cannot_be_made_changes_nothing() {
    let directory = directory();
    let cluster = Cluster::start(3);
    let jobs = start(cluster.address(), &saved_often("stays", directory.path(), 0)).await;
    begin(&jobs, directory.path(), 4).await;
    let client = connect(cluster.address()).await;
    let refused = async |version, url, skips: &[std::ops::Range<u64>]| {
        client.rewind("stays", version, url, skips).await.unwrap_err()
    };
    assert!(matches!(refused(3, None, &[]).await, Error::NoCheckpoint { .. }));
    let current = refused(4, None, &[]).await.to_string();
    assert!(current.contains("is at version 4"), "{current}");
    let used = refused(2, None, &[1..5]).await.to_string();
    assert!(used.contains("skip from 2 on"), "{used}");
    let nowhere = url(&directory.path().join("nowhere"));
    assert!(matches!(refused(2, Some(&nowhere), &[]).await, Error::Storage { .. }));
    let unknown = client.rewind("unknown", 2, None, &[]).await;
    assert!(matches!(unknown, Err(Error::UnknownJob { .. })), "{unknown:?}");
    step_all(&jobs, 4).await;
    assert_eq!((jobs[0].line().number, jobs[0].restored()), (0, None));
}
