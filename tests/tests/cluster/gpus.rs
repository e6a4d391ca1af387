//! Shard servers on GPUs of the fake driver, which runs the kernels of the binary for real, ends a
//! server that uses it wrongly, and fails on request.
//!
//! promise: same-bits

use std::{path::Path, process::Command, sync::atomic::AtomicU64};

use futures_util::future::join;
use zeroshard_client::{Commit, Copied, Error, Follow};
use zeroshard_model::{DType, JobSpec, Optimizer, StateDType, TensorSpec};
use zeroshard_tests::{Cluster, Process, Training, binary, synthetic};

use crate::{adamw, connect, follow, job, options, replicas::train, start, tiers, until};

/// A cluster whose shard servers are all on GPUs, with these flags.
fn cluster(servers: usize, flags: &[String], settings: &[(&str, &str)]) -> Cluster {
    let coordinator = Cluster::coordinator();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let shard = |_| Cluster::shard_on_gpu(coordinator.address(), &flags, settings);
    let shards = (0..servers).map(shard).collect();
    Cluster { coordinator, shards }
}

fn spec(name: &str, optimizer: Optimizer, dtype: DType) -> JobSpec {
    let mut tensors = synthetic::kinds(&optimizer);
    tensors.iter_mut().for_each(|tensor| tensor.dtype = dtype);
    JobSpec { min_servers: 2, ..job(name, 3, optimizer, tensors) }
}

#[tokio::test]
async fn a_gpu_has_the_bits_of_the_cpu() {
    let [on_cpu, on_gpu] = [Cluster::start(2), cluster(2, &[], &[("FAKE_CUDA_SEED", "7")])];
    for (name, dtype) in [("adamw", DType::F32), ("lamb", DType::Bf16), ("adafactor", DType::F16)] {
        let spec = spec(name, name.parse().unwrap(), dtype);
        let commit = Commit::default().max_norm(0.5);
        let training = Training { commit, options: options(), ..Training::new(spec) };
        let expected = training.run(on_cpu.address()).await.unwrap();
        assert!(training.run(on_gpu.address()).await.unwrap() == expected, "{name}");
    }
}

#[tokio::test]
async fn a_gpu_has_the_bits_of_the_cpu_with_8_bit_state_in_all_of_its_tiers() {
    const ALL: u64 = 1 << 30;
    let disk = tempfile::tempdir().unwrap();
    let state_on_host = ["--state-tier", "host"].map(str::to_owned);
    for (name, dtype) in [("adamw", DType::F32), ("lion", DType::Bf16)] {
        let spec = spec(name, name.parse().unwrap(), dtype);
        let spec = JobSpec { min_servers: 1, state_dtype: StateDType::Int8, ..spec };
        let commit = Commit::default().max_norm(0.5);
        let training = Training { commit, options: options(), ..Training::new(spec) };
        let expected = training.run(Cluster::start(1).address()).await.unwrap();
        let all = [
            Vec::new(),
            [budgets(ALL, ALL, None), state_on_host.to_vec()].concat(),
            budgets(ALL / 1024, 0, Some(disk.path())),
        ];
        // The tiers are the same for all optimizers.
        for flags in all.into_iter().take(if name == "adamw" { 3 } else { 1 }) {
            let on_gpu = cluster(1, &flags, &[("FAKE_CUDA_SEED", "7")]);
            let trained = training.run(on_gpu.address()).await.unwrap();
            assert!(trained == expected, "{name} {flags:?}");
        }
    }
}

#[tokio::test]
async fn readers_of_a_job_on_gpus_receive_changes() {
    let cluster = cluster(2, &[], &[("FAKE_CUDA_SEED", "7")]);
    let spec = JobSpec { world: 1, ..spec("watched", adamw(), DType::Bf16) };
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let (truth, client) = (follow::Truth::default(), connect(cluster.address()).await);
    let training = async {
        truth.train(&trainer, 0..3).await;
        truth.record(&trainer, 3).await;
    };
    let follow = Follow { dtype: DType::Bf16, ..Follow::default() };
    let reader = async {
        let reader = follow::Reader::with(&client, "watched", follow).await;
        reader.follow(3, 1, &truth).await
    };
    let ((), reader) = join(training, reader).await;
    assert_eq!(*reader.follower.copies(), [(Copied::Joined, 1)].into());
}

