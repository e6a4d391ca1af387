//! `Push`: receives gradients and uploads, from the network buffer directly to their destination.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::HeaderMap;
use http_body::Body;
use zeroshard_kernels::Backend;
use zeroshard_loops::{Level, int8};
use zeroshard_model::{Attempt, DType, Error, JobSpec, Result, SliceSpec, listing::some_of};
use zeroshard_net::{
    Deadline,
    trace::{Span, SpanKind, Trace},
};
use zeroshard_proto::{
    Wire,
    frame::{Event, Extent, Reader, Reference, Spare},
    pb::{self, push_begin::Contents},
};
use zeroshard_shard::{
    fair::end_after_others,
    round::Chunk,
    senders::{self, Sent},
    slice::Upload,
    state_selector::StateSelector,
};

use super::{job::Job, state_selector, store::Store, window::Window};
use crate::access::Caller;

/// The time for which a push waits when there is no space for gradients whose turn has not come.
/// Then it is refused, so that the caller can send data that other ranks wait for: a stream that
/// waited for longer could wait for itself.
const PARKING_WAIT: Duration = Duration::from_millis(50);

/// The bytes in an outbox that are taken in one turn, rounded down to whole tiles of int8.
const MAX_TAKEN: usize = 1 << 20;

/// The int8 elements that are decoded at once: 256 KiB of f32, so that a push needs no more memory
/// than that of one message, and finds it in the cache.
const DECODED: usize = 64 << 10;

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
        return Err(Error::refused("the push stream did not start with `begin`"));
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
                    return Err(Error::refused("the push stream has a second `begin`"));
                }
                Event::Extent(extent, elements) => push.check(extent, elements).await?,
                Event::Payload(bytes) => push.take(bytes).await?,
                Event::Reference(reference) => push.fetch(reference).await?,
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
#[derive(Debug)]
enum What {
    /// Gradients of a step.
    Gradients,
    /// New values of tensors.
    Replacement,
    /// Initial values.
    Start(pb::Upload),
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
    /// The window of the rank's process, if it has one.
    window: Option<Arc<Window<B>>>,
    /// The memory of decoded elements.
    spare: Spare,
    counted: pb::PushResponse,
}

