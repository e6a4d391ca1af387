//! A small job with tensors of every kind, and its checkpoint in a directory.

#![allow(clippy::unwrap_used, dead_code, reason = "tests; not every test needs everything")]

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use tempfile::TempDir;
use zeroshard_checkpoint::{Manifest, Part, Save, SavedSlice, Source, Storage, write};
use zeroshard_model::{
    AppliedSteps, DType, JobLine, JobSpec, LineVersion, Manifest as Tensors, Optimizer, Policy,
    Result, TensorSpec,
};
use zeroshard_proto::pb;

pub(crate) const JOB: &str = "runs/a %";
/// The id of the job.
pub(crate) const JOB_ID: u64 = 9;
pub(crate) const VERSION: u64 = 12;
pub(crate) const LINE: JobLine = JobLine { job_id: JOB_ID, line: 0 };

/// Tensors of every kind with `optimizer`, except one, with NAdam where a job can have both.
pub(crate) fn spec(optimizer: &str) -> JobSpec {
    let optimizer: Optimizer = optimizer.parse().unwrap();
    let other = if optimizer.skips_overflow() { "nadam".parse().unwrap() } else { optimizer };
    let policy = if optimizer.needs_whole_tensors() { Policy::Whole } else { Policy::Elementwise };
    let tensor = |name: &str, shape: &[u64]| TensorSpec { policy, ..TensorSpec::new(name, shape) };
    let mut tensors = vec![
        tensor("w", &[4, 5]),
        TensorSpec { dtype: DType::Bf16, group: 1, ..tensor("h/1", &[3, 2]) },
        TensorSpec { dtype: DType::F16, frozen: true, ..tensor("frozen", &[7]) },
        TensorSpec { buffer: true, ..tensor("mean", &[2]) },
        TensorSpec { alias_of: Some("w".into()), ..tensor("tied", &[4, 5]) },
        tensor("scalar", &[]),
    ];
    if policy == Policy::Elementwise {
        tensors.push(tensor("empty", &[0, 3]));
    }
    JobSpec::new(JOB, Tensors::new(tensors).unwrap(), vec![optimizer, other])
}

/// Content that differs in every part of every slice.
pub(crate) struct Content {
    pub(crate) spec: JobSpec,
    pub(crate) done: Mutex<Vec<u32>>,
}

impl Content {
    pub(crate) fn new(spec: JobSpec) -> Self {
        Self { spec, done: Mutex::default() }
    }

    pub(crate) fn bytes(&self, slice: u32, part: Part) -> Bytes {
        let cut = self.spec.manifest.slices()[slice as usize];
        let tensor = self.spec.manifest.tensor_of(slice as usize);
        let (numel, dtype, seed) = match part {
            Part::Values if tensor.trains() => (cut.numel, DType::F32, 0),
            Part::Values => (cut.numel, tensor.dtype, 0),
            Part::State(position) => {
                let (_, shape) = self.spec.state_of(cut.tensor).remove(position);
                (shape.numel(cut.numel), DType::F32, position + 1)
            }
        };
        let size = numel * dtype.size();
        (0..size).map(|i| (i * 7 + slice as usize * 31 + seed * 101) as u8).collect()
    }

    pub(crate) fn slice(&self, slice: u32) -> SavedSlice {
        let optimizer = self.spec.optimizer_of_slice(slice as usize);
        let tensor = self.spec.manifest.slices()[slice as usize].tensor;
        let states = self.spec.state_of(tensor).len();
        let state = (0..states).map(|position| self.bytes(slice, Part::State(position)));
        SavedSlice {
            values: self.bytes(slice, Part::Values),
            state: state.collect(),
            applied: match optimizer {
                Some(_) => self.applied(slice),
                None => AppliedSteps::default(),
            },
        }
    }
}

impl Source for Content {
    fn part(&self, slice: u32, part: Part) -> Result<Bytes> {
        Ok(self.bytes(slice, part))
    }

    fn applied(&self, slice: u32) -> AppliedSteps {
        let (count, values) = (10 + u64::from(slice), [0.1, 1.0 / 3.0]);
        match self.spec.optimizer_of_slice(slice as usize) {
            Some(optimizer) => {
                let scalar_state = optimizer.scalar_state().len();
                let applied = AppliedSteps::of(optimizer, count, &values[..scalar_state]);
                let averaged = if self.spec.averages.is_empty() { 0 } else { count + 5 };
                AppliedSteps { averaged, ..applied.unwrap() }
            }
            None => AppliedSteps::new(count),
        }
    }

    fn done(&self, slice: u32) {
        self.done.lock().unwrap().push(slice);
    }
}

pub(crate) struct Saved {
    pub(crate) directory: TempDir,
    pub(crate) storage: Storage,
    pub(crate) content: Arc<Content>,
}

impl Saved {
    pub(crate) fn new(optimizer: &str) -> Self {
        Self::of(spec(optimizer))
    }

    pub(crate) fn of(spec: JobSpec) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let storage = Storage::open(&format!("file://{}", directory.path().display())).unwrap();
        let content = Content::new(spec);
        Self { directory, storage, content: Arc::new(content) }
    }

    pub(crate) async fn files(&self, version: u64, number: u64) -> Vec<pb::CheckpointFile> {
        let version = on_line_0(version);
        save(&self.storage, &self.content, version, number).await
    }

    pub(crate) async fn save(&self, version: u64, save: u64) -> Manifest {
        self.save_on_line(on_line_0(version), save).await
    }

    pub(crate) async fn save_on_line(&self, version: LineVersion, number: u64) -> Manifest {
        let files = save(&self.storage, &self.content, version, number).await;
        let manifest = Manifest::new(&self.content.spec, JOB_ID, version, number, files).unwrap();
        assert!(self.storage.commit(&manifest).await.unwrap());
        self.storage.manifest(JOB, version).await.unwrap()
    }

    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        let jobs = fs::read_dir(self.directory.path()).unwrap().map(|job| job.unwrap().path());
        let versions = jobs.flat_map(|job| fs::read_dir(job).unwrap());
        let versions = versions.map(|version| version.unwrap().path());
        let files = versions.flat_map(|version| fs::read_dir(version).unwrap());
        files.map(|entry| entry.unwrap().path()).collect()
    }

    pub(crate) async fn check(&self) -> Result<()> {
        let manifest = self.storage.manifest(JOB, on_line_0(VERSION)).await?;
        self.storage.verify(&manifest, |_| {}).await
    }
}

pub(crate) fn on_line_0(version: u64) -> LineVersion {
    LineVersion { version, line: 0 }
}

/// Two servers write their slices, and two ranks their data.
pub(crate) async fn save(
    storage: &Storage,
    content: &Arc<Content>,
    version: LineVersion,
    save: u64,
) -> Vec<pb::CheckpointFile> {
    let slices = 0..content.spec.manifest.number_of_slices() as u32;
    let (first, second): (Vec<u32>, Vec<u32>) = slices.partition(|slice| slice % 2 == 0);
    let mut files = Vec::new();
    for (server, slices) in [(1, first), (2, second)] {
        let save = Save { spec: Arc::new(content.spec.clone()), version, save, server };
        files.extend(write(storage, &save, slices, content.clone()).await.unwrap());
    }
    let data = [(0, Bytes::from("random state")), (3, Bytes::from(vec![7; 1000]))];
    let (data, job) = (BTreeMap::from(data), &content.spec.name);
    files.push(storage.write_user_data(job, version, save, &data).await.unwrap());
    files
}
