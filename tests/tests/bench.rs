//! Runs `zs-bench` with small sizes and checks the documented fields. Times are not checked.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{
    env,
    path::Path,
    process::{Command, Output},
};

use serde_json::Value;
use zeroshard_tests::{binary, gpu::with_fake_driver, run};

/// The output lines of a run. Checks that the fields in `numbers` exist and are positive.
fn bench(arguments: &[&str], numbers: &[&str]) -> Vec<Value> {
    lines(&run("zs-bench", &[&["--json"], arguments].concat()), numbers)
}

fn lines(output: &Output, numbers: &[&str]) -> Vec<Value> {
    assert!(output.status.success(), "{output:?}");
    let text = std::str::from_utf8(&output.stdout).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for line in &lines {
        for field in numbers {
            assert!(line[field].as_f64().is_some_and(|number| number > 0.0), "{field} in {line}");
        }
    }
    lines
}

#[test]
fn transfer_compares_pull_and_push_with_raw_tcp_and_plain_tonic() {
    let numbers = ["bytes", "gbps", "raw_tcp_gbps", "ratio_raw_tcp", "ratio_plain_tonic"];
    let lines =
        bench(&["transfer", "--bytes", "65536,1048576", "--repeat", "1", "--boxes", "0"], &numbers);
    let what: Vec<_> =
        lines.iter().map(|line| (line["bench"].as_str().unwrap(), &line["bytes"])).collect();
    let (small, large) = (Value::from(65_536), Value::from(1_048_576));
    assert_eq!(what, [("pull", &small), ("push", &small), ("pull", &large), ("push", &large)]);
}

#[test]
fn transfer_measures_several_connections_with_tls() {
    let numbers = ["gbps", "raw_tls_gbps", "ratio_raw_tls"];
    let options = ["--tls", "--connections", "1,3", "--bytes", "65536", "--repeat", "1"];
    let lines = bench(&[&["transfer"], &options[..]].concat(), &numbers);
    let connections: Vec<_> = lines.iter().map(|line| line["connections"].as_u64()).collect();
    assert_eq!(connections, [Some(1), Some(1), Some(3), Some(3)]);
}

#[test]
fn transfer_compares_boxes_with_an_array() {
    let numbers = ["bytes", "gbps", "ratio_array"];
    let lines = bench(&["transfer", "--bytes", "65536", "--repeat", "1", "--boxes", "64"], &[]);
    let (_, boxes) = lines.split_at(2);
    let what: Vec<_> = boxes
        .iter()
        .map(|line| [&line["bench"], &line["of"]].map(|f| f.as_str().unwrap()))
        .collect();
    let of = ["array", "Shard(0)", "Shard(1)"];
    assert_eq!(
        what,
        ["pull", "push"].into_iter().flat_map(|bench| of.map(|of| [bench, of])).collect::<Vec<_>>()
    );
    for (line, field) in boxes.iter().flat_map(|line| numbers.map(|field| (line, field))) {
        assert!(line[field].as_f64().is_some_and(|number| number > 0.0), "{field} in {line}");
    }
}

#[test]
fn tiers_compares_bytes_with_the_formula_and_steps_with_the_disk_and_with_memory() {
    let arguments = ["tiers", "--tensors", "3", "--numel", "65536", "--steps", "1"];
    let lines = bench(&arguments, &["params", "seconds", "server_peak_bytes"]);
    let of = |field: &str| lines.iter().map(|line| line[field].as_f64()).collect::<Vec<_>>();
    assert_eq!(of("memory"), [1.0, 0.5, 0.25, 0.0].map(Some));
    assert_eq!(of("ratio_formula"), [None, Some(1.0), Some(1.0), Some(1.0)]);
    for field in ["read_bytes", "written_bytes", "floor_seconds", "ratio_floor", "ratio_memory"] {
        assert!(of(field)[1..].iter().all(|number| number.is_some_and(|it| it > 0.0)), "{field}");
    }
}

