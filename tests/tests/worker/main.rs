//! Tests of `zeroshard-worker train`, with a small model on real text.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests, which show the figures that they check"
)]

mod checkpoints;
mod groups;
mod nccl;
mod parallel;
mod process;
mod results;

use std::{path::Path, process::Output};

use serde_json::Value;
use zeroshard_tests::run;

/// The training text: sources of this project.
const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../proto/src");

/// Trains a small model for a few steps, and returns the printed lines.
fn train(flags: &str) -> Vec<Value> {
    lines(flags, start(flags))
}

/// The printed lines of a run that has succeeded.
fn lines(flags: &str, output: Output) -> Vec<Value> {
    assert!(output.status.success(), "{flags}: {output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn start(flags: &str) -> Output {
    let out = tempfile::tempdir().unwrap();
    run("zeroshard-worker", &arguments(flags, out.path()))
}

fn arguments(flags: &str, out: &Path) -> Vec<String> {
    let mut arguments = vec!["train", "--json", "--out", out.to_str().unwrap()];
    if !flags.contains("--data") {
        arguments.extend(["--data", TEXT]);
    }
    arguments.extend(flags.split_whitespace());
    arguments.into_iter().map(str::to_owned).collect()
}

fn done(lines: &[Value]) -> &Value {
    let done = lines.last().unwrap();
    assert_eq!(done["event"], "done");
    done
}

fn hash(lines: &[Value]) -> String {
    done(lines)["state_hash"].as_str().unwrap().to_owned()
}
