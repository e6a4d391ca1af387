//! ZeRO x tensor parallelism: the model is sharded over several workers, and training equals that
//! of one dense process.
//!
//! promise: same-bits

use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use tempfile::TempDir;
use zeroshard_tests::{Cluster, binary};

use crate::{done, start, train};

/// 31 characters, a number that is not divisible by 2 or 3.
const ALPHABET: &[u8; 31] = b"abcdefghijklmnopqrstuvwxyz .,;\n";

/// A small model. The hidden width of the MLP is not divisible by 3. The gradient is clipped and
/// accumulated. At this learning rate training is stable and does not amplify the rounding of sums.
const TINY: &str = "--width 24 --blocks 2 --heads 6 --hidden 50 --context 12 --batch 4 --micro-batches 2 --lr 0.002 \
    --clip 0.5 --steps 100 --sample-chars 0";

/// A folder with a text that can be learned, because its words are repeated.
fn text() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut state = 7u64;
    let mut next = |bound: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % bound
    };
    let words: Vec<String> = (0..40)
        .map(|_| (0..2 + next(6)).map(|_| char::from(ALPHABET[next(26)])).collect())
        .collect();
    let mut text = String::from_utf8(ALPHABET.to_vec()).unwrap();
    for _ in 0..2_000 {
        text.push_str(&words[next(words.len())]);
        text.push(char::from(ALPHABET[26 + next(5)]));
    }
    fs::write(folder.path().join("text.txt"), text).unwrap();
    folder
}

/// The values that must have the same bits: the losses, and the state hash.
#[derive(Debug, PartialEq)]
struct Trained {
    losses: Vec<f64>,
    hash: String,
}

fn trained(text: &Path, flags: &str) -> Trained {
    let lines = train(&format!("--data {} {TINY} {flags}", text.display()));
    let steps: Vec<&Value> = lines.iter().filter(|line| line["event"] == "step").collect();
    assert!(
        steps.iter().any(|step| step["gradient_norm"].as_f64().unwrap() > 0.5),
        "some steps are clipped"
    );
    let losses = steps.iter().map(|step| step["loss"].as_f64().unwrap()).collect();
    Trained { losses, hash: done(&lines)["state_hash"].as_str().unwrap().to_owned() }
}

/// Compares a run with one dense process, at all levels, on one and on three shard servers.
fn assert_equals_one_process(flags: &str) {
    let text = text();
    let dense = trained(text.path(), "--workers 1 --shards 1 --level os");
    assert!(dense.losses[99] < dense.losses[0] - 0.1, "the loss decreases: {dense:?}");
    let first = trained(text.path(), &format!("{flags} --shards 1 --level os"));
    let pairs = dense
        .losses
        .iter()
        .zip(&first.losses)
        .map(|(dense, found)| ((found - dense) / dense).abs());
    let worst = pairs.fold(0f64, f64::max);
    println!("{flags}: losses differ by {worst:.1e} at most");
    assert!(first.losses.len() == 100 && worst <= 1e-4, "{flags}: losses differ by {worst}");
    for rest in ["--shards 3 --level os_g", "--shards 3 --level p_g_os"] {
        assert_eq!(trained(text.path(), &format!("{flags} {rest}")), first, "{flags} {rest}");
    }
}

#[test]
fn training_on_two_tensor_parallel_ranks_equals_one_process() {
    assert_equals_one_process("--data-parallel 1 --tensor-parallel 2");
}

#[test]
fn training_on_two_replicas_equals_one_process() {
    assert_equals_one_process("--data-parallel 2 --tensor-parallel 1");
}

#[test]
fn training_on_two_replicas_of_two_ranks_equals_one_process() {
    assert_equals_one_process("--data-parallel 2 --tensor-parallel 2");
}

#[test]
fn training_on_three_ranks_with_parts_of_different_sizes_equals_one_process() {
    assert_equals_one_process("--data-parallel 1 --tensor-parallel 3");
}

#[test]
fn training_with_sequence_parallelism_equals_one_process() {
    assert_equals_one_process("--data-parallel 1 --tensor-parallel 2 --sequence-parallel");
}

