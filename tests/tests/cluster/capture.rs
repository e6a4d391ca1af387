//! A captured step is applied again, at every instruction set and on a GPU of the fake driver, and
//! has the hash that the servers had.
//!
//! promise: same-bits

use std::{
    cell::Cell,
    fs,
    path::Path,
    process::{Command, Output},
};

use futures_util::future::join_all;
use prost::Message;
use serde_json::Value;
use tempfile::TempDir;
use zeroshard_client::{Commit, Job, TensorData, Wire};
use zeroshard_loops::Level;
use zeroshard_model::{
    DType, JobSpec, RunningAverage, SpikeAction, SpikePolicy, StateDType, TensorSpec,
};
use zeroshard_proto::pb::{self, capture_response::Part};
use zeroshard_tests::{Cluster, Process, binary, gpu, run, synthetic, training};

use crate::{adamw, job, options, rewinds::zsctl, sgd, start_with, tiers::metric, until};

/// The ranks of a job, and the next step.
struct Trainer {
    jobs: Vec<Job>,
    next: Cell<u64>,
}

impl Trainer {
    async fn new(cluster: &Cluster, spec: &JobSpec, wire: impl Into<Wire>) -> Self {
        let jobs = start_with(options().wire(wire), cluster.address(), spec).await;
        Self { jobs, next: Cell::new(0) }
    }

    /// Makes a step. The gradients of rank 1 are too large by `factor`. Returns the version, and
    /// its hash.
    async fn step(&self, factor: f32) -> (u64, String) {
        let at = self.next.replace(self.next.get() + 1);
        let ranks = self.jobs.iter().map(async |job| {
            training::pull(job, at).await.unwrap();
            let (manifest, rank) = (&job.spec().manifest, job.rank());
            let factor = if rank == 1 { factor } else { 1.0 };
            let gradients = synthetic::scaled_gradients(manifest, rank, at, factor).into_iter();
            let gradients = gradients.map(|(tensor, values)| TensorData::new(tensor, values));
            let attempt = job.attempt(at).unwrap();
            attempt.push(gradients.collect()).await.unwrap();
            attempt.commit(Commit::default().max_norm(0.5)).await.unwrap()
        });
        join_all(ranks).await;
        (at + 1, self.jobs[0].state_hash(at + 1).await.unwrap())
    }
}

/// Runs `zsctl capture` while the job trains. `factor`: that of rank 1's gradients, by step.
/// Returns the output, and the hashes of the versions that were made meanwhile.
async fn capture(
    cluster: &Cluster,
    trainer: &Trainer,
    arguments: &[&str],
    factor: impl Fn(u64) -> f32,
) -> (Output, Vec<(u64, String)>) {
    let name = &trainer.jobs[0].spec().name;
    let flags = ["--json", "--address", cluster.address(), "capture", name];
    let arguments: Vec<String> =
        flags.iter().chain(arguments).map(|one| (*one).to_owned()).collect();
    let captured = tokio::task::spawn_blocking(move || run("zsctl", &arguments));
    let mut hashes = Vec::new();
    while !captured.is_finished() {
        hashes.push(trainer.step(factor(trainer.next.get())).await);
    }
    (captured.await.unwrap(), hashes)
}

/// Captures the next step into a directory. Returns the line that was printed.
async fn captured(cluster: &Cluster, trainer: &Trainer, to: &Path) -> Value {
    let arguments = ["--to", to.to_str().unwrap()];
    let (output, hashes) = capture(cluster, trainer, &arguments, |_| 1.0).await;
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
    let version = printed["step"].as_u64().unwrap() + 1;
    let (_, hash) = hashes.iter().find(|(number, _)| *number == version).unwrap();
    assert_eq!(printed["state_hash"], **hash);
    printed
}

/// Runs `zsctl replay`. Returns the exit code, and the printed lines.
fn replay(directory: &Path, flags: &[&str]) -> (Option<i32>, Vec<Value>) {
    let mut command = Command::new(binary("zsctl"));
    command.args(["--json", "replay", directory.to_str().unwrap()]).args(flags);
    gpu::with_fake_driver(&mut command);
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (output.status.code(), lines)
}

