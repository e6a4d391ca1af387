//! One slice: `state[v+1] = apply(state[v], reduced_gradient[v], decision[v])`, and nothing else
//! changes its state.
//!
//! Buffers are reference-counted. A reader of a version holds a reference to it. A step writes in
//! place if there is no reader, and otherwise to a new buffer.

use std::sync::{
    Arc, Mutex, MutexGuard, Weak,
    atomic::{AtomicU8, AtomicU64, Ordering},
};

use zeroshard_kernels::{Backend, reads_gradient_once};
use zeroshard_model::{
    AppliedSteps, Attempt, DType, Error, JobSpec, Result, SliceSpec,
    geometry::{Contributions, Ranks, SliceContributors},
    optimizer::{Code, StateShape},
};

use super::{
    budget::Budget,
    device::{Device, Home},
    round::{Absent, Chunk, Contributed, Largest, Round},
};
use crate::tier::{Array, Kind, Tiers};
use average::Averages;
use forked::Forked;
use history::History;
use hold::Hold;
use received::Received;
use replacement::Replacement;
use staged::Staged;
use versioned::{Versioned, in_memory};

mod average;
mod backup;
mod capture;
mod factors;
mod follow;
mod fork;
mod forked;
mod history;
mod hold;
mod home;
mod read;
mod received;
mod recording;
mod replace;
mod replacement;
mod rotate;
mod saved;
mod staged;
mod step;
mod upload;
mod versioned;

pub use backup::Role;
pub use capture::CapturedSlice;
pub use follow::Unhashed;
pub use history::Since;
pub use hold::Holds;
pub use saved::HeldSlice;
pub use step::{Apply, Step};
pub use upload::Upload;

/// The number of elements that are read at once when master weights outside of memory are cast.
const CAST: usize = 1 << 18;

/// The version of a slice of a job whose initial parameters are not complete.
const NOT_INITIALISED: u64 = u64::MAX;

/// A slice that this server owns.
pub struct Slice<B: Backend> {
    pub spec: SliceSpec,
    /// The ranks that contribute to the slice.
    pub contributors: Arc<[SliceContributors]>,
    /// The ranks that push the gradient: of each group one for each share.
    pub pushers: Arc<[SliceContributors]>,
    /// The parameter group, for a slice that takes gradients.
    pub group: Option<usize>,
    /// `true` if the clip coefficient does not apply to the slice.
    no_clip: bool,
    /// The divisor of summed gradients.
    divisor: f64,
    /// The names of the optimizer's state tensors.
    state_names: &'static [&'static str],
    /// The shapes of the state tensors.
    state_shapes: Vec<StateShape>,
    /// The codes of the optimizer's state, if it is 8-bit state; none: it is f32.
    state_codes: &'static [Code],
    /// The initial value of all elements of the optimizer state.
    initial_state: f32,
    /// The running averages, whose state follows that of the optimizer.
    averages: Averages,
    /// The dtype of the published parameters.
    dtype: DType,
    /// The device of all arrays.
    backend: Arc<B>,
    /// The tiers, if arrays of the slice are outside of memory.
    tiers: Option<Arc<Tiers<B>>>,
    /// Readable without the lock, because waiting for a version must not wait for a step that is
    /// being applied.
    version: AtomicU64,
    /// A [`Role`]. It changes under the lock.
    role: AtomicU8,
    inner: Mutex<Inner<B>>,
}

struct Inner<B: Backend> {
    /// The attempt to which the uploaded or contributed data belongs. It changes with the first
    /// message of a later attempt, so that there is no moment between two attempts.
    attempt: Attempt,
    /// Ranks that have no more data and are absent from every attempt.
    done: Vec<u32>,
    /// The f32 master weights; for a slice without gradients, its published parameters.
    master: Versioned<B>,
    /// The master weights in the tensor's dtype, if it is not f32.
    published: Option<Versioned<B>>,
    state: Vec<Versioned<B>>,
    /// Of 8-bit state, one for each state tensor: values that have not been encoded yet.
    staged: Vec<Option<Staged<B>>>,
    /// The applied steps: those that were not skipped and had a gradient from at least one rank.
    applied: AppliedSteps,
    /// The initial content that was copied from the predecessor of the job, if any.
    forked: Option<Forked>,
    /// The initial parameters that have arrived.
    uploaded: Received,
    /// The state tensors that have arrived.
    uploaded_state: Vec<Received>,
    /// `true` if the state tensors hold uploads of an earlier epoch.
    stale_state: bool,
    open: Option<Open<B>>,
    /// The arrived part of new values that come with the open step.
    replacement: Option<Replacement<B>>,
    /// The number of checkpoints that hold a version of the slice: more than one, if some have been
    /// given up and have not ended yet.
    saves: u32,
    /// The last checkpoint that holds the current version, unless it has released it.
    hold: Weak<Hold>,
    /// The last checkpoint that has held a version, and the number of the slice.
    last_save: Option<(Arc<Holds>, u32)>,
    /// Of a backup: the elements of the reduced gradient that have arrived.
    from_primary: usize,
    /// The changes of the last steps, in each view in which somebody follows the tensor.
    histories: Vec<History>,
    /// The failure of the disk in a step, after which the content has elements of two versions.
    broken: Option<Error>,
}

