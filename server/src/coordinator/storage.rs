//! The coordinator's part of a checkpoint in its storage: the data of the ranks, the manifest, and
//! the removal of old checkpoints.

use futures_util::{StreamExt, TryStreamExt, stream};
use zeroshard_checkpoint::{Manifest, Storage};
use zeroshard_proto::{Error, JobSpec, Restore, RestoreVersion, Result};

use super::{
    events::{Checkpoint, Placing},
    save::{Completion, SavePlan},
    user_data::UserData,
};

/// The number of ranks whose data is read at the same time.
const READS: usize = 16;

/// A checkpoint, if there is one, and the data of its ranks.
type Found = (Option<Checkpoint>, UserData);

/// Finds the checkpoint from which a job starts. `None`: it starts without one.
///
/// # Errors
/// [`Error::NoCheckpoint`]; [`Error::Invalid`] for a checkpoint of another model or optimizer, and
/// for a job whose own checkpoints are not those that it would continue; [`Error::Storage`],
/// [`Error::CheckpointDamaged`].
pub(super) async fn find(placing: &Placing) -> Result<Found> {
    let found = match &placing.restore {
        Some(restore) => look_up(restore, &placing.spec).await?,
        None => Found::default(),
    };
    check_own(&placing.spec, found.0.as_ref()).await?;
    Ok(found)
}

async fn look_up(restore: &Restore, spec: &JobSpec) -> Result<Found> {
    let Restore { url, job, version } = restore;
    let storage = Storage::open(url)?;
    let version = match version {
        RestoreVersion::Exactly(version) => *version,
        latest => match (storage.versions(job).await?.last(), latest) {
            (Some(version), _) => *version,
            (None, RestoreVersion::LatestIfAny) => return Ok(Found::default()),
            (None, _) => {
                let (url, job) = (url.clone(), job.clone());
                return Err(Error::NoCheckpoint { url, job, version: "any version".to_owned() });
            }
        },
    };
    let manifest = storage.manifest(job, version).await?;
    if let Some(difference) = manifest.difference(spec) {
        let what = format!("spec of job {:?}", spec.name);
        let expected = format!("the model and optimizer of version {version} of job {job:?}");
        return Err(Error::invalid(what, format!("different in its {difference}"), expected));
    }
    let (storage, manifest) = (&storage, &manifest);
    let read = |rank| async move {
        let data = storage.user_data(manifest, rank).await?;
        Ok::<_, Error>(data.map(|data| (rank, data)))
    };
    let ranks = stream::iter(manifest.ranks()).map(read).buffer_unordered(READS);
    let ranks = ranks.try_filter_map(async |found| Ok(found)).try_collect().await?;
    let user_data = UserData::restored(ranks, manifest.lost_ranks());
    Ok((Some(Checkpoint { url: url.clone(), job: job.clone(), version }), user_data))
}

/// Checks that the place of a job's own checkpoints has none that the job does not continue: after
/// the loss of a server it would be restored from one of them.
async fn check_own(spec: &JobSpec, found: Option<&Checkpoint>) -> Result<()> {
    let Some(policy) = &spec.checkpoints else { return Ok(()) };
    let Some(latest) = Storage::open(&policy.url)?.versions(&spec.name).await?.pop() else {
        return Ok(());
    };
    let own = found.filter(|found| found.url == policy.url && found.job == spec.name);
    if own.is_some_and(|own| own.version == latest) {
        return Ok(());
    }
    let what = format!("latest checkpoint of job {:?} at {}", spec.name, policy.url);
    let expected = match own {
        Some(own) => format!(
            "version {}, from which the job starts; remove the later ones with `zsctl checkpoint rm`",
            own.version
        ),
        None => "absent for a new job; resume from it, remove it with `zsctl checkpoint rm`, or \
                 choose another name or URL"
            .to_owned(),
    };
    Err(Error::invalid(what, format!("version {latest}"), expected))
}

/// Completes a checkpoint whose slices are written. Returns its size in bytes. `check_leader`: the
/// error of a coordinator that has been replaced. The next one may return the job to an earlier
/// checkpoint, which must not be removed, and nothing must be added to it.
///
/// # Errors
/// The error of `check_leader`; [`Error::Storage`]; [`Error::Internal`] if the servers have not
/// written each slice once.
pub(super) async fn complete(
    completion: Completion,
    check_leader: impl Fn() -> Result<()>,
) -> Result<u64> {
    let Completion { job, spec, plan, files, user_data, lost_ranks } = completion;
    let SavePlan { save, version, url, .. } = plan;
    let storage = Storage::open(&url)?;
    let mut files: Vec<_> = files.into_iter().flat_map(|files| files.0).collect();
    if !user_data.is_empty() {
        files.push(storage.write_user_data(&job.name, version, save, &user_data).await?);
    }
    let manifest = Manifest::new(&spec, job.id, version, save, files)?.without_data_of(lost_ranks);
    check_leader()?;
    if !storage.commit(&manifest).await? {
        storage.discard(&job.name, version, save).await?;
        // A job has one state at a version, so its earlier checkpoint is as good, and so is that of
        // an earlier job from which this one was restored and has made no step since.
        let existing = storage.manifest(&job.name, version).await?;
        if existing.job_id() == job.id || existing.has_state_of(&manifest) {
            return Ok(existing.bytes());
        }
        let cause =
            format!("another version {version}, of an earlier job of this name, is saved there");
        return Err(Error::Storage { action: "write".to_owned(), url, cause });
    }
    Ok(manifest.bytes())
}

/// Removes old checkpoints after one is complete. A failure does not matter for that one.
pub(super) async fn prune(job: &str, plan: &SavePlan) {
    let removed = async { Storage::open(&plan.url)?.prune(job, plan.keep).await };
    match removed.await {
        Ok(removed) if !removed.is_empty() => {
            tracing::info!(job, ?removed, "old checkpoints are removed");
        }
        Ok(_) => {}
        Err(error) => tracing::warn!(job, %error, "old checkpoints could not be removed"),
    }
}