#[test]
fn optimizer_measures_every_optimizer_on_one_and_two_threads() {
    let numbers = ["threads", "gparams_per_s", "gbps", "ratio_memory"];
    let lines = bench(&["optimizer", "--elements", "100000", "--repeat", "1"], &numbers);
    for optimizer in zeroshard_model::Optimizer::defaults() {
        for threads in [1, 2] {
            let is_it =
                |line: &&Value| line["optimizer"] == optimizer.name() && line["threads"] == threads;
            let states: Vec<_> =
                lines.iter().filter(is_it).map(|line| line["state_dtype"].as_str()).collect();
            let has_codes = optimizer.state_codes().is_some_and(|codes| !codes.is_empty());
            let expected = if has_codes { &["f32", "int8"][..] } else { &["f32"] };
            let expected: Vec<_> = expected.iter().copied().map(Some).collect();
            assert_eq!(states, expected, "{optimizer} on {threads} threads");
        }
    }
}

#[test]
fn kernels_measures_every_optimizer_and_transfers_on_a_gpu() {
    let mut command = Command::new(binary("zs-bench"));
    command.args(["--json", "kernels", "--elements", "4096", "--repeat", "1"]);
    with_fake_driver(&mut command);
    let lines = lines(&command.output().unwrap(), &["gbps"]);
    for optimizer in zeroshard_model::Optimizer::defaults() {
        let is_it = |line: &&Value| line["kernel"] == optimizer.name();
        assert_eq!(lines.iter().filter(is_it).count(), 1, "{optimizer}");
    }
    let kernels = lines.iter().filter(|line| line["bench"] == "kernels");
    assert!(kernels.clone().all(|line| line["ratio_copy"].as_f64() > Some(0.0)));
    let transfers = lines.iter().filter(|line| line["bench"] == "transfers");
    assert_eq!((kernels.count(), transfers.count()), (20, 8));
}

#[test]
fn wire_measures_every_encoding_that_is_not_a_copy_with_every_instruction_set() {
    let numbers = ["encode_ns", "decode_ns", "copy_ns"];
    let lines = bench(&["wire", "--elements", "1000", "--repeat", "3"], &numbers);
    let of = |field: &str| lines.iter().map(|line| line[field].clone()).collect::<Vec<_>>();
    let sets = lines.len() / 3;
    let expected = ["bf16", "f16", "int8"].into_iter().flat_map(|wire| vec![wire; sets]);
    assert_eq!(of("wire"), expected.collect::<Vec<_>>());
    assert_eq!(of("instructions")[sets - 1], "baseline");
}

fn transports(lines: &[Value]) -> Vec<&str> {
    lines.iter().map(|line| line["transport"].as_str().unwrap()).collect()
}