/// The servers of a slice compare its content after each step.
#[tokio::test]
async fn replicas_of_a_slice_are_on_a_gpu_and_a_cpu() {
    let mut cluster = Cluster::start(1);
    cluster.shards.push(Cluster::shard_on_gpu(cluster.address(), &[], &[]));
    let spec = JobSpec { replicas: 2, compare_every: 1, ..spec("mixed", adamw(), DType::F32) };
    let jobs = start(cluster.address(), &spec).await;
    let done = AtomicU64::new(0);
    let train = |rank: usize| train(&jobs[rank], 0..3, &done);
    futures_util::future::join3(train(0), train(1), train(2)).await;
    let before = jobs[0].state_hash(3).await.unwrap();
    // One of the two has no other copy any more.
    cluster.shards.remove(0).kill();
    assert_eq!(jobs[0].state_hash(3).await.unwrap(), before);
}

/// A device that is lost after a number of launches. A slice has at least two of them in a step,
/// and a server at least one slice.
const LOST: &str = "cuLaunchKernel:40:719";
const STEPS_UNTIL_LOST: u64 = 30;

/// Runs a job with replicas on two CPUs and a device with this `FAKE_CUDA_FAIL`.
async fn lose_a_device(failure: &str) {
    const STEPS: u64 = STEPS_UNTIL_LOST;
    let spec = |name| {
        let tensors = synthetic::kinds(&adamw());
        JobSpec { min_servers: 3, ..job(name, 2, adamw(), tensors) }
    };
    let undisturbed = Training { steps: STEPS, options: options(), ..Training::new(spec("calm")) };
    let mut cluster = Cluster::start(2);
    let lost = Cluster::shard_on_gpu(cluster.address(), &[], &[("FAKE_CUDA_FAIL", failure)]);
    cluster.shards.push(lost);
    let expected = undisturbed.run(Cluster::start(3).address()).await.unwrap().hash;
    // The servers compare their slices, so that the device is read from even if all of its slices
    // are backups.
    let spec = JobSpec { replicas: 2, compare_every: 1, ..spec("lost") };
    let jobs = start(cluster.address(), &spec).await;
    let done = AtomicU64::new(0);
    join(train(&jobs[0], 0..STEPS, &done), train(&jobs[1], 0..STEPS, &done)).await;
    assert_eq!(jobs[0].state_hash(STEPS).await.unwrap(), expected);
    // The server with the lost device goes on, without the job.
    let empty = "zeroshard_memory_bytes{kind=\"master\"} 0\n";
    until("the job is dropped", || cluster.shards[2].get("/metrics").contains(empty)).await;
}

#[tokio::test]
async fn a_device_lost_in_a_step_is_replaced_by_the_backups_and_no_bit_changes() {
    lose_a_device(LOST).await;
}

#[tokio::test]
async fn a_device_lost_in_a_pull_is_replaced_by_the_backups_and_no_bit_changes() {
    lose_a_device("cuMemcpyDtoHAsync_v2:12:719").await;
}

#[tokio::test]
async fn without_backups_a_lost_device_ends_its_jobs_with_an_error_that_names_it() {
    let cluster = cluster(1, &[], &[("FAKE_CUDA_FAIL", LOST)]);
    let spec = JobSpec { min_servers: 1, ..spec("lost", adamw(), DType::F32) };
    let failed =
        Training { steps: STEPS_UNTIL_LOST, options: options(), ..Training::new(spec.clone()) };
    let error = failed.run(cluster.address()).await.unwrap_err();
    let client = connect(cluster.address()).await;
    let reason = client.describe_job("lost").await.unwrap_err().to_string();
    for part in ["slice ", "cuda:0 is lost", "CUDA_ERROR_LAUNCH_FAILED (code 719)"] {
        assert!(reason.contains(part), "{part:?} in {reason} after {error}");
    }
    // The process and its server go on, and refuse further jobs with the same error.
    let next = client.create_job(&JobSpec { name: "next".to_owned(), ..spec }).await;
    let next = next.unwrap_err().to_string();
    assert!(next.contains("cuda:0 is lost"), "{next}");
}

/// The flags and settings of a server with two GPUs.
const TWO: [&str; 2] = ["--device", "cuda:0,1"];
const TWO_DEVICES: (&str, &str) = ("FAKE_CUDA_DEVICES", "2");

