//! Checkpoints: saved while training continues, and restored on another cluster.
//!
//! promise: durability

use std::{collections::BTreeSet, path::Path};

use futures_util::future::join_all;
use tempfile::TempDir;
use zeroshard_client::{CreateJob, Error, Job};
use zeroshard_model::{
    CheckpointPolicy, JobSpec, OnLoss, OnMemoryShortage, Optimizer, Restore, RestoreVersion,
    optimizer::AdamW,
};
use zeroshard_tests::{Cluster, synthetic, training};

use crate::{adamw, connect, job, start, until};

/// A directory for checkpoints. It is in memory where the system has such directories, because
/// files are flushed to disk, which takes seconds on a busy one.
pub(crate) fn directory() -> TempDir {
    let memory = Path::new("/dev/shm");
    match memory.is_dir() {
        true => tempfile::tempdir_in(memory).unwrap(),
        false => tempfile::tempdir().unwrap(),
    }
}

/// The URL of a directory.
pub(crate) fn url(directory: &Path) -> String {
    format!("file://{}", directory.display())
}

/// A policy that saves at each version that is a multiple of `every`.
pub(crate) fn policy(directory: &Path, every: u64) -> CheckpointPolicy {
    CheckpointPolicy {
        url: url(directory),
        every_steps: Some(every),
        every: None,
        keep: 0,
        on_loss: OnLoss::Restore,
        on_memory_shortage: OnMemoryShortage::Wait,
    }
}

pub(crate) async fn step_all(jobs: &[Job], step: u64) {
    let reports = join_all(jobs.iter().map(|job| training::step(job, step))).await;
    reports.into_iter().for_each(|report| drop(report.unwrap()));
}

/// Creates a job from a checkpoint of job `of`, and joins all ranks.
pub(crate) async fn resume(address: &str, spec: &JobSpec, directory: &Path, of: &str) -> Vec<Job> {
    let version = RestoreVersion::Latest;
    let restore = Restore { url: url(directory), job: of.to_owned(), version, line: None };
    let mut create = CreateJob::new(spec.clone());
    create.restore = Some(restore);
    let cluster = connect(address).await;
    cluster.create_job(create).await.unwrap();
    let ranks = (0..spec.world).map(|rank| cluster.join(&spec.name, rank));
    join_all(ranks).await.into_iter().map(|job| job.unwrap()).collect()
}

/// The versions of the complete checkpoints of a job, on any line.
pub(crate) fn saved(directory: &Path, job: &str) -> Vec<u64> {
    let Ok(versions) = std::fs::read_dir(directory.join(job)) else { return Vec::new() };
    let complete = versions.map(|version| version.unwrap().path());
    let complete = complete.filter(|version| version.join("manifest.json").exists());
    let number = |path: std::path::PathBuf| {
        let name = path.file_name()?.to_str()?.to_owned();
        name.split('-').next()?.parse().ok()
    };
    let mut complete: Vec<u64> = complete.filter_map(number).collect();
    complete.sort_unstable();
    complete.dedup();
    complete
}

#[tokio::test]
async fn a_restored_job_continues_as_if_it_had_never_stopped() {
    let directory = directory();
    let spec = |name: &str| job(name, 2, adamw(), synthetic::kinds_and_large(&adamw()));
    let cluster = Cluster::start(3);
    let jobs = start(cluster.address(), &spec("a")).await;
    for step in 0..3 {
        step_all(&jobs, step).await;
    }
    let client = connect(cluster.address()).await;
    let place = url(directory.path());
    let (version, bytes) = client.save_checkpoint("a", Some(&place)).await.unwrap();
    assert_eq!(version, 3);
    assert!(bytes > 0);
    let at_three = jobs[0].state_hash(3).await.unwrap();
    for step in 3..5 {
        step_all(&jobs, step).await;
    }
    let (parameters, at_five) =
        (training::pull(&jobs[0], 5).await.unwrap(), jobs[0].state_hash(5).await.unwrap());
    for servers in [1, 2, 7] {
        let cluster = Cluster::start(servers);
        let jobs = resume(cluster.address(), &spec("b"), directory.path(), "a").await;
        assert_eq!(jobs[0].version(), Some(3));
        assert_eq!(jobs[0].state_hash(3).await.unwrap(), at_three, "on {servers} servers");
        for step in 3..5 {
            step_all(&jobs, step).await;
        }
        assert_eq!(jobs[0].state_hash(5).await.unwrap(), at_five, "on {servers} servers");
        assert_eq!(training::pull(&jobs[0], 5).await.unwrap(), parameters);
    }
    // Another number of ranks starts from the same state.
    for world in [1, 4] {
        let cluster = Cluster::start(2);
        let spec = JobSpec { world, ..spec("c") };
        let jobs = resume(cluster.address(), &spec, directory.path(), "a").await;
        assert_eq!(jobs[0].state_hash(3).await.unwrap(), at_three, "with {world} ranks");
        step_all(&jobs, 3).await;
    }
}

