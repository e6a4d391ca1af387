//! Copies master weights and optimizer state from one version of another job, the predecessor, into
//! the slices of a job that is being opened. The source is the memory of this server or another
//! server that holds slices of the predecessor.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap, VecDeque},
    ops::Range,
    sync::Arc,
    time::Duration,
};

use backon::{BackoffBuilder, ConstantBuilder};
use futures_util::future::try_join_all;
use rayon::prelude::*;
use zeroshard_kernels::Backend;
use zeroshard_model::{AppliedSteps, DType, Error, JobVersion, Result, error::Remedy};
use zeroshard_net::transport::{Connection, Credentials, MAX_CONTROL_MESSAGE};
use zeroshard_proto::{
    pb::{self, data_service_client::DataServiceClient, shard_service_client::ShardServiceClient},
    status::from_status,
};
use zeroshard_shard::state_selector::StateSelector;

use super::{job::Job, state_selector, store::Store};

/// The number of extents that one pull requests.
const PULLED_EXTENTS: usize = 4096;
/// The minimum of the pause before a retry. The pauses are random, so that servers that failed
/// together do not retry together.
const PAUSE: Duration = Duration::from_millis(150);
/// How often a call to another server is repeated after transient errors.
const RETRIES: usize = 5;

/// Copies the slices that the coordinator names in `fork` into `job`, which no client can
/// reach yet. `server` is the id of this server.
///
/// # Errors
/// [`Error::VersionGone`] if the predecessor has made another step; [`Error::UnknownJob`],
/// [`Error::JobReplaced`] and [`Error::JobFailed`] if it has ended; [`Error::Unavailable`] and
/// [`Error::Timeout`] if another server does not send its slices.
pub(super) async fn copy_fork<B: Backend>(
    store: &Arc<Store<B>>,
    credentials: &Credentials,
    server: u64,
    job: &Arc<Job<B>>,
    fork: pb::Fork,
) -> Result<()> {
    let pb::Fork { from, servers, copies, .. } = fork;
    let from = Arc::new(JobVersion::try_from(from.unwrap_or_default())?);
    let mut shares: Vec<Vec<SliceCopy>> = servers.iter().map(|_| Vec::new()).collect();
    let mut forked = BTreeMap::<_, usize>::new();
    for copy in copies {
        let share = shares.get_mut(copy.server as usize).ok_or_else(|| malformed(&copy))?;
        share.push(SliceCopy::new(job, &copy)?);
        *forked.entry((copy.slice, copy.state)).or_default() += copy.length as usize;
    }
    let copies = servers.iter().zip(shares).filter(|(_, share)| !share.is_empty());
    let copies = copies.map(|(holder, share)| {
        let copy = Copier { store: store.clone(), job: job.clone(), from: from.clone() };
        async move {
            match holder.id == server {
                true => copy.copy_here(share).await,
                false => copy.copy_remote(holder, credentials, &share).await,
            }
        }
    });
    let copied = job.closed().run_until_cancelled(try_join_all(copies)).await;
    copied.unwrap_or_else(|| Err(job.closed_error()))?;
    for ((index, state), elements) in forked {
        let slice = job.slice(index)?;
        if elements == slice.spec.numel {
            slice.end_fork(state);
        }
    }
    Ok(())
}

/// Consecutive elements of a slice, and their position in a slice of the predecessor.
#[derive(Debug, Clone)]
pub(super) struct SliceCopy {
    slice: u32,
    offset: usize,
    source: u32,
    source_offset: usize,
    /// INVARIANT: within `slice`, and not empty.
    length: usize,
    state: bool,
    averages: bool,
}

impl SliceCopy {
    /// A copy of a whole slice from the same job on another server.
    pub(super) fn whole<B: Backend>(job: &Job<B>, index: u32) -> Result<Self> {
        let slice = job.slice(index)?;
        let (length, state) = (slice.spec.numel, slice.group.is_some());
        let (slice, source) = (index, index);
        Ok(Self { slice, offset: 0, source, source_offset: 0, length, state, averages: state })
    }

    fn new<B: Backend>(job: &Job<B>, copy: &pb::SliceCopy) -> Result<Self> {
        let slice = job.slice(copy.slice)?;
        let end = copy.offset.checked_add(copy.length);
        let is_inside = copy.length > 0 && end.is_some_and(|end| end <= slice.spec.numel as u64);
        if !is_inside || (copy.state || copy.averages) && slice.group.is_none() {
            return Err(malformed(copy));
        }
        let offset =
            usize::try_from(copy.source_offset).ok().filter(|&offset| offset < usize::MAX / 2);
        Ok(Self {
            slice: copy.slice,
            offset: copy.offset as usize,
            source: copy.source,
            source_offset: offset.ok_or_else(|| malformed(copy))?,
            length: copy.length as usize,
            state: copy.state,
            averages: copy.averages,
        })
    }

    fn source_range(&self) -> Range<usize> {
        self.source_offset..self.source_offset + self.length
    }

