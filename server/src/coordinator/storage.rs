//! The coordinator's part of a checkpoint in its storage: the data of the ranks, the manifest, and
//! the removal of old checkpoints.

use std::collections::BTreeSet;

use futures_util::{StreamExt, TryStreamExt, stream};
use prost::Message;
use zeroshard_checkpoint::{Manifest, Storage};
use zeroshard_coordinator::{
    state::user_data::UserData,
    vocabulary::{
        commands::{Checkpoint, SavePlan},
        events::{Completion, Placing},
        ids::JobRef,
    },
};
use zeroshard_model::{
    Error, JobSpec, Restore, RestoreVersion, Result,
    checkpoint::{Start, is_same_place},
};
use zeroshard_proto::pb;

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
        Some(restore) => look_up(restore, placing).await?,
        None => Found::default(),
    };
    if !placing.returns {
        check_own(&placing.spec, found.0.as_ref()).await?;
    }
    Ok(found)
}

/// How a job whose own checkpoints are at `url` begins, for its claim.
pub(super) fn start(placing: &Placing, found: Option<&Checkpoint>, url: &str) -> Start {
    match found.filter(|of| is_same_place(&of.url, url) && of.job == placing.spec.name) {
        Some(found) => Start::From(found.job_id, found.version),
        None => Start::Anew,
    }
}

async fn look_up(restore: &Restore, placing: &Placing) -> Result<Found> {
    let Restore { url, job, version } = restore;
    let (storage, spec) = (Storage::open(url)?, &placing.spec);
    let found = match version {
        RestoreVersion::Exactly(version) => Some(storage.manifest(job, *version).await?),
        _ if placing.returns => {
            let claim = storage.claim_of(job, placing.job.id).await?;
            storage.latest(job, &claim).await?
        }
        _ => latest(&storage, job).await?,
    };
    let Some(manifest) = found else {
        if *version == RestoreVersion::LatestIfAny {
            return Ok(Found::default());
        }
        let version = match placing.returns {
            true => format!("any version that is its own (id {:016x})", placing.job.id),
            false => "any version".to_owned(),
        };
        return Err(Error::NoCheckpoint { url: url.clone(), job: job.clone(), version });
    };
    let version = manifest.version();
    if let Some(difference) = manifest.difference(spec) {
        return Err(Error::refused(format!(
            "job {:?} cannot start from version {version} of job {job:?}: they differ in their \
             {difference}",
            spec.name
        )));
    }
    let (storage, manifest) = (&storage, &manifest);
    let read = |rank| async move {
        let data = storage.user_data(manifest, rank).await?;
        Ok::<_, Error>(data.map(|data| (rank, data)))
    };
    let ranks = stream::iter(manifest.ranks()).map(read).buffer_unordered(READS);
    let ranks = ranks.try_filter_map(async |found| Ok(found)).try_collect().await?;
    let user_data = UserData::restored(ranks, manifest.lost_ranks());
    let (url, job, job_id) = (url.clone(), job.clone(), manifest.job_id());
    Ok((Some(Checkpoint { url, job, job_id, version }), user_data))
}

/// The latest checkpoint of a name, of the job that owns them and its ancestors.
async fn latest(storage: &Storage, job: &str) -> Result<Option<Manifest>> {
    if let Some(owner) = storage.owner(job).await? {
        return storage.latest(job, &owner).await;
    }
    match storage.versions(job).await?.pop() {
        Some(version) => storage.manifest(job, version).await.map(Some),
        None => Ok(None),
    }
}

/// Checks that the place of a job's own checkpoints has none that the job does not continue: after
/// the loss of a server it would be restored from one of them.
async fn check_own(spec: &JobSpec, found: Option<&Checkpoint>) -> Result<()> {
    let Some(policy) = &spec.checkpoints else { return Ok(()) };
    let storage = Storage::open(&policy.url)?;
    let Some(latest) = latest(&storage, &spec.name).await? else { return Ok(()) };
    let latest = latest.version();
    let own =
        found.filter(|found| is_same_place(&found.url, &policy.url) && found.job == spec.name);
    if own.is_some_and(|own| own.version == latest) {
        return Ok(());
    }
    let remedy = match own {
        Some(own) => format!(
            "the job starts from version {}: remove the later ones with `zsctl checkpoint rm`",
            own.version
        ),
        None => "resume from it, remove it with `zsctl checkpoint rm`, or choose another name or \
                 URL for the new job"
            .to_owned(),
    };
    Err(Error::refused(format!(
        "job {:?} already has a checkpoint of version {latest} at {}; {remedy}",
        spec.name, policy.url
    )))
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
    let files = files.into_iter().flat_map(|files| files.0).map(pb::CheckpointFile::decode);
    let mut files: Vec<_> = files.collect::<Result<_, _>>().map_err(|error| Error::Internal {
        cause: format!("a description of files was changed: {error}"),
    })?;
    if !user_data.is_empty() {
        files.push(storage.write_user_data(&job.name, version, save, &user_data).await?);
    }
    let manifest = Manifest::new(&spec, job.id, version, save, files)?.without_data_of(lost_ranks);
    check_leader()?;
    storage.check_owner(&job.name, job.id).await?;
    if !storage.commit(&manifest).await? {
        storage.discard(&job.name, version, save).await?;
        // A job has one state at a version, so its earlier checkpoint is as good, and so is that of
        // an earlier job from which this one was restored and has made no step since.
        let existing = storage.manifest(&job.name, version).await?;
        let is_ancestor = storage.claim_of(&job.name, job.id).await?.admits(&existing);
        if existing.job_id() == job.id || is_ancestor && existing.has_state_of(&manifest) {
            return Ok(existing.bytes());
        }
        let cause =
            format!("another version {version}, of another job of this name, is saved there");
        return Err(Error::Storage { action: "write".to_owned(), url, cause });
    }
    Ok(manifest.bytes())
}

/// Removes old checkpoints after one is complete. A failure does not matter for that one.
pub(super) async fn prune(JobRef { name: job, id }: &JobRef, plan: &SavePlan) {
    let removed = async { Storage::open(&plan.url)?.prune(job, *id, plan.keep).await };
    match removed.await {
        Ok(removed) if !removed.is_empty() => {
            tracing::info!(job, ?removed, "old checkpoints are removed");
        }
        Ok(_) => {}
        Err(error) => tracing::warn!(job, %error, "old checkpoints could not be removed"),
    }
}

/// States that a job is over, where it has claimed the checkpoints of its name.
pub(super) async fn end_claims(JobRef { name, id }: JobRef, urls: BTreeSet<String>) {
    for url in urls {
        let ended = async {
            match Storage::open_existing(&url)? {
                Some(storage) => storage.end_claim(&name, id).await,
                None => Ok(()), // somebody has removed it
            }
        };
        if let Err(error) = ended.await {
            tracing::warn!(job = name, url, %error, "the claim of a job could not be ended");
        }
    }
}
