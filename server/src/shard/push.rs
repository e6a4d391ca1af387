//! `Push`: receives gradients and uploads, from the network buffer directly to their destination.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::HeaderMap;
use http_body::Body;
use zeroshard_kernels::Backend;
use zeroshard_model::{AppliedSteps, Attempt, DType, Error, JobSpec, Result, listing::some_of};
use zeroshard_net::{
    Deadline,
    trace::{Span, SpanKind, Trace},
};
use zeroshard_proto::{
    frame::{Event, Extent, Reader},
    pb::{self, push_begin::Contents},
};
use zeroshard_shard::{
    fair::end_after_others,
    part::Part,
    round::Chunk,
    senders::{self, Sent},
    slice::Upload,
};

use super::{job::Job, part, store::Store};
use crate::access::Caller;

/// The time for which a push waits when there is no space for gradients whose turn has not come.
/// Then it is refused, so that the caller can send data that other ranks wait for: a stream that
/// waited for longer could wait for itself.
const PARKING_WAIT: Duration = Duration::from_millis(50);

/// The sender of a push.
pub(super) struct Pusher {
    pub(super) caller: Caller,
    /// The weight of its token or certificate.
    pub(super) weight: u32,
    /// The headers of the call, which may name its span.
    pub(super) headers: HeaderMap,
}

/// Receives one push; `deadline` is that of the call, if it has one.
///
/// # Errors
/// The first error of the push. Elements received before the error have been accepted.
pub(super) async fn push<B, S>(
    store: &Store<B>,
    pusher: Pusher,
    body: S,
    deadline: Option<Deadline>,
) -> Result<pb::PushResponse>
where
    B: Backend,
    S: Body<Data = Bytes> + Unpin,
    S::Error: std::fmt::Display,
{
    let mut reader = Reader::new(body, store.limits.max_message);
    let first = tokio::time::timeout(store.limits.wait, reader.next()).await;
    let first = first.map_err(|_| Error::Timeout {
        waiting_for: "the first message of a push".to_owned(),
        waited_ms: store.limits.wait.as_millis() as u64,
    })?;
    let Some(Event::Begin(begin)) = first? else {
        let what = "first message of a push";
        return Err(Error::invalid(what, "without `begin`", "a message with `begin`"));
    };
    pusher.caller.check_train(&begin.job)?;
    let mut push = Push::open(store, begin, deadline)?;
    let job = push.job.clone();
    job.shares.weigh(pusher.weight);
    let mut span = push.span(&pusher.headers);
    let receive = async {
        push.wait_for_attempt().await?;
        push.note_absent().await?;
        push.note_overflows().await?;
        while let Some(event) = reader.next().await? {
            match event {
                Event::Begin(_) => {
                    let expected = "in the first message only";
                    return Err(Error::invalid("`begin`", "in a later message", expected));
                }
                Event::Extent(extent, elements) => push.check(extent, elements).await?,
                Event::Payload(bytes) => push.take(bytes).await?,
            }
        }
        Ok(())
    };
    let received = job.closed().run_until_cancelled(receive).await;
    // Elements accepted into a job that has been closed since are lost.
    let received = match received.filter(|_| !job.closed().is_cancelled()) {
        Some(received) => received.map(|()| push.counted),
        None => Err(job.closed_error()),
    };
    received.inspect_err(|error| span.fail(error))
}

/// The contents of the extents of a push.
#[derive(Debug, Clone, Copy)]
enum What {
    /// Gradients of a step.
    Gradients,
    /// New values of tensors.
    Replacement,
    /// Initial values.
    Start(Upload),
}

struct Push<'a, B: Backend> {
    store: &'a Store<B>,
    job: Arc<Job<B>>,
    rank: u32,
    what: What,
    attempt: Attempt,
    /// Slices of which the rank sends nothing more, or uploads nothing.
    absent: Vec<u32>,
    /// The ranks of the group that have overflowed.
    overflows: Vec<pb::Overflow>,
    /// The deadline of the call.
    deadline: Option<Deadline>,
    /// The position of the next payload.
    next: Extent,
    counted: pb::PushResponse,
}