#[tokio::test]
async fn a_server_with_two_gpus_has_the_bits_of_the_cpu_in_all_tiers() {
    let disk = tempfile::tempdir().unwrap();
    let spec = JobSpec { min_servers: 1, ..spec("two", adamw(), DType::Bf16) };
    let training =
        Training { commit: Commit::default().max_norm(0.5), ..Training::new(spec.clone()) };
    let expected = training.run(Cluster::start(1).address()).await.unwrap();
    let state = tiers::state(&spec);
    let cases = [
        Vec::new(),
        budgets(state / 4, 1 << 30, None),
        budgets(state / 8, state / 4, Some(disk.path())),
    ];
    for flags in cases {
        let flags = [TWO.map(str::to_owned).to_vec(), flags].concat();
        let cluster = cluster(1, &flags, &[TWO_DEVICES]);
        assert!(training.run(cluster.address()).await.unwrap() == expected, "{flags:?}");
        // Both devices have slices, and the metrics say so.
        for device in ["cuda:0", "cuda:1"] {
            for metric in device_metrics(device) {
                let value = || tiers::find_metric(&cluster.shards[0], &metric);
                until(&metric, || value().is_some_and(|value| value > 0.0)).await;
            }
        }
    }
}

/// The names of a device's metrics, with labels.
fn device_metrics(device: &str) -> [String; 4] {
    let series = |name: &str, label: &str| format!("device_{name}{{device=\"{device}\"{label}}}");
    [
        series("copied_bytes_total", ",direction=\"upload\""),
        series("copied_bytes_total", ",direction=\"download\""),
        series("kernel_seconds_total", ""),
        series("memory_bytes", ",kind=\"used\""),
    ]
}

/// The second of two GPUs is lost: the job with slices on it fails, and a later one is on the first
/// GPU.
#[tokio::test]
async fn a_server_goes_on_with_its_other_gpu_when_one_is_lost() {
    let failure = ("FAKE_CUDA_FAIL", "cuLaunchKernel:40:719:1");
    let cluster = cluster(1, &TWO.map(str::to_owned), &[TWO_DEVICES, failure]);
    let spec = |name| JobSpec { min_servers: 1, ..spec(name, adamw(), DType::F32) };
    let training =
        |name, steps| Training { steps, options: options(), ..Training::new(spec(name)) };
    let lost = training("lost", STEPS_UNTIL_LOST).run(cluster.address()).await.unwrap_err();
    let client = connect(cluster.address()).await;
    let reason = client.describe_job("lost").await.unwrap_err().to_string();
    assert!(reason.contains("cuda:1 is lost"), "{reason} after {lost}");
    let expected = training("next", 5).run(Cluster::start(1).address()).await.unwrap();
    assert!(training("next", 5).run(cluster.address()).await.unwrap() == expected);
}

#[tokio::test]
async fn a_job_that_does_not_fit_on_the_device_is_refused_and_others_go_on() {
    let cluster = cluster(1, &[], &[("FAKE_CUDA_CAPACITY", "268435456")]);
    let small = JobSpec { min_servers: 1, ..spec("small", adamw(), DType::F32) };
    let undisturbed = Training { options: options(), ..Training::new(small.clone()) };
    let expected = undisturbed.run(Cluster::start(1).address()).await.unwrap().hash;
    let jobs = start(cluster.address(), &small).await;
    let large = job("large", 1, adamw(), vec![TensorSpec::new("w", [32 << 20])]);
    let refused = connect(cluster.address()).await.create_job(&large).await.unwrap_err();
    assert!(refused.to_string().contains("out of memory"), "{refused}");
    assert!(refused.to_string().contains("\"w\""), "{refused}");
    let done = AtomicU64::new(0);
    let train = |rank: usize| train(&jobs[rank], 0..3, &done);
    futures_util::future::join3(train(0), train(1), train(2)).await;
    assert_eq!(jobs[0].state_hash(3).await.unwrap(), expected);
}

/// A machine without a GPU, as are those on which the tests run.
#[tokio::test]
async fn without_a_driver_a_server_uses_the_cpu_or_says_what_is_missing() {
    let driver = std::path::Path::new("/proc/driver/nvidia");
    if driver.exists() {
        println!("not tested: this machine has a driver ({})", driver.display());
        return;
    }
    let coordinator = Cluster::coordinator();
    let start = |device: &str, log: &str| {
        let mut command = Command::new(binary("zeroshard-server"));
        command.args(["shard", "--listen", "127.0.0.1:0", "--admin-listen", "off", "--json"]);
        command.args(["--coordinator", coordinator.address(), "--device", device, "--log", log]);
        command
    };
    let refused = start("cuda:0", "error").output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success());
    assert!(text.contains("no CUDA device: libcuda.so was not found"), "{text}");

    let log = tempfile::NamedTempFile::new().unwrap();
    let mut command = start("auto", "info");
    command.stderr(log.reopen().unwrap());
    let _server = Process::start(command);
    let text = std::fs::read_to_string(log.path()).unwrap();
    assert!(text.contains("no CUDA device was found"), "{text}");
    let spec = job("on-cpu", 1, adamw(), vec![TensorSpec::new("w", [9])]);
    connect(coordinator.address()).await.create_job(&spec).await.unwrap();
}