#[tokio::test]
async fn the_state_of_every_optimizer_is_saved() {
    let directory = directory();
    let (before, after) = (Cluster::start(2), Cluster::start(3));
    for name in Optimizer::NAMES {
        let optimizer: Optimizer = name.parse().unwrap();
        let spec = job(name, 1, optimizer, synthetic::kinds(&optimizer));
        let jobs = start(before.address(), &spec).await;
        step_all(&jobs, 0).await;
        step_all(&jobs, 1).await;
        let client = connect(before.address()).await;
        client.save_checkpoint(name, Some(&url(directory.path()))).await.unwrap();
        step_all(&jobs, 2).await;
        let resumed = resume(after.address(), &spec, directory.path(), name).await;
        step_all(&resumed, 2).await;
        let (expected, found) = (jobs[0].state_hash(3).await, resumed[0].state_hash(3).await);
        assert_eq!(found.unwrap(), expected.unwrap(), "{name}");
    }
}

#[tokio::test]
async fn a_save_beside_steps_has_exactly_one_version() {
    let directory = directory();
    let cluster = Cluster::start(3);
    let spec = job("busy", 2, adamw(), synthetic::kinds(&adamw()));
    let jobs = start(cluster.address(), &spec).await;
    let mut hashes = vec![jobs[0].state_hash(0).await.unwrap()];
    let client = connect(cluster.address()).await;
    let url = url(directory.path());
    let mut saving = std::pin::pin!(async {
        let mut versions = BTreeSet::new();
        while versions.len() < 4 {
            versions.insert(client.save_checkpoint("busy", Some(&url)).await.unwrap().0);
        }
        versions
    });
    let mut versions = None;
    for step in 0.. {
        let steps = async {
            step_all(&jobs, step).await;
            jobs[0].state_hash(step + 1).await.unwrap()
        };
        tokio::pin!(steps);
        let hash = loop {
            tokio::select! {
                hash = &mut steps => break hash,
                done = &mut saving, if versions.is_none() => versions = Some(done),
            }
        };
        hashes.push(hash);
        if versions.is_some() {
            break;
        }
    }
    let after = Cluster::start(2);
    for version in versions.into_iter().flatten() {
        let spec = JobSpec { name: format!("at-{version}"), ..spec.clone() };
        let mut create = CreateJob::new(spec.clone());
        let (url, job) = (url.clone(), "busy".to_owned());
        create.restore =
            Some(Restore { url, job, version: RestoreVersion::Exactly(version), line: None });
        let client = connect(after.address()).await;
        client.create_job(create).await.unwrap();
        let hash = client.state_hash(&spec.name).await.unwrap();
        assert_eq!(hash, hashes[version as usize], "version {version}");
        client.delete_job(&spec.name).await.unwrap();
    }
}

#[tokio::test]
async fn a_job_is_saved_by_its_policy_and_the_last_checkpoints_are_kept() {
    let directory = directory();
    let cluster = Cluster::start(2);
    let checkpoints = Some(CheckpointPolicy { keep: 2, ..policy(directory.path(), 2) });
    let spec = JobSpec { checkpoints, ..job("kept", 1, adamw(), synthetic::kinds(&adamw())) };
    let jobs = start(cluster.address(), &spec).await;
    for step in 0..9 {
        step_all(&jobs, step).await;
        let version = step + 1;
        // The next version would not be saved before this save has ended.
        let ended =
            format!("zeroshard_checkpoints_total{{outcome=\"succeeded\"}} {}\n", version / 2);
        until("the save has ended", || cluster.coordinator.get("/metrics").contains(&ended)).await;
    }
    // Older checkpoints are removed after the save.
    until("the last two are left", || saved(directory.path(), "kept") == [6, 8]).await;
    // A new job of the name would be restored from checkpoints of another one.
    connect(cluster.address()).await.delete_job("kept").await.unwrap();
    let refused = connect(cluster.address()).await.create_job(&spec).await;
    assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
    let resumed = resume(cluster.address(), &spec, directory.path(), "kept").await;
    assert_eq!(resumed[0].version(), Some(8));
    // The state of the earlier job is that of the new one, so the version has a checkpoint.
    let (version, bytes) =
        connect(cluster.address()).await.save_checkpoint("kept", None).await.unwrap();
    assert_eq!(version, 8);
    assert!(bytes > 0);
    assert_eq!(saved(directory.path(), "kept"), [6, 8]);
}

/// Returns when the latest complete checkpoint of a job is of `version`.
pub(crate) async fn until_saved(directory: &Path, job: &str, version: u64) {
    until(&format!("version {version} is saved"), || {
        saved(directory, job).last() == Some(&version)
    })
    .await;
}

