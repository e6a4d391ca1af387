//! Checkpoints of a job that has returned to one of them.
//!
//! promise: durability

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use zeroshard_checkpoint::{Claim, Claimant, Storage};
use zeroshard_model::{
    Error, JobLine, Line, LineVersion, Result, checkpoint::Start, line::parse_version,
};

use common::{JOB, JOB_ID, Saved};

/// Parses a version such as `120@1`.
fn at(text: &str) -> LineVersion {
    let (version, line) = parse_version(text).unwrap();
    LineVersion { version, line: line.unwrap_or(0) }
}

fn of(line: u64) -> JobLine {
    JobLine { job_id: JOB_ID, line }
}

async fn claim(storage: &Storage, line: u64, start: Start) -> Result<()> {
    let line = &Line::new(line, []).unwrap();
    storage.claim(&Claimant { job: JOB, job_id: JOB_ID, line, by: "a:1", start }).await
}

async fn versions(storage: &Storage) -> Vec<String> {
    storage.versions(JOB).await.unwrap().iter().map(LineVersion::to_string).collect()
}

/// A job that has saved 100, 110 and 120, and has returned to 100.
async fn returned() -> Saved {
    let saved = Saved::new("sgd");
    claim(&saved.storage, 0, Start::Anew).await.unwrap();
    for version in [100, 110, 120] {
        saved.save(version, version).await;
    }
    claim(&saved.storage, 1, Start::From(JOB_ID, at("100"))).await.unwrap();
    saved
}

async fn latest(storage: &Storage, claim: Option<&Claim>) -> String {
    storage.latest(JOB, claim).await.unwrap().unwrap().version().to_string()
}

#[tokio::test]
async fn abandoned_versions_are_neither_the_latest_nor_those_of_their_number() {
    let saved = returned().await;
    let storage = &saved.storage;
    let owner = storage.owner(JOB).await.unwrap().unwrap();
    assert_eq!(owner.of(), of(1));
    assert_eq!(latest(storage, Some(&owner)).await, "100");
    let abandoned = storage.checkpoint(JOB, (120, None), Some(&owner)).await.unwrap_err();
    assert!(abandoned.to_string().contains("there is 120 on an abandoned one"), "{abandoned}");
    let named = storage.checkpoint(JOB, (120, Some(0)), Some(&owner)).await.unwrap();
    assert_eq!(named.version(), at("120"));
}

#[tokio::test]
async fn a_version_that_is_made_again_is_saved_beside_the_abandoned_one() {
    let saved = returned().await;
    let storage = &saved.storage;
    let again = saved.save_on_line(at("120@1"), 7).await;
    assert_eq!(again.version(), at("120@1"));
    assert_eq!(versions(storage).await, ["100", "110", "120", "120@1"]);
    let owner = storage.owner(JOB).await.unwrap().unwrap();
    let found = storage.checkpoint(JOB, (120, None), Some(&owner)).await.unwrap();
    assert_eq!((found.version(), found.save()), (at("120@1"), 7));
    storage.verify(&found, |_| {}).await.unwrap();
}

#[tokio::test]
async fn a_line_that_follows_from_several_has_the_versions_of_each_up_to_its_end() {
    let saved = returned().await;
    let storage = &saved.storage;
    for version in ["110@1", "120@1", "130@1"] {
        saved.save_on_line(at(version), 7).await;
    }
    claim(storage, 2, Start::From(JOB_ID, at("120@1"))).await.unwrap();
    let owner = storage.owner(JOB).await.unwrap().unwrap();
    assert_eq!(latest(storage, Some(&owner)).await, "120@1");
    claim(storage, 3, Start::From(JOB_ID, at("100"))).await.unwrap();
    let owner = storage.owner(JOB).await.unwrap().unwrap();
    assert_eq!(latest(storage, Some(&owner)).await, "100");
}

#[tokio::test]
async fn a_line_keeps_its_own_checkpoints_and_removes_abandoned_ones_that_it_has_passed() {
    let saved = returned().await;
    let storage = &saved.storage;
    saved.save_on_line(at("105@1"), 7).await;
    assert!(storage.prune(JOB, of(1), 2).await.unwrap().is_empty());
    saved.save_on_line(at("110@1"), 8).await;
    let removed = storage.prune(JOB, of(1), 2).await.unwrap();
    assert_eq!(removed, ["100", "110"].map(at));
    assert_eq!(versions(storage).await, ["105@1", "110@1", "120"]);
    saved.save_on_line(at("120@1"), 9).await;
    storage.prune(JOB, of(1), 2).await.unwrap();
    assert_eq!(versions(storage).await, ["110@1", "120@1"]);
}

#[tokio::test]
async fn a_job_that_has_not_continued_on_a_claimed_line_owns_its_checkpoints_again() {
    let saved = returned().await;
    let storage = &saved.storage;
    // The coordinator that had claimed line 1 was lost before a server knew of it.
    assert!(storage.continue_claim(JOB, of(0)).await.unwrap());
    let owner = storage.owner(JOB).await.unwrap().unwrap();
    assert_eq!((owner.of(), latest(storage, Some(&owner)).await), (of(0), "120".to_owned()));
    assert_eq!(storage.next_line(JOB).await.unwrap(), 2, "line 1 is not used again");
    claim(storage, 2, Start::From(JOB_ID, at("110"))).await.unwrap();
    let owner = storage.owner(JOB).await.unwrap().unwrap();
    assert_eq!((owner.of(), latest(storage, Some(&owner)).await), (of(2), "110".to_owned()));
}

#[tokio::test]
async fn a_program_that_does_not_know_lines_refuses_their_claims() {
    let saved = returned().await;
    let claims =
        saved.paths().into_iter().filter(|path| path.extension().is_some_and(|of| of == "json"));
    let claims = claims.filter(|path| path.parent().unwrap().ends_with("claims"));
    let mut claims: Vec<_> = claims.map(|path| std::fs::read_to_string(path).unwrap()).collect();
    claims.sort();
    let [later, first] = &claims[..] else { panic!("{claims:?}") };
    // It needs `job_id`.
    let keys = |text: &str| {
        let object: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(text).unwrap();
        object.keys().cloned().collect::<Vec<_>>()
    };
    assert_eq!(keys(first), ["ancestors", "by", "job_id"]);
    assert_eq!(keys(later), ["claim", "format"]);
}

#[tokio::test]
async fn a_claim_of_a_later_format_is_refused() {
    let saved = returned().await;
    let paths = saved.paths().into_iter();
    let mut claims = paths.filter(|path| path.ends_with("claims/00000000000000000002.json"));
    let path = claims.next().unwrap();
    let text = std::fs::read_to_string(&path).unwrap().replace("\"format\":2", "\"format\":3");
    std::fs::write(&path, text).unwrap();
    let refused = saved.storage.owner(JOB).await.unwrap_err().to_string();
    assert!(refused.contains("its format is 3"), "{refused}");
}

#[tokio::test]
async fn a_number_that_was_never_saved_has_no_checkpoint() {
    let saved = returned().await;
    let owner = saved.storage.owner(JOB).await.unwrap();
    let missing = saved.storage.checkpoint(JOB, (99, None), owner.as_ref()).await;
    assert!(matches!(missing, Err(Error::NoCheckpoint { version, .. }) if version == "version 99"));
}
