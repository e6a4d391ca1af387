//! Runs that continue from checkpoints.
//!
//! promise: durability

use std::{
    fs,
    path::{Path, PathBuf},
};

use tempfile::TempDir;
use zeroshard_tests::Cluster;

use crate::{done, hash, process::Worker, train};

const FLAGS: &str = "--batch 4 --context 16 --width 32 --blocks 2 --sample-chars 0 --workers 2 \
                     --steps 60";

/// A directory for checkpoints, in memory if there is such a place: files are flushed to disk.
fn directory() -> TempDir {
    let memory = Path::new("/dev/shm");
    match memory.is_dir() {
        true => tempfile::tempdir_in(memory).unwrap(),
        false => tempfile::tempdir().unwrap(),
    }
}

/// Reads until there is a complete checkpoint in the directory.
fn until_saved(worker: &mut Worker, directory: &Path) {
    let is_saved = |version: PathBuf| version.join("manifest.json").exists();
    let folders = |of: &Path| fs::read_dir(of).unwrap().map(|entry| entry.unwrap().path());
    while !folders(directory).any(|job| folders(&job).any(is_saved)) {
        worker.line();
    }
}

#[test]
fn a_run_restores_itself_when_a_server_is_killed_and_ends_with_the_same_hash() {
    let expected = hash(&train(FLAGS));
    let directory = directory();
    let mut cluster = Cluster::start(3);
    let flags = format!(
        "{FLAGS} --checkpoint file://{} --checkpoint-every 20 --checkpoint-keep 1",
        directory.path().display()
    );
    let mut workers = [0, 1].map(|rank| Worker::start(&cluster, rank, &flags));
    workers[0].until_step(32);
    until_saved(&mut workers[0], directory.path());
    cluster.shards[0].kill();
    let [first, _] = workers.map(Worker::rest);
    let restored: Vec<_> = first.iter().filter(|line| line["event"] == "restored").collect();
    assert_eq!(restored.len(), 1);
    assert_eq!(hash(&first), expected);
    assert_eq!(done(&first)["steps"], 60);
}

#[test]
fn a_run_resumes_on_another_cluster_and_ends_with_the_same_hash() {
    let expected = hash(&train(FLAGS));
    let directory = directory();
    let flags =
        format!("{FLAGS} --checkpoint file://{} --checkpoint-every 10", directory.path().display());
    let cluster = Cluster::start(3);
    let mut workers = [0, 1].map(|rank| Worker::start(&cluster, rank, &flags));
    workers[0].until_step(25);
    until_saved(&mut workers[0], directory.path());
    drop(cluster);
    for worker in &mut workers {
        worker.kill();
    }
    drop(workers);
    let cluster = Cluster::start(2);
    let [first, _] = [0, 1].map(|rank| Worker::start(&cluster, rank, &flags)).map(Worker::rest);
    assert!(first[0]["step"].as_u64().unwrap() >= 10, "{}", first[0]);
    assert_eq!(hash(&first), expected);
}
