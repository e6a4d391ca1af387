//! Jobs of one name: who may write checkpoints, and who may read and remove whose.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::{
    fs::File,
    time::{Duration, SystemTime},
};

use zeroshard_checkpoint::{BEAT, Claimant, Storage};
use zeroshard_model::{Error, JobLine, Line, Result, checkpoint::Start};

use common::{JOB, JOB_ID, Saved, on_line_0};

const OTHER: u64 = 0xb0b;

async fn claim(storage: &Storage, job_id: u64, by: &str, start: Start) -> Result<()> {
    let line = &Line::default();
    storage.claim(&Claimant { job: JOB, job_id, line, by, start }).await
}

fn line_0(job_id: u64) -> JobLine {
    JobLine { job_id, line: 0 }
}

/// The message of a refusal.
fn refusal(outcome: Result<()>) -> String {
    match outcome {
        Err(Error::Storage { cause, .. }) => cause,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn of_jobs_that_claim_a_name_at_the_same_time_one_is_the_owner() {
    let saved = Saved::new("sgd");
    let storage = &saved.storage;
    for round in 0..8_u64 {
        let id = |index: u64| 100 * (round + 1) + index;
        let jobs = (0..8).map(|index| claim(storage, id(index), "a:1", Start::Anew));
        let claimed = futures_util::future::join_all(jobs).await;
        let owner = storage.owner(JOB).await.unwrap().unwrap().of().job_id;
        assert_eq!(claimed[(owner - id(0)) as usize], Ok(()), "its claim is the last one");
        storage.check_owner(JOB, owner).await.unwrap();
        claim(storage, owner, "a:1", Start::Anew).await.unwrap();
        storage.end_claim(JOB, owner).await.unwrap();
    }
}

#[tokio::test]
async fn a_job_of_another_cluster_is_refused_until_the_owner_is_over() {
    let saved = Saved::new("sgd");
    let storage = &saved.storage;
    claim(storage, JOB_ID, "host-a:7400", Start::Anew).await.unwrap();
    let refused = {
        let lives = async {
            for sign in 1.. {
                storage.beat(JOB, JOB_ID, sign).await.unwrap();
                tokio::time::sleep(BEAT).await;
            }
        };
        tokio::select! {
            claimed = claim(storage, OTHER, "host-b:7400", Start::Anew) => refusal(claimed),
            () = lives => panic!("it ends"),
        }
    };
    assert!(refused.contains("0000000000000009"), "{refused}");
    assert!(refused.contains("host-a:7400"), "{refused}");
    refusal(storage.check_owner(JOB, OTHER).await);
    refusal(storage.prune(JOB, line_0(OTHER), 1).await.map(drop));
    storage.end_claim(JOB, OTHER).await.unwrap();
    refusal(storage.check_owner(JOB, OTHER).await);
    storage.end_claim(JOB, JOB_ID).await.unwrap();
    claim(storage, OTHER, "host-b:7400", Start::Anew).await.unwrap();
    refusal(storage.check_owner(JOB, JOB_ID).await);
}

#[tokio::test]
async fn a_fork_reads_its_ancestors_up_to_its_own_start_and_a_living_one_keeps_its_checkpoints() {
    let saved = Saved::new("sgd");
    let storage = &saved.storage;
    claim(storage, JOB_ID, "a:1", Start::Anew).await.unwrap();
    storage.beat(JOB, JOB_ID, 1).await.unwrap();
    for version in [1, 2] {
        saved.save(version, version).await;
    }
    claim(storage, OTHER, "a:1", Start::From(JOB_ID, on_line_0(2))).await.unwrap();
    let fork = storage.claim_of(JOB, line_0(OTHER)).await.unwrap();
    // The ancestor had begun this one before the fork became the owner.
    saved.save(3, 3).await;
    let latest = storage.latest(JOB, Some(&fork)).await.unwrap().unwrap();
    assert_eq!((latest.version(), latest.job_id()), (on_line_0(2), JOB_ID));
    let own = storage.claim_of(JOB, line_0(JOB_ID)).await.unwrap();
    assert_eq!(storage.latest(JOB, Some(&own)).await.unwrap().unwrap().version(), on_line_0(3));
    let stranger = storage.claim_of(JOB, line_0(77)).await.unwrap();
    assert!(storage.latest(JOB, Some(&stranger)).await.unwrap().is_none());
    storage.beat(JOB, OTHER, 5).await.unwrap();
    assert_eq!(
        storage.prune(JOB, line_0(OTHER), 1).await.unwrap(),
        [],
        "the ancestor may come back"
    );
    set_age(&saved, "00000000000000000002.json", Duration::from_secs(700));
    storage.beat(JOB, JOB_ID, 2).await.unwrap();
    assert_eq!(storage.prune(JOB, line_0(OTHER), 1).await.unwrap(), [], "the ancestor is alive");
    storage.beat(JOB, JOB_ID, 1).await.unwrap();
    // The latest one that the fork can return to stays, although another job has a later one.
    assert_eq!(storage.prune(JOB, line_0(OTHER), 1).await.unwrap(), [on_line_0(1)]);
    assert_eq!(storage.versions(JOB).await.unwrap(), [2, 3].map(on_line_0));
    // A fork of the fork shares no more of the first job than the fork does.
    storage.end_claim(JOB, OTHER).await.unwrap();
    claim(storage, OTHER + 1, "a:1", Start::From(OTHER, on_line_0(1))).await.unwrap();
    let third = storage.claim_of(JOB, line_0(OTHER + 1)).await.unwrap();
    assert!(storage.latest(JOB, Some(&third)).await.unwrap().is_none());
}

#[tokio::test]
async fn a_job_removes_an_ancestors_checkpoints_at_once_only_if_its_coordinator_has_ended_it() {
    let saved = Saved::new("sgd");
    let storage = &saved.storage;
    claim(storage, JOB_ID, "a:1", Start::Anew).await.unwrap();
    storage.beat(JOB, JOB_ID, 1).await.unwrap();
    for version in [1, 2] {
        saved.save(version, version).await;
    }
    // An operator cannot know that the job is over.
    storage.release_claim(JOB, JOB_ID).await.unwrap();
    claim(storage, OTHER, "b:1", Start::From(JOB_ID, on_line_0(2))).await.unwrap();
    storage.beat(JOB, OTHER, 1).await.unwrap();
    assert_eq!(storage.prune(JOB, line_0(OTHER), 1).await.unwrap(), []);
    // Another coordinator has it: its sign of life is younger than the end.
    let [alive, ended] = ["alive", "ended"].map(|of| format!("{JOB_ID:016x}.{of}"));
    storage.end_claim(JOB, JOB_ID).await.unwrap();
    set_age(&saved, &ended, Duration::from_secs(5));
    storage.beat(JOB, JOB_ID, 2).await.unwrap();
    assert_eq!(storage.prune(JOB, line_0(OTHER), 1).await.unwrap(), []);
    set_age(&saved, &alive, Duration::from_secs(10));
    assert_eq!(storage.prune(JOB, line_0(OTHER), 1).await.unwrap(), [on_line_0(1)]);
}

/// Makes a file of claims look as if it had been written earlier.
fn set_age(saved: &Saved, name: &str, age: Duration) {
    let path = saved.paths().into_iter().find(|path| path.ends_with(format!("claims/{name}")));
    let file = File::options().write(true).open(path.unwrap()).unwrap();
    file.set_modified(SystemTime::now() - age).unwrap();
}

#[tokio::test]
async fn a_job_does_not_bring_back_a_directory_that_somebody_has_removed() {
    let saved = Saved::new("sgd");
    let (directory, storage) = (saved.directory.path(), &saved.storage);
    claim(storage, JOB_ID, "a:1", Start::Anew).await.unwrap();
    storage.beat(JOB, JOB_ID, 1).await.unwrap();
    let of_job = directory.read_dir().unwrap().next().unwrap().unwrap().path();
    std::fs::remove_dir_all(of_job).unwrap();
    storage.beat(JOB, JOB_ID, 2).await.unwrap();
    assert_eq!(directory.read_dir().unwrap().count(), 0, "the directory of the job is back");
    std::fs::remove_dir(directory).unwrap();
    storage.beat(JOB, JOB_ID, 3).await.unwrap();
    storage.end_claim(JOB, JOB_ID).await.unwrap();
    assert!(Storage::open_existing(storage.url()).unwrap().is_none());
    assert!(!directory.exists(), "the directory of all jobs is back");
    Storage::open(storage.url()).unwrap();
    assert!(Storage::open_existing(storage.url()).unwrap().is_some());
}
