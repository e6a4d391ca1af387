//! `Push`: gradients, and what a job begins with, from the network buffer straight to where they belong.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http_body::Body;
use zeroshard_proto::{
    DType, Error, JobSpec, Result,
    frame::{Event, Extent, Reader},
    pb,
};

use super::{
    job::Job,
    part::Part,
    round::Piece,
    senders::{self, Sent},
    slice::Upload,
    store::Store,
};
use crate::backend::Backend;

/// How long a push stands still when there is no room for gradients whose turn has not come. Then it is refused,
/// so that the caller can send what others wait for: a stream that stood still for longer could wait for itself.
const PARKING_WAIT: Duration = Duration::from_millis(50);

/// Takes one push.
///
/// # Errors
/// What is wrong with it; what came before the error has been taken.
pub(super) async fn push<B, S>(store: &Store<B>, body: S) -> Result<pb::PushResponse>
where
    B: Backend,
    S: Body<Data = Bytes> + Unpin,
    S::Error: std::fmt::Display,
{
    let mut reader = Reader::new(body, store.limits.max_message);
    let Some(Event::Begin(begin)) = reader.next().await? else {
        return Err(Error::invalid("first message of a push", "without `begin`", "the one that opens it"));
    };
    let mut push = Push::open(store, begin)?;
    push.note_absent().await?;
    while let Some(event) = reader.next().await? {
        match event {
            Event::Begin(_) => {
                return Err(Error::invalid("`begin`", "in a later message", "in the first message only"));
            }
            Event::Extent(extent, elements) => push.check(extent, elements).await?,
            Event::Payload(bytes) => push.take(bytes).await?,
        }
    }
    Ok(push.counted)
}

/// What a push brings.
#[derive(Debug, Clone, Copy)]
enum What {
    /// Gradients, or buffers, of a step.
    Step(u64),
    /// What the job begins with.
    Start(Upload),
}

struct Push<'a, B: Backend> {
    store: &'a Store<B>,
    job: Arc<Job<B>>,
    begin: pb::PushBegin,
    what: What,
    /// Where the next payload belongs.
    next: Extent,
    counted: pb::PushResponse,
}

impl<'a, B: Backend> Push<'a, B> {
    fn open(store: &'a Store<B>, begin: pb::PushBegin) -> Result<Self> {
        let job = store.job(&begin.job)?;
        job.check_epoch(begin.epoch)?;
        if begin.rank >= job.spec.world {
            let expected = format!("less than the world, {}", job.spec.world);
            return Err(Error::invalid("rank", begin.rank, expected));
        }
        let what = what(&begin, &job.spec)?;
        let next = Extent { slice: 0, offset: 0, dtype: DType::F32 };
        Ok(Self { store, job, begin, what, next, counted: pb::PushResponse::default() })
    }

    /// Checks an extent before any of its bytes is used.
    async fn check(&mut self, extent: Extent, elements: u64) -> Result<()> {
        let sent = self.check_takes(extent)?;
        self.check_bounds(extent, elements, sent)?;
        if let What::Step(step) = self.what {
            self.wait_for_step(extent.slice, step).await?;
        }
        self.next = extent;
        Ok(())
    }

    /// Whether the slice takes what this push brings, of this dtype.
    fn check_takes(&self, extent: Extent) -> Result<Sent> {
        let slice = self.job.slice(extent.slice)?;
        let tensor = &self.job.spec.manifest.tensors()[slice.spec.tensor].name;
        match self.what {
            What::Start(Upload { state, .. }) => {
                let part = state.map_or(Part::Parameters, Part::State);
                part.check(slice.group.is_some(), tensor)?;
                Ok(Sent::Start)
            }
            What::Step(_) if slice.group.is_some() => Ok(Sent::Gradient),
            What::Step(_) if !slice.buffer => Err(Error::invalid(
                format!("gradient of tensor {tensor:?}"),
                "pushed",
                "left out: the tensor is frozen",
            )),
            What::Step(_) if extent.dtype != DType::F32 => {
                Err(Error::invalid(format!("dtype of buffer {tensor:?}"), extent.dtype, "f32"))
            }
            What::Step(_) => Ok(Sent::Buffer),
        }
    }

