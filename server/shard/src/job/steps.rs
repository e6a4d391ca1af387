//! The commands of the coordinator to a job: leases, epochs, attempts, version 0, decisions. The
//! job's own task calls these methods one after the other.

use std::{
    mem,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
};

use rayon::prelude::*;
use zeroshard_kernels::Backend;
use zeroshard_model::{Attempt, Error, Result};

use super::{
    Job, Phase, Rest, arrivals::Arrivals, contributions::Collected, of_slice, progress::Progress,
};
use crate::{
    device::Device,
    events::JobEvent,
    fair::{Share, Turn},
    slice::{Apply, Slice, Step},
};

/// Readers are woken after this number of elements of a step, so that they can send while the rest
/// is computed.
const WAKE_ELEMENTS: usize = 1 << 20;

/// The number of elements after which a turn ends if another job waits. They take about 2 ms.
const TURN_ELEMENTS: u64 = 1 << 20;

impl<B: Backend, D: Send + Sync> Job<B, D> {
    /// From now on only pushes with this lease are accepted from `rank`.
    pub fn grant(&self, rank: u32, lease: u64) {
        self.ranks_mut().grant(rank, lease);
        self.tell(JobEvent::Granted { rank, lease });
    }

    /// The rank had left in order before the job was opened.
    pub fn rank_left(&self, rank: u32) {
        self.ranks_mut().end_lease(rank, true);
    }

