//! One slice: `state[v+1] = apply(state[v], reduced_gradient[v], decision[v])`, and nothing else changes it.
//!
//! Buffers are reference-counted. Whoever reads a version holds a reference to it; a step writes in place where
//! nobody does, else to a fresh buffer.

use std::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicU64, Ordering},
};

use zeroshard_proto::{DType, Error, JobSpec, Optimizer, Result, SliceSpec};

use super::{
    budget::Budget,
    lane::Lane,
    round::{Absent, Piece, Round},
};
use crate::{
    backend::{Backend, OutOfMemory, Update},
    optim,
};
use buffer::Next;
use filling::Filling;

mod buffer;
mod filling;
mod read;
mod upload;

pub(crate) use upload::Upload;

/// The version of a slice whose initial parameters are not complete.
const NOT_INITIALISED: u64 = u64::MAX;

/// A slice that this server owns.
pub(crate) struct Slice<B: Backend> {
    pub(crate) spec: SliceSpec,
    /// Who contributes what of it.
    pub(crate) lanes: Arc<[Lane]>,
    /// The parameter group, for a slice that takes gradients.
    pub(crate) group: Option<usize>,
    /// Whether a step may bring new content.
    pub(crate) buffer: bool,
    /// Whether the clip coefficient leaves it alone.
    no_clip: bool,
    /// What summed gradients are divided by.
    divisor: f64,
    /// What all elements of all optimizer state start at.
    initial_state: f32,
    /// What the parameters are published as.
    dtype: DType,
    /// Readable without the lock: waiting for a version must not wait for a step that is being applied.
    version: AtomicU64,
    inner: Mutex<Inner<B>>,
}

struct Inner<B: Backend> {
    /// Master weights, f32; of a slice that takes no gradients the parameters as they are published.
    master: Arc<B::Buffer>,
    /// The master weights in the tensor's dtype, where that is not f32.
    published: Option<Arc<B::Buffer>>,
    state: Vec<Arc<B::Buffer>>,
    /// Steps that were applied: not skipped, and with a gradient from somebody.
    applied: u64,
    /// What has come of the initial parameters.
    uploaded: Filling,
    /// What has come of each state tensor.
    uploaded_state: Vec<Filling>,
    /// The state tensors hold what was uploaded in an epoch that is over.
    stale_state: bool,
    open: Option<Open<B>>,
    /// Of a buffer, what has come of its next content.
    next: Option<Next<B>>,
}

/// The gradient of the open step.
struct Open<B: Backend> {
    sum: B::Buffer,
    round: Round,
}

/// A slice's gradient of a step, when every rank's is in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Reduced {
    pub(crate) sum_of_squares: f64,
    /// Whether it has inf or NaN, and the lowest rank that sent one.
    pub(crate) overflow: Option<Option<u32>>,
    /// Who had none of it, if anybody.
    pub(crate) absent: Option<Absent>,
}

/// What a step does to a slice.
pub(crate) struct Step<'a> {
    pub(crate) version: u64,
    /// `None`: skip.
    pub(crate) apply: Option<Apply<'a>>,
}

/// What is the same for every slice of a step that is not skipped.
#[derive(Clone, Copy)]
pub(crate) struct Apply<'a> {
    pub(crate) groups: &'a [Optimizer],
    /// What mean gradients are multiplied by.
    pub(crate) coefficient: f64,
    /// The same where gradients are not clipped.
    pub(crate) unclipped: f64,
}

/// Bytes by kind.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Memory {
    pub(crate) master: u64,
    pub(crate) state: u64,
    pub(crate) accumulator: u64,
    pub(crate) published: u64,
}

impl<B: Backend> Slice<B> {
    /// Memory for slice number `index` of a job, of which these are the lanes.
    pub(crate) fn allocate(
        backend: &B,
        job: &JobSpec,
        index: usize,
        lanes: Arc<[Lane]>,
    ) -> Result<Self, OutOfMemory> {
        let JobSpec { manifest, groups, .. } = job;
        let spec = manifest.slices()[index];
        let tensor = manifest.tensor_of(index);
        let group = tensor.trains().then_some(tensor.group as usize);
        let buffer = |dtype| backend.allocate(dtype, spec.numel);
        let inner = match group {
            None => Inner::new(buffer(tensor.dtype)?, &lanes),
            Some(group) => Inner {
                uploaded_state: groups[group].state().iter().map(|_| Filling::new(&lanes)).collect(),
                published: match tensor.dtype {
                    DType::F32 => None,
                    dtype => Some(Arc::new(buffer(dtype)?)),
                },
                state: optim::initial_state(backend, &groups[group], spec.numel)?
                    .into_iter()
                    .map(Arc::new)
                    .collect(),
                open: Some(Open {
                    sum: buffer(DType::F32)?,
                    round: Round::new(index as u32, spec.numel, &lanes),
                }),
                ..Inner::new(buffer(DType::F32)?, &lanes)
            },
        };
        Ok(Self {
            spec,
            lanes,
            group,
            buffer: tensor.buffer,
            no_clip: tensor.no_clip,
            divisor: job.divisor(spec.tensor) as f64,
            initial_state: group.map_or(0.0, |group| optim::initial_value(&groups[group])),
            dtype: tensor.dtype,
            version: AtomicU64::new(NOT_INITIALISED),
            inner: Mutex::new(inner),
        })
    }

    /// The version that is there; `None` before the initial parameters are complete.
    pub(crate) fn version(&self) -> Option<u64> {
        Some(self.version.load(Ordering::Acquire)).filter(|&version| version != NOT_INITIALISED)
    }