/// The flags of a server on a GPU that keeps so many bytes in the memory of the GPU and in host
/// memory, and the rest in a directory.
fn budgets(device: u64, host: u64, disk: Option<&Path>) -> Vec<String> {
    let mut flags = vec!["--device-memory".to_owned(), device.to_string()];
    flags.extend(["--host-memory".to_owned(), host.to_string()]);
    if let Some(disk) = disk {
        flags.extend(
            ["--disk", &disk.display().to_string(), "--disk-bytes", "1GiB"].map(str::to_owned),
        );
    }
    flags
}

#[tokio::test]
async fn slices_in_the_memory_of_a_gpu_in_host_memory_and_on_disk_have_the_same_bits() {
    const ALL: u64 = 1 << 30;
    let disk = tempfile::tempdir().unwrap();
    let spec = JobSpec { min_servers: 1, ..spec("tiers", adamw(), DType::F32) };
    let training =
        Training { commit: Commit::default().max_norm(0.5), ..Training::new(spec.clone()) };
    let expected = training.run(Cluster::start(1).address()).await.unwrap();
    let state = tiers::state(&spec);
    let state_on_host = ["--state-tier", "host"].map(str::to_owned);
    // With whether arrays are in host memory, and on disk.
    let cases = [
        (budgets(ALL, 0, None), [false, false]),
        ([budgets(ALL, ALL, None), state_on_host.to_vec()].concat(), [true, false]),
        (budgets(state / 2, ALL, None), [true, false]),
        (budgets(0, ALL, None), [true, false]),
        (budgets(state / 4, 0, Some(disk.path())), [false, true]),
        (budgets(state / 2, state / 4, Some(disk.path())), [true, true]),
        (budgets(state / 4, state / 2, Some(disk.path())), [true, true]),
        (budgets(0, 0, Some(disk.path())), [false, true]),
    ];
    for (flags, expected_tiers) in cases {
        let cluster = cluster(1, &flags, &[]);
        let trained = training.run(cluster.address()).await.unwrap();
        assert!(trained == expected, "{flags:?}");
        let are_used = ["host", "disk"].map(|tier| {
            let name =
                format!("tier_transferred_bytes_total{{direction=\"read\",tier=\"{tier}\"}}");
            tiers::metric(&cluster.shards[0], &name) > 0.0
        });
        assert_eq!(are_used, expected_tiers, "{flags:?}");
    }
}

#[tokio::test]
async fn a_job_with_offload_has_its_state_in_host_memory_and_the_same_bits() {
    let spec = JobSpec { min_servers: 1, ..spec("offload", adamw(), DType::F32) };
    let expected = Training::new(spec.clone()).run(Cluster::start(1).address()).await.unwrap();
    let flags = budgets(1 << 30, 1 << 30, None);
    for offload in [false, true] {
        let cluster = cluster(1, &flags, &[]);
        let training = Training::new(JobSpec { offload, ..spec.clone() });
        assert!(training.run(cluster.address()).await.unwrap() == expected, "{offload}");
        let name = "tier_transferred_bytes_total{direction=\"read\",tier=\"host\"}";
        assert_eq!(tiers::metric(&cluster.shards[0], name) > 0.0, offload);
    }
    let without_budgets = cluster(1, &[], &[]);
    let offload = JobSpec { offload: true, ..spec };
    let refused = connect(without_budgets.address()).await.create_job(&offload).await.unwrap_err();
    let refused = refused.to_string();
    assert!(refused.contains("offload") && refused.contains("--host-memory"), "{refused}");
}

#[tokio::test]
async fn a_job_that_fits_in_no_tier_of_a_gpu_is_refused_with_the_budgets_and_others_go_on() {
    let cluster = cluster(1, &budgets(1 << 20, 1 << 20, None), &[]);
    let small = job("small", 1, adamw(), vec![TensorSpec::new("w", [1 << 16])]);
    let jobs = start(cluster.address(), &small).await;
    let large = job("large", 1, adamw(), vec![TensorSpec::new("w", [1 << 17])]);
    let refused = connect(cluster.address()).await.create_job(&large).await.unwrap_err();
    let text = refused.to_string();
    assert!(matches!(refused, Error::InsufficientMemory { .. }), "{text}");
    assert!(text.contains("1048576 of 2097152"), "{text}");
    let attempt = jobs[0].attempt(0).unwrap();
    attempt.push(synthetic::gradients(&small.manifest, 0, 0)).await.unwrap();
    assert!(attempt.commit(Commit::default()).await.unwrap().applied);
}