impl<'a, B: Backend> Push<'a, B> {
    fn open(store: &'a Store<B>, begin: pb::PushBegin, deadline: Option<Deadline>) -> Result<Self> {
        let pb::PushBegin { job: name, job_id, rank, lease, epoch, covers, contents } = begin;
        if job_id == 0 || lease == 0 {
            let found = format!("{job_id:016x} with lease {lease:016x}");
            return Err(Error::invalid(
                "job_id of a push",
                found,
                "the job_id and lease that the rank received when it joined",
            ));
        }
        let job = store.job(&name, job_id)?;
        if rank >= job.spec.world {
            let expected = format!("less than the world size, {}", job.spec.world);
            return Err(Error::invalid("rank", rank, expected));
        }
        job.check_lease(rank, lease)?;
        let is_gradient = matches!(contents, Some(Contents::Gradients(_)));
        check_covers(&job.spec, rank, &covers, is_gradient)?;
        let mut overflows = Vec::new();
        let (what, attempt, absent) = match contents {
            Some(Contents::Gradients(pb::Gradients {
                step,
                attempt: number,
                absent,
                overflow,
            })) => {
                overflows = overflow;
                (What::Gradients, Attempt { epoch, step, number }, absent)
            }
            Some(Contents::Replacement(pb::Replacement { step, attempt: number })) => {
                (What::Replacement, Attempt { epoch, step, number }, Vec::new())
            }
            Some(Contents::Upload(upload)) => {
                let start = self::upload(&upload, &job.spec)?;
                (What::Start(start), Attempt::first(epoch, 0), upload.kept)
            }
            None => {
                return Err(Error::invalid(
                    "contents of a push",
                    "absent",
                    "gradients, an upload or a replacement",
                ));
            }
        };
        let next = Extent { slice: 0, offset: 0, dtype: DType::F32 };
        let counted = pb::PushResponse::default();
        Ok(Self { store, job, rank, what, attempt, absent, overflows, deadline, next, counted })
    }

    /// The span of the push, a child of the caller's span. The upload of initial parameters is not
    /// part of a step.
    fn span(&self, headers: &HeaderMap) -> Span {
        let trace = match self.what {
            What::Gradients | What::Replacement => self.job.trace(self.attempt).within(headers),
            What::Start(_) => Trace::default(),
        };
        trace.span("receive", SpanKind::Server).with("zeroshard.rank", i64::from(self.rank))
    }

    /// Waits until the coordinator has announced the push's attempt to this server; the rank may
    /// have been informed first.
    ///
    /// # Errors
    /// [`Error::StaleEpoch`], [`Error::StepMismatch`], [`Error::StaleAttempt`] if the attempt has
    /// ended, or is not the next one; [`Error::Timeout`].
    async fn wait_for_attempt(&self) -> Result<()> {
        let (job, attempt) = (&self.job, self.attempt);
        let is_open = || {
            let current = job.attempt();
            let is_upload = matches!(self.what, What::Start(_));
            if attempt == current || is_upload && attempt.epoch == current.epoch {
                return Ok(Some(()));
            }
            let is_next = attempt > current && attempt.step <= current.step + 1;
            if is_next || is_upload && attempt.epoch > current.epoch {
                return Ok(None);
            }
            Err(attempt.refusal(&job.spec.name, current))
        };
        if is_open()?.is_some() {
            return Ok(());
        }
        let waiting_for =
            || format!("{attempt:?} of job {:?} to be opened by the coordinator", job.spec.name);
        job.wait_for(self.store.deadline(self.deadline), is_open, waiting_for).await
    }