/// The gradient of the open step.
struct Open<B: Backend> {
    /// Backups and other readers may hold it, once it is complete.
    sum: Versioned<B>,
    round: Round,
    /// `true` if the reduced gradient has been reported; from then on the step may be decided at
    /// any moment.
    is_reported: bool,
}

impl<B: Backend> Open<B> {
    /// Records that a rank sends nothing more of this attempt's gradient.
    ///
    /// # Errors
    /// Those of [`Versioned::write`].
    fn absent(&mut self, backend: &B, rank: u32) -> Result<()> {
        match self.round.is_touched() {
            true => {
                let mut sum = self.sum.write(backend)?;
                self.round.absent(backend, &mut sum, rank)?;
            }
            false => _ = self.round.note_absent(rank),
        }
        Ok(())
    }
}

/// The properties of a slice's reduced gradient, after every rank has contributed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reduced {
    pub sum_of_squares: f64,
    /// Whether it has inf or NaN, and the lowest rank that sent one.
    pub overflow: Option<Option<u32>>,
    /// The ranks without a gradient, if there are any.
    pub absent: Option<Absent>,
    /// The contribution with the largest norm, if any rank has a gradient.
    pub largest: Option<Largest>,
}

/// Memory by content, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Memory {
    pub master: u64,
    pub state: u64,
    pub accumulator: u64,
    pub published: u64,
}

impl<B: Backend> Slice<B> {
    /// Allocates slice number `index` of a job, without providing the memory. `contributions` are
    /// those to its tensor.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], which names the tensor; [`Error::Storage`].
    pub fn allocate(
        home: Home<'_, B>,
        job: &JobSpec,
        index: usize,
        contributions: &Contributions,
        attempt: Attempt,
        role: Role,
    ) -> Result<Self> {
        let JobSpec { manifest, groups, .. } = job;
        let spec = manifest.slices()[index];
        let contributors = contributions.of_slice(&spec);
        let pushers = contributions.pushes(index as u32, &spec);
        let tensor = manifest.tensor_of(index);
        let group = tensor.trains().then_some(tensor.group as usize);
        let home = home::Of { home, slice: index as u32, tensor: &tensor.name };
        let array = |kind, dtype| home.array(kind, dtype, spec.numel, None);
        let state_codes = group.map_or(&[][..], |group| job.state_codes(group));
        let rotates = tensor.dtype == DType::F32
            && job.replicas == 1
            && home.tiers().is_none()
            && group.is_some_and(|group| reads_gradient_once(&groups[group]));
        let state_names = group.map_or(&[][..], |group| groups[group].state());
        let averages = Averages::of(job, group.is_some(), state_names.len());
        let inner = match group {
            None => Inner::new(
                home.shared(Some(Kind::Master), tensor.dtype, spec.numel)?,
                &contributors,
                attempt,
            ),
            Some(group) => Inner {
                uploaded_state: groups[group]
                    .state()
                    .iter()
                    .map(|_| Received::new(&contributors, Ranks::uploader))
                    .collect(),
                published: match tensor.dtype {
                    DType::F32 => None,
                    dtype => Some(Versioned::new(home.shared(None, dtype, spec.numel)?)),
                },
                state: home.state(
                    (&groups[group], state_codes),
                    (&tensor.shape, spec.numel),
                    averages.parts(),
                )?,
                staged: state_codes.iter().map(|_| None).collect(),
                open: Some(Open {
                    sum: Versioned::new(match rotates {
                        true => home.shared(Some(Kind::Sum), DType::F32, spec.numel)?,
                        false => array(Kind::Sum, DType::F32)?,
                    }),
                    round: Round::new(index as u32, spec.numel, &pushers),
                    is_reported: false,
                }),
                ..Inner::new(
                    match tensor.dtype {
                        DType::F32 => home.shared(Some(Kind::Master), DType::F32, spec.numel)?,
                        _ => array(Kind::Master, DType::F32)?,
                    },
                    &contributors,
                    attempt,
                )
            },
        };
        Ok(Self {
            spec,
            contributors,
            pushers,
            group,
            no_clip: tensor.no_clip,
            divisor: job.divisor(spec.tensor) as f64,
            state_names,
            state_shapes: job.state_of(spec.tensor).into_iter().map(|(_, shape)| shape).collect(),
            state_codes,
            initial_state: group.map_or(0.0, |group| groups[group].initial_state()),
            averages,
            dtype: tensor.dtype,
            backend: home.backend(),
            tiers: home.tiers(),
            version: AtomicU64::new(NOT_INITIALISED),
            role: AtomicU8::new(role as u8),
            inner: Mutex::new(inner),
        })
    }

