//! One job on this server: its slices, the open step, and the epoch.
//!
//! The job tells its server through [`Host`] what happens, and gets the time from it. It keeps each
//! decision as the server got it, in a type of the server.

use std::{
    mem,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak,
        atomic::AtomicU64,
    },
    time::{Duration, Instant},
};

use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::{Notify, watch},
};
use tokio_util::sync::CancellationToken;
use zeroshard_model::{AppliedSteps, Error, JobSpec, Placement, Result};
use zeroshard_shm::Arena;

use super::{
    budget::{Budget, Space},
    device::Device,
    events::JobEvent,
    fair::Shares,
    round::Chunk,
    senders::{self, Sent, describe},
    slice::{Holds, Memory, Reduced, Role, Slice, Upload},
};
use allocation::{Allocation, arena_of, check_placement};
pub use capture::CapturedSlices;
use contributions::Contributions;
pub use contributions::StepContributions;
use early::EarlyValues;
use followers::Followers;
use progress::Progress;
pub use progress::{Decided, Ready};
use ranks::Ranks;
pub use ranks::Rest;
pub use report::JobReport;
use zeroshard_kernels::Backend;
use zeroshard_model::Attempt;

mod allocation;
mod arrivals;
mod capture;
mod contributions;
mod early;
mod follow;
mod followers;
mod progress;
mod ranks;
mod replicas;
mod report;
mod steps;

/// A job to be opened, and the resources of this server that it uses.
pub struct Opening<B: Backend> {
    pub id: u64,
    pub spec: JobSpec,
    pub epoch: u64,
    pub placement: Placement,
    /// The id of this server in the placement.
    pub server: u64,
    /// The version of a job that runs already, of which this server is to be a backup.
    pub version: Option<u64>,
    /// The slices will be read from a checkpoint, and their memory be provided one after the other.
    pub is_restored: bool,
    /// Cancelled when the job is closed, also while it is being opened.
    pub closed: CancellationToken,
    pub devices: Arc<[Device<B>]>,
    pub shares: Shares,
    pub budget: Arc<Budget>,
}

/// The server of a job: it has a clock, and receives what happens in the job. Its methods must not
/// call the job, whose locks may be held.
pub trait Host: Send + Sync + 'static {
    /// Returns the current time.
    fn now(&self) -> Instant;

    /// Receives an event for the coordinator.
    fn tell(&self, event: JobEvent);

    /// Receives the duration of a phase of a step, which ends now. `failed`: the phase has failed
    /// with this error.
    fn measured(&self, phase: Phase, attempt: Attempt, took: Duration, failed: Option<&Error>);

    /// Returns whether the job does without a safeguard. Only simulations take them out, to prove
    /// that they find what the safeguards prevent.
    fn lacks(&self, _safeguard: Safeguard) -> bool {
        false
    }
}

/// A part of a job that simulations can take out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Safeguard {
    /// Gradients of an attempt that has ended are refused.
    Fence,
    /// Gradients that have arrived already are not added again.
    Ledger,
    /// A version can be read when all servers have stored the decision that leads to it.
    Confirmation,
}

/// A phase of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// From the first gradient to the last completed sum of a slice.
    Reduce,
    /// From the report to the coordinator to its decision.
    Decide,
    /// The optimizer and the conversion to the published dtype.
    Apply,
}

