//! `zeroshard-worker train --tensor-parallel`: several processes with one model, against one process with all of it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{
    io::{BufRead, BufReader},
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use zeroshard_tests::{Cluster, binary, run};

/// Text to learn: sources of this project.
const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../proto/src");

/// A model whose heads divide by 2 and 3, and whose vocabulary does not; tied embedding, clipping and accumulated gradients. At this
/// rate training is stable: otherwise it makes the rounding of the sums larger with every step.
const SMALL: &str =
    "--width 24 --heads 6 --blocks 2 --context 16 --batch 4 --micro-batches 2 --clip 0.5 --lr 0.002";

/// The lines that a run prints.
fn train(flags: &str) -> Vec<Value> {
    let out = tempfile::tempdir().unwrap();
    let mut arguments = vec!["train", "--json", "--out", out.path().to_str().unwrap(), "--data", TEXT];
    arguments.extend(SMALL.split_whitespace().chain(flags.split_whitespace()));
    let output = run("zeroshard-worker", &arguments);
    assert!(output.status.success(), "{flags}: {output:?}");
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn losses(lines: &[Value]) -> Vec<f64> {
    let steps = lines.iter().filter(|line| line["event"] == "step");
    steps.map(|line| line["loss"].as_f64().unwrap()).collect()
}

fn done(lines: &[Value], field: &str) -> Value {
    assert_eq!(lines.last().unwrap()["event"], "done");
    lines.last().unwrap()[field].clone()
}

#[test]
fn losses_are_those_of_one_process_on_every_mesh_at_every_level() {
    let flags = "--steps 100 --shards 2 --sample-chars 4";
    let expected = losses(&train(&format!("{flags} --workers 1 --level os")));
    assert_eq!(expected.len(), 100);
    assert!(expected[99] < 0.9 * expected[0], "it learns: {expected:?}");
    let meshes = ["--data-parallel 1 --tensor-parallel 2", "--data-parallel 2 --tensor-parallel 1"];
    let meshes = meshes.into_iter().chain(["--data-parallel 2 --tensor-parallel 2", "--tensor-parallel 3"]);
    let mut cases: Vec<String> = meshes
        .flat_map(|mesh| ["os", "os_g", "p_g_os"].map(|level| format!("{mesh} --level {level}")))
        .collect();
    cases.push("--data-parallel 2 --tensor-parallel 2 --sequence-parallel --level p_g_os".to_owned());
    cases.push("--tensor-parallel 3 --sequence-parallel --level os".to_owned());
    for case in cases {
        let found = losses(&train(&format!("{flags} {case}")));
        assert_eq!(found.len(), 100, "{case}");
        for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let difference = (found - expected).abs() / expected;
            assert!(difference <= 1e-4, "{case}: step {step}: {found} and {expected}");
        }
    }
}

#[test]
fn the_state_hash_depends_neither_on_shards_nor_level_nor_chunks() {
    for mesh in ["--data-parallel 2 --tensor-parallel 2 --sequence-parallel", "--tensor-parallel 3"] {
        let hash = |flags: &str| {
            let lines = train(&format!("--steps 4 --sample-chars 0 {mesh} {flags}"));
            done(&lines, "state_hash").as_str().unwrap().to_owned()
        };
        let expected = hash("--shards 1 --level os");
        assert_eq!(hash("--shards 3 --level os_g --chunk-bytes 4096"), expected, "{mesh}");
        assert_eq!(hash("--shards 2 --level p_g_os"), expected, "{mesh}");
    }
}