#[test]
fn step_measures_a_case_at_every_level() {
    for level in ["os", "os_g", "p_g_os"] {
        let case = [
            "--workers",
            "2",
            "--servers",
            "2",
            "--tensors",
            "5",
            "--numel",
            "1000",
            "--steps",
            "2",
        ];
        let lines = bench(&[&["step", "--level", level], &case[..]].concat(), &["seconds"]);
        assert_eq!(transports(&lines), ["shm", "grpc"]);
        for line in &lines {
            let labels = (&line["bench"], &line["level"]);
            assert_eq!(labels, (&Value::from("step"), &Value::from(level)));
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
}

/// The count in a row of `step --group`: least, median and greatest bytes, and the formula.
fn counted(lines: &[Value], group: u64, of: &str, bytes: &str) -> [u64; 4] {
    let is_it = |line: &&Value| {
        (&line["group"], &line["of"], &line["bytes"])
            == (&Value::from(group), &Value::from(of), &Value::from(bytes))
    };
    let line = lines.iter().find(is_it).unwrap();
    ["min", "median", "max", "formula"].map(|field| line[field].as_u64().unwrap())
}

#[test]
fn step_counts_the_bytes_of_groups_and_the_count_equals_the_formula() {
    // The slices can be divided evenly among the servers, so every server has the same bytes.
    let case = ["--workers", "12", "--servers", "4", "--tensors", "8", "--numel", "65536"];
    let lines = bench(&[&["step", "--group", "4", "--level", "p_g_os"], &case[..]].concat(), &[]);
    let parameters = 8 * 65536 * 4;
    let expected = [
        (1, "server", "received from ranks", parameters * 12 / 4),
        (4, "server", "received from ranks", parameters * 12 / 4 / 4),
        (4, "server", "sent to ranks", 2 * parameters * 12 / 4 / 4),
        (1, "rank", "sent to servers", parameters),
        (4, "rank", "sent to servers", parameters / 4),
        (4, "rank", "received from servers", 2 * parameters / 4),
        (1, "rank", "sent in the group", 0),
        (4, "rank", "sent in the group", 3 * parameters / 4 * 3),
    ];
    for (group, of, bytes, expected) in expected {
        assert_eq!(counted(&lines, group, of, bytes), [expected; 4], "{group} {of} {bytes}");
    }
    let fsdp = lines.iter().find(|line| line["system"] == "FSDP").unwrap();
    assert_eq!(fsdp["formula"], 3 * parameters / 12 * 11);
}

#[test]
fn step_refuses_groups_that_do_not_divide_the_workers() {
    let output = run("zs-bench", &["step", "--group", "3", "--workers", "8"]);
    assert!(!output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("group_size"), "{output:?}");
}

#[test]
fn checkpoint_compares_saves_and_restores_with_plain_files_and_steps_beside_saves() {
    let folder = tempfile::tempdir().unwrap();
    let case =
        ["--tensors", "5", "--numel", "1000", "--rounds", "2", "--steps", "2", "--directory"];
    let arguments = [&["checkpoint"], &case[..], &[folder.path().to_str().unwrap()]].concat();
    let lines = bench(&arguments, &["seconds", "bytes", "params", "workers", "servers"]);
    let fields: [(&str, &[&str]); 10] = [
        ("write", &["gbps"]),
        ("save", &["gbps", "ratio_plain"]),
        ("read", &["gbps"]),
        ("restore", &["gbps", "ratio_plain", "server_peak_bytes", "ratio_state"]),
        ("step", &["server_peak_bytes", "ratio_state"]),
        ("step-beside-save", &["ratio_step", "server_peak_bytes", "ratio_state"]),
        ("save-beside-steps", &["gbps", "ratio_plain"]),
        ("step-without-room", &["server_peak_bytes", "ratio_state"]),
        ("step-beside-save-without-room", &["ratio_step", "server_peak_bytes", "ratio_state"]),
        ("save-beside-steps-without-room", &["gbps", "ratio_plain"]),
    ];
    assert_eq!(lines.len(), fields.len(), "{lines:?}");
    for (line, (operation, fields)) in lines.iter().zip(fields) {
        assert_eq!((&line["bench"], &line["operation"]), (&"checkpoint".into(), &operation.into()));
        for field in fields {
            assert!(line[field].as_f64().is_some_and(|number| number > 0.0), "{field} in {line}");
        }
        let is_read = ["read", "restore"].contains(&operation);
        assert_eq!(line["cold"].is_boolean(), is_read, "{line}");
        // f32 master weights and two moments, and the headers of the files.
        assert!((60_000..100_000).contains(&line["bytes"].as_u64().unwrap()), "{line}");
    }
    assert_eq!(folder.path().read_dir().unwrap().count(), 0, "all files are removed");
}

#[test]
fn step_measures_a_job_with_replicas() {
    let case = ["step", "--replicas", "2", "--tensors", "5", "--numel", "1000", "--steps", "2"];
    let lines = bench(&case, &["seconds", "server_peak_bytes", "ratio_server_floor"]);
    assert_eq!(transports(&lines), ["shm", "grpc"]);
    assert!(lines.iter().all(|line| line["replicas"] == 2), "{lines:?}");
}

#[test]
fn step_measures_parameters_and_optimizer_state_of_other_dtypes() {
    let case = ["step", "--dtype", "bf16", "--state-dtype", "int8", "--tensors", "2"];
    let lines = bench(&[&case[..], &["--numel", "1000", "--steps", "2"]].concat(), &["seconds"]);
    for line in &lines {
        assert_eq!((&line["dtype"], &line["state_dtype"]), (&"bf16".into(), &"int8".into()));
        assert_eq!((&line["wire"], &line["parameter_wire"]), (&"bf16".into(), &"bf16".into()));
        assert_eq!(line["pushed_mb"], 0.004, "{line}");
    }
}

#[test]
fn recovery_measures_the_time_from_a_death_to_the_next_step_and_to_all_replicas() {
    let case = ["--tensors", "5", "--numel", "1000", "--rounds", "2", "--steps", "2"];
    let numbers = ["seconds", "largest_seconds", "ratio_step", "params", "servers", "replicas"];
    let lines = bench(&[&["recovery"], &case[..]].concat(), &numbers);
    let operations: Vec<_> = lines.iter().map(|line| line["operation"].as_str().unwrap()).collect();
    let expected = ["step", "noticed", "committed", "step-beside-copy", "redundant"];
    assert_eq!(operations, expected);
    let seconds = |operation: usize| lines[operation]["seconds"].as_f64().unwrap();
    assert!(seconds(1) < seconds(2) && seconds(2) < seconds(4), "{lines:?}");
}

#[test]
fn control_measures_every_event_with_each_number_of_jobs_and_decisions_and_placements() {
    let case = ["control", "--jobs", "1,2", "--ranks", "3", "--servers", "3", "--slices", "300"];
    let lines = bench(&[&case[..], &["--rounds", "1", "--repeat", "1"]].concat(), &[]);
    let rows = |bench: &str, labels: &[&str], numbers: &[&str]| -> Vec<String> {
        let rows = lines.iter().filter(|line| line["bench"] == bench);
        let row = |line: &Value| {
            for field in numbers {
                let number = line[field].as_f64();
                assert!(number.is_some_and(|number| number > 0.0), "{field} in {line}");
            }
            let labels = labels.iter().filter_map(|label| match &line[label] {
                Value::String(text) => Some(text.clone()),
                Value::Null => None,
                other => Some(other.to_string()),
            });
            labels.collect::<Vec<_>>().join(" ")
        };
        rows.map(row).collect()
    };
    let numbers = ["number", "handle_us", "handle_p99_us", "event_us", "event_p99_us", "ratio"];
    let of_jobs = ["commit", "ready", "stored", "lease-ended", "join", "granted"];
    let of_jobs = of_jobs
        .iter()
        .flat_map(|event| ["large 1", "large 2", "small 2"].map(|job| format!("{event} {job}")));
    let others = ["stats 1", "stats 2", "tick 1", "tick 2"].map(str::to_owned);
    let expected: Vec<String> = of_jobs.chain(others).collect();
    assert_eq!(rows("control", &["event", "job", "jobs"], &numbers), expected);
    let steps = ["decided-ready-before", "decided-ready-after", "all-events"];
    let expected: Vec<String> =
        steps.iter().flat_map(|step| [1, 2].map(|jobs| format!("{step} {jobs}"))).collect();
    let numbers = ["number", "p50_ms", "p99_ms", "ratio"];
    assert_eq!(rows("control-step", &["step", "jobs"], &numbers), expected);
    let placements = rows(
        "control-placement",
        &["placement", "slices", "servers", "replicas"],
        &["seconds", "largest_seconds", "goal_seconds"],
    );
    let expected = ["balanced 300 3 1", "replicas-in-zones 300 3 2", "within-memory 300 3 1"];
    assert_eq!(placements, expected);
}

#[test]
fn neighbours_reports_the_slowdown_by_each_manner() {
    let case = ["neighbours", "--jobs", "2", "--tensors", "2", "--numel", "1000"];
    let length = ["--large", "100000", "--seconds", "1", "--rounds", "1"];
    let lines = bench(&[&case[..], &length].concat(), &["steps", "seconds", "p90_seconds"]);
    let manners: Vec<_> = lines.iter().map(|line| line["manner"].as_str().unwrap()).collect();
    let expected = ["well-behaved", "slow-reader", "huge-tensors", "job-storm", "large-job"];
    assert_eq!(manners, expected);
    for (line, field) in
        lines[1..].iter().flat_map(|line| ["ratio_median", "ratio_p90"].map(|f| (line, f)))
    {
        assert!(line[field].as_f64().is_some_and(|ratio| ratio > 0.0), "{field} in {line}");
    }
}

/// A fake interpreter that imports everything except DeepSpeed, and reports the same result for all
/// systems.
const STUB: &str = r#"#!/bin/sh
[ "$1" = -c ] && exit 0
while [ $# -gt 0 ]; do
    case "$1" in --output) output=$2 ;; --system) system=$2 ;; esac
    shift
done
case "$system" in ds*) echo "ModuleNotFoundError: No module named 'deepspeed'" >&2; exit 1 ;; esac
echo '{"params": 8192, "tokens": 512, "seconds": 0.5, "loss": 1.0, "peak_bytes": 2097152, "gpu_peak_bytes": 1048576}' >"$output"
"#;

