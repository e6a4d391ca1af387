//! Fills the slices of a job that is being opened from a checkpoint.

use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt, stream};
use zeroshard_checkpoint::{Manifest, Storage};
use zeroshard_kernels::Backend;
use zeroshard_model::{Error, LineVersion, Restore, RestoreVersion, Result};
use zeroshard_proto::pb;

use super::{job::Job, store::Store};

/// The number of slices that are read at the same time. Each has a thread, since its bytes are also
/// hashed and stored; more of them than cores hide the time for which the disk is waited for.
const READS: usize = 4;

/// Reads the slices of `job`, which no client can reach yet, and publishes the version. The
/// checkpoint comes with the id of the job that wrote it. `returns`: ranks are waiting for it.
///
/// # Errors
/// [`Error::NoCheckpoint`], [`Error::CheckpointDamaged`], [`Error::Storage`];
/// [`Error::Internal`] for a checkpoint of another model; [`Error::JobFailed`] if the job is closed
/// meanwhile.
pub(super) async fn restore<B: Backend>(
    store: &Arc<Store<B>>,
    job: &Arc<Job<B>>,
    checkpoint: (pb::Restore, u64),
    returns: bool,
) -> Result<()> {
    let restored = job.closed().run_until_cancelled(read(job, checkpoint)).await;
    let version = restored.unwrap_or_else(|| Err(job.closed_error()))?;
    let publish = {
        let job = job.clone();
        move || if returns { job.return_to(version) } else { job.publish_at(version) }
    };
    store.failure.blocking("publish a restored version", publish).await?;
    // The first gradients arrive when the ranks have read the parameters, which can begin.
    let job = job.clone();
    tokio::task::spawn_blocking(move || {
        let open = job.slices().take_while(|_| !job.closed().is_cancelled());
        open.for_each(|(_, slice)| slice.populate_sum());
    });
    Ok(())
}

/// Reads all slices. Returns the version.
async fn read<B: Backend>(
    job: &Arc<Job<B>>,
    (checkpoint, job_id): (pb::Restore, u64),
) -> Result<u64> {
    let Restore { url, job: name, version, line } = Restore::try_from(checkpoint)?;
    let RestoreVersion::Exactly(version) = version else {
        return Err(Error::Internal { cause: "a checkpoint without a version".to_owned() });
    };
    let storage = Storage::open(&url)?;
    let saved = LineVersion { version, line: line.unwrap_or_default() };
    let manifest = Arc::new(storage.manifest(&name, saved).await?);
    if manifest.job_id() != job_id {
        // The checkpoint was removed, and another job has written one of the same version.
        let version = format!("version {saved} of the job with id {job_id:016x}");
        return Err(Error::NoCheckpoint { url, job: name, version });
    }
    if let Some(difference) = manifest.difference(&job.spec) {
        let cause = format!("version {saved} of job {name:?} has another {difference}");
        return Err(Error::Internal { cause });
    }
    let slices: Vec<u32> = job.slices().map(|(index, _)| index).collect();
    stream::iter(slices)
        .map(|index| fill(job, &storage, &manifest, index))
        .buffer_unordered(READS)
        .try_collect::<()>()
        .await?;
    Ok(version)
}

/// Reads one slice and stores it.
async fn fill<B: Backend>(
    job: &Arc<Job<B>>,
    storage: &Storage,
    manifest: &Manifest,
    index: u32,
) -> Result<()> {
    let filled = job.clone();
    let store = move |part, at, bytes: &[u8]| filled.slice(index)?.restore(part, at, bytes);
    let applied = storage.stream_slice(manifest, index, store).await?;
    job.slice(index)?.set_applied(applied);
    Ok(())
}