/// A job's slices on this server, and the open attempt. `D`: a decision about a step, as the server
/// got it.
pub struct Job<B: Backend, D> {
    pub id: u64,
    pub spec: JobSpec,
    /// The id of this server in placements.
    server: u64,
    placement: RwLock<Arc<Placement>>,
    /// The devices of the server.
    devices: Arc<[Device<B>]>,
    /// The shares of the job in the resources of the server.
    pub shares: Shares,
    /// The memory of the published parameters, which processes on this host can map; `None` if the
    /// system has no such memory.
    arena: Option<Arc<Arena>>,
    /// The parts of the devices' budgets that the slices take.
    spaces: Mutex<Vec<Space>>,
    /// The budget for the memory of early gradients.
    budget: Arc<Budget>,
    host: Arc<dyn Host>,
    /// The slices by number, empty where this server is neither primary nor backup. With another
    /// placement the server may get more slices.
    slices: Vec<OnceLock<Slice<B>>>,
    early: Mutex<EarlyValues>,
    followers: Followers,
    /// In a job with replicas: the version that can be read.
    served: AtomicU64,
    progress: Mutex<Progress<D>>,
    /// The contributions to the last steps.
    contributions: Mutex<Contributions>,
    ranks: RwLock<Ranks>,
    /// Notified when a slice has a new version, and when another attempt is open.
    changed: watch::Sender<()>,
    closed: CancellationToken,
    /// The epoch and the version in which the job was restored while ranks were waiting.
    restored: OnceLock<(u64, u64)>,
    /// Notified when gradients arrive, after which parked ones may have their turn.
    contributed: Notify,
    /// Dropped when the memory of the job has been freed.
    memory_in_use: Arc<()>,
}

/// The system takes a second for some gigabytes of memory, so it is freed on a thread that may
/// block.
impl<B: Backend, D> Drop for Job<B, D> {
    fn drop(&mut self) {
        let slices = mem::take(&mut self.slices);
        let spaces = mem::take(&mut *self.spaces.lock().expect("no holder of the lock panics"));
        let memory_in_use = mem::take(&mut self.memory_in_use);
        let free = move || {
            drop(slices);
            // Only now another job may have it.
            drop(spaces);
            drop(memory_in_use);
        };
        match Handle::try_current() {
            Ok(runtime) if runtime.runtime_flavor() == RuntimeFlavor::MultiThread => {
                drop(runtime.spawn_blocking(free));
            }
            _ => free(),
        }
    }
}

impl<B: Backend, D: Send + Sync> Job<B, D> {
    /// Allocates the slices that this server holds. Stops when `opening.closed` is cancelled.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], which names the tensor, or the budgets that are too small;
    /// [`Error::JobFailed`] if the job was closed. The memory allocated so far is freed.
    pub fn open(opening: Opening<B>, host: Arc<dyn Host>) -> Result<Self> {
        let Opening { id, spec, epoch, placement, server, version, closed, devices, .. } = opening;
        let attempt = Attempt::first(epoch, version.unwrap_or(0));
        let slices: Vec<_> = (0..spec.manifest.slices().len()).map(|_| OnceLock::new()).collect();
        let populates = !opening.is_restored;
        let arena = arena_of(&spec);
        let new = Allocation {
            devices: &devices,
            spec: &spec,
            closed: &closed,
            arena: arena.as_ref(),
            slices: &slices,
            populates,
            memory: &opening.shares.memory,
            lacks_ledger: host.lacks(Safeguard::Ledger),
        };
        check_placement(&spec, &placement)?;
        let wanted = placement.slices_of(server).collect();
        let spaces = new.allocate(wanted, attempt, version.is_some())?;
        let progress = match version {
            None => Progress::upload(attempt, slices.iter().filter_map(OnceLock::get).count()),
            Some(_) => Progress::step(attempt, version, 0),
        };
        Ok(Self {
            id,
            spec,
            server,
            placement: RwLock::new(Arc::new(placement)),
            served: AtomicU64::new(0),
            devices,
            arena,
            shares: opening.shares,
            spaces: Mutex::new(spaces),
            budget: opening.budget,
            host,
            slices,
            early: Mutex::default(),
            followers: Followers::default(),
            progress: Mutex::new(progress),
            contributions: Mutex::default(),
            ranks: RwLock::default(),
            changed: watch::Sender::new(()),
            closed,
            restored: OnceLock::new(),
            contributed: Notify::new(),
            memory_in_use: Arc::default(),
        })
    }

    pub fn epoch(&self) -> u64 {
        self.attempt().epoch
    }

    /// Returns the memory of the published parameters, which processes on this host can map, if the
    /// system has such memory.
    pub fn arena(&self) -> Option<&Arc<Arena>> {
        self.arena.as_ref()
    }

    /// The open attempt.
    pub fn attempt(&self) -> Attempt {
        self.progress().attempt
    }