    /// The lease of `rank` has ended, in order if it has `left`: the open attempt ends, and all
    /// messages of the old epoch are stale.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn new_epoch(&self, epoch: u64, rank: u32, left: bool) -> Result<()> {
        self.ranks_mut().end_lease(rank, left);
        for (index, slice) in self.slices() {
            of_slice(index, slice.set_done(rank, false))?;
        }
        let attempt = Attempt { epoch, number: 0, ..self.attempt() };
        self.open_attempt(attempt, None)
    }

    /// Messages of earlier attempts are refused from now on. Slices and counts change to the new
    /// attempt with its first message that reaches them, or here, whichever comes first. `rested`:
    /// the highest rank of the last step, if the attempt is open because every rank has rested.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn open_attempt(&self, attempt: Attempt, rested: Option<u32>) -> Result<()> {
        {
            let mut progress = self.progress();
            if attempt <= progress.attempt {
                return Ok(());
            }
            *progress = match progress.is_upload {
                true => Progress::upload(attempt, self.slices().count()),
                false => progress.again(attempt, self.training_slices()),
            };
            progress.rested = rested;
        }
        self.changed.send_replace(());
        self.finish_upload(attempt, 0);
        for (index, slice) in self.slices() {
            let reduced = of_slice(index, slice.catch_up(attempt))?;
            self.finish_reduction(attempt, index, reduced);
        }
        Ok(())
    }

    /// `rank` has no more data: elements that it has not sent count as zeros, in this step and in
    /// all later ones.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn rank_done(&self, rank: u32) -> Result<()> {
        self.ranks_mut().finish(rank);
        self.set_absent(rank, true)
    }

    /// A rank contributes nothing: elements that it has not sent count as zeros, in this step and
    /// in later ones. If its rest `ends`, it contributes again from the next attempt on.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn rank_rests(&self, rest: Rest, ends: bool) -> Result<()> {
        self.ranks_mut().rest(rest, ends);
        self.set_absent(rest.rank, !ends)
    }

    fn set_absent(&self, rank: u32, absent: bool) -> Result<()> {
        let attempt = self.attempt();
        for (index, slice) in self.slices() {
            let reduced = of_slice(index, slice.set_done(rank, absent))?;
            self.finish_reduction(attempt, index, reduced);
        }
        Ok(())
    }

    /// Every server has its initial parameters: version 0 is published.
    ///
    /// # Errors
    /// [`Error::Internal`] if this server does not have them, [`Error::OutOfMemory`].
    pub fn publish(&self, epoch: u64) -> Result<()> {
        {
            let progress = self.progress();
            if !progress.is_upload || progress.waiting > 0 || progress.attempt.epoch != epoch {
                let cause = format!(
                    "version 0 was published in epoch {epoch}; this server is in epoch {} with {} slices incomplete",
                    progress.attempt.epoch, progress.waiting
                );
                return Err(Error::Internal { cause });
            }
        }
        self.publish_at(0)
    }

    /// Publishes the first version for all readers at once: 0, or that of a checkpoint.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn publish_at(&self, version: u64) -> Result<()> {
        let attempt = {
            let mut progress = self.progress();
            let attempt = Attempt { step: version, ..progress.attempt };
            // From now on slices accept gradients, one after the other.
            *progress = Progress::step(attempt, None, self.training_slices());
            attempt
        };
        self.slices.par_iter().enumerate().try_for_each(|(index, slice)| -> Result<()> {
            let Some(slice) = slice.get() else { return Ok(()) };
            let index = index as u32;
            let published = of_slice(index, slice.publish(version))?;
            self.finish_reduction(attempt, index, published);
            Ok(())
        })?;
        self.progress().version = Some(version);
        self.serve(version);
        Ok(())
    }

    /// Publishes `version`, to which the job has returned while ranks were waiting.
    ///
    /// # Errors
    /// Those of [`Self::publish_at`].
    pub fn return_to(&self, version: u64) -> Result<()> {
        self.restored.get_or_init(|| (self.epoch(), version));
        self.publish_at(version)
    }

    /// Takes every slice to the next version; without `apply`, with the same state. `absent`: the
    /// slices for which no rank had a gradient, which backups do not know themselves. Blocks for
    /// the duration of the arithmetic. The coordinator is informed before it that the decision is
    /// stored.
    ///
    /// # Errors
    /// [`Error::Internal`] if the decision is not about the open attempt, or the attempt is
    /// incomplete; [`Error::Invalid`] for hyperparameters that the job cannot have;
    /// [`Error::Storage`] if the disk of slices fails.
    pub fn decide(
        &self,
        decision: &Arc<D>,
        attempt: Attempt,
        (apply, absent): (Option<Apply<'_>>, &[u32]),
    ) -> Result<()> {
        if let Some(apply) = &apply {
            self.spec.validate_step(apply.groups)?;
        }
        let (next, arrivals) = self.begin_step(decision, attempt)?;
        let contributions = Collected::new(attempt.step, arrivals);
        self.end_follows();
        let began = self.host.now();
        let applied = self.apply(&Step { apply, next, absent }, &contributions);
        let took = self.host.now().saturating_duration_since(began);
        self.host.measured(Phase::Apply, attempt, took, applied.as_ref().err());
        applied?;
        self.recorded().push(contributions);
        self.progress().version = Some(next.step);
        self.changed.send_replace(());
        if self.spec.compares_at(next.step) {
            self.tell_hashes(next.epoch, next.step);
        }
        Ok(())
    }

    /// Sends the hashes of all slices that have content, which the coordinator compares with those
    /// of their other servers. A slice is omitted if there is no memory for a second version of it,
    /// which the next step needs while this one is read.
    fn tell_hashes(&self, epoch: u64, version: u64) {
        let hash = |(index, slice): (usize, &OnceLock<Slice<B>>)| {
            let slice = slice.get().filter(|slice| slice.role().has_content())?;
            let digest = slice.digest(&self.spec.name, version).ok()?;
            let hash = u64::from_le_bytes(std::array::from_fn(|at| digest[at]));
            Some((index as u32, hash))
        };
        let slices = self.slices.par_iter().enumerate().filter_map(hash).collect();
        self.tell(JobEvent::Hashes { epoch, version, slices });
    }

    /// Checks and stores the decision. Returns the first attempt at the next step, and the arrivals
    /// of the gradients of this one.
    fn begin_step(&self, decision: &Arc<D>, attempt: Attempt) -> Result<(Attempt, Arrivals)> {
        let Attempt { epoch, step, .. } = attempt;
        let mut progress = self.progress();
        let took = progress.end_phase(self.host.now());
        self.host.measured(Phase::Decide, attempt, took, None);
        if progress.attempt != attempt || progress.version != Some(step) || progress.waiting > 0 {
            let cause = format!(
                "{attempt:?} was decided; this server is at {:?} and version {:?} with {} slices incomplete",
                progress.attempt, progress.version, progress.waiting
            );
            return Err(Error::Internal { cause });
        }
        // From now on slices are open for the next step, one after the other, and may have all of
        // its gradients before the last slice has its version. Gradients therefore count from now
        // on, and the version when all slices have it.
        let next = Attempt::first(epoch, step + 1);
        let arrivals = mem::take(&mut progress.arrivals);
        *progress = progress.after(decision.clone(), next, self.training_slices());
        drop(progress);
        self.tell(JobEvent::Stored { epoch, step });
        Ok((next, arrivals))
    }

    fn apply(&self, step: &Step<'_>, contributions: &Collected) -> Result<()> {
        let done = AtomicU64::new(0);
        let apply = |(index, slice): (u32, &Slice<B>)| {
            contributions.add(slice);
            let reduced = of_slice(index, slice.step(index, step))?;
            self.finish_reduction(step.next, index, reduced);
            let numel = slice.spec.numel as u64;
            let before = done.fetch_add(numel, Ordering::Relaxed);
            let wake = WAKE_ELEMENTS as u64;
            if (before + numel) / wake > before / wake {
                self.changed.send_replace(());
            }
            Ok(())
        };
        let (streamed, resident): (Vec<_>, Vec<_>) =
            self.slices().partition(|(_, slice)| slice.is_streamed());
        let in_memory = || in_turns(&self.shares.apply, &resident, &apply);
        apply_streamed(&self.devices, &streamed, &apply, Box::new(in_memory))
    }
}

