//! The capture of a job that waits for its step. The decision about the step fills it.

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use tokio::sync::oneshot;
use zeroshard_kernels::Backend;
use zeroshard_model::{Attempt, Error, Result};
use zeroshard_net::Deadline;
use zeroshard_proto::pb;
use zeroshard_shard::{budget::Budget, job::Job, slice::Apply};

use super::captured::Captured;

/// How long a call waits for the end of another capture, whose caller may have gone just now.
const PATIENCE: Duration = Duration::from_millis(500);
/// The pause before it looks again.
const PAUSE: Duration = Duration::from_millis(10);

/// The step that a caller wants.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) slices: Vec<u32>,
    pub(super) step: u64,
    /// The first spike from this step on.
    pub(super) until_spike: bool,
}

/// A capture that waits for its step.
struct Armed {
    wanted: Wanted,
    budget: Arc<Budget>,
    captured: oneshot::Sender<Result<Captured>>,
}

/// The capture of a job that waits for its step, if there is one.
#[derive(Default)]
pub(super) struct Captures(Mutex<Option<Armed>>);

impl Captures {
    fn lock(&self) -> MutexGuard<'_, Option<Armed>> {
        self.0.lock().expect("no holder of the lock panics")
    }

    /// Waits a moment until no other capture waits for its step.
    pub(super) async fn until_free(&self) {
        let deadline = Deadline::after(PATIENCE);
        while self.lock().is_some() && !deadline.left().is_zero() {
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// The slices keep gradients until the step. Returns where the captured step arrives.
    ///
    /// # Errors
    /// Those of [`Job::begin_capture`]; [`Error::Refused`] if another capture waits for its step.
    pub(super) fn arm<B: Backend>(
        &self,
        job: &Job<B, pb::Decision>,
        wanted: &Wanted,
        budget: &Arc<Budget>,
    ) -> Result<oneshot::Receiver<Result<Captured>>> {
        let (sender, captured) = oneshot::channel();
        // The lock is held, so that no decision comes before the capture is armed.
        let mut armed = self.lock();
        if armed.is_some() {
            return Err(Error::refused(format!(
                "another call is capturing a step of job {:?} on this server; repeat this one when \
                 it has ended",
                job.spec.name
            )));
        }
        job.begin_capture(&wanted.slices, wanted.step, budget)?;
        let (wanted, budget) = (wanted.clone(), budget.clone());
        *armed = Some(Armed { wanted, budget, captured: sender });
        Ok(captured)
    }

    /// Ends the capture whose caller has closed its receiver, if it still waits.
    pub(super) fn disarm<B: Backend>(&self, job: &Job<B, pb::Decision>) {
        let mut armed = self.lock();
        if let Some(abandoned) = armed.take_if(|armed| armed.captured.is_closed()) {
            job.end_capture(&abandoned.wanted.slices);
        }
    }

    /// Takes the capture that waits for the step of this decision.
    fn take_due(&self, decision: &pb::Decision) -> Option<Armed> {
        self.lock().take_if(|Armed { wanted, .. }| match wanted.until_spike {
            true => decision.step >= wanted.step && !decision.spike.is_empty(),
            false => decision.step == wanted.step,
        })
    }

    /// Takes every slice to the next version, and captures the step if somebody waits for it.
    ///
    /// # Errors
    /// Those of [`Job::decide`]. Those of the capture go to its caller.
    pub(super) fn decide<B: Backend>(
        &self,
        job: &Job<B, pb::Decision>,
        decision: &Arc<pb::Decision>,
        attempt: Attempt,
        apply: Option<Apply<'_>>,
    ) -> Result<()> {
        let due = self.take_due(decision).map(|armed| {
            let Armed { wanted, budget, .. } = &armed;
            let before = job.capture(&wanted.slices, decision.step, budget);
            job.end_capture(&wanted.slices);
            (armed, before)
        });
        let decided = job.decide(decision, attempt, (apply, &decision.absent));
        if let Some((armed, before)) = due {
            let captured = before.and_then(|before| {
                decided.clone()?;
                let after = job.digests(&armed.wanted.slices, decision.step + 1)?;
                Ok(Captured::new(job, decision, before, after))
            });
            // The caller may have gone.
            drop(armed.captured.send(captured));
        }
        decided
    }
}
