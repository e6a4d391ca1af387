//! Checks the settings that must not change the result of a run, and the output of a run.

use std::thread;

use zeroshard_tests::{Cluster, run};

use crate::{TEXT, done, start, train};

/// The state hash after a few steps.
fn hash(flags: &str) -> String {
    let lines = train(&format!("--steps 3 --batch 4 --context 16 --sample-chars 0 {flags}"));
    let done = done(&lines);
    assert_eq!(done["steps"], 3);
    let hash = done["state_hash"].as_str().unwrap().to_owned();
    assert_eq!(hash.len(), 64, "{hash}");
    hash
}

#[test]
fn the_state_hash_does_not_depend_on_shards_level_processes_or_chunk_size() {
    let expected = hash("");
    for flags in [
        "--shards 1 --level os",
        "--shards 2 --level os_g",
        "--shards 3 --level p_g_os --chunk-bytes 65536",
        "--shards 7 --level p_g_os --chunk-bytes 4194304",
        "--shards 1 --level p_g_os --processes",
        "--shards 2 --level os --processes --chunk-bytes 4194304",
        "--shards 7 --level os_g --processes --chunk-bytes 65536",
    ] {
        assert_eq!(hash(flags), expected, "{flags}");
    }
    assert_ne!(hash("--seed 1"), expected);
}

#[test]
fn two_workers_with_half_the_batch_equal_one_with_the_whole_batch() {
    // At this learning rate training is stable. At a higher rate it could amplify the rounding of
    // sums with every step.
    let losses = |workers: u32| -> Vec<f64> {
        let flags =
            "--steps 100 --batch 8 --context 32 --lr 0.001 --shards 1 --level os --sample-chars 0";
        let lines = train(&format!("{flags} --workers {workers}"));
        let steps = lines.iter().filter(|line| line["event"] == "step");
        steps.map(|line| line["loss"].as_f64().unwrap()).collect()
    };
    let (one, two) = (losses(1), losses(2));
    assert_eq!((one.len(), two.len()), (100, 100));
    for (step, (one, two)) in one.iter().zip(&two).enumerate() {
        assert!((one - two).abs() <= 1e-5 * one, "step {step}: {one} and {two}");
    }
}

#[test]
fn a_run_without_a_terminal_prints_lines_about_its_progress_on_standard_error() {
    let out = tempfile::tempdir().unwrap();
    let stderr = |flags: &str| {
        let all = format!(
            "train --data {TEXT} --out {} --steps 3 --batch 4 --context 16 --sample-chars 0 {flags}",
            out.path().display()
        );
        let output = run("zeroshard-worker", &all.split_whitespace().collect::<Vec<_>>());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    // Each of two processes would print the lines of its rank; with --processes, rank 0 does.
    for flags in ["--workers 2", "--workers 2 --processes"] {
        let text = stderr(flags);
        let lines: Vec<&str> = text.lines().filter(|line| line.contains("step ")).collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(lines[0].starts_with("step 1 of 3, loss ") && !text.contains("rank 1"), "{text}");
        let last = lines[1];
        for part in ["step 3 of 3, loss ", " steps/s", "0 s left"] {
            assert!(last.contains(part), "{part}: {text}");
        }
    }
    assert_eq!(stderr("--quiet"), "");
    let cluster = Cluster::start(1);
    let rank = |rank| {
        stderr(&format!(
            "--workers 2 --shards 1 --rank {rank} --job train --address {}",
            cluster.address()
        ))
    };
    let text = thread::scope(|scope| {
        let other = scope.spawn(|| rank(1));
        rank(0);
        other.join().unwrap()
    });
    assert!(text.contains("rank 1: step 3 of 3"), "{text}");
}

#[test]
fn the_last_line_summarises_the_run() {
    let lines = train(
        "--steps 4 --batch 2 --context 16 --micro-batches 1 --wire bf16 --param-dtype bf16 --optimizer lamb",
    );
    let done = done(&lines);
    for field in [
        "steps",
        "train_loss",
        "eval_loss",
        "unigram_entropy",
        "seconds",
        "peak_bytes",
        "pulled_bytes",
        "pushed_bytes",
    ] {
        assert!(done[field].as_f64().is_some_and(|number| number > 0.0), "{field} in {done}");
    }
    assert_eq!(lines.iter().filter(|line| line["event"] == "step").count(), 4);
}

#[test]
fn the_memory_of_a_worker_decreases_from_level_to_level() {
    let peak = |level: &str| {
        let lines =
            train(&format!("--steps 2 --batch 2 --context 16 --sample-chars 0 --level {level}"));
        done(&lines)["peak_bytes"].as_u64().unwrap()
    };
    let (os, os_g, p_g_os) = (peak("os"), peak("os_g"), peak("p_g_os"));
    assert!(p_g_os < os_g && os_g < os, "{p_g_os}, {os_g}, {os}");
}

#[test]
fn separate_workers_on_a_running_cluster_give_the_same_hash() {
    let cluster = Cluster::start(2);
    let ranks = [0, 1].map(|rank| {
        let flags = format!(
            "--steps 3 --batch 4 --context 16 --sample-chars 0 --shards 2 --address {} --job train --rank {rank} --workers 2",
            cluster.address()
        );
        thread::spawn(move || train(&flags))
    });
    let lines = ranks.map(|rank| rank.join().unwrap());
    let found = done(&lines[0])["state_hash"].as_str().unwrap().to_owned();
    assert_eq!(found, hash(""));
    let output = run("zsctl", &["--address", cluster.address(), "hash", "train"]);
    assert_eq!(String::from_utf8(output.stdout).unwrap().trim(), found);
}

#[test]
fn invalid_training_settings_are_refused_with_the_valid_values() {
    let empty = tempfile::tempdir().unwrap();
    let no_text = format!("--data {}", empty.path().display());
    for (flags, expected) in [
        (no_text.as_str(), empty.path().to_str().unwrap()),
        ("--data /nowhere", "/nowhere"),
        ("--level zero", "os, os_g, p_g_os"),
        ("--optimizer adamx", "adamw"),
        ("--batch 3 --workers 2", "--batch"),
        ("--lr 0", "above 0"),
        ("--wire f64", "f32, bf16, f16"),
        ("--steps 0", "1.."),
        ("--rank 0", "--address"),
        ("--tensor-parallel 3", "--heads 6"),
        ("--tensor-parallel 2 --workers 3", "such as 4"),
        ("--tensor-parallel 2 --data-parallel 2 --workers 2", "= 4"),
        ("--tensor-parallel 2 --sequence-parallel --context 15", "--context 16"),
        ("--tensor-parallel 2 --address localhost:1", "--rank is missing"),
        ("--address nowhere --job a", "host:port"),
        ("--address localhost:1", "--job is missing; expected the name of your run"),
    ] {
        let output = start(flags);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code().is_some_and(|code| code != 0), "{flags}: {}", output.status);
        assert!(stderr.contains(expected), "{flags}: {stderr}");
    }
}
