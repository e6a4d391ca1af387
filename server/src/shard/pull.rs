//! `Pull`: sends parameters, or a part of the state, at one version, from the slice's buffer to the
//! socket. Nothing is copied, except boxes that consist of several runs, which are copied once. A
//! caller with a window is told where the elements are instead.

use std::{collections::VecDeque, ops::Range, sync::Arc};

use bytes::Bytes;
use futures_util::{Stream, stream};
use http::HeaderMap;
use zeroshard_kernels::Backend;
use zeroshard_loops::{
    Level,
    int8::{self, Rounding},
};
use zeroshard_model::{Elements, Error, Result, optimizer::StateShape};
use zeroshard_net::{
    Deadline,
    trace::{Span, SpanKind, Trace},
};
use zeroshard_proto::{
    Wire,
    convert::{Boxes, boxes},
    frame::{Extent, Spare, Writer},
    pb,
};
use zeroshard_shard::{
    fair::end_after_others, slice::Slice, state_selector::StateSelector, tier::Array,
};

use super::{
    content::{Content, attempt_of, bytes_of},
    job::Job,
    pins::Pin,
    store::Store,
    window::{Keep, Window},
};

/// The payload of one message if the caller does not specify it.
const CHUNK_BYTES: usize = 1 << 20;
/// The smallest and largest payload that a caller may request.
const CHUNK_LIMITS: Range<usize> = 4 << 10..16 << 20;
/// The largest int8 payload. It is encoded in 0.2 to 0.7 milliseconds, for which the other tasks of
/// the thread wait.
const MAX_INT8_BYTES: usize = 256 << 10;

/// One slice's part of a pull.
struct Wanted<B: Backend> {
    slice: u32,
    content: Content,
    /// The elements to which the positions in the request refer.
    elements: Elements,
    /// The elements that have not been sent.
    rest: Range<usize>,
    /// The data to be sent, once its version is available and the budget allows holding it.
    held: Option<Held<B>>,
}

/// A version of a slice that steps do not overwrite.
struct Held<B: Backend> {
    buffer: Array<B>,
    /// `None` for the slice that is being sent when the budget is exhausted.
    keep: Option<Keep<B>>,
}

struct Pull<B: Backend> {
    store: Arc<Store<B>>,
    job: Arc<Job<B>>,
    /// The epoch in which the caller is a member; `None`: a reader.
    epoch: Option<u64>,
    version: u64,
    /// The pin that keeps the version, if the caller has one.
    pin: Option<Arc<Pin<B>>>,
    /// The window in which the caller can read parameters, if it has one.
    window: Option<Arc<Window<B>>>,
    wire: Wire,
    /// Elements per message.
    chunk: usize,
    deadline: Deadline,
    wanted: VecDeque<Wanted<B>>,
    writer: Writer,
    /// The memory of int8 payloads.
    spare: Spare,
    /// Ends with the pull.
    span: Span,
}