/// Writes an interpreter in a separate process: a program cannot be started if another test has it
/// open for writing at the moment of a fork.
fn interpreter(folder: &Path, script: &str) -> String {
    let path = folder.join("python").to_str().unwrap().to_owned();
    let write = r#"printf %s "$1" >"$0" && chmod +x "$0""#;
    assert!(Command::new("sh").args(["-c", write, &path, script]).status().unwrap().success());
    path
}

#[test]
fn torch_measures_every_system_and_level_and_omits_deepspeed_if_it_does_not_run() {
    let folder = tempfile::tempdir().unwrap();
    let python = interpreter(folder.path(), STUB);
    let numbers =
        ["params", "seconds", "ratio_local", "ratio_ddp", "rank0_peak_mib", "rank1_peak_mib"];
    let lines =
        bench(&["torch", "--python", &python, "--servers", "embedded", "--rounds", "2"], &numbers);
    let labels: Vec<_> =
        lines.iter().map(|it| [&it["system"], &it["level"], &it["transport"]]).collect();
    let expected = [
        ["local".into(), Value::Null, Value::Null],
        ["ddp".into(), Value::Null, "gloo".into()],
        ["zero1".into(), Value::Null, "gloo".into()],
        ["fsdp2".into(), Value::Null, "gloo".into()],
        ["zeroshard".into(), "os".into(), "shm".into()],
        ["zeroshard".into(), "os_g".into(), "shm".into()],
        ["zeroshard".into(), "p_g_os".into(), "shm".into()],
        ["zeroshard".into(), "os".into(), "grpc".into()],
        ["zeroshard".into(), "os_g".into(), "grpc".into()],
        ["zeroshard".into(), "p_g_os".into(), "grpc".into()],
    ];
    assert_eq!(labels, expected.each_ref().map(|it| it.each_ref()));
    let segment_sizes: Vec<_> =
        lines.iter().filter_map(|line| line["segment_size"].as_u64()).collect();
    assert_eq!(segment_sizes, [1024 * 1024 / 2; 2], "only at p_g_os, and smaller than a layer");
    for line in &lines {
        let floor = line["floor_seconds"].as_f64();
        assert_eq!(floor.is_some(), line["system"] == "zeroshard", "{line}");
        assert!(floor.is_none_or(|floor| floor > 0.5 && line["ratio_floor"].as_f64() < Some(1.0)));
    }
    assert!(lines.iter().all(|line| line["bench"] == "torch"));
}