/// Replays a captured step, which must have the recorded hash.
fn assert_replays(directory: &Path, flags: &[&str]) {
    let (code, lines) = replay(directory, flags);
    assert_eq!(code, Some(0), "{flags:?}: {lines:?}");
    let last = lines.last().unwrap();
    assert_eq!((&last["event"], &last["differing"]), (&"replayed".into(), &0.into()));
    assert!(lines.len() > 1 && last["found"] == last["expected"] && last["found"].is_string());
}

fn levels() -> Vec<String> {
    Level::all().iter().map(|level| format!("{:?}", level.isa()).to_lowercase()).collect()
}

/// Returns when no server holds memory for a capture. Metrics are a second old.
async fn until_no_memory(cluster: &Cluster) {
    let used = |server: &Process| metric(server, "memory_bytes{kind=\"pinned\"}");
    let is_free = || cluster.shards.iter().all(|server| used(server) == 0.0);
    until("the memory of the capture is free", is_free).await;
}

fn directory() -> (TempDir, std::path::PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let to = directory.path().join("captured");
    (directory, to)
}

/// A job of two ranks on two servers.
fn two(name: &str, spec: JobSpec) -> JobSpec {
    JobSpec { name: name.to_owned(), min_servers: 2, ..spec }
}

#[tokio::test]
async fn a_captured_step_has_the_same_hash_at_every_level_and_on_a_gpu() {
    let cluster = Cluster::start(2);
    let in_bf16 = |mut tensors: Vec<TensorSpec>| {
        tensors.iter_mut().for_each(|tensor| tensor.dtype = DType::Bf16);
        tensors
    };
    let eight_bits = JobSpec {
        state_dtype: StateDType::Int8,
        averages: vec![RunningAverage::exponential("slow", 0.9)].into(),
        ..job("", 2, adamw(), in_bf16(synthetic::kinds(&adamw())))
    };
    let lamb = "lamb".parse().unwrap();
    let replicated = JobSpec { replicas: 2, ..job("", 2, adamw(), synthetic::kinds(&adamw())) };
    let cases: [(JobSpec, Wire); 5] = [
        (two("adamw", job("", 2, adamw(), synthetic::kinds(&adamw()))), DType::F32.into()),
        (
            two("sgd", job("", 2, sgd(0.1), in_bf16(synthetic::kinds(&sgd(0.1))))),
            DType::Bf16.into(),
        ),
        (two("lamb", job("", 3, lamb, synthetic::kinds(&"lamb".parse().unwrap()))), Wire::Int8),
        (two("8-bits", eight_bits), DType::F16.into()),
        (two("replicas", replicated), DType::F32.into()),
    ];
    for (spec, wire) in cases {
        let trainer = Trainer::new(&cluster, &spec, wire).await;
        trainer.step(1.0).await;
        let (_kept, to) = directory();
        let printed = captured(&cluster, &trainer, &to).await;
        assert_eq!(printed["slices"], spec.manifest.slices().len());
        for level in levels() {
            assert_replays(&to, &["--level", &level]);
        }
        assert_replays(&to, &["--device", "cuda:0"]);
        until_no_memory(&cluster).await;
    }
}

/// A capture of one tensor has no hash of the whole state, but those of its slices.
#[tokio::test]
async fn a_captured_tensor_of_several_slices_on_disk_is_replayed_in_memory() {
    let disk = tempfile::tempdir().unwrap();
    let path = disk.path().display().to_string();
    let flags = ["--host-memory", "1MiB", "--disk", &path, "--disk-bytes", "1GiB"];
    let cluster = Cluster::start_with(2, &flags);
    let spec = two("large", job("", 2, adamw(), synthetic::kinds_and_large(&adamw())));
    let trainer = Trainer::new(&cluster, &spec, DType::F32).await;
    let (_kept, to) = directory();
    let last = spec.manifest.tensors().last().unwrap().name.clone();
    let arguments = ["--to", to.to_str().unwrap(), "--tensor", &last];
    let (output, _) = capture(&cluster, &trainer, &arguments, |_| 1.0).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (code, lines) = replay(&to, &[]);
    let (summary, slices) = lines.split_last().unwrap();
    assert_eq!((code, &summary["found"]), (Some(0), &Value::Null));
    assert!(slices.len() > 1 && slices.iter().all(|slice| slice["tensor"] == *last));
}