/// Checks the request, and returns the data frames of the response, which can end with an error.
/// `headers` may name the span of the caller.
///
/// # Errors
/// [`Error::Invalid`] and other errors of the request.
pub(super) fn pull<B: Backend>(
    store: &Arc<Store<B>>,
    request: &pb::PullRequest,
    headers: &HeaderMap,
    deadline: Option<Deadline>,
) -> Result<impl Stream<Item = Result<Bytes>> + Send + use<B>> {
    let job = store.job(&request.job, request.job_id)?;
    // A backup may know an epoch first.
    let is_member = request.epoch != 0 && attempt_of(request).is_none();
    let epoch = is_member.then_some(request.epoch);
    epoch.map_or(Ok(()), |epoch| job.check_epoch(epoch))?;
    job.check_line(request.line, request.version)?;
    let wire = Wire::of_message(request.dtype, || "dtype of a pull".to_owned())?;
    let bytes = match request.chunk_bytes as usize {
        0 => CHUNK_BYTES,
        bytes => bytes.clamp(CHUNK_LIMITS.start, CHUNK_LIMITS.end),
    };
    let bytes = match wire {
        Wire::Plain(_) => bytes,
        Wire::Int8 => bytes.min(MAX_INT8_BYTES),
    };
    let boxes = boxes(&job.spec.manifest, &request.boxes)?;
    let pin = pinned(&job, request)?;
    // A mapped parameter is not rounded.
    let window = store.windows.get(job.id, request.window)?.filter(|_| wire != Wire::Int8);
    let window = window.filter(|window| window.shows(job.arena()));
    let wanted = request
        .extents
        .iter()
        .map(|extent| {
            let slice = job.slice(extent.slice)?;
            let content = Content::of(request, &job, slice)?;
            // A slice that is pinned may have moved to another server.
            if !pinned_here(pin.as_deref(), (extent.slice, slice), content)? {
                job.primary_slice(extent.slice)?;
            }
            wanted(&job, slice, (content, wire), &boxes, extent)
        })
        .collect::<Result<_>>()?;
    // A reader pulls outside of a step.
    let trace = match request.epoch {
        0 => Trace::default(),
        epoch => Trace::of_step(job.id, epoch, request.version).within(headers),
    };
    let span =
        trace.span("send", SpanKind::Server).with("zeroshard.version", request.version as i64);
    let mut pull = Pull {
        span,
        store: store.clone(),
        epoch,
        version: request.version,
        pin,
        window,
        wire,
        chunk: wire.elements_within(bytes),
        deadline: store.deadline(deadline),
        wanted,
        writer: Writer::default(),
        spare: Spare::default(),
        job,
    };
    pull.hold()?;
    Ok(stream::try_unfold(pull, |mut pull| async {
        let next = pull.next_frame().await;
        let next = next.inspect_err(|error| pull.span.fail(error))?;
        Ok(next.map(|frame| (frame, pull)))
    }))
}

/// The pin of a pull, if it has one.
///
/// # Errors
/// [`Error::VersionGone`] if the pin has ended.
fn pinned<B: Backend>(job: &Job<B>, request: &pb::PullRequest) -> Result<Option<Arc<Pin<B>>>> {
    if request.pin == 0 {
        return Ok(None);
    }
    let Some(pin) = job.pins.get(request.pin) else {
        // The version may exist again, after the job was restored from a checkpoint.
        let (job, current) = (job.spec.name.clone(), job.version().unwrap_or_default());
        return Err(Error::VersionGone { job, version: request.version, current });
    };
    Ok(Some(pin))
}

/// Returns whether the pin, if there is one, keeps the slice on this server.
///
/// # Errors
/// [`Error::Refused`] for another version or part than the pinned one.
fn pinned_here<B: Backend>(
    pin: Option<&Pin<B>>,
    (index, slice): (u32, &Slice<B>),
    content: Content,
) -> Result<bool> {
    let Some(pin) = pin else { return Ok(false) };
    if !pin.parts(slice).contains(&content.part) || content.version != pin.version {
        return Err(Error::refused(format!(
            "the pin keeps {} at version {}, not {:?} at version {}",
            pin.kept(),
            pin.version,
            content.part,
            content.version
        )));
    }
    Ok(pin.slice(index, content.part).is_some())
}

fn wanted<B: Backend>(
    job: &Job<B>,
    slice: &Slice<B>,
    (content, wire): (Content, Wire),
    boxes: &Boxes,
    extent: &pb::Extent,
) -> Result<Wanted<B>> {
    let part = content.part;
    if wire == Wire::Int8 && part != StateSelector::Parameters {
        let sentence = "only parameters can be pulled as int8; pull this part of the state as f32";
        return Err(Error::refused(sentence));
    }
    let tensor = &job.spec.manifest.tensors()[slice.spec.tensor].name;
    part.check(slice.group.is_some(), slice.shape_of(part), tensor)?;
    let elements = match boxes.get(&slice.spec.tensor) {
        None => (0..slice.spec.numel).into(),
        Some(of) => of.elements(&slice.spec),
    };
    let numel = elements.numel() as u64;
    let length = match extent.length {
        0 => numel.saturating_sub(extent.offset),
        length => length,
    };
    match extent.offset.checked_add(length) {
        Some(end) if end <= numel && extent.offset < end => {
            let what = || format!("extent of slice {}", extent.slice);
            wire.check_cut(extent.offset, length, numel, what)?;
            let rest = extent.offset as usize..end as usize;
            Ok(Wanted { slice: extent.slice, content, elements, rest, held: None })
        }
        _ => Err(Error::invalid(
            format!("extent of slice {}", extent.slice),
            format!("{} elements from position {}", extent.length, extent.offset),
            match slice.spec.numel {
                all if all as u64 == numel => format!("within the {all} elements of the slice"),
                all => format!(
                    "within the {numel} elements (of {all}) of the slice that are in the box of {tensor:?}"
                ),
            },
        )),
    }
}

