//! One slice: `state[v+1] = apply(state[v], reduced_gradient[v], decision[v])`, and nothing else changes it.
//!
//! Buffers are reference-counted. Whoever reads a version holds a reference to it; a step writes in place where
//! nobody does, else to a fresh buffer.

use std::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicU64, Ordering},
};

use zeroshard_proto::{DType, Error, Manifest, Optimizer, Result, SliceSpec};

use super::{
    ranges::Ranges,
    round::{ParkingBudget, Piece, Round},
};
use crate::{
    backend::{Backend, OutOfMemory, Update},
    optim,
};

/// The version of a slice whose initial parameters are not complete.
const NOT_INITIALISED: u64 = u64::MAX;

/// A slice that this server owns.
pub(crate) struct Slice<B: Backend> {
    pub(crate) spec: SliceSpec,
    /// The parameter group, for a slice that takes gradients.
    pub(crate) group: Option<usize>,
    /// What [`Inner::parameters`] are published as.
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
    /// Steps that were applied, not skipped.
    applied: u64,
    /// What has come of the initial parameters.
    uploaded: Ranges,
    open: Option<Open<B>>,
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
}

/// What a step does to a slice.
pub(crate) struct Step<'a> {
    pub(crate) version: u64,
    /// `None`: skip.
    pub(crate) apply: Option<(&'a [Optimizer], f32)>,
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
    /// Memory for slice number `index` of a job of `world` ranks.
    pub(crate) fn allocate(
        backend: &B,
        manifest: &Manifest,
        index: usize,
        groups: &[Optimizer],
        world: u32,
    ) -> Result<Self, OutOfMemory> {
        let spec = manifest.slices()[index];
        let tensor = manifest.tensor_of(index);
        let group = tensor.trains().then_some(tensor.group as usize);
        let buffer = |dtype| backend.allocate(dtype, spec.numel);
        let inner = match group {
            None => Inner::new(buffer(tensor.dtype)?),
            Some(group) => Inner {
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
                    round: Round::new(index as u32, spec.numel, world),
                }),
                ..Inner::new(buffer(DType::F32)?)
            },
        };
        Ok(Self {
            spec,
            group,
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
            accumulator: numel * if self.group.is_some() { 4 } else { 0 },
            published: inner.published.as_ref().map_or(0, |_| numel * self.dtype.size() as u64),
        }
    }

    /// Stores a piece of the initial parameters. Returns how many elements were new, and whether that made
    /// the slice complete. `current` says, under the slice's lock, whether the caller's epoch still holds.
    pub(crate) fn upload(
        &self,
        backend: &B,
        piece: &Piece,
        current: impl FnOnce() -> Result<()>,
    ) -> Result<(u64, bool)> {
        let mut inner = self.lock();
        current()?;
        let inner = &mut *inner;
        let mut new = 0;
        for (range, known) in inner.uploaded.split(piece.range()) {
            if !known {
                let part = piece.part(range.clone());
                let master = exclusive(backend, &mut inner.master)?;
                backend.store(master, part.offset, &part.bytes, part.dtype);
                new += range.len() as u64;
                inner.uploaded.insert(range);
            }
        }
        if new == 0 || !inner.uploaded.is_all(self.spec.numel) {
            return Ok((new, false));
        }
        if let Some(published) = &mut inner.published {
            backend.copy(&inner.master, exclusive(backend, published)?);
        }
        self.version.store(0, Ordering::Release);
        Ok((new, true))
    }

    /// Adds a piece of a rank's gradient of `step`. Returns how many elements were new and, when the last
    /// rank's last element is in, the reduced gradient's figures. `current` as for [`Self::upload`].
    pub(crate) fn contribute(
        &self,
        backend: &B,
        piece: &Piece,
        budget: &Arc<ParkingBudget>,
        current: impl FnOnce() -> Result<()>,
    ) -> Result<(u64, Option<Reduced>)> {
        let mut inner = self.lock();
        current()?;
        let open = inner.open.as_mut().expect("the caller asked `group`");
        let new = open.round.contribute(backend, &mut open.sum, piece, budget)?;
        if new == 0 || !open.round.is_complete() {
            return Ok((new, None));
        }
        let sum_of_squares = open.round.sum_of_squares();
        let overflow = open.round.overflow();
        let overflow = (overflow.is_some() || !sum_of_squares.is_finite()).then_some(overflow);
        Ok((new, Some(Reduced { sum_of_squares, overflow })))
    }

    /// The first rank whose gradient is not all here.
    pub(crate) fn missing_rank(&self) -> Option<u32> {
        self.lock().open.as_ref()?.round.missing_rank()
    }

    /// Drops what has come of the open step and, unless the job is `initialised`, of the initial parameters.
    pub(crate) fn abort(&self, initialised: bool) {
        let mut inner = self.lock();
        if let Some(open) = &mut inner.open {
            open.round.reset();
        }
        if !initialised {
            inner.uploaded.clear();
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
            if let Some((groups, coefficient)) = step.apply {
                let update = Update { optimizer: &groups[group], step: inner.applied + 1, coefficient };
                let published = inner.published.as_mut().map(|p| exclusive(backend, p)).transpose()?;
                let master = exclusive(backend, &mut inner.master)?;
                let state = inner.state.iter_mut().map(|state| exclusive(backend, state));
                let mut state = state.collect::<Result<Vec<_>>>()?;
                backend.apply(&update, master, &mut state, &open.sum, published);
                inner.applied += 1;
            }
            open.round.reset();
        }
        self.version.store(step.version + 1, Ordering::Release);
        Ok(())
    }

    /// The parameters at `version`, held for as long as the caller likes; `None` if it is not there yet.
    ///
    /// # Errors
    /// [`Error::VersionGone`] if a later one has replaced it.
    pub(crate) fn parameters(&self, job: &str, version: u64) -> Result<Option<Arc<B::Buffer>>> {
        if self.version().is_none_or(|current| current < version) {
            return Ok(None);
        }
        let inner = self.lock();
        self.check_version(job, version)?;
        Ok(Some(inner.published.as_ref().unwrap_or(&inner.master).clone()))
    }

    /// BLAKE3 of size, applied steps, master weights and optimizer state at `version`.
    pub(crate) fn digest(&self, backend: &B, job: &str, version: u64) -> Result<[u8; 32]> {
        let (applied, buffers) = {
            let inner = self.lock();
            self.check_version(job, version)?;
            let buffers: Vec<_> = [&inner.master].into_iter().chain(&inner.state).cloned().collect();
            (inner.applied, buffers)
        };
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(self.spec.numel as u64).to_le_bytes());
        hasher.update(&applied.to_le_bytes());
        for buffer in &buffers {
            hasher.update(&backend.read(buffer, 0..self.spec.numel, backend.dtype(buffer)));
        }
        Ok(*hasher.finalize().as_bytes())
    }

    fn check_version(&self, job: &str, version: u64) -> Result<()> {
        match self.version() {
            Some(current) if current == version => Ok(()),
            current => {
                Err(Error::VersionGone { job: job.to_owned(), version, current: current.unwrap_or_default() })
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner<B>> {
        self.inner.lock().expect("no holder of the lock panics")
    }
}

impl<B: Backend> Inner<B> {
    fn new(master: B::Buffer) -> Self {
        Self {
            master: Arc::new(master),
            published: None,
            state: Vec::new(),
            applied: 0,
            uploaded: Ranges::default(),
            open: None,
        }
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
