//! `Pull`: sends parameters, or a part of the state, at one version, from the slice's buffer to the
//! socket. Nothing is copied, except boxes that consist of several runs, which are copied once.

use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
    sync::Arc,
};

use bytes::Bytes;
use futures_util::{Stream, stream};
use http::HeaderMap;
use zeroshard_kernels::Backend;
use zeroshard_model::{DType, Elements, Error, JobSpec, Result, StridedBox, TensorBox};
use zeroshard_net::{
    Deadline,
    trace::{Span, SpanKind, Trace},
};
use zeroshard_proto::{
    convert,
    frame::{Extent, Writer},
    pb,
};
use zeroshard_shard::{
    budget::Space, fair::end_after_others, part::Part, slice::Slice, tier::Array,
};

use super::{
    content::{Content, bytes_of},
    job::Job,
    pins::Pin,
    store::Store,
};

/// The payload of one message if the caller does not specify it.
const CHUNK_BYTES: usize = 1 << 20;
/// The smallest and largest payload that a caller may request.
const CHUNK_LIMITS: Range<usize> = 4 << 10..16 << 20;

/// One slice's part of a pull.
struct Wanted<B: Backend> {
    slice: u32,
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
    /// A part of the budget for all pulls; `None` for the slice that is being sent when the budget
    /// is exhausted, and for a slice that is pinned, which is part of another budget.
    _space: Option<Space>,
}

struct Pull<B: Backend> {
    store: Arc<Store<B>>,
    job: Arc<Job<B>>,
    /// The epoch in which the caller is a member; `None`: a reader.
    epoch: Option<u64>,
    content: Content,
    /// The pin that keeps the version, if the caller has one.
    pin: Option<Arc<Pin<B>>>,
    dtype: DType,
    chunk: usize,
    deadline: Deadline,
    wanted: VecDeque<Wanted<B>>,
    writer: Writer,
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
    let content = Content::of(request, &job.spec)?;
    // A backup may know an epoch first.
    let epoch = Some(request.epoch).filter(|&epoch| epoch != 0 && content.attempt.is_none());
    epoch.map_or(Ok(()), |epoch| job.check_epoch(epoch))?;
    let dtype = convert::dtype(request.dtype)
        .ok_or_else(|| Error::invalid("dtype of a pull", request.dtype, "f32, bf16 or f16"))?;
    let bytes = match request.chunk_bytes as usize {
        0 => CHUNK_BYTES,
        bytes => bytes.clamp(CHUNK_LIMITS.start, CHUNK_LIMITS.end),
    };
    let boxes = boxes(&job.spec, &request.boxes)?;
    let pin = pinned(&job, request, content)?;
    let wanted = request
        .extents
        .iter()
        .map(|extent| {
            // A slice that is pinned may have moved to another server.
            let slice = match &pin {
                Some(pin) if pin.slice(extent.slice).is_some() => job.slice(extent.slice),
                _ => job.primary_slice(extent.slice),
            };
            wanted(&job, slice?, content.part, &boxes, extent)
        })
        .collect::<Result<_>>()?;
    // A reader pulls outside of a step.
    let trace = match request.epoch {
        0 => Trace::default(),
        epoch => Trace::of_step(job.id, epoch, content.version).within(headers),
    };
    let span =
        trace.span("send", SpanKind::Server).with("zeroshard.version", content.version as i64);
    let mut pull = Pull {
        span,
        store: store.clone(),
        epoch,
        content,
        pin,
        dtype,
        chunk: bytes / dtype.size(),
        deadline: store.deadline(deadline),
        wanted,
        writer: Writer::default(),
        job,
    };
    pull.hold()?;
    Ok(stream::try_unfold(pull, |mut pull| async {
        let next = pull.next_frame().await;
        let next = next.inspect_err(|error| pull.span.fail(error))?;
        Ok(next.map(|frame| (frame, pull)))
    }))
}

/// The boxes of a pull, by the tensor that owns the storage.
type Boxes = HashMap<usize, Arc<StridedBox>>;

fn boxes(spec: &JobSpec, messages: &[pb::Box]) -> Result<Boxes> {
    let tensors = spec.manifest.tensors();
    let mut boxes = Boxes::with_capacity(messages.len());
    for message in messages {
        let index = message.tensor as usize;
        let Some(tensor) = tensors.get(index) else {
            let expected = format!("less than the job's number of tensors, {}", tensors.len());
            return Err(Error::invalid("tensor of a box", index, expected));
        };
        let bounds = TensorBox::from(message);
        bounds.check(&tensor.shape, &tensor.name)?;
        // Tied tensors have one storage, and the same shape.
        let owner = spec.manifest.owner(index);
        if boxes.insert(owner, Arc::new(StridedBox::new(&tensor.shape, bounds))).is_some() {
            let what = format!("number of boxes of tensor {:?}", tensors[owner].name);
            return Err(Error::invalid(
                what,
                "greater than 1",
                "1 in one pull, including the tensors tied to it",
            ));
        }
    }
    Ok(boxes)
}