    /// Provides the memory of the values and state.
    pub fn populate(&self) {
        self.lock().buffers().for_each(|buffer| buffer.populate(&self.backend));
    }

    /// Does without [`Safeguard::Ledger`](crate::job::Safeguard::Ledger) from now on.
    pub(crate) fn drop_ledger(&self) {
        self.lock().open.iter_mut().for_each(|open| open.round.drop_ledger());
    }

    /// Provides the memory of the gradient.
    pub fn populate_sum(&self) {
        self.lock().open.iter_mut().for_each(|open| open.sum.populate(&self.backend));
    }

    /// The current version; `None` before the initial parameters are complete.
    pub fn version(&self) -> Option<u64> {
        Some(self.version.load(Ordering::Acquire)).filter(|&version| version != NOT_INITIALISED)
    }

    /// Returns whether arrays of the slice are outside of memory, so that its steps go piece by
    /// piece.
    pub fn is_streamed(&self) -> bool {
        self.tiers.is_some()
    }

    pub fn is_on(&self, device: &Device<B>) -> bool {
        Arc::ptr_eq(&self.backend, &device.backend)
    }

    /// The memory of the arrays that are in memory.
    pub fn memory(&self) -> Memory {
        let inner = self.lock();
        let bytes = |array: &Array<B>| array.memory().map_or(0, |_| array.bytes(&self.backend));
        let replacement = inner.replacement.as_ref().map_or(0, |new| bytes(&new.values));
        let staged = inner.staged.iter().flatten().map(|staged| staged.bytes(&self.backend));
        Memory {
            master: bytes(inner.master.current()),
            state: inner.state.iter().map(|state| bytes(state.current())).chain(staged).sum(),
            accumulator: inner.open.as_ref().map_or(0, |open| bytes(open.sum.current()))
                + replacement,
            published: inner.published.as_ref().map_or(0, |of| bytes(of.current())),
        }
    }

    /// Adds a chunk of a contributing rank's gradient. Returns the number of new elements and, once
    /// in each attempt, the properties of the reduced gradient when it is complete. `current`
    /// checks, under the slice's lock, that `attempt` is the job's open attempt.
    ///
    /// # Errors
    /// Those of `current` and of [`Round::contribute`]; [`zeroshard_model::Error::OutOfMemory`] if
    /// the gradient is complete but the step could not be applied.
    pub fn contribute(
        &self,
        attempt: Attempt,
        chunk: &Chunk,
        budget: &Arc<Budget>,
        current: impl FnOnce() -> Result<()>,
    ) -> Result<(u64, Option<Reduced>)> {
        let mut inner = self.lock();
        current()?;
        self.enter(&mut inner, attempt)?;
        let open = inner.open.as_mut().expect("the caller asked `group`");
        if open.is_reported {
            return Ok((0, None)); // every rank has sent everything, or is absent
        }
        let added = {
            let mut sum = open.sum.write(&self.backend)?;
            open.round.contribute(&*self.backend, &mut sum, chunk, budget)
        };
        let new = inner.note(added)?;
        Ok((new, inner.reduced(&self.backend, self.role())?))
    }

