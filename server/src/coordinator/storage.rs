//! The coordinator's part of a checkpoint in its storage: the data of the ranks, the manifest, and
//! the removal of old checkpoints.

use std::{collections::BTreeSet, ops::Range, slice};

use futures_util::{StreamExt, TryStreamExt, stream};
use prost::Message;
use zeroshard_checkpoint::{Claim, Manifest, Storage};
use zeroshard_coordinator::{
    state::user_data::UserData,
    vocabulary::{
        commands::{Checkpoint, SavePlan},
        events::{Completion, Placing, Search, Target},
        ids::JobRef,
    },
};
use zeroshard_model::{
    Error, JobLine, JobSpec, Line, LineVersion, RecentSteps, Restore, RestoreVersion, Result,
    checkpoint::{Start, is_same_place},
};
use zeroshard_proto::pb;

/// The number of ranks whose data is read at the same time.
const READS: usize = 16;

/// From what a job starts.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// The checkpoint, if there is one.
    pub(super) checkpoint: Option<Checkpoint>,
    /// The data of its ranks.
    pub(super) user_data: UserData,
    /// The line that begins.
    pub(super) line: Line,
    /// The figures of the steps before the version of the checkpoint.
    pub(super) recent: RecentSteps,
}

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
    if placing.returns {
        return Ok(found);
    }
    let number = check_own(&placing.spec, found.checkpoint.as_ref()).await?.max(found.line.number);
    Ok(Found { line: found.line.numbered(number), ..found })
}

/// Finds the checkpoint to which a job is to return, and the batches that its next line skips.
/// `line`: the job's current line. `skip`: batches that the next line skips in addition.
///
/// # Errors
/// Those of [`find`]; [`Error::Refused`] for batches that earlier steps have used.
pub(super) async fn target(
    (job, spec, line): (&JobRef, &JobSpec, &Line),
    (url, version): (&str, u64),
    skip: &[Range<u64>],
) -> Result<Target> {
    let storage = existing(url)?;
    let name = &job.name;
    // The job has claimed every line at the place of its policy, but perhaps not at `url`.
    let policy = spec.checkpoints.as_ref().map(|policy| Storage::open(&policy.url)).transpose()?;
    let of = JobLine { job_id: job.id, line: line.number };
    let own = policy.as_ref().unwrap_or(&storage).claim_of(name, of).await?;
    let manifest = storage.checkpoint(name, (version, None), Some(&own)).await?;
    target_at(&manifest, url, (spec, line), skip)
}

/// Returns a checkpoint as the target of a return: see [`target`].
fn target_at(
    manifest: &Manifest,
    url: &str,
    (spec, line): (&JobSpec, &Line),
    skip: &[Range<u64>],
) -> Result<Target> {
    check_fits(manifest, spec)?;
    let (job, job_id, version) = (spec.name.clone(), manifest.job_id(), manifest.version());
    let skips = line.next(line.number, version.version, skip)?.skips().to_vec();
    Ok(Target { to: Checkpoint { url: url.to_owned(), job, job_id, version }, skips })
}

/// Finds the newest checkpoint to which a job can return after a spike.
///
/// # Errors
/// Those of [`target`]; [`Error::NoCheckpoint`].
pub(super) async fn search(search: &Search) -> Result<Target> {
    let Search { job, spec, line, until, skip, .. } = search;
    let policy = spec.checkpoints.as_ref().expect("a policy that rewinds needs checkpoints");
    let storage = existing(&policy.url)?;
    let of = JobLine { job_id: job.id, line: line.number };
    let own = storage.claim_of(&job.name, of).await?;
    let found = storage.latest_until(&job.name, *until, Some(&own)).await?;
    let found = found.ok_or_else(|| Error::NoCheckpoint {
        url: policy.url.clone(),
        job: job.name.clone(),
        version: format!("a version until {until} of this run"),
    })?;
    target_at(&found, &policy.url, (spec, line), slice::from_ref(skip))
}

/// Opens a storage that exists.
fn existing(url: &str) -> Result<Storage> {
    Storage::open_existing(url)?.ok_or_else(|| {
        let cause = "the directory does not exist".to_owned();
        Error::Storage { action: "read".to_owned(), url: url.to_owned(), cause }
    })
}

/// Returns the last claim of a job, or the empty one of its line.
async fn claim(storage: &Storage, job: &JobRef, line: &Line) -> Result<Claim> {
    if let Some(claim) = storage.last_claim_of(&job.name, job.id).await? {
        return Ok(claim);
    }
    storage.claim_of(&job.name, JobLine { job_id: job.id, line: line.number }).await
}

/// Returns the places at which a job claims its checkpoints when it begins a line: that of its
/// policy, and that of the checkpoint to which it returns.
pub(super) fn places(placing: &Placing) -> BTreeSet<&str> {
    let policy = placing.spec.checkpoints.as_ref().map(|policy| policy.url.as_str());
    let target = placing.restore.as_ref().filter(|_| placing.returns);
    policy.into_iter().chain(target.map(|of| of.url.as_str())).collect()
}

/// Returns the checkpoint that the line of a job continues, for its claim at `url`. A job that
/// returns to one of its own versions continues it, wherever it has saved it.
pub(super) fn start(placing: &Placing, found: Option<&Checkpoint>, url: &str) -> Start {
    let is_here = |of: &&Checkpoint| {
        is_same_place(&of.url, url) && of.job == placing.spec.name
            || placing.returns && of.job_id == placing.job.id
    };
    match found.filter(is_here) {
        Some(found) => Start::From(found.job_id, found.version),
        None => Start::Anew,
    }
}

