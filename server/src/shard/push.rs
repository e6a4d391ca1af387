//! `Push`: gradients from the network buffer straight into the sum.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http_body::Body;
use zeroshard_proto::{
    Error, Result,
    frame::{Event, Extent, Reader},
    pb,
};

use super::{job::Job, round::Piece, store::Store};
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

struct Push<'a, B: Backend> {
    store: &'a Store<B>,
    job: Arc<Job<B>>,
    begin: pb::PushBegin,
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
        if begin.step.is_none() && begin.rank != 0 {
            return Err(Error::invalid("rank that uploads the initial parameters", begin.rank, "0"));
        }
        let next = Extent { slice: 0, offset: 0, dtype: zeroshard_proto::DType::F32 };
        Ok(Self { store, job, begin, next, counted: pb::PushResponse::default() })
    }

    /// Checks an extent before any of its bytes is used.
    async fn check(&mut self, extent: Extent, elements: u64) -> Result<()> {
        let slice = self.job.slice(extent.slice)?;
        let tensor = || &self.job.spec.manifest.tensors()[slice.spec.tensor].name;
        if extent.offset.checked_add(elements).is_none_or(|end| end > slice.spec.numel as u64) {
            return Err(Error::invalid(
                format!("extent of slice {} of tensor {:?}", extent.slice, tensor()),
                format!("{elements} elements from {} on", extent.offset),
                format!("within its {} elements", slice.spec.numel),
            ));
        }
        if let Some(step) = self.begin.step {
            if slice.group.is_none() {
                return Err(Error::invalid(
                    format!("gradient of tensor {:?}", tensor()),
                    "pushed",
                    "left out: the tensor is frozen",
                ));
            }
            self.wait_for_step(extent.slice, step).await?;
        }
        self.next = extent;
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
        let new = match self.begin.step {
            None => self.job.upload(self.begin.epoch, slice, &piece)?,
            Some(step) => self.contribute(step, slice, &piece).await?,
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
