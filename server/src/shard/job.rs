//! One job on this server: its slices, the open step, the epoch.

use std::{
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use rayon::prelude::*;
use tokio::sync::{Notify, mpsc::UnboundedSender, watch};
use tokio_util::sync::CancellationToken;
use zeroshard_proto::{Error, JobSpec, Placement, Result, pb};

use super::{
    budget::Budget,
    lane::Lanes,
    round::Piece,
    senders::describe,
    slice::{Apply, Memory, Reduced, Slice, Step, Upload},
};
use crate::{backend::Backend, metrics::Metrics};
use progress::Progress;

mod progress;
mod wait;

pub(crate) use wait::Deadline;

/// Readers are woken after so many elements of a step, so that they can send while the rest is computed.
const WAKE_ELEMENTS: usize = 1 << 20;

/// What a job needs of its surroundings.
pub(crate) struct Surroundings<B> {
    pub(crate) backend: Arc<B>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) metrics: Arc<Metrics>,
    /// To the coordinator.
    pub(crate) events: UnboundedSender<pb::server_event::Event>,
}

/// A job's slices on this server, and the step that is open.
pub(crate) struct Job<B: Backend> {
    pub(crate) spec: JobSpec,
    surroundings: Surroundings<B>,
    /// By number; `None` where another server is the primary.
    slices: Vec<Option<Slice<B>>>,
    epoch: AtomicU64,
    progress: Mutex<Progress>,
    /// Ticks when a slice has a new version, and when the epoch changes.
    changed: watch::Sender<()>,
    closed: CancellationToken,
    /// Ticks when gradients come in: parked ones may have their turn.
    contributed: Notify,
}

impl<B: Backend> Job<B> {
    /// Allocates the slices of which server `id` is the primary.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] naming the tensor; what was allocated is freed.
    pub(crate) fn open(
        spec: JobSpec,
        epoch: u64,
        placement: &Placement,
        id: u64,
        surroundings: Surroundings<B>,
    ) -> Result<Self> {
        let mut slices: Vec<_> = (0..spec.manifest.slices().len()).map(|_| None).collect();
        let mut lanes: Option<Lanes> = None;
        for index in placement.primary_slices(id) {
            let cut = spec.manifest.slices()[index];
            // Most slices follow another of their tensor.
            let same = lanes.take_if(|lanes| lanes.tensor == cut.tensor);
            let lanes = lanes.insert(same.unwrap_or_else(|| Lanes::new(&spec, cut.tensor)));
            let slice = Slice::allocate(&*surroundings.backend, &spec, index, lanes.of(&cut));
            slices[index] = Some(slice.map_err(|e| Error::OutOfMemory {
                what: format!("slice {index} of tensor {:?}", spec.manifest.tensor_of(index).name),
                bytes: (e.numel * e.dtype.size()) as u64,
            })?);
        }
        let progress = Progress::new(None, slices.iter().flatten().count());
        Ok(Self {
            spec,
            surroundings,
            slices,
            epoch: AtomicU64::new(epoch),
            progress: Mutex::new(progress),
            changed: watch::Sender::new(()),
            closed: CancellationToken::new(),
            contributed: Notify::new(),
        })
    }