    /// Checks an extent before any of its bytes is used.
    async fn check(&mut self, extent: Extent, elements: u64) -> Result<()> {
        let sent = self.check_takes(extent)?;
        self.check_bounds(extent, elements, sent)?;
        if !matches!(self.what, What::Start(_)) {
            self.wait_for_version(extent.slice).await?;
        }
        self.next = extent;
        Ok(())
    }

    /// Checks that the slice accepts the contents of this push in this dtype.
    fn check_takes(&self, extent: Extent) -> Result<Sent> {
        let slice = self.job.slice(extent.slice)?;
        let tensor = &self.job.spec.manifest.tensors()[slice.spec.tensor].name;
        match self.what {
            What::Start(Upload { state, .. }) => {
                let part = state.map_or(Part::Parameters, Part::State);
                part.check(slice.group.is_some(), slice.shape_of(part), tensor)?;
                Ok(Sent::Initial)
            }
            What::Gradients if slice.group.is_some() => Ok(Sent::Gradient),
            What::Gradients => Err(Error::invalid(
                format!("gradient of tensor {tensor:?}"),
                "pushed",
                "omitted, because the tensor is not trained",
            )),
            What::Replacement if extent.dtype != DType::F32 => Err(Error::invalid(
                format!("dtype of the new values of tensor {tensor:?}"),
                extent.dtype,
                "f32",
            )),
            What::Replacement => Ok(Sent::Replacement),
        }
    }

    /// Checks that the rank holds these elements.
    fn check_bounds(&self, extent: Extent, elements: u64, sent: Sent) -> Result<()> {
        let (spec, rank) = (&self.job.spec, self.rank);
        let slice = self.job.slice(extent.slice)?;
        let all = if sent == Sent::Gradient { &slice.pushers } else { &slice.contributors };
        let of = senders::contributors_of(spec, extent.slice, all, rank, sent)?;
        let numel = of.elements.numel();
        if extent.offset.checked_add(elements).is_some_and(|end| end <= numel as u64) {
            return Ok(());
        }
        let tensor = slice.spec.tensor;
        let expected = match slice.spec.numel {
            all if all == numel => format!("within the {all} elements of the slice"),
            all => {
                let rank = senders::describe(spec, tensor, rank);
                format!(
                    "within the {numel} elements that {rank} holds of the {all} elements of the slice"
                )
            }
        };
        Err(Error::invalid(
            format!(
                "extent of slice {} of tensor {:?}",
                extent.slice,
                spec.manifest.tensors()[tensor].name
            ),
            format!("{elements} elements from position {}", extent.offset),
            expected,
        ))
    }

