//! `Changes`: sends readers what the steps between two versions have changed. The slices record the
//! changes. This file waits for the version, adds the changes of several steps, and sends the sum.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{Stream, TryStreamExt, stream};
use tokio::sync::Semaphore;
use zeroshard_changes::sum;
use zeroshard_kernels::Backend;
use zeroshard_model::{Error, Result, View};
use zeroshard_net::Deadline;
use zeroshard_proto::{
    changes::{Change, bytes, followed, messages},
    pb,
};
use zeroshard_shard::{fair::end_after_others, slice::Since};

use super::{job::Job, store::Store};
#[cfg(test)]
use crate::simulation::{Safeguard, is_missing};

/// The pause before a call looks again for a hash that another call computes.
const PAUSE: Duration = Duration::from_millis(5);

/// The changes still to be sent.
struct Changes<B: Backend> {
    store: Arc<Store<B>>,
    job: Arc<Job<B>>,
    /// The slices still to be sent, last one first.
    rest: Vec<(u32, View)>,
    from: u64,
    to: u64,
    deadline: Deadline,
}

/// The versions of a reader's request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Versions {
    /// The version that the reader has.
    from: Option<u64>,
    /// The version that the reader wants; `None`: the newest one.
    to: Option<u64>,
    /// The newest version must be after this one.
    newer_than: Option<u64>,
}

impl Versions {
    /// Checks the versions of a request, and their line.
    ///
    /// # Errors
    /// [`Error::VersionGone`] if the job is on another line; [`Error::Invalid`].
    pub(crate) fn of<B: Backend>(request: &pb::ChangesRequest, job: &Job<B>) -> Result<Self> {
        let &pb::ChangesRequest { line, from, to, newer_than, .. } = request;
        job.check_line(line, to.or(from).unwrap_or_default())?;
        if let (Some(from), Some(to)) = (from, to)
            && to < from
        {
            let expected = format!("at least the version of the reader, {from}");
            return Err(Error::invalid("version of a reader's request", to, expected));
        }
        Ok(Self { from, to, newer_than: newer_than.or(from) })
    }

    /// Returns the version to which the changes lead, or `None` if the reader has to wait for it.
    pub(crate) fn ready<B: Backend>(self, job: &Job<B>) -> Option<u64> {
        match self.to {
            Some(to) => job.version().filter(|&at| at >= to && job.serves(to)).map(|_| to),
            None => {
                let is_newer = |version| self.newer_than.is_none_or(|than| version > than);
                newest(job).filter(|&version| is_newer(version))
            }
        }
    }

    /// Returns the version with which the reader goes on if there is no newer one; `None`: the
    /// reader gets an error.
    pub(crate) fn same<B: Backend>(self, job: &Job<B>) -> Option<u64> {
        newest(job).filter(|_| self.to.is_none())
    }

    /// Returns the version after which the changes to `version` begin; `None`: the reader gets
    /// none.
    pub(crate) fn first(self, version: u64) -> Option<u64> {
        self.from.filter(|&from| from < version || self.to.is_some())
    }

    /// Waits for the version. `limits`: the deadline of the call, and the longest wait for a newer
    /// version.
    ///
    /// # Errors
    /// [`Error::Timeout`] if the version is not there yet.
    async fn wait<B: Backend>(self, job: &Job<B>, limits: (Deadline, Duration)) -> Result<u64> {
        let (deadline, wait) = limits;
        let deadline = self.to.map_or(deadline.at_most(wait), |_| deadline);
        let waiting_for = || match self.to {
            Some(to) => format!("version {to} of job {:?}", job.spec.name),
            None => format!("the next version of job {:?}", job.spec.name),
        };
        match job.wait_for(deadline, || Ok(self.ready(job)), waiting_for).await {
            Err(error @ Error::Timeout { .. }) => self.same(job).ok_or(error),
            version => version,
        }
    }
}

/// Returns the newest version that this server can serve for all of its slices.
fn newest<B: Backend>(job: &Job<B>) -> Option<u64> {
    #[cfg(test)]
    if is_missing(Safeguard::ReadableVersion) {
        return job.version();
    }
    job.readable_version()
}