    /// Of the steps of the source, those that count for what is copied.
    fn applied(&self, source: AppliedSteps) -> AppliedSteps {
        let applied = if self.state { source } else { AppliedSteps::default() };
        AppliedSteps { averaged: if self.averages { source.averaged } else { 0 }, ..applied }
    }

    /// The copy without its first `elements`; `None` if no element is left.
    fn rest(self, elements: usize) -> Option<Self> {
        (elements < self.length).then(|| Self {
            offset: self.offset + elements,
            source_offset: self.source_offset + elements,
            length: self.length - elements,
            ..self
        })
    }
}

fn malformed(copy: &pb::SliceCopy) -> Error {
    Error::Internal { cause: format!("the coordinator requested an invalid copy: {copy:?}") }
}

/// A part of slices, as a predecessor and its successor name it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Named {
    Master,
    State(Cow<'static, str>),
}

impl From<Named> for pb::StateSelector {
    fn from(named: Named) -> Self {
        use pb::state_selector::{MasterWeights, Part};
        let part = match named {
            Named::Master => Part::MasterWeights(MasterWeights {}),
            Named::State(name) => Part::OptimizerState(name.into_owned()),
        };
        Self { part: Some(part) }
    }
}

/// Copies from one server.
pub(super) struct Copier<B: Backend> {
    pub(super) store: Arc<Store<B>>,
    pub(super) job: Arc<Job<B>>,
    pub(super) from: Arc<JobVersion>,
}

impl<B: Backend> Copier<B> {
    /// The parts that are copied to the slice of `copy`, by their name.
    fn parts(&self, copy: &SliceCopy) -> Result<Vec<(Named, StateSelector)>> {
        let slice = self.job.slice(copy.slice)?;
        let state = slice.state_parts().filter(|_| copy.state);
        let state = state.chain(slice.average_parts().filter(|_| copy.averages));
        let state = state.map(|(name, part)| (Named::State(name), part));
        Ok(std::iter::once((Named::Master, StateSelector::Master)).chain(state).collect())
    }

    /// Copies from a job on this server.
    async fn copy_here(self, copies: Vec<SliceCopy>) -> Result<()> {
        let JobVersion { job: name, job_id, version } = &*self.from;
        let source = self.store.job(name, *job_id)?;
        source.wait_for_version(*version, self.store.deadline(None)).await?;
        let failure = self.store.failure.clone();
        let copy = move || {
            copies.par_iter().try_for_each(|copy| match self.job.closed().is_cancelled() {
                true => Err(self.job.closed_error()),
                false => self.copy_slice(&source, copy),
            })
        };
        failure.blocking("copy slices of a job", copy).await
    }

    fn copy_slice(&self, source: &Job<B>, copy: &SliceCopy) -> Result<()> {
        let JobVersion { job: name, version, .. } = &*self.from;
        let from = source.slice(copy.source)?;
        let range = copy.source_range();
        if range.end > from.spec.numel {
            return Err(Error::Internal { cause: format!("{copy:?} is not in job {name:?}") });
        }
        for (named, target) in self.parts(copy)? {
            let part = state_selector::of(Some(&named.into()), &source.spec, from.spec.tensor)?;
            let Some(buffer) = from.read(part, name, *version)? else {
                let cause = format!("version {version} of job {name:?} is no longer available");
                return Err(Error::Internal { cause });
            };
            let bytes = from.values(part, &buffer, range.clone(), DType::F32)?;
            self.job.slice(copy.slice)?.fill(target, copy.offset, &bytes)?;
        }
        if copy.state || copy.averages {
            let applied = copy.applied(from.applied(name, *version)?);
            self.job.slice(copy.slice)?.set_applied(applied);
        }
        Ok(())
    }

    /// Copies from a job on another server.
    pub(super) async fn copy_remote(
        self,
        holder: &pb::Server,
        credentials: &Credentials,
        copies: &[SliceCopy],
    ) -> Result<()> {
        let peer = format!("shard server {}", holder.address);
        let connection = Connection::lazy(&holder.address, credentials)?;
        let counted = copies.iter().filter(|copy| copy.state || copy.averages);
        let counted: Vec<SliceCopy> = counted.cloned().collect();
        let mut by_name: BTreeMap<Named, Vec<(SliceCopy, StateSelector)>> = BTreeMap::new();
        for copy in copies {
            for (named, target) in self.parts(copy)? {
                by_name.entry(named).or_default().push((copy.clone(), target));
            }
        }
        for (named, wanted) in by_name {
            for copies in wanted.chunks(PULLED_EXTENTS) {
                let mut rest = VecDeque::from(copies.to_vec());
                let mut pauses = pauses();
                while let Err(error) = self.pull(&connection, &peer, &named, &mut rest).await {
                    tokio::time::sleep(next_pause(error, &mut pauses)?).await;
                }
            }
        }
        if counted.is_empty() {
            return Ok(());
        }
        let mut pauses = pauses();
        while let Err(error) = self.pull_applied(&connection, &peer, &counted).await {
            tokio::time::sleep(next_pause(error, &mut pauses)?).await;
        }
        Ok(())
    }