    pub fn version(&self) -> Option<u64> {
        self.progress().version
    }

    /// All slices on this server, with their numbers.
    pub fn slices(&self) -> impl Iterator<Item = (u32, &Slice<B>)> {
        let numbered = (0u32..).zip(&self.slices);
        numbered.filter_map(|(index, slice)| Some((index, slice.get()?)))
    }

    /// The slices of which this server is the primary, with their numbers.
    pub fn primary_slices(&self) -> impl Iterator<Item = (u32, &Slice<B>)> {
        self.slices().filter(|(_, slice)| slice.role() == Role::Primary)
    }

    /// Slice number `index`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the job has no such slice, [`Error::NotHere`] if another server holds
    /// it.
    pub fn slice(&self, index: u32) -> Result<&Slice<B>> {
        let Some(slice) = self.slices.get(index as usize) else {
            let expected = format!("less than the job's number of slices, {}", self.slices.len());
            return Err(Error::invalid("slice", index, expected));
        };
        slice.get().ok_or_else(|| Error::NotHere { job: self.spec.name.clone(), slice: index })
    }

    /// Slice number `index`, of which this server is the primary.
    ///
    /// # Errors
    /// Those of [`Self::slice`].
    pub fn primary_slice(&self, index: u32) -> Result<&Slice<B>> {
        match self.slice(index)? {
            slice if slice.role() == Role::Primary => Ok(slice),
            _ => Err(Error::NotHere { job: self.spec.name.clone(), slice: index }),
        }
    }

    /// Checks the epoch of a call.
    ///
    /// # Errors
    /// [`Error::StaleEpoch`].
    pub fn check_epoch(&self, epoch: u64) -> Result<()> {
        match self.epoch() {
            current if current == epoch => Ok(()),
            current => Err(Error::StaleEpoch { job: self.spec.name.clone(), epoch, current }),
        }
    }

    /// The memory of all slices.
    pub fn memory(&self) -> Memory {
        self.slices().fold(Memory::default(), |sum, (_, slice)| {
            let one = slice.memory();
            Memory {
                master: sum.master + one.master,
                state: sum.state + one.state,
                accumulator: sum.accumulator + one.accumulator,
                published: sum.published + one.published,
            }
        })
    }

    /// Returns the contributions to a step, if it is one of the last ones.
    ///
    /// # Errors
    /// [`Error::Refused`] for any other step.
    pub fn contributions(&self, step: u64) -> Result<StepContributions> {
        self.recorded().of(&self.spec.name, step)
    }