#[test]
fn torch_measures_one_rank_on_a_gpu_with_the_memory_of_the_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let python = interpreter(folder.path(), STUB);
    let arguments = ["torch", "--python", &python, "--servers", "embedded", "--rounds", "1"];
    let choice = ["--systems", "fsdp2,zeroshard", "--device", "cuda", "--ranks", "1"];
    let lines = bench(&[&arguments[..], &choice].concat(), &["rank0_peak_mib", "gpu_peak_mib"]);
    assert_eq!(transports(&lines), ["nccl", "shm", "shm", "shm", "grpc", "grpc", "grpc"]);
    assert!(lines.iter().all(|line| line["rank1_peak_mib"].is_null()), "there is one rank");
    assert!(lines.iter().all(|line| line["tokens_per_s"] == 1024.0), "512 tokens in half a second");
}

#[test]
fn torch_knows_sizes_of_gpt2() {
    let folder = tempfile::tempdir().unwrap();
    let python = interpreter(folder.path(), STUB);
    let arguments = ["torch", "--python", &python, "--systems", "local", "--rounds", "1"];
    for (model, layers, width) in [("gpt2-1g", 18, 2048), ("gpt2-3g", 36, 2560)] {
        let lines = bench(&[&arguments[..], &["--model", model]].concat(), &["tokens_per_s"]);
        let of = |field: &str| &lines[0][field];
        assert_eq!(
            (of("model"), of("layers"), of("width")),
            (&"gpt2".into(), &layers.into(), &width.into())
        );
    }
}