/// Starts all ranks of a run by hand, on a running cluster; how each ended.
fn ranks(cluster: &Cluster, count: u32, flags: &str) -> Vec<Output> {
    let ranks = (0..count).map(|rank| {
        let flags = format!("--shards 1 --address {} --rank {rank} {flags}", cluster.address());
        thread::spawn(move || {
            let out = tempfile::tempdir().unwrap();
            let mut arguments =
                vec!["train", "--json", "--out", out.path().to_str().unwrap(), "--data", TEXT];
            arguments.extend(SMALL.split_whitespace().chain(flags.split_whitespace()));
            run("zeroshard-worker", &arguments)
        })
    });
    let ranks: Vec<_> = ranks.collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

#[test]
fn a_tensor_parallel_group_moves_hardly_more_bytes_than_one_worker_with_the_whole_model() {
    // By the server's own counters: what was pushed, what was pulled.
    let bytes = |count: u32, mesh: &str| {
        let cluster = Cluster::start(1);
        let outputs = ranks(&cluster, count, &format!("--steps 2 --sample-chars 0 --level os {mesh}"));
        assert!(outputs.iter().all(|output| output.status.success()), "{mesh}: {outputs:?}");
        let metrics = cluster.shards[0].get("/metrics");
        [("push", "received"), ("pull", "sent")].map(|(operation, direction)| {
            let labels = format!("{{direction=\"{direction}\",operation=\"{operation}\"}} ");
            let series = format!("zeroshard_payload_bytes_total{labels}");
            let line = metrics.lines().find_map(|line| line.strip_prefix(&series));
            line.unwrap_or_else(|| panic!("{series} in {metrics}")).parse::<f64>().unwrap()
        })
    };
    let whole = bytes(1, "--workers 1");
    for count in [2, 3] {
        let group = bytes(count, &format!("--tensor-parallel {count}"));
        // Each box is pushed once; what is not cut (norms, positions, biases of rows) goes to every rank.
        assert_eq!(group[0], whole[0], "{count} ranks");
        let share = group[1] / whole[1] / f64::from(count);
        assert!(share < 1.1 / f64::from(count), "{count} ranks: {share} of the bytes each");
    }
}

#[test]
fn a_run_that_ended_goes_on_with_the_same_mesh_and_no_other() {
    let cluster = Cluster::start(1);
    let start = |flags: &str| ranks(&cluster, 2, &format!("--sample-chars 0 --tensor-parallel 2 {flags}"));
    assert!(start("--steps 2").iter().all(|output| output.status.success()));
    assert!(start("--steps 4").iter().all(|output| output.status.success()), "version 2 goes on");
    for output in start("--steps 6 --sequence-parallel") {
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains("exists with another"), "{said}");
    }
}

#[test]
fn a_rank_whose_peer_is_not_there_says_so() {
    let cluster = Cluster::start(1);
    let flags =
        format!("--tensor-parallel 2 --shards 1 --deadline 1 --address {} --rank 0", cluster.address());
    let mut arguments = vec!["train", "--json", "--data", TEXT];
    arguments.extend(SMALL.split_whitespace().chain(flags.split_whitespace()));
    let output = run("zeroshard-worker", &arguments);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("rank 1"), "{said}");
}

#[test]
fn a_rank_that_is_killed_ends_the_others_long_before_the_deadline_and_is_named() {
    let cluster = Cluster::start(1);
    let out = tempfile::tempdir().unwrap();
    let mut ranks = [0, 1].map(|rank| {
        let flags = format!("--steps 100000 --shards 1 --tensor-parallel 2 --deadline 600 --rank {rank}");
        let mut command = Command::new(binary("zeroshard-worker"));
        command
            .args(["train", "--json", "--data", TEXT, "--address", cluster.address(), "--out"])
            .arg(out.path());
        command.args(SMALL.split_whitespace().chain(flags.split_whitespace()));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    let mut line = String::new();
    BufReader::new(ranks[0].stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("step"), "{line}");
    ranks[1].kill().unwrap();
    ranks[1].wait().unwrap();
    let begin = Instant::now();
    let [first, _] = ranks;
    let output = first.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("rank 1"), "{said}");
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}: {said}", begin.elapsed());
}

#[test]
fn heads_that_do_not_divide_are_refused_before_anything_starts() {
    let output = run("zeroshard-worker", &["train", "--data", TEXT, "--tensor-parallel", "3"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("one of 1, 2 or 4"), "{said}");
}