    /// Records that a rank sends nothing more of this attempt's gradient. Returns the properties of
    /// the reduced gradient if it is now complete. `current` and the errors are the same as for
    /// [`Self::contribute`].
    pub fn absent(
        &self,
        attempt: Attempt,
        rank: u32,
        current: impl FnOnce() -> Result<()>,
    ) -> Result<Option<Reduced>> {
        let mut inner = self.lock();
        current()?;
        self.enter(&mut inner, attempt)?;
        let open = inner.open.as_mut().expect("the caller asked `group`");
        let added = open.absent(&self.backend, rank);
        inner.note(added)?;
        inner.reduced(&self.backend, self.role())
    }

    /// Names the rank whose gradient is not finite in the sum that `pusher` sends in this attempt.
    /// `current` and the errors are the same as for [`Self::contribute`].
    pub fn name_overflow(
        &self,
        attempt: Attempt,
        (pusher, rank): (u32, Option<u32>),
        current: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut inner = self.lock();
        current()?;
        self.enter(&mut inner, attempt)?;
        let open = inner.open.as_mut().expect("the caller asked `group`");
        open.round.name_overflow(pusher, rank);
        Ok(())
    }

    /// Returns the contributions to the open step of which this server has the sum itself: those to
    /// a slice of which it is the primary.
    pub fn contributions(&self) -> Vec<Contributed> {
        let inner = self.lock();
        let open = inner.open.as_ref().filter(|_| self.role() == Role::Primary);
        open.map(|open| open.round.contributions().collect()).unwrap_or_default()
    }

    /// The first rank whose gradient is incomplete.
    pub fn missing_rank(&self) -> Option<u32> {
        self.lock().open.as_ref()?.round.missing_rank()
    }

    /// Drops the data of attempts before `attempt`, unless a message of that or a later attempt has
    /// already done so. Returns the properties of the reduced gradient if it is complete without
    /// further contributions.
    ///
    /// # Errors
    /// Those of [`Self::contribute`].
    pub fn catch_up(&self, attempt: Attempt) -> Result<Option<Reduced>> {
        let mut inner = self.lock();
        // A slice that the decision has not reached yet is at the previous step.
        if attempt <= inner.attempt || self.version().is_some_and(|version| version != attempt.step)
        {
            return Ok(None);
        }
        self.enter(&mut inner, attempt)?;
        inner.reduced(&self.backend, self.role())
    }

    /// From now on `rank` is absent from every attempt or, if it is not `done`, contributes again
    /// from the next attempt on. Returns the properties of the reduced gradient if the open attempt
    /// is now complete.
    ///
    /// # Errors
    /// Those of [`Self::contribute`].
    pub fn set_done(&self, rank: u32, done: bool) -> Result<Option<Reduced>> {
        let mut inner = self.lock();
        let inner = &mut *inner;
        inner.done.retain(|&other| other != rank);
        if !done {
            return Ok(None);
        }
        inner.done.push(rank);
        let adds = self.version().is_some() && self.role() == Role::Primary;
        let Some(open) = inner.open.as_mut().filter(|_| adds) else {
            return Ok(None);
        };
        let added = open.absent(&self.backend, rank);
        inner.note(added)?;
        inner.reduced(&self.backend, self.role())
    }

    /// Changes to `attempt`, if it is a later one. Called under the lock.
    ///
    /// # Errors
    /// Those of [`Inner::restart`].
    fn enter(&self, inner: &mut Inner<B>, attempt: Attempt) -> Result<()> {
        if inner.attempt < attempt {
            inner.replacement = None;
            if self.version().is_none() {
                inner.forget_upload();
            }
            inner.restart(&self.backend, attempt, self.role())?;
        }
        Ok(())
    }

    /// Publishes the first version: 0, or that of the checkpoint that was restored. Returns the
    /// properties of the first step's gradient if it is complete because all ranks are absent.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Storage`].
    pub fn publish(&self, version: u64) -> Result<Option<Reduced>> {
        let mut inner = self.lock();
        let inner = &mut *inner;
        inner.histories.clear();
        inner.encode_all_staged(&self.backend)?;
        inner.cast(&self.backend)?;
        self.begin_averages(inner)?;
        inner.settle(&self.backend)?;
        inner.restart(&self.backend, Attempt { step: version, ..inner.attempt }, self.role())?;
        self.set_version(version);
        inner.reduced(&self.backend, self.role())
    }