impl<B: Backend> Pull<B> {
    /// Holds the available data within the budget, so that later steps do not overwrite it.
    fn hold(&mut self) -> Result<()> {
        self.hold_pinned();
        for position in 0..self.wanted.len() {
            let Wanted { slice: index, content, held: None, .. } = self.wanted[position] else {
                continue;
            };
            let slice = self.job.slice(index)?;
            let Some(buffer) = content.read(&self.job, slice)? else { continue };
            let held = self.held((index, slice), content.part, buffer);
            if held.keep.is_none() {
                return Ok(()); // the rest is held when it is sent
            }
            self.wanted[position].held = Some(held);
        }
        Ok(())
    }

    /// Holds an array: until the caller has the next version, if it can map this one; otherwise
    /// within the budget.
    fn held(
        &self,
        (index, slice): (u32, &Slice<B>),
        part: StateSelector,
        buffer: Array<B>,
    ) -> Held<B> {
        let is_parameters = part == StateSelector::Parameters;
        let has_room = self.window.as_ref().is_some_and(|window| window.has_room());
        let can_last = has_room && is_parameters && slice.rotates();
        let place = buffer.memory().and_then(|memory| slice.backend().place(memory));
        let place = place.filter(|_| can_last);
        let lasting = place.and_then(|place| self.job.lasting.hold(index, place.start));
        let space = || self.store.held.take(bytes_of(&self.job, slice, part));
        let keep = lasting.map(Keep::Lasting).or_else(|| space().map(Keep::Budget));
        Held { buffer, keep }
    }

    /// Holds the slices that are pinned, which needs no further memory.
    fn hold_pinned(&mut self) {
        let Some(pin) = &self.pin else { return };
        for wanted in self.wanted.iter_mut().filter(|wanted| wanted.held.is_none()) {
            let buffer = pin.slice(wanted.slice, wanted.content.part).cloned();
            let keep = Some(Keep::Pinned(pin.clone()));
            wanted.held = buffer.map(|buffer| Held { buffer, keep });
        }
    }

    /// Holds the next slice to be sent, if it is available, even beyond the budget.
    fn hold_next(&mut self) -> Result<bool> {
        let Some(wanted) = self.wanted.front() else { return Ok(false) };
        let Wanted { slice: index, content, held: None, .. } = *wanted else { return Ok(true) };
        let slice = self.job.slice(index)?;
        let Some(buffer) = content.read(&self.job, slice)? else { return Ok(false) };
        let held = self.held((index, slice), content.part, buffer);
        self.wanted.front_mut().expect("something is wanted").held = Some(held);
        Ok(true)
    }