async fn look_up(restore: &Restore, placing: &Placing) -> Result<Found> {
    let Restore { url, job, version, line } = restore;
    let storage = Storage::open(url)?;
    let owner = match placing.returns {
        true => Some(claim(&storage, &placing.job, &placing.line).await?),
        false => storage.owner(job).await?,
    };
    let found = match version {
        RestoreVersion::Exactly(version) => {
            Some(storage.checkpoint(job, (*version, *line), owner.as_ref()).await?)
        }
        _ => storage.latest(job, owner.as_ref()).await?,
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
    check_fits(&manifest, &placing.spec)?;
    let line = next_line(placing, restore, (&storage, owner.as_ref()), &manifest).await?;
    let (storage, manifest) = (&storage, &manifest);
    let read = |rank| async move {
        let data = storage.user_data(manifest, rank).await?;
        Ok::<_, Error>(data.map(|data| (rank, data)))
    };
    let ranks = stream::iter(manifest.ranks()).map(read).buffer_unordered(READS);
    let ranks = ranks.try_filter_map(async |found| Ok(found)).try_collect().await?;
    let user_data = UserData::restored(ranks, manifest.lost_ranks());
    let (job_id, version) = (manifest.job_id(), manifest.version());
    let checkpoint = Checkpoint { url: url.clone(), job: job.clone(), job_id, version };
    let recent = manifest.recent()?;
    Ok(Found { checkpoint: Some(checkpoint), user_data, line, recent })
}

/// Returns the line of a job that starts from a checkpoint of `owner`. A job that returns begins a
/// new line. A new job of the same name continues the owner's line, because it makes no version
/// that this line already has. Any other job begins with line 0, and skips the same batches.
async fn next_line(
    placing: &Placing,
    restore: &Restore,
    (storage, owner): (&Storage, Option<&Claim>),
    found: &Manifest,
) -> Result<Line> {
    let claimed = owner.map(Claim::line).transpose()?.unwrap_or_default();
    let policy = placing.spec.checkpoints.as_ref();
    if placing.returns {
        // A coordinator may have claimed a later line, and died before the job knew it. The return
        // that it began still counts, unless somebody rewinds the job again.
        let is_requested = matches!(restore.version, RestoreVersion::Exactly(_));
        let is_later = claimed.number > placing.line.number && !is_requested;
        let line = if is_later { claimed } else { Line::clone(&placing.line) };
        let mut number = storage.next_line(&restore.job).await?;
        number = number.max(line.number.saturating_add(1));
        if let Some(policy) = policy {
            number = number.max(Storage::open(&policy.url)?.next_line(&restore.job).await?);
        }
        return Ok(line.numbered(number));
    }
    let is_own = restore.job == placing.spec.name
        && policy.is_none_or(|policy| is_same_place(&policy.url, &restore.url));
    if is_own && owner.is_some_and(|owner| owner.admits(found)) {
        return Ok(claimed);
    }
    Ok(found.line()?.numbered(if is_own { claimed.number } else { 0 }))
}

/// Checks that a job can start from a checkpoint.
fn check_fits(manifest: &Manifest, spec: &JobSpec) -> Result<()> {
    let Some(difference) = manifest.difference(spec) else { return Ok(()) };
    Err(Error::refused(format!(
        "job {:?} cannot start from version {} of job {:?}: they differ in their {difference}",
        spec.name,
        manifest.version(),
        manifest.job()
    )))
}

/// Checks that the place of a job's own checkpoints has none that the job does not continue: after
/// the loss of a server it would be restored from one of them. Returns the number of the owner's
/// line, which the new job can continue.
async fn check_own(spec: &JobSpec, found: Option<&Checkpoint>) -> Result<u64> {
    let Some(policy) = &spec.checkpoints else { return Ok(0) };
    let storage = Storage::open(&policy.url)?;
    let owner = storage.owner(&spec.name).await?;
    let latest = storage.latest(&spec.name, owner.as_ref()).await?;
    let number = owner.map_or(0, |owner| owner.of().line);
    let Some(latest) = latest else { return Ok(number) };
    let latest = latest.version();
    let own =
        found.filter(|found| is_same_place(&found.url, &policy.url) && found.job == spec.name);
    if own.is_some_and(|own| own.version == latest) {
        return Ok(number);
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
    let Completion { job, spec, line, plan, files, user_data, lost_ranks, recent } = completion;
    let SavePlan { save, version, url, .. } = plan;
    let storage = Storage::open(&url)?;
    let files = files.into_iter().flat_map(|files| files.0).map(pb::CheckpointFile::decode);
    let mut files: Vec<_> = files.collect::<Result<_, _>>().map_err(|error| Error::Internal {
        cause: format!("a description of files was changed: {error}"),
    })?;
    if !user_data.is_empty() {
        files.push(storage.write_user_data(&job.name, version, save, &user_data).await?);
    }
    let manifest = Manifest::new(&spec, job.id, version, save, files)?
        .without_data_of(lost_ranks)
        .skipping(&line)
        .after(&recent);
    check_leader()?;
    let of = JobLine { job_id: job.id, line: line.number };
    if !storage.continue_claim(&job.name, of).await? {
        storage.check_owner(&job.name, job.id).await?;
    }
    if !storage.commit(&manifest).await? {
        storage.discard(&job.name, version, save).await?;
        // A version of a line has one state, so its earlier checkpoint is as good. So is the one
        // that this job was restored from, if it has made no step since.
        let existing = storage.manifest(&job.name, version).await?;
        let is_ancestor = storage.claim_of(&job.name, of).await?.admits(&existing);
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
    let of = JobLine { job_id: *id, line: plan.version.line };
    let removed = async { Storage::open(&plan.url)?.prune(job, of, plan.keep).await };
    match removed.await {
        Ok(removed) if !removed.is_empty() => {
            let removed = removed.iter().map(LineVersion::to_string).collect::<Vec<_>>();
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
