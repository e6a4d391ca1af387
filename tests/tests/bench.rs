//! `zs-bench` with tiny sizes: the fields that are promised, no timing.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use serde_json::Value;
use zeroshard_tests::run;

/// The lines of a run; numbers that are promised are there, finite and positive.
fn bench(arguments: &[&str], numbers: &[&str]) -> Vec<Value> {
    let output = run("zs-bench", &[&["--json"], arguments].concat());
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for line in &lines {
        for field in numbers {
            assert!(line[field].as_f64().is_some_and(|number| number > 0.0), "{field} in {line}");
        }
    }
    lines
}

#[test]
fn transfer_measures_pull_and_push_beside_raw_tcp_and_plain_tonic() {
    let numbers = ["bytes", "gbps", "raw_tcp_gbps", "ratio_raw_tcp", "ratio_plain_tonic"];
    let lines = bench(&["transfer", "--bytes", "65536,1048576", "--repeat", "1"], &numbers);
    let what: Vec<_> = lines.iter().map(|line| (line["bench"].as_str().unwrap(), &line["bytes"])).collect();
    let (small, large) = (Value::from(65_536), Value::from(1_048_576));
    assert_eq!(what, [("pull", &small), ("push", &small), ("pull", &large), ("push", &large)]);
}

#[test]
fn optimizer_measures_every_optimizer_on_one_and_two_threads() {
    let numbers = ["threads", "gparams_per_s", "gbps", "ratio_memory"];
    let lines = bench(&["optimizer", "--elements", "100000", "--repeat", "1"], &numbers);
    for optimizer in zeroshard_proto::Optimizer::defaults() {
        for threads in [1, 2] {
            let is_it = |line: &&Value| line["optimizer"] == optimizer.name() && line["threads"] == threads;
            assert_eq!(lines.iter().filter(is_it).count(), 1, "{optimizer} on {threads} threads");
        }
    }
}

#[test]
fn step_measures_a_case_at_every_level() {
    for level in ["os", "os_g", "p_g_os"] {
        let case = ["--workers", "2", "--servers", "2", "--tensors", "5", "--numel", "1000", "--steps", "2"];
        let lines = bench(&[&["step", "--level", level], &case[..]].concat(), &["seconds"]);
        assert_eq!(lines.len(), 1);
        let line = &lines[0];
        assert_eq!((&line["bench"], &line["level"]), (&Value::from("step"), &Value::from(level)));
        let whole = ["params", "workers", "servers"].map(|field| line[field].as_u64().unwrap());
        assert_eq!(whole, [5000, 2, 2]);
        for phase in ["push", "decide", "pull"] {
            assert!(
                line["phases"][phase].as_f64().is_some_and(|seconds| seconds >= 0.0),
                "{phase} in {line}"
            );
        }
    }
}