/// Changes the messages of a file.
fn change(file: &Path, mut change: impl FnMut(&mut Part)) {
    let bytes = fs::read(file).unwrap();
    let (mut rest, mut changed) = (&bytes[..], Vec::new());
    while !rest.is_empty() {
        let mut message = pb::CaptureResponse::decode_length_delimited(&mut rest).unwrap();
        change(message.part.as_mut().unwrap());
        message.encode_length_delimited(&mut changed).unwrap();
    }
    fs::write(file, changed).unwrap();
}

/// Flips a bit of the second number of an array.
fn flip(data: &mut bytes::Bytes) {
    let mut bytes = data.to_vec();
    bytes[5] ^= 0x10;
    *data = bytes.into();
}

#[tokio::test]
async fn replay_names_the_tensor_and_the_rank_of_a_flipped_bit() {
    let cluster = Cluster::start(2);
    let spec = two("flipped", job("", 2, adamw(), synthetic::small()));
    let trainer = Trainer::new(&cluster, &spec, DType::F32).await;
    let (_kept, to) = directory();
    captured(&cluster, &trainer, &to).await;
    // The server with tensor "w".
    let files = [0, 1].map(|server| to.join(format!("server-{server}.bin")));
    let has_w = |file: &&std::path::PathBuf| {
        let mut found = false;
        change(file, |part| found |= matches!(part, Part::Slice(slice) if slice.slice == 0));
        found
    };
    let file = files.iter().find(has_w).unwrap();
    let original = fs::read(file).unwrap();
    type Flip = fn(&mut Part);
    let gradient: Flip = |part| match part {
        Part::Gradient(of) if of.rank == 1 && of.data.len() > 100 => flip(&mut of.data),
        _ => {}
    };
    let state: Flip = |part| match part {
        Part::State(of) if of.tensor == 1 && of.data.len() > 100 => flip(&mut of.data),
        _ => {}
    };
    let decision: Flip = |part| {
        if let Part::Step(step) = part {
            step.update.as_mut().unwrap().coefficient *= 1.0 + 1e-6;
        }
    };
    for (flip, what, other) in [
        (gradient, "gradient of rank 1", "state before the step"),
        (state, "state before the step", "gradient of rank 1"),
        (decision, "state after the step", "gradient of rank 1"),
    ] {
        change(file, flip);
        let (code, lines) = replay(&to, &[]);
        assert_eq!(code, Some(3), "{what}: {lines:?}");
        let row = lines.iter().find(|line| line["tensor"] == "w").unwrap();
        let differs = row["differs"].to_string();
        assert!(differs.contains(what) && !differs.contains(other), "{differs}");
        assert!(row["found"] != row["expected"], "{row}");
        let printed = run("zsctl", &["replay", to.to_str().unwrap()]);
        assert_eq!(printed.status.code(), Some(3));
        let text = String::from_utf8(printed.stdout).unwrap();
        assert!(text.contains(what) && text.contains("was"), "{text}");
        fs::write(file, &original).unwrap();
    }
    assert_replays(&to, &[]);
    // A file that lacks its end is not a captured step, and neither is one of another job.
    fs::write(file, &original[..original.len() / 2]).unwrap();
    assert_eq!(replay(&to, &[]).0, Some(1));
    fs::remove_file(file).unwrap();
    assert_eq!(replay(&to, &[]).0, Some(1));
}