    /// Whether it comes from a rank that has these elements.
    fn check_bounds(&self, extent: Extent, elements: u64, sent: Sent) -> Result<()> {
        let (spec, rank) = (&self.job.spec, self.begin.rank);
        let slice = self.job.slice(extent.slice)?;
        let numel = senders::lane_of(spec, extent.slice, &slice.lanes, rank, sent)?.area.numel();
        if extent.offset.checked_add(elements).is_some_and(|end| end <= numel as u64) {
            return Ok(());
        }
        let tensor = slice.spec.tensor;
        let expected = match slice.spec.numel {
            all if all == numel => format!("within its {all} elements"),
            all => {
                let rank = senders::describe(spec, tensor, rank);
                format!("within the {numel} that {rank} has of its {all} elements")
            }
        };
        Err(Error::invalid(
            format!("extent of slice {} of tensor {:?}", extent.slice, spec.manifest.tensors()[tensor].name),
            format!("{elements} elements from {} on", extent.offset),
            expected,
        ))
    }

    /// Takes the opening message's word for what does not come.
    async fn note_absent(&self) -> Result<()> {
        let What::Step(step) = self.what else { return Ok(()) };
        for &index in &self.begin.absent {
            let slice = self.job.slice(index)?;
            if slice.group.is_none() {
                let tensor = &self.job.spec.manifest.tensors()[slice.spec.tensor].name;
                let what = format!("tensor {tensor:?}");
                return Err(Error::invalid(what, "said to be absent", "left out: it does not train"));
            }
            self.wait_for_step(index, step).await?;
            self.job.absent(self.begin.epoch, step, index, self.begin.rank)?;
            // Zeros for a large slice take a while, and others want this thread.
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    /// A gradient of the next step may come while this one is still being applied.
    async fn wait_for_step(&self, index: u32, step: u64) -> Result<()> {
        let slice = self.job.slice(index)?;
        if slice.version().is_none_or(|version| version + 1 != step) {
            return self.job.check_step(slice, step);
        }
        let ready = || {
            self.job.check_epoch(self.begin.epoch)?;
            Ok((slice.version() == Some(step)).then_some(()))
        };
        let waiting_for =
            || format!("version {step} of slice {index} of job {:?}, to push its gradient", self.begin.job);
        self.job.wait_for(self.store.deadline(0)?, ready, waiting_for).await
    }

    async fn take(&mut self, bytes: Bytes) -> Result<()> {
        let Extent { slice, offset, dtype } = self.next;
        let elements = (bytes.len() / dtype.size()) as u64;
        self.store.metrics.push_received_bytes.inc_by(bytes.len() as u64);
        let piece = Piece { rank: self.begin.rank, offset: offset as usize, dtype, bytes };
        let new = match self.what {
            What::Start(upload) => self.job.upload(self.begin.epoch, slice, upload, &piece)?,
            What::Step(step) if self.job.slice(slice)?.buffer => {
                self.job.replace(self.begin.epoch, step, slice, &piece)?
            }
            What::Step(step) => self.contribute(step, slice, &piece).await?,
        };
        self.next.offset += elements;
        self.counted.added += new;
        self.counted.duplicates += elements - new;
        self.store.metrics.push_duplicate_bytes.inc_by((elements - new) * dtype.size() as u64);
        Ok(())
    }

    async fn contribute(&self, step: u64, slice: u32, piece: &Piece) -> Result<u64> {
        let contribute = || self.job.contribute(self.begin.epoch, step, slice, piece);
        match contribute() {
            Err(Error::ParkingFull { .. }) => {
                self.job.contribution(PARKING_WAIT).await;
                contribute()
            }
            taken => taken,
        }
    }
}

/// What the opening message says that the push brings.
fn what(begin: &pb::PushBegin, spec: &JobSpec) -> Result<What> {
    if let Some(step) = begin.step {
        if !begin.part.is_empty() || begin.applied != 0 {
            let found = format!("of part {:?} with {} applied steps", begin.part, begin.applied);
            return Err(Error::invalid(format!("push of step {step}"), found, "without either"));
        }
        return Ok(What::Step(step));
    }
    if !begin.absent.is_empty() {
        let found = format!("said of {} slices", begin.absent.len());
        return Err(Error::invalid("absence", found, "of gradients of a step"));
    }
    let state = match Part::parse(&begin.part, &spec.groups[0])? {
        Part::Parameters => None,
        Part::State(position) => Some(position),
        Part::Master => {
            let expected = "empty: the parameters, which the master weights are";
            return Err(Error::invalid("part that is uploaded", "master", expected));
        }
    };
    Ok(What::Start(Upload { state, applied: begin.applied }))
}