    async fn next_frame(&mut self) -> Result<Option<Bytes>> {
        loop {
            if let Some(frame) = self.writer.next_frame() {
                return Ok(Some(frame));
            }
            if self.job.closed().is_cancelled() {
                return Err(self.job.closed_error());
            }
            if !self.hold_next()? {
                // Gathered data must not wait.
                self.writer.flush();
                match self.writer.next_frame() {
                    None if !self.wanted.is_empty() => self.wait().await?,
                    last => return Ok(last),
                }
                continue;
            }
            if self.refer() {
                continue;
            }
            let rest = self.wanted.front().expect("it is held").rest.len().min(self.chunk);
            let bytes = self.wire.bytes(rest) as u64;
            end_after_others(self.job.shares.network.turn(bytes).await).await;
            let wanted = self.wanted.front_mut().expect("it is held");
            let held = wanted.held.as_ref().expect("it is held");
            let end = wanted.rest.end.min(wanted.rest.start + self.chunk);
            let offset = std::mem::replace(&mut wanted.rest.start, end);
            let (slice, wire) = (self.job.slice(wanted.slice)?, self.wire);
            let elements = wanted.elements.select(offset..end);
            let part = wanted.content.part;
            let values = slice.values(part, &held.buffer, elements, wire.decoded());
            let values = self.job.note(wanted.slice, values)?;
            let payload = match wire {
                Wire::Plain(_) => values,
                Wire::Int8 => {
                    let seed = self.job.spec.rounding_seed;
                    let tensor = slice.spec.tensor as u32;
                    let rounding = Rounding::of_parameters(seed, self.version, tensor);
                    let first = (slice.spec.offset + offset) as u64;
                    self.spare.payload(wire.bytes(end - offset), |tiles| {
                        let dtype = wire.decoded();
                        int8::encode(Level::best(), &values, dtype, first, &rounding, tiles);
                    })
                }
            };
            self.job.count(|series| series.sent(payload.len() as u64));
            let extent = Extent { slice: wanted.slice, offset: offset as u64, wire };
            self.writer.extent(extent, payload);
            if wanted.rest.is_empty() {
                self.wanted.pop_front();
            }
        }
    }

    /// Refers the caller to the next slice, which is held, in its window. Returns `false` if the
    /// elements have to be sent: they are not there, are not consecutive, or have another dtype.
    fn refer(&mut self) -> bool {
        let (Some(window), Some(wanted)) = (&self.window, self.wanted.front_mut()) else {
            return false;
        };
        let Ok(slice) = self.job.slice(wanted.slice) else { return false };
        let Elements::Range(elements) = wanted.elements.select(wanted.rest.clone()) else {
            return false;
        };
        let Some(held) = &mut wanted.held else { return false };
        let dtype = held.buffer.dtype(slice.backend());
        let shape = slice.shape_of(wanted.content.part);
        if self.wire != dtype.into() || shape != StateShape::Elements {
            return false;
        }
        let place = held.buffer.memory().and_then(|memory| slice.backend().place(memory));
        let Some(place) = place else { return false };
        let Some(keep) = held.keep.take() else { return false };
        let [start, end] = [elements.start, elements.end].map(|at| place.start + at * dtype.size());
        let reference = window.hold(held.buffer.clone(), start..end, keep);
        self.job.count(|series| series.shown(reference.bytes));
        let extent =
            Extent { slice: wanted.slice, offset: wanted.rest.start as u64, wire: self.wire };
        self.writer.reference(extent, reference);
        self.wanted.pop_front();
        true
    }

    async fn wait(&mut self) -> Result<()> {
        let &Wanted { slice: index, content, .. } =
            self.wanted.front().expect("something is wanted");
        let (slice, epoch) = (self.job.slice(index)?, self.epoch);
        let name = &self.job.spec.name;
        let ready = || {
            // A member that waits for a step's result must learn that the step was aborted. A
            // reader continues to wait, because the step will be run again.
            epoch.map_or(Ok(()), |epoch| self.job.check_epoch(epoch))?;
            content.read(&self.job, slice)
        };
        let waiting_for = || {
            let tensor = &self.job.spec.manifest.tensors()[slice.spec.tensor].name;
            let missing =
                self.job.waiting_for().map(|missing| format!("; the server waits for {missing}"));
            format!(
                "version {} of tensor {tensor:?} of job {name:?} in epoch {}{}",
                content.version,
                self.job.epoch(),
                missing.unwrap_or_default()
            )
        };
        let buffer = self.job.wait_for(self.deadline, ready, waiting_for).await?;
        let held = self.held((index, slice), content.part, buffer);
        self.wanted.front_mut().expect("something is wanted").held = Some(held);
        self.hold()
    }
}