    pub(crate) fn backend(&self) -> &B {
        &self.surroundings.backend
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    pub(crate) fn version(&self) -> Option<u64> {
        self.progress().version
    }

    /// All slices that are here, with their numbers.
    pub(crate) fn slices(&self) -> impl Iterator<Item = (u32, &Slice<B>)> {
        let numbered = (0u32..).zip(&self.slices);
        numbered.filter_map(|(index, slice)| Some((index, slice.as_ref()?)))
    }

    /// Slice number `index`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the job has no such slice, [`Error::NotHere`] if another server has it.
    pub(crate) fn slice(&self, index: u32) -> Result<&Slice<B>> {
        let Some(slice) = self.slices.get(index as usize) else {
            let expected = format!("less than the job's number of slices, {}", self.slices.len());
            return Err(Error::invalid("slice", index, expected));
        };
        slice.as_ref().ok_or_else(|| Error::NotHere { job: self.spec.name.clone(), slice: index })
    }

    /// # Errors
    /// [`Error::StaleEpoch`].
    pub(crate) fn check_epoch(&self, epoch: u64) -> Result<()> {
        match self.epoch() {
            current if current == epoch => Ok(()),
            current => Err(Error::StaleEpoch { job: self.spec.name.clone(), epoch, current }),
        }
    }

    /// Bytes of all slices.
    pub(crate) fn memory(&self) -> Memory {
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

    /// The first tensor and rank that the open step, or the upload, waits for.
    pub(crate) fn waiting_for(&self) -> Option<String> {
        let (index, what, rank) = self.slices().find_map(|(index, slice)| match slice.version() {
            None => Some((index, "initial parameters", slice.missing_upload()?)),
            Some(_) => Some((index, "gradient", slice.missing_rank()?)),
        })?;
        let tensor = self.spec.manifest.slices()[index as usize].tensor;
        let name = &self.spec.manifest.tensors()[tensor].name;
        Some(format!("{what} of {} for tensor {name:?}", describe(&self.spec, tensor, rank)))
    }

    /// Takes a piece of what the job begins with. Returns how many elements were new.
    pub(crate) fn upload(&self, epoch: u64, index: u32, upload: Upload, piece: &Piece) -> Result<u64> {
        let slice = self.slice(index)?;
        let (new, complete) = slice.upload(self.backend(), upload, piece, || self.check_epoch(epoch))?;
        if complete {
            self.finish_upload(epoch, 1);
        }
        Ok(new)
    }

    /// Counts `slices` whose initial parameters are complete; with the last one, version 0 is there. Call it
    /// with 0 at first, for a server without a slice.
    pub(crate) fn finish_upload(&self, epoch: u64, slices: usize) {
        let mut progress = self.progress();
        if self.epoch() != epoch {
            return; // aborted meanwhile: these slices count no longer
        }
        progress.waiting -= slices;
        if progress.waiting == 0 && progress.version.is_none() {
            *progress = Progress::new(Some(0), self.training_slices());
            let job = self.spec.name.clone();
            self.tell(pb::server_event::Event::Initialised(pb::JobInitialised {
                job,
                epoch,
                ..Default::default()
            }));
        }
        self.changed.send_replace(());
    }

    /// Takes a piece of a rank's gradient of `step`. Returns how many elements were new.
    pub(crate) fn contribute(&self, epoch: u64, step: u64, index: u32, piece: &Piece) -> Result<u64> {
        let slice = self.slice(index)?;
        let current = || {
            self.check_epoch(epoch)?;
            self.check_step(slice, step)
        };
        let (new, reduced) = slice.contribute(self.backend(), piece, &self.surroundings.budget, current)?;
        self.contributed(epoch, step, index, reduced);
        Ok(new)
    }

    /// Notes that a rank has nothing more of a slice that trains in `step`.
    pub(crate) fn absent(&self, epoch: u64, step: u64, index: u32, rank: u32) -> Result<()> {
        let slice = self.slice(index)?;
        let current = || {
            self.check_epoch(epoch)?;
            self.check_step(slice, step)
        };
        let reduced = slice.absent(self.backend(), rank, current)?;
        self.contributed(epoch, step, index, reduced);
        Ok(())
    }

    /// Takes a piece of what a buffer is after `step`. Returns how many elements were new.
    pub(crate) fn replace(&self, epoch: u64, step: u64, index: u32, piece: &Piece) -> Result<u64> {
        let slice = self.slice(index)?;
        slice.replace(self.backend(), piece, || {
            self.check_epoch(epoch)?;
            self.check_step(slice, step)
        })
    }

    fn contributed(&self, epoch: u64, step: u64, slice: u32, reduced: Option<Reduced>) {
        self.contributed.notify_waiters();
        self.progress().phase_began.get_or_insert_with(Instant::now);
        if let Some(reduced) = reduced {
            self.finish_reduction(epoch, step, slice, reduced);
        }
    }

    /// # Errors
    /// [`Error::StepMismatch`] unless `step` is the slice's open step.
    pub(crate) fn check_step(&self, slice: &Slice<B>, step: u64) -> Result<()> {
        match slice.version() {
            Some(current) if current == step => Ok(()),
            current => Err(Error::StepMismatch {
                job: self.spec.name.clone(),
                step,
                current: current.unwrap_or_default(),
            }),
        }
    }

    fn finish_reduction(&self, epoch: u64, step: u64, slice: u32, reduced: Reduced) {
        let mut progress = self.progress();
        if self.epoch() != epoch {
            return; // aborted meanwhile
        }
        progress.add(slice, reduced);
        if progress.waiting == 0 {
            progress.end_phase(&self.surroundings.metrics.phases.reduce);
            let report = progress.report(&self.spec.name, epoch, step);
            self.tell(pb::server_event::Event::Ready(report));
        }
    }

    /// Takes every slice to the next version. Blocks for as long as the arithmetic takes.
    ///
    /// # Errors
    /// [`Error::StaleEpoch`] or [`Error::StepMismatch`] if the decision is not about the open step,
    /// [`Error::Internal`] if the step is not complete, [`Error::OutOfMemory`].
    pub(crate) fn decide(&self, decision: &pb::Decision) -> Result<()> {
        self.check_epoch(decision.epoch)?;
        let groups = zeroshard_proto::job::optimizers(decision.groups.clone())?;
        self.spec.validate_step(&groups)?;
        let phases = &self.surroundings.metrics.phases;
        {
            let mut progress = self.progress();
            progress.end_phase(&phases.decide);
            if progress.version != Some(decision.step) || progress.waiting > 0 {
                let cause = format!(
                    "step {} was decided at version {:?} with {} slices incomplete",
                    decision.step, progress.version, progress.waiting
                );
                return Err(Error::Internal { cause });
            }
            // From here on slice after slice is open for the next step, and may have all of its gradients before
            // the last slice is there: they count from now on, the version when all slices have it.
            *progress = Progress::new(progress.version, self.training_slices());
        }
        let step = Step {
            version: decision.step,
            apply: decision.apply.then_some(Apply {
                groups: &groups,
                coefficient: decision.coefficient,
                unclipped: decision.unclipped,
            }),
        };
        let began = Instant::now();
        self.apply(&step)?;
        phases.apply.observe(began.elapsed().as_secs_f64());
        self.progress().version = Some(decision.step + 1);
        self.changed.send_replace(());
        Ok(())
    }

    fn apply(&self, step: &Step<'_>) -> Result<()> {
        let done = AtomicU64::new(0);
        self.slices.par_iter().flatten().try_for_each(|slice| {
            slice.step(self.backend(), step)?;
            let numel = slice.spec.numel as u64;
            let before = done.fetch_add(numel, Ordering::Relaxed);
            let wake = WAKE_ELEMENTS as u64;
            if (before + numel) / wake > before / wake {
                self.changed.send_replace(());
            }
            Ok(())
        })
    }

    /// Aborts the open step: what has come of it is dropped, and the old epoch refused from now on.
    pub(crate) fn new_epoch(&self, epoch: u64, initialised: bool) {
        // First the epoch, then the slices: whoever adds later, under a slice's lock, sees the new epoch.
        self.epoch.store(epoch, Ordering::Release);
        for (_, slice) in self.slices() {
            slice.abort(initialised);
        }
        let mut progress = self.progress();
        *progress = match progress.version {
            Some(version) if initialised => Progress::new(Some(version), self.training_slices()),
            _ => Progress::new(None, self.slices().count()),
        };
        drop(progress);
        if !initialised {
            self.finish_upload(epoch, 0);
        }
        self.changed.send_replace(());
    }

    /// Ends all waits: the job is being dropped.
    pub(crate) fn close(&self) {
        self.closed.cancel();
    }

    /// Cancelled when the job is dropped.
    pub(crate) fn closed(&self) -> &CancellationToken {
        &self.closed
    }

    /// What calls are told that were open when the job was dropped.
    pub(crate) fn closed_error(&self) -> Error {
        let reason = "it was deleted, or this server has given it up".to_owned();
        Error::JobFailed { job: self.spec.name.clone(), reason }
    }

    fn training_slices(&self) -> usize {
        self.slices().filter(|(_, slice)| slice.group.is_some()).count()
    }

    fn tell(&self, event: pb::server_event::Event) {
        // Nobody listens once the coordinator is lost, and then this job is about to be dropped.
        let _ = self.surroundings.events.send(event);
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().expect("no holder of the lock panics")
    }
}