    /// Makes `version` available. Called under the lock.
    fn set_version(&self, version: u64) {
        self.version.store(version, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, Inner<B>> {
        self.inner.lock().expect("no holder of the lock panics")
    }
}

impl<B: Backend> Inner<B> {
    fn new(master: Array<B>, contributors: &[SliceContributors], attempt: Attempt) -> Self {
        Self {
            attempt,
            done: Vec::new(),
            master: Versioned::new(master),
            published: None,
            state: Vec::new(),
            staged: Vec::new(),
            applied: AppliedSteps::default(),
            forked: None,
            uploaded: Received::new(contributors, Ranks::uploader),
            uploaded_state: Vec::new(),
            stale_state: false,
            open: None,
            replacement: None,
            saves: 0,
            hold: Weak::new(),
            last_save: None,
            from_primary: 0,
            histories: Vec::new(),
            broken: None,
        }
    }

    /// Publishes the master weights in the dtype of the tensor.
    fn cast(&mut self, backend: &B) -> Result<()> {
        let Some(published) = &mut self.published else { return Ok(()) };
        let to = in_memory(published.next(backend)?).buffer;
        match self.master.current() {
            Array::Memory(master) => backend.copy(master, to)?,
            master @ Array::Paged(_) => {
                let numel = master.numel(backend);
                for start in (0..numel).step_by(CAST) {
                    let range = start..numel.min(start + CAST);
                    let values = master.read(backend, range.clone(), DType::F32)?;
                    backend.store(to, range, &values, DType::F32)?;
                }
            }
        }
        Ok(())
    }

    /// Writes values and state to their tiers where they are outside of memory.
    fn settle(&self, backend: &B) -> Result<()> {
        [&self.master].into_iter().chain(&self.state).try_for_each(|array| array.settle(backend))
    }

    /// All buffers that a step writes and readers read.
    fn buffers(&mut self) -> impl Iterator<Item = &mut Versioned<B>> {
        self.published.iter_mut().chain([&mut self.master]).chain(&mut self.state)
    }

    /// Begins `attempt` without contributions.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::OutOfMemory`] if ranks are absent, a reader holds the last sum,
    /// and there is no memory for another one.
    fn restart(&mut self, backend: &B, attempt: Attempt, role: Role) -> Result<()> {
        self.attempt = attempt;
        self.from_primary = 0;
        if let Some(open) = &mut self.open {
            open.round.reset();
            open.is_reported = false;
            open.sum.make_blank();
            // Of a backup, the sum is the primary's.
            for &rank in self.done.iter().filter(|_| role == Role::Primary) {
                open.absent(backend, rank)?;
            }
        }
        Ok(())
    }

    /// Returns the properties of the gradient when it is found complete for the first time, after
    /// reserving the memory that the step needs. Without that memory the step waits for a
    /// checkpoint that holds the slice (see [`Slice::end_save`]).
    fn reduced(&mut self, backend: &B, role: Role) -> Result<Option<Reduced>> {
        let is_complete = |open: &Open<B>| match role {
            Role::Primary => open.round.is_complete(),
            Role::Backup | Role::Copying => self.from_primary == open.sum.current().numel(backend),
            Role::Empty => false,
        };
        if self.open.as_ref().is_none_or(|open| open.is_reported || !is_complete(open)) {
            return Ok(None);
        }
        self.check()?;
        match self.reserve(backend) {
            Err(error @ Error::OutOfMemory { .. }) if self.saves > 0 => {
                if let Some((save, slice)) = &self.last_save {
                    save.wait(*slice, error);
                }
                return Ok(None);
            }
            reserved => reserved?,
        }
        let Some(open) = &mut self.open else { return Ok(None) };
        open.sum.settle(backend)?;
        open.is_reported = true;
        let sum_of_squares = open.round.sum_of_squares();
        let overflow = open.round.overflow();
        let overflow = (overflow.is_some() || !sum_of_squares.is_finite()).then_some(overflow);
        Ok(Some(Reduced {
            sum_of_squares,
            overflow,
            absent: open.round.absentees(&self.done),
            largest: open.round.largest(),
        }))
    }
}

#[cfg(test)]
mod average_tests;
#[cfg(test)]
mod contributors_tests;
#[cfg(test)]
mod disk_tests;
#[cfg(test)]
mod history_tests;
#[cfg(test)]
mod hold_tests;
#[cfg(test)]
mod reserve_tests;
#[cfg(test)]
mod rotate_tests;
#[cfg(test)]
mod staged_tests;
#[cfg(test)]
#[path = "slice_tests.rs"]
mod tests;
