//! Runs that continue from checkpoints.

use std::{
    fs,
    io::{BufRead, BufReader, Lines},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
};

use serde_json::Value;
use tempfile::TempDir;
use zeroshard_tests::{Cluster, binary};

use crate::{TEXT, done, train};

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

/// A worker whose output is read line by line.
struct Worker {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
    out: TempDir,
}

impl Worker {
    fn start(cluster: &Cluster, rank: u32, flags: &str) -> Self {
        let out = tempfile::tempdir().unwrap();
        let flags = format!(
            "train --json --data {TEXT} --out {} --address {} --rank {rank} --shards 2 {FLAGS} \
             {flags}",
            out.path().display(),
            cluster.address()
        );
        let mut command = Command::new(binary("zeroshard-worker"));
        command.args(flags.split_whitespace()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Self { process, lines, out }
    }

    /// The next line.
    fn line(&mut self) -> Value {
        serde_json::from_str(&self.lines.next().unwrap().unwrap()).unwrap()
    }

    /// Reads up to the result of a step.
    fn until_step(&mut self, step: u64) {
        while self.line()["step"] != step {}
    }

    /// Reads until there is a complete checkpoint in the directory.
    fn until_saved(&mut self, directory: &Path) {
        let is_saved = |version: PathBuf| version.join("manifest.json").exists();
        let folders = |of: &Path| fs::read_dir(of).unwrap().map(|entry| entry.unwrap().path());
        while !folders(directory).any(|job| folders(&job).any(is_saved)) {
            self.line();
        }
    }

    /// The remaining lines, after the worker has ended.
    fn rest(mut self) -> Vec<Value> {
        let lines = self.lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap());
        let lines = lines.collect();
        assert!(self.process.wait().unwrap().success());
        drop(self.out);
        lines
    }
}

fn hash(lines: &[Value]) -> String {
    done(lines)["state_hash"].as_str().unwrap().to_owned()
}

#[test]
fn a_run_restores_itself_when_a_server_is_killed_and_ends_with_the_same_hash() {
    let expected = hash(&train(FLAGS));
    let directory = directory();
    let mut cluster = Cluster::start(3);
    let flags = format!(
        "--checkpoint file://{} --checkpoint-every 20 --checkpoint-keep 1",
        directory.path().display()
    );
    let mut workers = [0, 1].map(|rank| Worker::start(&cluster, rank, &flags));
    workers[0].until_step(32);
    workers[0].until_saved(directory.path());
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
    let flags = format!("--checkpoint file://{} --checkpoint-every 10", directory.path().display());
    let cluster = Cluster::start(3);
    let mut workers = [0, 1].map(|rank| Worker::start(&cluster, rank, &flags));
    workers[0].until_step(25);
    workers[0].until_saved(directory.path());
    drop(cluster);
    for worker in &mut workers {
        worker.process.kill().unwrap();
        worker.process.wait().unwrap();
    }
    drop(workers);
    let cluster = Cluster::start(2);
    let [first, _] = [0, 1].map(|rank| Worker::start(&cluster, rank, &flags)).map(Worker::rest);
    assert!(first[0]["step"].as_u64().unwrap() >= 10, "{}", first[0]);
    assert_eq!(hash(&first), expected);
}