    pub(crate) fn memory(&self) -> Memory {
        let numel = self.spec.numel as u64;
        let inner = self.lock();
        Memory {
            master: numel * if self.group.is_some() { 4 } else { self.dtype.size() as u64 },
            state: numel * 4 * inner.state.len() as u64,
            accumulator: match &inner.next {
                Some(_) => numel * self.dtype.size() as u64,
                None if self.group.is_some() => numel * 4,
                None => 0,
            },
            published: inner.published.as_ref().map_or(0, |_| numel * self.dtype.size() as u64),
        }
    }

    /// Adds a piece of a contributing rank's gradient. Returns how many elements were new and, when the last
    /// rank's last element is in, the reduced gradient's figures. `current` as for [`Self::upload`].
    pub(crate) fn contribute(
        &self,
        backend: &B,
        piece: &Piece,
        budget: &Arc<Budget>,
        current: impl FnOnce() -> Result<()>,
    ) -> Result<(u64, Option<Reduced>)> {
        let mut inner = self.lock();
        current()?;
        let open = inner.open.as_mut().expect("the caller asked `group`");
        let new = open.round.contribute(backend, &mut open.sum, piece, budget)?;
        Ok((new, (new > 0).then(|| open.reduced()).flatten()))
    }

    /// Notes that a rank sends nothing more of this step's gradient. Returns the reduced gradient's figures, if the
    /// step waited for nothing else. `current` as for [`Self::upload`].
    pub(crate) fn absent(
        &self,
        backend: &B,
        rank: u32,
        current: impl FnOnce() -> Result<()>,
    ) -> Result<Option<Reduced>> {
        let mut inner = self.lock();
        current()?;
        let open = inner.open.as_mut().expect("the caller asked `group`");
        let news = open.round.absent(backend, &mut open.sum, rank);
        Ok(news.then(|| open.reduced()).flatten())
    }

    /// The first rank whose gradient is not all here.
    pub(crate) fn missing_rank(&self) -> Option<u32> {
        self.lock().open.as_ref()?.round.missing_rank()
    }

    /// Drops what has come of the open step and, unless the job is `initialised`, of the upload.
    pub(crate) fn abort(&self, initialised: bool) {
        let mut inner = self.lock();
        if let Some(open) = &mut inner.open {
            open.round.reset();
        }
        inner.next = None;
        if !initialised {
            inner.forget_upload();
            self.version.store(NOT_INITIALISED, Ordering::Release);
        }
    }

    /// Takes the slice from `step.version` to the next.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if a reader holds the old version and there is no room for the new one.
    pub(crate) fn step(&self, backend: &B, step: &Step<'_>) -> Result<()> {
        let mut inner = self.lock();
        let inner = &mut *inner;
        if let Some((group, open)) = self.group.zip(inner.open.as_mut()) {
            if let Some(apply) = step.apply
                && !open.round.is_absent_everywhere()
            {
                let coefficient = if self.no_clip { apply.unclipped } else { apply.coefficient };
                let coefficient = (coefficient / self.divisor) as f32;
                let optimizer = &apply.groups[group];
                let update = Update { optimizer, step: inner.applied + 1, coefficient };
                let published = inner.published.as_mut().map(|p| exclusive(backend, p)).transpose()?;
                let master = exclusive(backend, &mut inner.master)?;
                let state = inner.state.iter_mut().map(|state| exclusive(backend, state));
                let mut state = state.collect::<Result<Vec<_>>>()?;
                backend.apply(&update, master, &mut state, &open.sum, published);
                inner.applied += 1;
            }
            open.round.reset();
        }
        inner.turn_over(&self.lanes);
        self.enter(step.version + 1);
        Ok(())
    }

    /// From here on `version` is there. Under the lock.
    fn enter(&self, version: u64) {
        self.version.store(version, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, Inner<B>> {
        self.inner.lock().expect("no holder of the lock panics")
    }
}

impl<B: Backend> Inner<B> {
    fn new(master: B::Buffer, lanes: &[Lane]) -> Self {
        Self {
            master: Arc::new(master),
            published: None,
            state: Vec::new(),
            applied: 0,
            uploaded: Filling::new(lanes),
            uploaded_state: Vec::new(),
            stale_state: false,
            open: None,
            next: None,
        }
    }
}

impl<B: Backend> Open<B> {
    /// The gradient's figures, once it is complete.
    fn reduced(&self) -> Option<Reduced> {
        if !self.round.is_complete() {
            return None;
        }
        let sum_of_squares = self.round.sum_of_squares();
        let overflow = self.round.overflow();
        let overflow = (overflow.is_some() || !sum_of_squares.is_finite()).then_some(overflow);
        Some(Reduced { sum_of_squares, overflow, absent: self.round.absentees() })
    }
}

/// Write access: in place if nobody else holds the buffer, else to a copy of it.
fn exclusive<'a, B: Backend>(backend: &B, buffer: &'a mut Arc<B::Buffer>) -> Result<&'a mut B::Buffer> {
    if Arc::get_mut(buffer).is_none() {
        let (dtype, numel) = (backend.dtype(buffer), backend.numel(buffer));
        let mut fresh = backend.allocate(dtype, numel).map_err(|_| Error::OutOfMemory {
            what: "a version beside the one that is being read".to_owned(),
            bytes: (numel * dtype.size()) as u64,
        })?;
        backend.copy(buffer, &mut fresh);
        *buffer = Arc::new(fresh);
    }
    Ok(Arc::get_mut(buffer).expect("nobody else has seen the copy"))
}

#[cfg(test)]
mod lane_tests;
#[cfg(test)]
#[path = "slice_tests.rs"]
mod tests;
