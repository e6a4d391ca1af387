//! Fills the slices of a job that is being opened from a checkpoint.

use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt, stream};
use zeroshard_checkpoint::{Manifest, SavedSlice, Storage};
use zeroshard_proto::{Error, Restore, RestoreVersion, Result, pb};

use super::{job::Job, store::Store};
use crate::backend::Backend;

/// The number of slices that are read at the same time. Each is held in memory once more until it
/// is stored.
const READS: usize = 8;

/// Reads the slices of `job`, which no client can reach yet, and publishes the version.
///
/// # Errors
/// [`Error::NoCheckpoint`], [`Error::CheckpointDamaged`], [`Error::Storage`];
/// [`Error::Internal`] for a checkpoint of another model; [`Error::JobFailed`] if the job is closed
/// meanwhile.
pub(super) async fn restore<B: Backend>(
    store: &Arc<Store<B>>,
    job: &Arc<Job<B>>,
    checkpoint: pb::Restore,
) -> Result<()> {
    let restored = job.closed().run_until_cancelled(read(store, job, checkpoint)).await;
    let version = restored.unwrap_or_else(|| Err(job.closed_error()))?;
    let publish = {
        let job = job.clone();
        move || job.publish_at(version)
    };
    store.failure.blocking("publish a restored version", publish).await
}

/// Reads all slices. Returns the version.
async fn read<B: Backend>(
    store: &Arc<Store<B>>,
    job: &Arc<Job<B>>,
    checkpoint: pb::Restore,
) -> Result<u64> {
    let Restore { url, job: name, version } = Restore::try_from(checkpoint)?;
    let RestoreVersion::Exactly(version) = version else {
        return Err(Error::Internal { cause: "a checkpoint without a version".to_owned() });
    };
    let storage = Storage::open(&url)?;
    let manifest = Arc::new(storage.manifest(&name, version).await?);
    if let Some(difference) = manifest.difference(&job.spec) {
        let cause = format!("version {version} of job {name:?} has another {difference}");
        return Err(Error::Internal { cause });
    }
    let slices: Vec<u32> = job.slices().map(|(index, _)| index).collect();
    stream::iter(slices)
        .map(|index| fill(store, job, &storage, &manifest, index))
        .buffer_unordered(READS)
        .try_collect::<()>()
        .await?;
    Ok(version)
}

/// Reads one slice and stores it.
async fn fill<B: Backend>(
    store: &Arc<Store<B>>,
    job: &Arc<Job<B>>,
    storage: &Storage,
    manifest: &Manifest,
    index: u32,
) -> Result<()> {
    let saved: SavedSlice = storage.read_slice(manifest, index).await?;
    let job = job.clone();
    let fill = move || job.slice(index)?.restore(job.backend(), &saved);
    store.failure.blocking("fill a slice from a checkpoint", fill).await
}