    /// Records the absences that the opening message declares.
    async fn note_absent(&self) -> Result<()> {
        for &index in &self.absent {
            if let What::Start(upload) = self.what {
                self.job.keep(self.attempt, index, self.rank, upload.applied)?;
                continue;
            }
            self.check_trains(index, "declared absent")?;
            self.wait_for_version(index).await?;
            self.job.absent(self.attempt, index, self.rank)?;
            // Adding zeros to a large slice takes some time, and other tasks need this thread.
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    /// Records the overflows that the opening message names.
    async fn note_overflows(&self) -> Result<()> {
        for &pb::Overflow { slice, rank } in &self.overflows {
            self.check_trains(slice, "with an overflow")?;
            self.wait_for_version(slice).await?;
            self.job.name_overflow(self.attempt, slice, (self.rank, rank))?;
        }
        Ok(())
    }

    fn check_trains(&self, index: u32, found: &str) -> Result<()> {
        let slice = self.job.slice(index)?;
        if slice.group.is_some() {
            return Ok(());
        }
        let tensor = &self.job.spec.manifest.tensors()[slice.spec.tensor].name;
        let what = format!("tensor {tensor:?}");
        Err(Error::invalid(what, found, "omitted, because it is not trained"))
    }

    /// Waits for the version of a slice: a gradient may arrive while the previous step is still
    /// being applied, or version 0 is being published.
    async fn wait_for_version(&self, index: u32) -> Result<()> {
        let slice = self.job.slice(index)?;
        let step = self.attempt.step;
        if slice.version() == Some(step) {
            return Ok(());
        }
        let name = &self.job.spec.name;
        let ready = || match self.job.attempt() {
            current if self.attempt < current => Err(self.attempt.refusal(name, current)),
            _ => Ok((slice.version() == Some(step)).then_some(())),
        };
        let waiting_for = || {
            format!(
                "version {step} of slice {index} of job {name:?}, before its gradient can be pushed"
            )
        };
        self.job.wait_for(self.store.deadline(self.deadline), ready, waiting_for).await
    }

    async fn take(&mut self, bytes: Bytes) -> Result<()> {
        let Extent { slice, offset, dtype } = self.next;
        let elements = (bytes.len() / dtype.size()) as u64;
        self.job.count(|series| series.received(bytes.len() as u64));
        let chunk = Chunk { rank: self.rank, offset: offset as usize, dtype, bytes };
        let new = match self.store_chunk(slice, &chunk).await {
            Err(Error::ParkingFull { .. }) => {
                self.job.contribution(PARKING_WAIT).await;
                self.store_chunk(slice, &chunk).await?
            }
            stored => stored?,
        };
        self.next.offset += elements;
        self.counted.added += new;
        self.counted.duplicates += elements - new;
        let duplicate = (elements - new) * dtype.size() as u64;
        self.job.count(|series| series.skipped(duplicate));
        Ok(())
    }

    /// Waits for a turn of the job, and stores a chunk. Returns the number of new elements.
    async fn store_chunk(&self, slice: u32, chunk: &Chunk) -> Result<u64> {
        let (job, attempt) = (&self.job, self.attempt);
        let turn = job.shares.network.turn(chunk.bytes.len() as u64).await;
        let stored = match self.what {
            What::Start(upload) => job.upload(attempt, slice, upload, chunk),
            What::Replacement => job.replace(attempt, slice, chunk),
            What::Gradients => job.contribute(attempt, slice, chunk),
        };
        end_after_others(turn).await;
        stored
    }
}

/// Checks that gradients are sums over the ranks of the group, and everything else is of one rank.
///
/// # Errors
/// [`Error::Invalid`].
fn check_covers(spec: &JobSpec, rank: u32, covers: &[u32], is_gradient: bool) -> Result<()> {
    let own = [rank];
    let covers = if covers.is_empty() { &own } else { covers };
    let group = if is_gradient { spec.group_of(rank) } else { rank..rank + 1 };
    if covers.iter().copied().eq(group.clone()) {
        return Ok(());
    }
    let expected = match group.len() {
        1 => format!("only rank {rank}"),
        _ => format!("the ranks {} to {} of the group", group.start, group.end - 1),
    };
    let found = some_of(covers.iter().map(|rank| format!("rank {rank}")));
    Err(Error::invalid("ranks that a push covers", found, expected))
}

/// Converts the description of an upload.
///
/// # Errors
/// [`Error::Invalid`] for a part that cannot be uploaded.
fn upload(message: &pb::Upload, spec: &JobSpec) -> Result<Upload> {
    let state = match part::of(message.part.as_ref(), &spec.groups[0])? {
        Part::Parameters => None,
        Part::State(position) => Some(position),
        other @ (Part::Master | Part::GradientSum) => {
            let found = match other {
                Part::GradientSum => "the sum of the gradients",
                _ => "the master weights",
            };
            let expected = "the parameters (which set the master weights) or optimizer state";
            return Err(Error::invalid("part of the state that is uploaded", found, expected));
        }
    };
    if state.is_some() && !message.kept.is_empty() {
        let found = format!("{} slices in an upload of optimizer state", message.kept.len());
        return Err(Error::invalid("kept", found, "slices in an upload of parameters"));
    }
    let applied = AppliedSteps::of(&spec.groups[0], message.applied, &message.scalar_state)?;
    Ok(Upload { state, applied })
}