#[test]
fn torch_measures_ways_of_clipping_in_one_run() {
    let folder = tempfile::tempdir().unwrap();
    let python = interpreter(folder.path(), STUB);
    let arguments = ["torch", "--python", &python, "--servers", "embedded", "--rounds", "1"];
    let choice = ["--systems", "ddp,zeroshard", "--clip", "torch,own", "--model", "gpt2"];
    let transport = ["--transport", "grpc"];
    let arguments = [&arguments[..], &choice, &transport].concat();
    let lines = bench(&arguments, &["seconds", "ratio_ddp"]);
    let labels: Vec<_> =
        lines.iter().map(|it| [&it["level"], &it["clip"], &it["segment_size"]]).collect();
    let row = |level: &str, clip: &str| [level.into(), clip.into(), Value::Null];
    let expected = [
        [Value::Null, "torch".into(), Value::Null],
        row("os", "torch"),
        row("os", "own"),
        row("os_g", "torch"),
        row("os_g", "own"),
        row("p_g_os", "torch"),
        row("p_g_os", "own"),
    ];
    assert_eq!(labels, expected.each_ref().map(|it| it.each_ref()));
}

#[test]
fn torch_prints_a_table_and_the_reason_for_an_omitted_system() {
    let folder = tempfile::tempdir().unwrap();
    let python = interpreter(folder.path(), STUB);
    let output =
        run("zs-bench", &["torch", "--python", &python, "--systems", "ddp,ds1", "--rounds", "1"]);
    assert!(output.status.success(), "{output:?}");
    let table = String::from_utf8(output.stdout).unwrap();
    let rows: Vec<Vec<_>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    let [header, row] = &rows[..] else { panic!("{table}") };
    let cell = |field| row[header.iter().position(|it| *it == field).unwrap()];
    let cells =
        ["system", "level", "seconds", "ratio_ddp", "ratio_fsdp2", "rank0_peak_mib"].map(cell);
    assert_eq!(cells, ["ddp", "-", "0.500", "1.000", "-", "2"]);
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(
        log.contains("ds1 is skipped: ModuleNotFoundError: No module named 'deepspeed'"),
        "{log}"
    );
}

#[test]
fn torch_names_missing_packages_and_the_failed_rank() {
    let folder = tempfile::tempdir().unwrap();
    let cases = [
        ("#!/bin/sh\necho 'No module named torch' >&2; exit 1\n", "pip install torch"),
        ("#!/bin/sh\n[ \"$2\" = 'import torch' ]\n", "pip install client/python"),
        (
            "#!/bin/sh\n[ \"$1\" = -c ] || { [ $RANK = 0 ] && exec tail -f /dev/null; echo boom; exit 3; }\n",
            "rank 1 ended",
        ),
        ("#!/bin/sh\n", "rank 0 wrote no result"),
    ];
    for (script, message) in cases {
        let python = interpreter(folder.path(), script);
        let arguments =
            ["torch", "--python", &python, "--systems", "zeroshard", "--servers", "embedded"];
        let output = run("zs-bench", &arguments);
        assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
        let log = String::from_utf8(output.stderr).unwrap();
        assert!(log.contains(message), "{message:?} is not in {log}");
    }
}