impl<'a, B: Backend> Push<'a, B> {
    fn open(store: &'a Store<B>, begin: pb::PushBegin, deadline: Option<Deadline>) -> Result<Self> {
        let pb::PushBegin { job: name, job_id, rank, lease, epoch, covers, contents, window } =
            begin;
        if job_id == 0 || lease == 0 {
            return Err(Error::refused(
                "`begin` lacks the job_id or the lease that the rank received when it joined",
            ));
        }
        let job = store.job(&name, job_id)?;
        if rank >= job.spec.world {
            let expected = format!("less than the world size, {}", job.spec.world);
            return Err(Error::invalid("rank", rank, expected));
        }
        job.check_lease(rank, lease)?;
        let window = store.windows.get(job.id, window)?.filter(|window| window.rank == Some(rank));
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
            Some(Contents::Upload(mut upload)) => {
                check_part(&upload)?;
                let kept = std::mem::take(&mut upload.kept);
                (What::Start(upload), Attempt::first(epoch, 0), kept)
            }
            None => {
                return Err(Error::refused(
                    "`begin` has no contents; set gradients, an upload or a replacement",
                ));
            }
        };
        let next = Extent { slice: 0, offset: 0, wire: DType::F32.into() };
        let counted = pb::PushResponse::default();
        Ok(Self {
            store,
            job,
            rank,
            what,
            attempt,
            absent,
            overflows,
            deadline,
            next,
            window,
            spare: Spare::default(),
            counted,
        })
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
        let is_early = sent == Sent::Replacement && self.job.is_to_copy(extent.slice);
        if !matches!(self.what, What::Start(_)) && !is_early {
            self.wait_for_version(extent.slice).await?;
        }
        self.next = extent;
        Ok(())
    }

    /// Checks that the slice accepts the contents of this push in this encoding.
    fn check_takes(&self, extent: Extent) -> Result<Sent> {
        let tensor = &self.job.spec.manifest.tensors()[self.cut(extent.slice)?.tensor].name;
        match &self.what {
            What::Start(_) | What::Replacement if extent.wire == Wire::Int8 => {
                Err(Error::refused(format!(
                    "rank {} sent values of tensor {tensor:?} as int8, which only gradients and \
                     pulled parameters can be; send f32",
                    self.rank
                )))
            }
            What::Start(message) => {
                let slice = self.job.slice(extent.slice)?;
                let Upload { state, .. } = upload(message, &self.job.spec, slice.spec.tensor)?;
                let part = state.map_or(StateSelector::Parameters, StateSelector::State);
                part.check(slice.group.is_some(), slice.shape_of(part), tensor)?;
                Ok(Sent::Initial)
            }
            What::Gradients if self.job.slice(extent.slice)?.group.is_some() => Ok(Sent::Gradient),
            What::Gradients => Err(Error::refused(format!(
                "rank {} pushed a gradient of tensor {tensor:?}, which is not trained; leave it out",
                self.rank
            ))),
            What::Replacement if extent.wire != DType::F32.into() => Err(Error::invalid(
                format!("dtype of the new values of tensor {tensor:?}"),
                extent.wire,
                "f32",
            )),
            What::Replacement => Ok(Sent::Replacement),
        }
    }

    /// The elements of a slice.
    fn cut(&self, index: u32) -> Result<SliceSpec> {
        let known = self.job.spec.manifest.slices().get(index as usize);
        known.map_or_else(|| self.job.slice(index).map(|slice| slice.spec), |cut| Ok(*cut))
    }

    /// Checks that the rank holds these elements.
    fn check_bounds(&self, extent: Extent, elements: u64, sent: Sent) -> Result<()> {
        let (spec, rank) = (&self.job.spec, self.rank);
        let all = match sent {
            Sent::Gradient => self.job.slice(extent.slice)?.pushers.clone(),
            Sent::Initial | Sent::Replacement => self.job.contributors(extent.slice)?,
        };
        let of = senders::contributors_of(spec, extent.slice, &all, rank, sent)?;
        let numel = of.elements.numel();
        let SliceSpec { tensor, numel: in_slice, .. } = self.cut(extent.slice)?;
        let what = || {
            let name = &spec.manifest.tensors()[tensor].name;
            format!("extent of slice {} of tensor {name:?}", extent.slice)
        };
        if extent.offset.checked_add(elements).is_some_and(|end| end <= numel as u64) {
            return extent.wire.check_cut(extent.offset, elements, numel as u64, what);
        }
        let expected = match in_slice {
            all if all == numel => format!("within the {all} elements of the slice"),
            all => {
                let rank = senders::describe(spec, tensor, rank);
                format!(
                    "within the {numel} elements that {rank} holds of the {all} elements of the slice"
                )
            }
        };
        let found = format!("{elements} elements from position {}", extent.offset);
        Err(Error::invalid(what(), found, expected))
    }

    /// Records the absences that the opening message declares.
    async fn note_absent(&self) -> Result<()> {
        for &index in &self.absent {
            if let What::Start(message) = &self.what {
                let upload = upload(message, &self.job.spec, self.cut(index)?.tensor)?;
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
            self.check_trains(slice, "named with an overflow")?;
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
        let sentence = format!("tensor {tensor:?} is {found} but not trained; leave it out");
        Err(Error::refused(sentence))
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

    /// Takes whole elements or tiles of the current extent.
    async fn take(&mut self, mut bytes: Bytes) -> Result<()> {
        self.job.count(|series| series.received(bytes.len() as u64));
        match self.next.wire {
            Wire::Plain(dtype) => self.add(bytes, dtype).await,
            Wire::Int8 => {
                while !bytes.is_empty() {
                    let tiles = bytes.split_to(bytes.len().min(Wire::Int8.bytes(DECODED)));
                    let values = self.decode(&tiles);
                    self.add(values, DType::F32).await?;
                }
                Ok(())
            }
        }
    }

    /// Decodes tiles to f32.
    fn decode(&mut self, tiles: &[u8]) -> Bytes {
        let elements = Wire::Int8.elements(tiles.len() as u64).expect("the extent has whole tiles");
        let len = elements as usize * DType::F32.size();
        let decode = |values: &mut [u8]| int8::decode(Level::best(), tiles, values, DType::F32);
        self.spare.payload(len, decode)
    }

    /// Adds elements of the current extent.
    async fn add(&mut self, bytes: Bytes, dtype: DType) -> Result<()> {
        let Extent { slice, offset, wire } = self.next;
        let elements = (bytes.len() / dtype.size()) as u64;
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
        let duplicate = wire.bytes((elements - new) as usize) as u64;
        self.job.count(|series| series.skipped(duplicate));
        Ok(())
    }

    /// Takes elements from the outbox of the rank.
    async fn fetch(&mut self, reference: Reference) -> Result<()> {
        let no_window =
            || Error::refused("elements are in an outbox, but `begin` names no window of the rank");
        let window = self.window.clone().ok_or_else(no_window)?;
        let mut rest = window.sent(reference)?;
        while !rest.is_empty() {
            // Other tasks need this thread, as between the buffers of a connection.
            let most = self.next.wire.bytes(self.next.wire.elements_within(MAX_TAKEN));
            self.take(rest.split_to(rest.len().min(most))).await?;
        }
        self.job.count(|series| series.found(reference.bytes));
        window.tell_read(reference.hold)
    }

    /// Waits for a turn of the job, and stores a chunk. Returns the number of new elements.
    async fn store_chunk(&self, slice: u32, chunk: &Chunk) -> Result<u64> {
        let (job, attempt) = (&self.job, self.attempt);
        let bytes = self.next.wire.bytes(chunk.range().len()) as u64;
        let turn = job.shares.network.turn(bytes).await;
        let stored = match &self.what {
            What::Start(message) => {
                let upload = upload(message, &job.spec, self.cut(slice)?.tensor)?;
                job.upload(attempt, slice, upload, chunk)
            }
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
/// [`Error::Refused`].
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
    Err(Error::refused(format!("the push covers {found} instead of {expected}")))
}

/// Checks that a part can be uploaded, and kept.
///
/// # Errors
/// [`Error::Refused`].
fn check_part(message: &pb::Upload) -> Result<()> {
    use pb::state_selector::Part;
    let part = message.part.as_ref().map(|part| &part.part);
    let found = match part {
        Some(Some(Part::OptimizerState(_))) if !message.kept.is_empty() => {
            let sentence = "an upload of optimizer state has `kept`; leave it out";
            return Err(Error::refused(sentence));
        }
        Some(Some(Part::MasterWeights(_))) => "the master weights",
        Some(Some(Part::GradientSum(_))) => "the sum of the gradients",
        Some(None) => "an unknown part of the state",
        Some(Some(Part::OptimizerState(_) | Part::Parameters(_))) | None => return Ok(()),
    };
    Err(Error::refused(format!(
        "{found} cannot be uploaded; upload the parameters, which set the master weights, or \
         optimizer state"
    )))
}

/// Converts the description of an upload, which [`check_part`] has passed, to slices of tensor
/// number `tensor`.
///
/// # Errors
/// Those of [`state_selector::of`]; [`Error::Refused`] for an average; [`Error::Invalid`] for
/// another scalar state than that of the tensor's optimizer.
fn upload(message: &pb::Upload, spec: &JobSpec, tensor: usize) -> Result<Upload> {
    let own = spec.optimizer_of(tensor).map_or(0, |optimizer| optimizer.state().len());
    let state = match state_selector::of(message.part.as_ref(), spec, tensor)? {
        StateSelector::State(position) if position >= own => {
            let sentence = "averages cannot be uploaded; they begin with the parameters, or come \
                            from a checkpoint";
            return Err(Error::refused(sentence));
        }
        StateSelector::State(position) => Some(position),
        _ => None,
    };
    let applied = spec.applied_to(tensor, message.applied, &message.scalar_state)?;
    Ok(Upload { state, applied })
}