#[tokio::test]
async fn a_checkpoint_of_another_model_is_refused() {
    let directory = directory();
    let cluster = Cluster::start(1);
    let spec = job("first", 1, adamw(), synthetic::small());
    let jobs = start(cluster.address(), &spec).await;
    let client = connect(cluster.address()).await;
    let place = url(directory.path());
    client.save_checkpoint("first", Some(&place)).await.unwrap();
    drop(jobs);
    let create = async |spec: JobSpec, job: &str, version: RestoreVersion| {
        let mut create = CreateJob::new(spec);
        create.restore =
            Some(Restore { url: place.clone(), job: job.to_owned(), version, line: None });
        client.create_job(create).await
    };
    let other = || job("second", 1, adamw(), synthetic::kinds(&adamw()));
    let refused = create(other(), "first", RestoreVersion::Latest).await;
    assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
    let lamb = JobSpec { groups: vec!["sgd".parse().unwrap()], ..spec.clone() };
    let refused =
        create(JobSpec { name: "second".into(), ..lamb }, "first", RestoreVersion::Latest);
    assert!(matches!(refused.await, Err(Error::Refused { .. })));
    for (job, version) in [("first", RestoreVersion::Exactly(9)), ("other", RestoreVersion::Latest)]
    {
        let missing = create(JobSpec { name: "second".into(), ..spec.clone() }, job, version).await;
        assert!(matches!(missing, Err(Error::NoCheckpoint { .. })), "{missing:?}");
    }
    // Other hyperparameters are no other optimizer.
    let slower = Optimizer::AdamW(AdamW { lr: 0.5, ..AdamW::default() });
    let spec = JobSpec { name: "second".into(), groups: vec![slower], ..spec };
    create(spec, "first", RestoreVersion::Latest).await.unwrap();
    let anew = JobSpec { name: "anew".into(), ..other() };
    create(anew, "nothing", RestoreVersion::LatestIfAny).await.unwrap();
    assert_eq!(client.describe_job("anew").await.unwrap().version, None);
}

#[tokio::test]
async fn a_save_to_a_full_or_missing_place_is_an_error_and_the_job_continues() {
    let cluster = Cluster::start(2);
    let spec = job("full", 1, adamw(), synthetic::small());
    let jobs = start(cluster.address(), &spec).await;
    let client = connect(cluster.address()).await;
    // /dev/full cannot be a directory.
    let failed = client.save_checkpoint("full", Some("file:///dev/full/checkpoints")).await;
    assert!(matches!(failed, Err(Error::Storage { .. })), "{failed:?}");
    step_all(&jobs, 0).await;
    let directory = directory();
    let saved = client.save_checkpoint("full", Some(&url(directory.path()))).await;
    assert_eq!(saved.unwrap().0, 1);
}

// Another thread keeps the leases of the ranks while zsctl runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn zsctl_saves_lists_verifies_restores_exports_and_removes_checkpoints() {
    let (directory, out) = (directory(), directory());
    let place = url(directory.path());
    let cluster = Cluster::start(2);
    let spec = job("tool", 2, adamw(), synthetic::kinds(&adamw()));
    let jobs = start(cluster.address(), &spec).await;
    let zsctl = |arguments: &str| {
        let command = format!("checkpoint --json --address {} {arguments}", cluster.address());
        let output = zeroshard_tests::run("zsctl", &command.split(' ').collect::<Vec<_>>());
        let text = String::from_utf8(output.stdout).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
        match output.status.success() {
            true => Ok(lines.collect::<Vec<serde_json::Value>>()),
            false => Err(String::from_utf8(output.stderr).unwrap()),
        }
    };
    for step in 0..2 {
        step_all(&jobs, step).await;
        let saved = zsctl(&format!("save tool --url {place}")).unwrap();
        assert_eq!(saved[0]["version"], step + 1);
    }
    let hash = jobs[0].state_hash(2).await.unwrap();
    let listed = zsctl(&format!("ls --url {place}")).unwrap();
    let versions: Vec<_> = listed.iter().map(|line| line["version"].as_u64().unwrap()).collect();
    assert_eq!(versions, [1, 2]);
    assert_eq!(zsctl(&format!("show tool --url {place}")).unwrap()[0]["optimizer"], "adamw");
    zsctl(&format!("verify tool 1 --url {place}")).unwrap();
    let restored = format!("restore tool 2 --name again --world 3 --url {place}");
    assert_eq!(zsctl(&restored).unwrap()[0]["version"], 2);
    assert_eq!(connect(cluster.address()).await.state_hash("again").await.unwrap(), hash);
    let model = out.path().join("model");
    zsctl(&format!("export tool --to {} --url {place}", model.display())).unwrap();
    assert!(model.join("model.safetensors").exists());
    zsctl(&format!("rm tool 1 --url {place}")).unwrap();
    assert_eq!(saved(directory.path(), "tool"), [2]);
    let missing = zsctl(&format!("verify tool 1 --url {place}")).unwrap_err();
    assert!(missing.contains("no complete checkpoint of version 1"), "{missing}");
    let refused = zsctl("ls --url /checkpoints").unwrap_err();
    assert!(refused.contains("file:///"), "{refused}");
}