    fn recorded(&self) -> MutexGuard<'_, Contributions> {
        self.contributions.lock().expect("no holder of the lock panics")
    }

    /// The first tensor and rank for which the open step, or the upload, waits.
    pub fn waiting_for(&self) -> Option<String> {
        let (index, what, rank) =
            self.primary_slices().find_map(|(index, slice)| match slice.version() {
                None => Some((index, "initial parameters", slice.missing_upload()?)),
                Some(_) => Some((index, "gradient", slice.missing_rank()?)),
            })?;
        let tensor = self.spec.manifest.slices()[index as usize].tensor;
        let name = &self.spec.manifest.tensors()[tensor].name;
        Some(format!("{what} of {} for tensor {name:?}", describe(&self.spec, tensor, rank)))
    }

    /// Checks the lease of a push.
    ///
    /// # Errors
    /// [`Error::LeaseLost`] unless `lease` was granted for `rank`.
    pub fn check_lease(&self, rank: u32, lease: u64) -> Result<()> {
        match self.ranks().lease(rank) {
            Some(granted) if granted == lease => Ok(()),
            _ => Err(Error::LeaseLost { job: self.spec.name.clone(), rank }),
        }
    }

    /// Stores a chunk of an upload. Returns the number of new elements.
    pub fn upload(
        &self,
        attempt: Attempt,
        index: u32,
        upload: Upload,
        chunk: &Chunk,
    ) -> Result<u64> {
        let current = || self.check_epoch(attempt.epoch);
        let slice = self.slice(index)?;
        let (new, complete) = self.note(index, slice.upload(attempt, upload, chunk, current))?;
        if complete {
            self.finish_upload(attempt, 1);
        }
        Ok(new)
    }

    /// Records that `rank` uploads nothing of a slice: the slice keeps its copied content.
    /// `applied` is the same as in [`Upload`].
    pub fn keep(
        &self,
        attempt: Attempt,
        index: u32,
        rank: u32,
        applied: AppliedSteps,
    ) -> Result<()> {
        let slice = self.slice(index)?;
        senders::contributors_of(&self.spec, index, &slice.contributors, rank, Sent::Initial)?;
        let current = || self.check_epoch(attempt.epoch);
        if slice.keep(attempt, rank, applied, current)? {
            self.finish_upload(attempt, 1);
        }
        Ok(())
    }

    /// Counts `slices` whose initial parameters are complete. It is first called with 0, for a
    /// server without slices.
    pub fn finish_upload(&self, attempt: Attempt, slices: usize) {
        let mut progress = self.progress();
        if !progress.is_upload || progress.attempt != attempt {
            return; // the attempt has ended
        }
        progress.waiting -= slices;
        if progress.waiting == 0 {
            self.tell(JobEvent::Initialised { epoch: attempt.epoch });
        }
    }

    /// Adds a chunk of a rank's gradient. Returns the number of new elements.
    pub fn contribute(&self, attempt: Attempt, index: u32, chunk: &Chunk) -> Result<u64> {
        let slice = self.primary_slice(index)?;
        let current = || {
            let mut progress = self.check_attempt(attempt, slice)?;
            progress.arrivals.note(chunk.rank, self.host.now());
            Ok(())
        };
        let added = slice.contribute(attempt, chunk, &self.budget, current);
        let (new, reduced) = self.note(index, added)?;
        self.contributed.notify_waiters();
        self.finish_reduction(attempt, index, reduced);
        Ok(new)
    }

    /// Names the rank whose gradient is not finite in the sum that another rank pushes of a trained
    /// slice. `named`: the rank that pushes, and the other one, if it is known.
    pub fn name_overflow(
        &self,
        attempt: Attempt,
        index: u32,
        named: (u32, Option<u32>),
    ) -> Result<()> {
        let slice = self.primary_slice(index)?;
        let current = || self.check_attempt(attempt, slice).map(drop);
        self.note(index, slice.name_overflow(attempt, named, current))
    }

    /// Records that a rank has nothing more to send of a trained slice.
    pub fn absent(&self, attempt: Attempt, index: u32, rank: u32) -> Result<()> {
        let slice = self.primary_slice(index)?;
        let current = || self.check_attempt(attempt, slice).map(drop);
        let reduced = self.note(index, slice.absent(attempt, rank, current))?;
        self.contributed.notify_waiters();
        self.finish_reduction(attempt, index, reduced);
        Ok(())
    }

    /// Checks the attempt of a push. Returns the progress of the attempt.
    ///
    /// # Errors
    /// [`Error::StaleEpoch`], [`Error::StepMismatch`], [`Error::StaleAttempt`] unless `attempt` is
    /// open and `slice` is at its version.
    fn check_attempt(
        &self,
        attempt: Attempt,
        slice: &Slice<B>,
    ) -> Result<MutexGuard<'_, Progress<D>>> {
        let progress = self.check_open(attempt)?;
        match slice.version() {
            _ if self.host.lacks(Safeguard::Fence) => Ok(progress),
            Some(version) if version == attempt.step => Ok(progress),
            version => Err(Error::StepMismatch {
                job: self.spec.name.clone(),
                step: attempt.step,
                current: version.unwrap_or_default(),
            }),
        }
    }

    /// Checks that `attempt` is open. Returns its progress.
    ///
    /// # Errors
    /// [`Error::StaleEpoch`], [`Error::StepMismatch`], [`Error::StaleAttempt`].
    fn check_open(&self, attempt: Attempt) -> Result<MutexGuard<'_, Progress<D>>> {
        let mut progress = self.progress();
        if self.host.lacks(Safeguard::Fence) {
            return Ok(progress);
        }
        if progress.attempt != attempt {
            return Err(attempt.refusal(&self.spec.name, progress.attempt));
        }
        progress.begin_phase(|| self.host.now());
        Ok(progress)
    }

    /// Counts a slice whose gradient is complete.
    fn finish_reduction(&self, attempt: Attempt, slice: u32, reduced: Option<Reduced>) {
        let Some(reduced) = reduced else { return };
        let is_primary = self.slice(slice).is_ok_and(|slice| slice.role() == Role::Primary);
        let mut progress = self.progress();
        if progress.is_upload || progress.attempt != attempt {
            return; // the attempt has ended
        }
        let ready = progress.add(slice, reduced, is_primary);
        let is_ready = ready.is_some();
        if let Some(reduced) = ready {
            let took = progress.end_phase(self.host.now());
            self.host.measured(Phase::Reduce, attempt, took, None);
            self.tell(JobEvent::Ready { attempt, reduced });
        }
        drop(progress);
        if is_ready || is_primary && self.spec.replicas > 1 {
            // Readers of the gradient and backups wait for it.
            self.changed.send_replace(());
        }
    }

    /// Notified when gradients arrive, after which parked ones may have their turn.
    pub fn contributed(&self) -> &Notify {
        &self.contributed
    }

    /// Ends all waits and transfers, because the job is being dropped.
    pub fn close(&self) {
        self.closed.cancel();
    }

    /// Dropped when the memory of the job has been freed.
    pub fn memory_in_use(&self) -> Weak<()> {
        Arc::downgrade(&self.memory_in_use)
    }

    /// Cancelled when the job is dropped.
    pub fn closed(&self) -> &CancellationToken {
        &self.closed
    }

    /// The error for calls that were open when the job was dropped.
    pub fn closed_error(&self) -> Error {
        closed_error(&self.spec.name)
    }

    /// Ends the hold of a checkpoint on a slice. A gradient that was not reported because of it is
    /// reported now.
    pub fn finish_save(&self, index: u32, holds: &Arc<Holds>) -> Result<()> {
        let ended = self.note(index, self.slice(index)?.end_save(holds))?;
        if let Some((attempt, reduced)) = ended {
            self.finish_reduction(attempt, index, Some(reduced));
        }
        Ok(())
    }

    /// Ends the job if its disk or device has failed in an operation on slice number `index`, which
    /// the error then names.
    pub fn note<T>(&self, index: u32, done: Result<T>) -> Result<T> {
        of_slice(index, done).inspect_err(|error| {
            if matches!(error, Error::Storage { .. } | Error::Device { .. }) {
                self.fail(error);
            }
        })
    }

    /// Reports an error that ends the job.
    pub fn fail(&self, error: &Error) {
        self.tell(JobEvent::failed(self.epoch(), error));
    }

    /// The number of slices that the open step needs the reduced gradient of.
    fn training_slices(&self) -> usize {
        let trains = |slice: &Slice<B>| slice.group.is_some() && slice.role().takes_gradients();
        self.slices().filter(|(_, slice)| trains(slice)).count()
    }

    pub fn tell(&self, event: JobEvent) {
        self.host.tell(event);
    }

    fn ranks(&self) -> RwLockReadGuard<'_, Ranks> {
        self.ranks.read().expect("no holder of the lock panics")
    }

    fn ranks_mut(&self) -> RwLockWriteGuard<'_, Ranks> {
        self.ranks.write().expect("no holder of the lock panics")
    }

    fn progress(&self) -> MutexGuard<'_, Progress<D>> {
        self.progress.lock().expect("no holder of the lock panics")
    }
}

/// Names slice number `index` in the error of an operation on it.
fn of_slice<T>(index: u32, done: Result<T>) -> Result<T> {
    done.map_err(|error| match error {
        Error::Device { slice: None, cause } => Error::Device { slice: Some(index), cause },
        other => other,
    })
}

fn closed_error(job: &str) -> Error {
    Error::JobFailed {
        job: job.to_owned(),
        reason: "it was deleted, or this server has dropped it".to_owned(),
    }
}

#[cfg(test)]
#[path = "job_tests.rs"]
mod tests;
