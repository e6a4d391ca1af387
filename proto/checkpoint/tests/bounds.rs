//! Checkpoints of jobs that are large, hostile, or whose writers were killed.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::{fs, sync::Arc};

use bytes::Bytes;
use zeroshard_checkpoint::{Manifest, Part, Save, Source, Storage, write};
use zeroshard_model::{
    AppliedSteps, Error, JobSpec, Manifest as Tensors, Policy, Result, TensorSpec,
};
use zeroshard_proto::pb;

use common::{JOB, LINE, Saved, VERSION, on_line_0};

/// A source whose slices have one element each.
struct Scalars;

impl Source for Scalars {
    fn part(&self, slice: u32, _: Part) -> Result<Bytes> {
        Ok(Bytes::copy_from_slice(&slice.to_le_bytes()))
    }

    fn applied(&self, _: u32) -> AppliedSteps {
        AppliedSteps::new(1)
    }

    fn done(&self, _: u32) {}
}

#[tokio::test]
async fn many_small_slices_are_read() {
    let number = 3000;
    let directory = tempfile::tempdir().unwrap();
    let storage = Storage::open(&format!("file://{}", directory.path().display())).unwrap();
    let tensors = (0..number).map(|i| TensorSpec::new(format!("t{i}"), [1]));
    let spec =
        JobSpec::new(JOB, Tensors::new(tensors.collect()).unwrap(), vec!["sgd".parse().unwrap()]);
    let save = Save { spec: Arc::new(spec.clone()), version: on_line_0(1), save: 1, server: 1 };
    let files = write(&storage, &save, (0..number).collect(), Arc::new(Scalars)).await.unwrap();
    let manifest = Manifest::new(&spec, 1, on_line_0(1), 1, files).unwrap();
    for slice in 0..number {
        let saved = storage.read_slice(&manifest, slice).await.unwrap();
        assert_eq!(saved.values, slice.to_le_bytes()[..]);
    }
}

#[tokio::test]
async fn files_of_writers_that_were_killed_are_removed() {
    let saved = Saved::new("sgd");
    let manifest = saved.save(VERSION, 5).await;
    let version =
        |number: u64| saved.paths()[0].parent().unwrap().with_file_name(format!("{number:020}"));
    let unfinished = |number: u64, save: u64| {
        let path = version(number).join(format!("{save:016x}-0000000000000001-0.safetensors#1"));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, [0; 100]).unwrap();
        path
    };
    // The checkpoint of this version remains.
    let (of_5, of_6) = (unfinished(VERSION, 5), unfinished(VERSION, 6));
    saved.storage.discard(JOB, on_line_0(VERSION), 6).await.unwrap();
    assert!(of_5.exists() && !of_6.exists());
    saved.storage.verify(&manifest, |_| {}).await.unwrap();
    let (earlier, later) = (unfinished(VERSION - 1, 7), unfinished(VERSION + 1, 8));
    saved.storage.prune(JOB, LINE, 0).await.unwrap();
    assert!(!earlier.exists() && !version(VERSION - 1).exists());
    assert!(later.exists(), "its writer may be alive");
    saved.storage.remove(JOB, on_line_0(VERSION)).await.unwrap();
    assert!(!version(VERSION).exists());
}

/// Writes a manifest with a valid hash.
fn forge(saved: &Saved, change: impl FnOnce(&mut serde_json::Value)) {
    let path = saved.paths().into_iter().find(|path| path.ends_with("manifest.json")).unwrap();
    let mut document: serde_json::Value =
        serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut document["checkpoint"]);
    let inner = document["checkpoint"].to_string();
    let hash = blake3::hash(inner.as_bytes());
    fs::write(&path, format!("{{\"blake3\":\"{hash}\",\"checkpoint\":{inner}}}")).unwrap();
}

#[tokio::test]
async fn a_manifest_that_claims_huge_tensors_costs_no_more_than_its_size() {
    let huge = 1u64 << 43;
    // Two million slices, and one slice of as many elements.
    for (policy, expected) in [(1, "missing"), (2, "bytes")] {
        let saved = Saved::new("sgd");
        saved.save(VERSION, 5).await;
        forge(&saved, |checkpoint| {
            let tensor = &mut checkpoint["spec"]["tensors"][5];
            assert_eq!(tensor["name"], "scalar");
            tensor["shape"] = serde_json::json!([huge]);
            tensor["policy"] = policy.into();
        });
        match saved.storage.manifest(JOB, on_line_0(VERSION)).await {
            Err(Error::CheckpointDamaged { cause, .. }) => {
                assert!(cause.contains(expected), "{cause}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_slice_that_is_larger_than_its_file_is_not_allocated() {
    let saved = Saved::new("sgd");
    saved.save(VERSION, 5).await;
    let huge = 1u64 << 43;
    let mut slice = 0;
    forge(&saved, |checkpoint| {
        let tensor = &mut checkpoint["spec"]["tensors"][5];
        tensor["shape"] = serde_json::json!([huge]);
        tensor["policy"] = 2.into();
        let spec: pb::JobSpec = serde_json::from_value(checkpoint["spec"].clone()).unwrap();
        let spec = JobSpec::try_from(spec).unwrap();
        slice = spec.manifest.slices_of(5).start;
        assert_eq!(spec.manifest.tensors()[5].policy, Policy::Whole);
        let has = |file: &serde_json::Value| {
            file["slices"].as_array().unwrap().iter().any(|entry| entry["slice"] == slice)
        };
        let file = checkpoint["files"].as_array_mut().unwrap().iter_mut().find(|file| has(file));
        let file = file.unwrap();
        file["bytes"] = (file["bytes"].as_u64().unwrap() - 4 + 4 * huge).into();
    });
    let manifest = saved.storage.manifest(JOB, on_line_0(VERSION)).await.unwrap();
    let read = saved.storage.read_slice(&manifest, slice as u32).await;
    assert!(matches!(read, Err(Error::CheckpointDamaged { .. })), "{read:?}");
    let verified = saved.storage.verify(&manifest, |_| {}).await;
    assert!(matches!(verified, Err(Error::CheckpointDamaged { .. })), "{verified:?}");
}

#[tokio::test]
async fn large_data_of_ranks_is_stored_in_parts() {
    let saved = Saved::new("sgd");
    let mut files = saved.files(VERSION, 5).await;
    files.pop();
    let data = |rank: u8| Bytes::from(vec![rank; 15 << 20]);
    let ranks = (0..3).map(|rank| (u32::from(rank), data(rank))).collect();
    files.push(saved.storage.write_user_data(JOB, on_line_0(VERSION), 5, &ranks).await.unwrap());
    let manifest = Manifest::new(&saved.content.spec, 9, on_line_0(VERSION), 5, files).unwrap();
    for rank in 0..3 {
        let read = saved.storage.user_data(&manifest, u32::from(rank)).await.unwrap();
        assert!(read.unwrap() == data(rank));
    }
    saved.storage.verify(&manifest, |_| {}).await.unwrap();
}