/// Checks the request, makes the slices record changes, waits for the version, and returns the
/// messages of the response. A call that hashes slices takes one of `turns`.
///
/// # Errors
/// [`Error::VersionGone`] if the job is on another line; [`Error::NotHere`] if only other servers
/// have a slice; [`Error::Refused`] and [`Error::Invalid`] for a malformed request;
/// [`Error::Timeout`]; [`Error::OutOfMemory`].
pub(super) async fn changes<B: Backend>(
    store: &Arc<Store<B>>,
    turns: &Arc<Semaphore>,
    job: Arc<Job<B>>,
    request: pb::ChangesRequest,
    deadline: Deadline,
) -> Result<impl Stream<Item = Result<pb::ChangesResponse>> + Send + use<B>> {
    let versions = Versions::of(&request, &job)?;
    let mut slices = slices(&job, &request.slices)?;
    job.note_reader(request.reader, request.from);
    begin(store, turns, &job, &slices, deadline).await?;
    let wait = Duration::from_millis(request.wait_ms.into());
    let version = versions.wait(&job, (deadline, wait)).await?;
    slices.reverse();
    let from = match versions.first(version) {
        Some(from) => from,
        None => {
            slices.clear();
            version
        }
    };
    let (store, rest, to) = (store.clone(), slices, version);
    let changes = Changes { store, job: job.clone(), rest, from, to, deadline };
    let changes = stream::try_unfold(changes, |mut changes| async {
        let next = changes.next().await?;
        Ok(next.map(|change| (change, changes)))
    });
    Ok(messages(version, changes).and_then(move |message| {
        let job = job.clone();
        async move {
            let bytes = bytes(&message);
            if !message.changes.is_empty() {
                end_after_others(job.shares.network.turn(bytes).await).await;
                job.count(|series| series.sent_changes(bytes));
            }
            Ok(message)
        }
    }))
}

/// Returns the slices of a request, each as the reader has its tensor.
///
/// # Errors
/// [`Error::NotHere`], [`Error::Refused`] and [`Error::Invalid`].
pub(crate) fn slices<B: Backend>(
    job: &Job<B>,
    messages: &[pb::FollowedSlices],
) -> Result<Vec<(u32, View)>> {
    let manifest = &job.spec.manifest;
    let all = followed(messages, manifest)?;
    all.iter().try_for_each(|(slice, _)| job.followed_slice(*slice).map(drop))?;
    let tensor = |slice: u32| manifest.slices()[slice as usize].tensor;
    let same = |one: &(u32, View), other: &(u32, View)| {
        tensor(one.0) == tensor(other.0) && one.1 == other.1
    };
    for of_tensor in all.chunk_by(same) {
        let (slice, view) = &of_tensor[0];
        job.note_follower(tensor(*slice), view)?;
    }
    Ok(all)
}

/// Makes slices record changes from now on, and hashes those that did not do so before.
async fn begin<B: Backend>(
    store: &Arc<Store<B>>,
    turns: &Arc<Semaphore>,
    job: &Arc<Job<B>>,
    slices: &[(u32, View)],
    deadline: Deadline,
) -> Result<()> {
    let (job, budget) = (job.clone(), store.history.clone());
    let new: Vec<_> = slices
        .iter()
        .filter(|(index, view)| {
            job.followed_slice(*index).is_ok_and(|slice| !slice.is_followed(view))
        })
        .cloned()
        .collect();
    if new.is_empty() {
        return Ok(());
    }
    let name = job.spec.name.clone();
    let waiting_for = || format!("other calls that hash slices, at job {name:?}");
    let turn = deadline.limit(waiting_for, turns.clone().acquire_owned()).await?;
    let work = move || {
        // Keeps the turn until this thread has finished, even if the call ends earlier.
        let _turn = turn.expect("the semaphore is never closed");
        for (index, view) in new {
            let unhashed = job.note(index, job.follow(index, &view, &budget))?;
            if let Some(unhashed) = unhashed {
                let backend = job.followed_slice(index)?.backend();
                job.note(index, unhashed.compute(backend))?;
            }
        }
        Ok(())
    };
    store.failure.blocking("hash slices", work).await
}

impl<B: Backend> Changes<B> {
    /// Prepares the change of the next slice, or `None` if it is unknown. The last one was sent
    /// before if there is none.
    async fn next(&mut self) -> Result<Option<Option<Change>>> {
        let Some((index, view)) = self.rest.pop() else { return Ok(None) };
        let (changes, hash) = loop {
            if self.job.closed().is_cancelled() {
                return Err(self.job.closed_error());
            }
            match self.job.followed_slice(index)?.changes(&view, self.from, self.to) {
                Since::Unknown => return Ok(Some(None)),
                Since::Known { changes, hash } => break (changes, hash),
                Since::Pending if self.deadline.left().is_zero() => {
                    let waiting_for = format!("the hash of slice {index}");
                    return Err(self.deadline.timeout(waiting_for));
                }
                Since::Pending => tokio::time::sleep(PAUSE).await,
            }
        };
        let change = match &changes[..] {
            [change] => change.clone(),
            _ => self.merged(index, &view, changes).await?,
        };
        Ok(Some(Some(Change { slice: index, change, hash })))
    }

    /// Adds the changes of several steps, or of none.
    async fn merged(&self, index: u32, view: &View, changes: Vec<Bytes>) -> Result<Bytes> {
        let numel = view.positions(&self.job.followed_slice(index)?.spec).len();
        let dtype = view.dtype();
        let work = move || sum((dtype, numel), &changes);
        self.store.failure.blocking("add changes", work).await
    }
}
