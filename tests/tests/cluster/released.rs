//! Checkpoints of released versions (`tests/compat/`) are restored, and training continues with the
//! bits of the release.
//!
//! promise: durability

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use zeroshard_client::Job;
use zeroshard_model::{DType, JobSpec, Optimizer, Policy, StateDType, TensorSpec};
use zeroshard_tests::Cluster;

use crate::{
    checkpoints::{directory, resume, step_all, url},
    connect, job, start,
};

/// The version that each checkpoint has.
const SAVED: u64 = 2;
/// The version that training reaches from there.
const CONTINUED: u64 = 4;

/// The hashes of a job at [`SAVED`] and at [`CONTINUED`].
type Hashes = BTreeMap<String, [String; 2]>;

/// The jobs whose checkpoints are kept: state of each shape, two dtypes, and tensors of all kinds.
fn specs() -> Vec<JobSpec> {
    let tensors = || {
        vec![
            TensorSpec::new("w", [40, 33]),
            TensorSpec { dtype: DType::Bf16, ..TensorSpec::new("half", [129]) },
            TensorSpec { alias_of: Some("w".to_owned()), ..TensorSpec::new("tied", [40, 33]) },
            TensorSpec { frozen: true, ..TensorSpec::new("frozen", [7]) },
            TensorSpec { buffer: true, ..TensorSpec::new("buffer", [3]) },
        ]
    };
    let spec = |name: &str, optimizer: &str| {
        let optimizer: Optimizer = optimizer.parse().unwrap();
        let mut tensors = tensors();
        if optimizer.needs_whole_tensors() {
            tensors.iter_mut().for_each(|tensor| tensor.policy = Policy::Whole);
        }
        job(name, 2, optimizer, tensors)
    };
    let mut specs: Vec<_> =
        ["adamw", "nadam", "adafactor"].iter().map(|name| spec(name, name)).collect();
    let eight_bits = spec("eight-bits", "lion");
    specs.push(JobSpec { state_dtype: StateDType::Int8, ..eight_bits });
    specs
}

fn releases() -> Vec<PathBuf> {
    let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("compat");
    let entries = fs::read_dir(place).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.is_dir()).collect()
}

/// Hashes at both versions. Training has reached [`SAVED`].
async fn hashes(jobs: &[Job], mut saved: impl AsyncFnMut()) -> [String; 2] {
    let before = jobs[0].state_hash(SAVED).await.unwrap();
    saved().await;
    for step in SAVED..CONTINUED {
        step_all(jobs, step).await;
    }
    [before, jobs[0].state_hash(CONTINUED).await.unwrap()]
}

/// Writes the checkpoints of this version and their hashes to the directory that the variable
/// `ZEROSHARD_WRITE_RELEASE` names: a part of a release.
#[tokio::test]
#[ignore = "tests/compat/keep.sh runs it once for each release"]
async fn checkpoints_of_this_version_are_kept() {
    let directory = PathBuf::from(std::env::var("ZEROSHARD_WRITE_RELEASE").unwrap());
    let cluster = Cluster::start(2);
    let client = connect(cluster.address()).await;
    let mut found = Hashes::new();
    for spec in specs() {
        let jobs = start(cluster.address(), &spec).await;
        for step in 0..SAVED {
            step_all(&jobs, step).await;
        }
        let save = async || {
            let place = url(&directory.join("checkpoints"));
            client.save_checkpoint(&spec.name, Some(&place)).await.unwrap();
        };
        found.insert(spec.name.clone(), hashes(&jobs, save).await);
    }
    let text = serde_json::to_string_pretty(&found).unwrap();
    fs::write(directory.join("hashes.json"), text + "\n").unwrap();
}

/// Copies the files: a job may write beside the checkpoint that it continues.
fn copied(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copied(&entry.path(), &target),
            false => drop(fs::copy(entry.path(), target).unwrap()),
        }
    }
}

#[tokio::test]
async fn a_checkpoint_of_every_release_is_restored_and_continues_with_the_same_bits() {
    let cluster = Cluster::start(2);
    let releases = releases();
    assert!(!releases.is_empty());
    for release in releases {
        let expected = fs::read(release.join("hashes.json")).unwrap();
        let expected: Hashes = serde_json::from_slice(&expected).unwrap();
        let directory = directory();
        copied(&release.join("checkpoints"), directory.path());
        for (name, expected) in expected {
            let spec = specs().into_iter().find(|spec| spec.name == name).unwrap();
            let release = release.file_name().unwrap().display();
            let spec = JobSpec { name: format!("{name}-{release}"), ..spec };
            let jobs = resume(cluster.address(), &spec, directory.path(), &name).await;
            assert_eq!(hashes(&jobs, async || ()).await, expected, "{name} of {release}");
        }
    }
}