/// Runs `apply` for slices in memory. Each thread works only while the job has a turn.
///
/// # Errors
/// The first error of `apply`.
fn in_turns<'a, B: Backend>(
    share: &Share,
    slices: &[(u32, &'a Slice<B>)],
    apply: &(impl Fn((u32, &'a Slice<B>)) -> Result<()> + Sync),
) -> Result<()> {
    let (next, failed) = (&AtomicUsize::new(0), &OnceLock::new());
    // Applies slices until the turn is over. Returns true if slices may be left.
    let work = |turn: Turn| {
        let mut elements = 0;
        loop {
            let Some(&slice) = slices.get(next.fetch_add(1, Ordering::Relaxed)) else {
                turn.end(elements);
                return false;
            };
            if let Err(error) = apply(slice) {
                failed.get_or_init(|| error);
                next.store(slices.len(), Ordering::Relaxed);
                return false;
            }
            elements += slice.1.spec.numel as u64;
            if elements >= TURN_ELEMENTS && turn.is_wanted() {
                turn.end(elements);
                return true;
            }
        }
    };
    let (sender, turns) = &mpsc::channel();
    let work = &work;
    rayon::in_place_scope(|scope| {
        // Each turn applies at least one slice, unless no slice is left.
        for _ in slices {
            share.ask(TURN_ELEMENTS, sender);
            let Ok(Some(turn)) = turns.recv() else { return };
            let sender = sender.clone();
            scope.spawn(move |_| {
                if !work(turn) {
                    // The receiver outlives the scope, so sending cannot fail.
                    let _ = sender.send(None);
                }
            });
        }
    });
    failed.get().cloned().map_or(Ok(()), Err)
}

/// Runs `apply` for the streamed slices on the threads of their devices, and meanwhile `beside` on
/// this thread.
///
/// # Errors
/// The first one.
fn apply_streamed<'a, B: Backend>(
    devices: &[Device<B>],
    streamed: &[(u32, &'a Slice<B>)],
    apply: &(impl Fn((u32, &'a Slice<B>)) -> Result<()> + Sync),
    beside: Box<dyn FnOnce() -> Result<()> + '_>,
) -> Result<()> {
    let Some((device, others)) = devices.split_first() else { return beside() };
    let beside = || apply_streamed(others, streamed, apply, beside);
    let Some(steps) = device.tiers.as_ref().and_then(|tiers| tiers.steps()) else {
        return beside();
    };
    let here = streamed.iter().filter(|(_, slice)| slice.is_on(device));
    let here: Vec<_> = here.copied().collect();
    steps.run(here.len(), |number| apply(here[number]), beside)
}
