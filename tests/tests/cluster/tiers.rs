//! Servers whose slices do not fit in memory.
//!
//! promise: same-bits

use std::{fs, path::Path, sync::atomic::AtomicU64};

use tempfile::TempDir;
use zeroshard_client::{Commit, CreateJob, Error};
use zeroshard_model::{DType, JobSpec, Restore, RestoreVersion, TensorSpec};
use zeroshard_tests::{Cluster, Process, Trained, Training, synthetic};

use crate::{
    adamw,
    checkpoints::{policy, saved, step_all, url},
    connect, job, options,
    replicas::{train, until_redundant},
    start,
};

/// A directory on the disk of the build: the one for temporary files may be in memory.
pub(crate) fn directory() -> TempDir {
    let program = std::env::current_exe().unwrap();
    tempfile::tempdir_in(program.parent().unwrap()).unwrap()
}

fn flags(memory: u64, disk: &Path) -> [String; 6] {
    let (memory, disk) = (memory.to_string(), disk.to_str().unwrap().to_owned());
    ["--host-memory", &memory, "--disk", &disk, "--disk-bytes", "1GiB"].map(str::to_owned)
}

pub(crate) fn cluster(servers: usize, memory: u64, disk: &Path) -> Cluster {
    let flags = flags(memory, disk);
    Cluster::start_with(servers, &flags.each_ref().map(String::as_str))
}

/// The bytes of the arrays of f32 of a job under AdamW.
pub(crate) fn state(spec: &JobSpec) -> u64 {
    let slices = spec.manifest.slices().iter().enumerate();
    let bytes = slices.map(|(index, slice)| {
        let arrays = if spec.manifest.trains(index) { 4 } else { 1 };
        arrays * 4 * slice.numel as u64
    });
    bytes.sum()
}

/// A metric of a server.
pub(crate) fn metric(server: &Process, name: &str) -> f64 {
    find_metric(server, name).unwrap_or_else(|| panic!("{name} is missing"))
}

/// As [`metric`]; `None` if the server has not published it.
pub(crate) fn find_metric(server: &Process, name: &str) -> Option<f64> {
    let text = server.get("/metrics");
    let value = text.lines().find_map(|line| line.strip_prefix(&format!("zeroshard_{name} ")));
    value.map(|value| value.parse().unwrap())
}

#[tokio::test]
async fn the_bits_are_the_same_with_all_half_a_quarter_and_nothing_of_the_state_in_memory() {
    let disk = directory();
    let spec = job("tiers", 3, adamw(), synthetic::kinds_and_large(&adamw()));
    let spec = JobSpec { min_servers: 2, ..spec };
    let mut expected: Option<Trained> = None;
    for parts in [None, Some(1), Some(2), Some(4), Some(0)] {
        // The slices are distributed over two servers by bytes.
        let cluster = match parts {
            None => Cluster::start(2),
            Some(0) => cluster(2, 0, disk.path()),
            Some(parts) => cluster(2, state(&spec) / 2 / parts, disk.path()),
        };
        let commit = Commit::default().max_norm(0.5);
        let training = Training { commit, options: options(), ..Training::new(spec.clone()) };
        let trained = training.run(cluster.address()).await.unwrap();
        match &expected {
            None => expected = Some(trained),
            Some(expected) => assert!(*expected == trained, "{parts:?}"),
        }
        if parts == Some(0) {
            for server in &cluster.shards {
                assert_eq!(find_metric(server, "tier_bytes{tier=\"host\"}"), None);
                for direction in ["read", "written"] {
                    let name = format!(
                        "tier_transferred_bytes_total{{direction=\"{direction}\",tier=\"disk\"}}"
                    );
                    assert!(metric(server, &name) > 0.0);
                }
            }
        }
    }
}

#[tokio::test]
async fn half_precision_is_cast_from_master_weights_on_disk() {
    let disk = directory();
    let mut tensors = synthetic::kinds_and_large(&adamw());
    tensors.iter_mut().for_each(|tensor| tensor.dtype = DType::Bf16);
    let spec = job("half", 2, adamw(), tensors);
    let published = state(&spec) / 8 + 1_000;
    let mut trained = Vec::new();
    for cluster in [Cluster::start(1), cluster(1, published, disk.path())] {
        let training = Training { options: options(), ..Training::new(spec.clone()) };
        trained.push(training.run(cluster.address()).await.unwrap());
    }
    assert!(trained[0] == trained[1]);
}

