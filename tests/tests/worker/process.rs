//! A worker in a process of its own.

use std::{
    io::{BufRead, BufReader, Lines, Read},
    process::{Child, ChildStdout, Command, Stdio},
};

use serde_json::Value;
use tempfile::TempDir;
use zeroshard_tests::{Cluster, binary};

use crate::TEXT;

/// A worker whose output is read line by line.
pub(crate) struct Worker {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
    out: TempDir,
}

impl Worker {
    pub(crate) fn start(cluster: &Cluster, rank: u32, flags: &str) -> Self {
        let out = tempfile::tempdir().unwrap();
        let flags = format!(
            "train --json --data {TEXT} --out {} --address {} --job train --rank {rank} --shards 2 \
             {flags}",
            out.path().display(),
            cluster.address()
        );
        let mut command = Command::new(binary("zeroshard-worker"));
        command.args(flags.split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Self { process, lines, out }
    }

    /// The next line.
    pub(crate) fn line(&mut self) -> Value {
        serde_json::from_str(&self.lines.next().unwrap().unwrap()).unwrap()
    }

    /// Reads up to the result of a step.
    pub(crate) fn until_step(&mut self, step: u64) {
        while self.line()["step"] != step {}
    }

    /// Kills the process.
    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// What a worker that fails has printed on standard error.
    pub(crate) fn failure(mut self) -> String {
        let mut text = String::new();
        self.process.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        assert!(!self.process.wait().unwrap().success());
        text
    }

    /// The remaining lines, after the worker has ended.
    pub(crate) fn rest(mut self) -> Vec<Value> {
        let lines = self.lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap());
        let lines = lines.collect();
        assert!(self.process.wait().unwrap().success());
        drop(self.out);
        lines
    }
}