    /// Pulls the part `named` of `copies`, in order, to the part of the new slice that stands
    /// beside each, and removes the copies that have arrived.
    async fn pull(
        &self,
        connection: &Connection,
        peer: &str,
        named: &Named,
        copies: &mut VecDeque<(SliceCopy, StateSelector)>,
    ) -> Result<()> {
        let JobVersion { job, job_id, version } = (*self.from).clone();
        let extents = copies.iter().map(|(copy, _)| pb::Extent {
            slice: copy.source,
            offset: copy.source_offset as u64,
            length: copy.length as u64,
        });
        let request = pb::PullRequest {
            job,
            job_id,
            version,
            dtype: pb::Dtype::from(DType::F32).into(),
            extents: extents.collect(),
            part: Some(named.clone().into()),
            ..Default::default()
        };
        let failed = |status: tonic::Status| from_status(&status, peer);
        let mut client = DataServiceClient::new(connection.clone());
        let mut answer = client.pull(request).await.map_err(failed)?.into_inner();
        while let Some(pb::PullResponse { slice, offset, payload, .. }) =
            answer.message().await.map_err(failed)?
        {
            let elements = payload.len() / DType::F32.size();
            let copy = copies.pop_front().filter(|(copy, _)| {
                let start = (copy.source, copy.source_offset as u64);
                start == (slice, offset) && elements <= copy.length
            });
            let Some((copy, target)) = copy else {
                let cause = format!(
                    "{peer} sent data that was not requested: slice {slice} from position {offset}"
                );
                return Err(Error::Internal { cause });
            };
            self.job.slice(copy.slice)?.fill(target, copy.offset, &payload)?;
            if let Some(rest) = copy.rest(elements) {
                copies.push_front((rest, target));
            }
        }
        match copies.front() {
            None => Ok(()),
            Some((copy, _)) => {
                let cause = format!("the stream ended before slice {}", copy.source);
                Err(Error::Unavailable { peer: peer.to_owned(), cause })
            }
        }
    }

    /// Pulls the applied steps of the slices of `copies`.
    async fn pull_applied(
        &self,
        connection: &Connection,
        peer: &str,
        copies: &[SliceCopy],
    ) -> Result<()> {
        let JobVersion { job, job_id, version } = (*self.from).clone();
        let request = pb::StepsRequest { job: job.clone(), job_id, version, line: None };
        let mut client = ShardServiceClient::new(connection.clone())
            .max_decoding_message_size(MAX_CONTROL_MESSAGE);
        let answer = client.steps(request).await.map_err(|s| from_status(&s, peer))?;
        let slices = answer.into_inner().slices.into_iter();
        let steps: HashMap<u32, pb::SliceSteps> = slices.map(|of| (of.slice, of)).collect();
        for copy in copies {
            let Some(of) = steps.get(&copy.source) else {
                let slice = copy.source;
                let cause = format!("{peer} sent no step count for slice {slice} of job {job:?}");
                return Err(Error::Internal { cause });
            };
            let slice = self.job.slice(copy.slice)?;
            let tensor = slice.spec.tensor;
            let count = if copy.state { of.applied } else { 0 };
            let scalars = if copy.state { &of.scalar_state[..] } else { &[] };
            let applied = self.job.spec.applied_to(tensor, count, scalars)?;
            slice.set_applied(copy.applied(AppliedSteps { averaged: of.averaged, ..applied }));
        }
        Ok(())
    }
}

/// The pauses before the retries of one call.
fn pauses() -> impl Iterator<Item = Duration> {
    ConstantBuilder::default().with_delay(PAUSE).with_max_times(RETRIES).with_jitter().build()
}

/// The pause before the next try of a call that has failed with `error`.
///
/// # Errors
/// `error`, if it is not transient or no try is left.
fn next_pause(error: Error, pauses: &mut impl Iterator<Item = Duration>) -> Result<Duration> {
    pauses.next().filter(|_| error.remedy() == Remedy::Retry).ok_or(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transient_error_is_retried_a_limited_number_of_times_after_different_pauses() {
        let cause = "connection reset".to_owned();
        let error = Error::Unavailable { peer: "shard server 1".into(), cause };
        let mut pauses = pauses();
        let waited: Vec<_> =
            (0..RETRIES).map(|_| next_pause(error.clone(), &mut pauses).unwrap()).collect();
        assert!(waited.iter().all(|&pause| pause >= PAUSE && pause <= 2 * PAUSE), "{waited:?}");
        assert!(waited.iter().any(|&pause| pause != waited[0]), "{waited:?}");
        assert_eq!(next_pause(error.clone(), &mut pauses), Err(error));
    }

    #[test]
    fn other_errors_are_not_retried() {
        let gone = Error::VersionGone { job: "job".into(), version: 1, current: 2 };
        assert_eq!(next_pause(gone.clone(), &mut pauses()), Err(gone));
    }
}
