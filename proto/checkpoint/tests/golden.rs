//! A checkpoint that was written by the first version of the format. Later versions must read it.
//!
//! It was made by `cargo test -p zeroshard-checkpoint --test golden -- --ignored`.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use zeroshard_checkpoint::{Manifest, Storage};
use zeroshard_model::{
    DType, JobSpec, Manifest as Tensors, Optimizer, Policy, TensorSpec, optimizer::Adafactor,
};

use common::{Content, on_line_0, save};

const NAME: &str = "golden";
const VERSION: u64 = 7;
const JOB_ID: u64 = 9;
const SAVE: u64 = 5;

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/checkpoint")
}

fn open(directory: &Path) -> Storage {
    Storage::open(&format!("file://{}", directory.canonicalize().unwrap().display())).unwrap()
}

/// Two parameter groups, with tensors of every kind.
fn spec() -> JobSpec {
    let tensor = |name: &str, shape: &[u64]| TensorSpec {
        policy: Policy::Whole,
        ..TensorSpec::new(name, shape)
    };
    let tensors = vec![
        tensor("embedding.weight", &[6, 4]),
        TensorSpec { dtype: DType::Bf16, ..tensor("block.weight", &[4, 3]) },
        TensorSpec { dtype: DType::F16, group: 1, no_clip: true, ..tensor("block.bias", &[3]) },
        TensorSpec { frozen: true, dtype: DType::Bf16, ..tensor("block.scale", &[5]) },
        TensorSpec { buffer: true, ..tensor("norm.running_mean", &[2]) },
        TensorSpec {
            alias_of: Some("embedding.weight".to_owned()),
            ..tensor("head.weight", &[6, 4])
        },
        TensorSpec { group: 1, ..tensor("temperature", &[]) },
    ];
    let group = |lr| Optimizer::Adafactor(Adafactor { lr, ..Adafactor::default() });
    let spec = JobSpec::new(NAME, Tensors::new(tensors).unwrap(), vec![group(0.5), group(0.25)]);
    // The first format does not have it.
    JobSpec { compare_every: 0, ..spec }
}

async fn write(directory: &Path) -> Manifest {
    let (storage, content) = (open(directory), Arc::new(Content::new(spec())));
    let files = save(&storage, &content, on_line_0(VERSION), SAVE).await;
    let manifest = Manifest::new(&content.spec, JOB_ID, on_line_0(VERSION), SAVE, files).unwrap();
    assert!(storage.commit(&manifest).await.unwrap());
    manifest
}

#[tokio::test]
async fn the_first_format_is_read() {
    let storage = open(&directory());
    assert_eq!(storage.jobs().await.unwrap(), [NAME]);
    assert_eq!(storage.versions(NAME).await.unwrap(), [on_line_0(VERSION)]);
    let manifest = storage.manifest(NAME, on_line_0(VERSION)).await.unwrap();
    storage.verify(&manifest, |_| {}).await.unwrap();
    assert_eq!(manifest.spec(), &spec());
    assert_eq!((manifest.job_id(), manifest.save()), (JOB_ID, SAVE));
    assert!(manifest.created() > 1_760_000_000);
    let content = Content::new(spec());
    for slice in 0..content.spec.manifest.number_of_slices() as u32 {
        let read = storage.read_slice(&manifest, slice).await.unwrap();
        assert_eq!(read, content.slice(slice), "slice {slice}");
    }
    assert_eq!(manifest.ranks(), [0, 3]);
    let data = storage.user_data(&manifest, 0).await.unwrap();
    assert_eq!(data.unwrap(), "random state");
}

#[tokio::test]
async fn the_same_job_is_written_with_the_same_bytes() {
    let written = tempfile::tempdir().unwrap();
    write(written.path()).await;
    let version = Path::new(NAME).join(format!("{VERSION:020}"));
    let mut number = 0;
    for file in fs::read_dir(directory().join(&version)).unwrap() {
        let name = file.unwrap().file_name();
        let [golden, new] = [&directory(), written.path()]
            .map(|directory| fs::read(directory.join(&version).join(&name)).unwrap());
        if name == "manifest.json" {
            assert_eq!(files(&new), files(&golden));
        } else {
            assert!(new == golden, "{name:?} differs");
        }
        number += 1;
    }
    assert_eq!(fs::read_dir(written.path().join(&version)).unwrap().count(), number);
}

/// The index of the files in a manifest. The rest depends on the time, and later versions add to
/// it.
fn files(text: &[u8]) -> serde_json::Value {
    let mut document: serde_json::Value = serde_json::from_slice(text).unwrap();
    document["checkpoint"]["files"].take()
}

#[ignore = "makes the checkpoint"]
#[tokio::test]
async fn make() {
    fs::create_dir(directory()).unwrap();
    write(&directory()).await;
}