/// The interpreter that `ZEROSHARD_TEST_PYTHON` names, if it can import the module.
fn python_with(module: &str) -> Option<String> {
    let python = env::var("ZEROSHARD_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let output = Command::new(&python).args(["-c", &format!("import {module}")]).output();
    let reason = match output {
        Ok(output) if output.status.success() => return Some(python),
        Ok(output) => {
            String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_owned()
        }
        Err(error) => error.to_string(),
    };
    eprintln!("not measured, since {python} cannot import {module}: {reason}");
    None
}

#[test]
fn torch_follow_measures_bytes_steps_and_readers() {
    let Some(python) = python_with("zeroshard.torch") else { return };
    let sizes = ["--layers", "1", "--width", "64", "--pretrain", "2", "--pairs", "2"];
    let readers = ["--rates", "1e-5", "--readers", "2", "--versions", "1"];
    let arguments = [&["follow", "--python", &python][..], &sizes, &readers].concat();
    // The commit is known to a few milliseconds, and such a small model takes less.
    let lines = bench(&arguments, &["params", "bytes"]);
    let operations: Vec<_> = lines.iter().map(|line| line["operation"].as_str()).collect();
    assert_eq!(operations, ["step", "readers", "readers-of-mirror"].map(Some));
    let ratio = |line: usize, field: &str| lines[line][field].as_f64().unwrap();
    assert!((1.0..1.5).contains(&ratio(0, "ratio_entropy")), "{}", lines[0]);
    assert!(ratio(0, "ratio_snapshot") < 1.0, "{}", lines[0]);
    assert_eq!(ratio(1, "ratio_one_reader"), 2.0);
    assert!(ratio(2, "ratio_one_reader") < 1.5, "{}", lines[2]);
}

#[test]
fn chart_draws_the_results_of_other_benchmarks_and_prints_their_table() {
    let folder = tempfile::tempdir().unwrap();
    let python = interpreter(folder.path(), STUB);
    let [results, chart] = ["results.jsonl", "chart.svg"]
        .map(|name| folder.path().join(name).to_str().unwrap().to_owned());
    let runs: [&[&str]; 3] = [
        &["torch", "--python", &python, "--servers", "embedded", "--rounds", "1"],
        &["transfer", "--bytes", "65536", "--repeat", "1", "--boxes", "0", "--transport", "shm"],
        &["optimizer", "--elements", "100000", "--repeat", "1"],
    ];
    let rows = runs.map(|arguments| run("zs-bench", &[&["--json"], arguments].concat()).stdout);
    std::fs::write(&results, rows.concat()).unwrap();
    let output = run("zs-bench", &["chart", &results, "--out", &chart, "--table"]);
    assert!(output.status.success(), "{output:?}");
    let svg = std::fs::read_to_string(&chart).unwrap();
    for label in ["ZeroShard p_g_os", "DDP", "64 KiB", "shared memory", "adamw", "int8 state"] {
        assert!(svg.contains(label), "{label}");
    }
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("| ZeroShard | `os_g` | gRPC | 0.500 | 1.00 |"), "{table}");
}

/// Checks that all synchronised systems have the same final loss, since they do the same work.
fn assert_same_loss(lines: &[Value]) {
    let losses: Vec<_> =
        lines.iter().filter(|line| line["system"] != "local").map(|line| &line["loss"]).collect();
    let losses: Vec<_> = losses.iter().map(|loss| loss.as_f64().unwrap()).collect();
    assert!(losses.iter().all(|loss| (loss / losses[0] - 1.0).abs() < 1e-4), "{lines:?}");
}

/// A model of three layers of 64 x 64.
const SMALL: [&str; 8] = ["--layers", "3", "--width", "64", "--steps", "2", "--rounds", "1"];

#[test]
fn torch_runs_the_other_systems() {
    let Some(python) = python_with("torch") else { return };
    let arguments = ["torch", "--python", &python, "--systems", "local,ddp,zero1,fsdp2"];
    let lines = bench(&[&arguments[..], &SMALL].concat(), &["seconds", "loss"]);
    assert_eq!(lines.len(), 4);
    assert!(lines.iter().all(|line| line["params"] == 3 * 64 * 64));
    assert_same_loss(&lines);
}

#[test]
fn torch_runs_zeroshard_at_every_level_and_ddp() {
    let Some(python) = python_with("zeroshard.torch") else { return };
    for servers in ["processes", "embedded"] {
        let arguments =
            ["torch", "--python", &python, "--systems", "ddp,zeroshard", "--servers", servers];
        let lines = bench(&[&arguments[..], &SMALL].concat(), &["seconds", "loss", "ratio_ddp"]);
        assert_eq!(lines.len(), 4);
        assert_same_loss(&lines);
    }
}