#[tokio::test]
async fn a_spike_that_was_skipped_is_captured_and_replayed() {
    let cluster = Cluster::start(2);
    // A spike every 100 steps, until one comes after the capture has begun, is within the limit.
    let spikes =
        SpikePolicy { window: 3, limit_batches: 50, ..SpikePolicy::new(SpikeAction::Skip) };
    let spec =
        JobSpec { spikes: Some(spikes), ..two("spiky", job("", 2, adamw(), synthetic::small())) };
    let trainer = Trainer::new(&cluster, &spec, DType::F32).await;
    for _ in 0..4 {
        trainer.step(1.0).await;
    }
    let (_kept, to) = directory();
    let arguments = ["--to", to.to_str().unwrap(), "--until-spike"];
    let (output, _) =
        capture(
            &cluster,
            &trainer,
            &arguments,
            |at| if at.is_multiple_of(100) { 1e4 } else { 1.0 },
        )
        .await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(printed["step"].as_u64().unwrap() % 100, 0);
    assert!(printed["spike"].as_str().unwrap().contains("times the median"), "{printed}");
    let (code, lines) = replay(&to, &[]);
    assert_eq!(code, Some(0), "{lines:?}");
    assert_eq!(lines.last().unwrap()["applied"], false);
    until_no_memory(&cluster).await;
}

#[tokio::test]
async fn a_capture_that_cannot_succeed_says_why_and_leaves_nothing() {
    let cluster = Cluster::start_with(1, &["--pinned-bytes", "10000"]);
    let spec = job("refusing", 2, adamw(), synthetic::small());
    let trainer = Trainer::new(&cluster, &spec, DType::F32).await;
    let (kept, to) = directory();
    let to = to.to_str().unwrap();
    let refused = |arguments: &[&str]| {
        let output = zsctl(&cluster, arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    for (arguments, expected) in [
        (&["capture", "other", "--to", to][..], "job \"other\" does not exist"),
        (&["capture", "refusing", "--to", to, "--tensor", "x"], "\"x\""),
        (&["capture", "refusing", "--to", kept.path().to_str().unwrap()], "exists already"),
        (&["capture", "refusing", "--to", to, "--until-spike"], "no policy that skips spikes"),
        // Nobody trains.
        (&["capture", "refusing", "--to", to, "--within", "1"], "timed out"),
        (&["replay", to], "cannot read"),
        (&["replay", to, "--level", "avx7"], "cannot read"),
    ] {
        let text = refused(arguments);
        assert!(text.contains(expected), "{arguments:?}: {text}");
    }
    let (output, hashes) = capture(&cluster, &trainer, &["--to", to], |_| 1.0).await;
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("OUT_OF_MEMORY") || text.contains("out of memory"), "{text}");
    assert!(text.contains("--pinned-bytes"), "{text}");
    assert!(!hashes.is_empty());
    until_no_memory(&cluster).await;
    assert_eq!(fs::read_dir(kept.path()).unwrap().count(), 0, "nothing is left");
    // A smaller capture fits.
    let (output, _) = capture(&cluster, &trainer, &["--to", to, "--tensor", "b"], |_| 1.0).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(replay(Path::new(to), &[]).0, Some(0));
}

#[tokio::test]
async fn a_second_capture_of_a_job_is_refused_while_the_first_one_waits() {
    let cluster = Cluster::start(1);
    let spec = job("busy", 1, adamw(), synthetic::small());
    let trainer = Trainer::new(&cluster, &spec, DType::F32).await;
    let (_kept, to) = directory();
    let waits = to.with_extension("waits");
    let mut first = Command::new(binary("zsctl"));
    first.args(["--address", cluster.address(), "capture", "busy", "--to"]).arg(&waits);
    let mut first = first.spawn().unwrap();
    crate::until_calls_wait(&cluster.shards[0], "ShardService/Capture", 1).await;
    let second = zsctl(&cluster, &["capture", "busy", "--to", to.to_str().unwrap()]);
    let text = String::from_utf8(second.stderr).unwrap();
    assert!(text.contains("another call is capturing a step of job \"busy\""), "{text}");
    // The end of the first one makes room.
    first.kill().unwrap();
    first.wait().unwrap();
    captured(&cluster, &trainer, &to).await;
    assert_replays(&to, &[]);
}