/// The pin of a pull, if it has one.
///
/// # Errors
/// [`Error::VersionGone`] if the pin has ended; [`Error::Invalid`] for another version or part than
/// the pinned one.
fn pinned<B: Backend>(
    job: &Job<B>,
    request: &pb::PullRequest,
    content: Content,
) -> Result<Option<Arc<Pin<B>>>> {
    if request.pin == 0 {
        return Ok(None);
    }
    let Some(pin) = job.pins.get(request.pin) else {
        // The version may exist again, after the job was restored from a checkpoint.
        let (job, current) = (job.spec.name.clone(), job.version().unwrap_or_default());
        return Err(Error::VersionGone { job, version: request.version, current });
    };
    if content.part != Part::Parameters || content.version != pin.version {
        let found = format!("{:?} at version {}", content.part, content.version);
        let expected = format!("the parameters at version {}", pin.version);
        return Err(Error::invalid("pull with a pin", found, expected));
    }
    Ok(Some(pin))
}

fn wanted<B: Backend>(
    job: &Job<B>,
    slice: &Slice<B>,
    part: Part,
    boxes: &Boxes,
    extent: &pb::Extent,
) -> Result<Wanted<B>> {
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
            let rest = extent.offset as usize..end as usize;
            Ok(Wanted { slice: extent.slice, elements, rest, held: None })
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
        for wanted in self.wanted.iter_mut().filter(|wanted| wanted.held.is_none()) {
            let slice = self.job.slice(wanted.slice)?;
            let Some(space) = self.store.held.take(bytes_of(&self.job, slice, self.content.part))
            else {
                return Ok(()); // the rest is held when it is sent
            };
            let buffer = self.content.read(&self.job, slice)?;
            wanted.held = buffer.map(|buffer| Held { buffer, _space: Some(space) });
        }
        Ok(())
    }

    /// Holds the slices that are pinned, which needs no further memory.
    fn hold_pinned(&mut self) {
        let Some(pin) = &self.pin else { return };
        for wanted in self.wanted.iter_mut().filter(|wanted| wanted.held.is_none()) {
            let buffer = pin.slice(wanted.slice).cloned();
            wanted.held = buffer.map(|buffer| Held { buffer, _space: None });
        }
    }

    /// Holds the next slice to be sent, if it is available, even beyond the budget.
    fn hold_next(&mut self) -> Result<bool> {
        let Some(wanted) = self.wanted.front_mut() else { return Ok(false) };
        if wanted.held.is_none() {
            let slice = self.job.slice(wanted.slice)?;
            let buffer = self.content.read(&self.job, slice)?;
            let space = || self.store.held.take(bytes_of(&self.job, slice, self.content.part));
            wanted.held = buffer.map(|buffer| Held { buffer, _space: space() });
        }
        Ok(wanted.held.is_some())
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
            let rest = self.wanted.front().expect("it is held").rest.len().min(self.chunk);
            let bytes = (rest * self.dtype.size()) as u64;
            end_after_others(self.job.shares.network.turn(bytes).await).await;
            let wanted = self.wanted.front_mut().expect("it is held");
            let held = wanted.held.as_ref().expect("it is held");
            let end = wanted.rest.end.min(wanted.rest.start + self.chunk);
            let offset = std::mem::replace(&mut wanted.rest.start, end);
            let payload = self.job.slice(wanted.slice)?.values(
                self.content.part,
                &held.buffer,
                wanted.elements.select(offset..end),
                self.dtype,
            );
            let payload = self.job.note(wanted.slice, payload)?;
            self.job.count(|series| series.sent(payload.len() as u64));
            let extent = Extent { slice: wanted.slice, offset: offset as u64, dtype: self.dtype };
            self.writer.extent(extent, payload);
            if wanted.rest.is_empty() {
                self.wanted.pop_front();
            }
        }
    }

    async fn wait(&mut self) -> Result<()> {
        let index = self.wanted.front().expect("something is wanted").slice;
        let slice = self.job.slice(index)?;
        let (content, epoch) = (self.content, self.epoch);
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
        let _space = self.store.held.take(bytes_of(&self.job, slice, content.part));
        self.wanted.front_mut().expect("something is wanted").held = Some(Held { buffer, _space });
        self.hold()
    }
}