/// Runs the workers of a job as separate processes, each with its own flags.
fn run_ranks(cluster: &Cluster, flags: &[String]) -> Vec<Output> {
    let start = |(rank, flags): (usize, &String)| {
        let shards = cluster.shards.len();
        let flags =
            format!("--address {} --shards {shards} --rank {rank} {flags}", cluster.address());
        thread::spawn(move || start(&flags))
    };
    let ranks: Vec<_> = flags.iter().enumerate().map(start).collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_tensor_parallel_worker_transfers_only_its_part() {
    let (text, cluster) = (text(), Cluster::start(2));
    let mut before = cluster.payload();
    let mut bytes_of_a_worker = |workers: u32, level: &str| {
        let flags = format!(
            "--data {} --job {level}-{workers} --level {level} --workers {workers} --tensor-parallel {workers} --width 256 --blocks 1 \
             --context 16 --batch 2 --steps 3 --sample-chars 0",
            text.path().display()
        );
        let outputs = run_ranks(&cluster, &vec![flags; workers as usize]);
        assert!(outputs.iter().all(|output| output.status.success()), "{outputs:?}");
        let after = cluster.payload();
        let bytes = [0, 1].map(|i| (after[i] - before[i]) as f64 / f64::from(workers));
        before = after;
        bytes
    };
    for level in ["os", "p_g_os"] {
        let dense = bytes_of_a_worker(1, level);
        for workers in [2, 4] {
            let bytes = bytes_of_a_worker(workers, level);
            for (i, name) in ["pulled", "pushed"].into_iter().enumerate() {
                let ratio = bytes[i] / dense[i] * f64::from(workers);
                println!(
                    "{level}, {workers} ranks: {name} {ratio:.4} of the dense worker's bytes / {workers}"
                );
                assert!((0.98..1.05).contains(&ratio), "{level}, {workers} ranks: {name} {ratio}");
            }
        }
    }
}

#[test]
fn ranks_of_a_replica_with_different_settings_are_refused() {
    let (text, cluster) = (text(), Cluster::start(1));
    let flags = ["os", "p_g_os"].map(|level| {
        format!(
            "--data {} --job a {TINY} --tensor-parallel 2 --level {level}",
            text.path().display()
        )
    });
    for (rank, output) in run_ranks(&cluster, &flags).into_iter().enumerate() {
        let stderr = stderr(&output);
        assert!(!output.status.success(), "rank {rank}");
        assert!(
            stderr.contains("level os,") && stderr.contains("level p_g_os,"),
            "rank {rank}: {stderr}"
        );
    }
}

#[test]
fn a_finished_run_continues_only_with_the_same_mesh() {
    let (text, cluster) = (text(), Cluster::start(1));
    let start = |flags: &str| {
        let flags = format!(
            "--data {} --job a --batch 4 --sample-chars 0 --tensor-parallel 2 {flags}",
            text.path().display()
        );
        run_ranks(&cluster, &[flags.clone(), flags])
    };
    for flags in ["--steps 2", "--steps 4"] {
        assert!(start(flags).iter().all(|output| output.status.success()), "{flags}");
    }
    for output in start("--steps 6 --sequence-parallel") {
        assert!(
            !output.status.success() && stderr(&output).contains("exists with a different"),
            "{}",
            stderr(&output)
        );
    }
}

#[test]
fn a_rank_reports_a_missing_peer() {
    let (text, cluster) = (text(), Cluster::start(1));
    let flags = format!("--data {} --job a --tensor-parallel 2 --timeout 1", text.path().display());
    let output = run_ranks(&cluster, &[flags]).remove(0);
    assert!(!output.status.success() && stderr(&output).contains("rank 1"), "{}", stderr(&output));
}

#[test]
fn a_killed_rank_is_named_and_ends_the_others_before_the_deadline() {
    let (text, out, cluster) = (text(), tempfile::tempdir().unwrap(), Cluster::start(1));
    let mut ranks = [0, 1].map(|rank| {
        let flags = format!(
            "train --json --data {} --out {} {TINY} --address {} --job train --shards 1 --tensor-parallel 2 --rank {rank} --deadline 600",
            text.path().display(),
            out.path().display(),
            cluster.address()
        );
        let flags = flags.replace("--steps 100", "--steps 100000");
        let mut command = Command::new(binary("zeroshard-worker"));
        command.args(flags.split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    let mut line = String::new();
    BufReader::new(ranks[0].stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("step"), "{line}");
    ranks[1].kill().unwrap();
    ranks[1].wait().unwrap();
    let begin = Instant::now();
    let [first, _] = ranks;
    let output = first.wait_with_output().unwrap();
    let stderr = stderr(&output);
    assert!(
        !output.status.success()
            && stderr.contains("rank 1")
            && stderr.contains("start all of them"),
        "{stderr}"
    );
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}: {stderr}", begin.elapsed());
}