#[tokio::test]
async fn replicas_checkpoints_and_restores_of_slices_on_disk_have_the_same_bits() {
    let (disk, directory) = (directory(), directory());
    let mut hashes = Vec::new();
    for memory in [None, Some(0)] {
        let mut cluster = match memory {
            None => Cluster::start(3),
            Some(memory) => cluster(3, memory, disk.path()),
        };
        let name = format!("saved-{memory:?}");
        let spec = job(&name, 2, adamw(), synthetic::kinds_and_large(&adamw()));
        let checkpoints = Some(policy(directory.path(), 2));
        let spec = JobSpec { min_servers: 3, replicas: 2, compare_every: 1, checkpoints, ..spec };
        let jobs = start(cluster.address(), &spec).await;
        for step in 0..3 {
            step_all(&jobs, step).await;
        }
        // The backups take over, and others copy the slices.
        cluster.shards.remove(0).kill();
        let done = AtomicU64::new(0);
        let train = |rank: usize| train(&jobs[rank], 3..6, &done);
        futures_util::future::join(train(0), train(1)).await;
        until_redundant(&cluster.coordinator, &name).await;
        jobs[0].save(6).await.unwrap();
        hashes.push(jobs[0].state_hash(6).await.unwrap());
        let client = connect(cluster.address()).await;
        let last = *saved(directory.path(), &name).last().unwrap();
        let mut create = CreateJob::new(JobSpec {
            name: format!("{name}-restored"),
            min_servers: 2,
            checkpoints: None,
            ..spec.clone()
        });
        let version = RestoreVersion::Exactly(last);
        create.restore =
            Some(Restore { url: url(directory.path()), job: name.clone(), version, line: None });
        client.create_job(create).await.unwrap();
        assert_eq!(last, 6);
        hashes.push(client.state_hash(&format!("{name}-restored")).await.unwrap());
    }
    assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{hashes:?}");
}

#[tokio::test]
async fn servers_without_memory_for_more_backups_keep_the_job_until_another_server_connects() {
    let spec = |name, replicas| {
        // Slices of the same size, so that each server has the same number of them.
        let tensors = (0..12).map(|i| TensorSpec::new(format!("w.{i}"), [10_000]));
        JobSpec { min_servers: 3, replicas, ..job(name, 2, adamw(), tensors.collect()) }
    };
    let undisturbed = Training { steps: 6, ..Training::new(spec("undisturbed", 1)) };
    let expected = undisturbed.run(Cluster::start(3).address()).await.unwrap().hash;

    // Each server holds two thirds of the state. Two servers would have to hold all of it.
    let spec = spec("full", 2);
    let memory = (state(&spec) * 3 / 4).to_string();
    let mut cluster = Cluster::start_with(3, &["--host-memory", &memory]);
    let jobs = start(cluster.address(), &spec).await;
    let done = AtomicU64::new(0);
    for lost in 0..3 {
        let steps = 2 * lost..2 * lost + 2;
        let train = |rank: usize| train(&jobs[rank], steps.clone(), &done);
        futures_util::future::join(train(0), train(1)).await;
        match lost {
            0 => cluster.shards.remove(0).kill(),
            1 => {
                let metrics = cluster.coordinator.get("/metrics");
                assert!(!metrics.contains("zeroshard_job_degraded_slices{job=\"full\"} 0\n"));
                cluster.shards.push(Cluster::shard(cluster.address(), &[]));
                until_redundant(&cluster.coordinator, "full").await;
                cluster.shards.remove(0).kill();
            }
            _ => {}
        }
    }
    assert_eq!(jobs[0].state_hash(6).await.unwrap(), expected);
}

#[tokio::test]
async fn a_killed_server_leaves_no_file() {
    let disk = directory();
    let mut cluster = cluster(1, 0, disk.path());
    let spec = job("killed", 1, adamw(), synthetic::kinds_and_large(&adamw()));
    let jobs = start(cluster.address(), &spec).await;
    step_all(&jobs, 0).await;
    assert_eq!(fs::read_dir(disk.path()).unwrap().count(), 0, "the file has no name");
    cluster.shards.remove(0).kill();
    let flags = flags(0, disk.path());
    let flags = flags.each_ref().map(String::as_str);
    let _again = Cluster::shard(cluster.address(), &flags);
    assert_eq!(fs::read_dir(disk.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_job_that_fits_in_no_tier_is_refused_with_the_numbers() {
    let disk = directory();
    let directory = disk.path().to_str().unwrap();
    let cluster = Cluster::start_with(
        1,
        &["--host-memory", "64KiB", "--disk", directory, "--disk-bytes", "128KiB"],
    );
    let client = connect(cluster.address()).await;
    let spec = job("large", 1, adamw(), synthetic::kinds(&adamw()));
    let refused = client.create_job(&spec).await.unwrap_err();
    match refused {
        Error::InsufficientMemory { bytes, free, servers, .. } => {
            assert_eq!((bytes, free), (state(&spec), 196_608));
            assert!(servers.contains("196608 of 196608"), "{servers}");
        }
        other => panic!("{other:?}"),
    }
    // A job that fits is not disturbed.
    let small = job("small", 1, adamw(), synthetic::small());
    let jobs = start(cluster.address(), &small).await;
    step_all(&jobs, 0).await;
}
