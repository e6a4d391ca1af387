//! Rewinds: a job returns to a checkpoint, where it begins a new line, because an operator asks for
//! it or after a spike.

use std::{ops::Range, sync::Arc};

use zeroshard_model::{Error, Line, Restore, RestoreVersion, Result};

use crate::{
    cluster::context::Context,
    job::{Job, Phase, restore::being_restored},
    operators::history::Severity,
    vocabulary::{
        calls::{Reply, Rewind},
        commands::Checkpoint,
        events::Action,
        ids::{Caller, JobRef, Waiter},
    },
};

impl Job {
    /// A client asks the job to return to a checkpoint.
    pub(crate) fn rewind(&mut self, caller: Caller, rewind: Rewind, cx: &mut Context<'_>) {
        match self.try_rewind(caller, rewind, cx) {
            Ok(None) => {}
            Ok(Some(line)) => cx.push(Action::Answer(caller, Ok(Reply::Rewound { line }))),
            Err(error) => cx.push(Action::Answer(caller, Err(error))),
        }
    }

    /// Returns the line of the job if it has returned already.
    fn try_rewind(
        &mut self,
        caller: Caller,
        rewind: Rewind,
        cx: &mut Context<'_>,
    ) -> Result<Option<u64>> {
        let Rewind { job: JobRef { name, id }, from, to, completed, skips, wait } = rewind;
        if id != 0 && id != self.id {
            return Err(Error::JobReplaced { job: name });
        }
        let Self { line, phase, .. } = self;
        let is_returning = matches!(
            phase,
            Phase::Waiting { interrupted: Some(_), .. }
                | Phase::Opening { interrupted: Some(_), .. }
        );
        if is_returning {
            return Err(being_restored(&name));
        }
        let open = phase.open_mut(&name)?;
        let Some(current) = open.version.current() else {
            let cause = "its initial parameters have not all been uploaded yet".to_owned();
            return Err(Error::Unavailable { peer: format!("job {name:?}"), cause });
        };
        if line.number != from {
            let is_done = line.skips() == skips;
            return match open.began_from() {
                Some(version) if version == to.version.version && is_done => Ok(Some(line.number)),
                _ => Err(Error::refused(format!(
                    "job {name:?} has returned to another checkpoint meanwhile, and is on line {}; \
                     look at it before you rewind it",
                    line.number
                ))),
            };
        }
        if to.version.version >= current {
            return Err(Error::refused(format!(
                "job {name:?} is at version {current}; rewind it to an earlier one"
            )));
        }
        let saves = &cx.common.saves;
        if saves.completes(&name) || saves.number_completed() != completed {
            let cause = "a save is being completed, which may remove old checkpoints".to_owned();
            return Err(Error::Unavailable { peer: format!("job {name:?}"), cause });
        }
        let waiter = Waiter::new(caller, cx.now, wait);
        self.return_to(to, skips, Some(waiter), "as requested", cx)?;
        Ok(None)
    }

    /// Interrupts an open job, which returns to a checkpoint. `skips`: all batches that the next
    /// line skips. `why` ends a sentence about the return.
    ///
    /// # Errors
    /// Those of [`Line::new`].
    pub(crate) fn return_to(
        &mut self,
        to: Checkpoint,
        skips: Vec<Range<u64>>,
        waiter: Option<Waiter>,
        why: &str,
        cx: &mut Context<'_>,
    ) -> Result<()> {
        let Self { name, line, epoch, phase, progress, .. } = self;
        let Phase::Open(open) = phase else { return Ok(()) };
        let next = Line::new(line.number, skips)?;
        let checkpoint = Arc::new(Restore {
            url: to.url,
            job: to.job,
            version: RestoreVersion::Exactly(to.version.version),
            line: Some(to.version.line),
        });
        let (attempt, known, current) = (open.attempt(*epoch), *epoch, open.step());
        let (interrupted, waiters) = open.interrupt(checkpoint, cx.now);
        let interrupted = Some(Box::new(interrupted.requested(next, waiter)));
        *phase = Phase::Waiting { creators: Vec::new(), placing: false, interrupted };
        let cause = format!("it returns to version {}, {why}", to.version);
        progress.disturbed(Error::Unavailable { peer: format!("job {name:?}"), cause });
        cx.refuse(waiters, &being_restored(name));
        let text = format!("job {name:?} returns from version {current} to {}, {why}", to.version);
        cx.alarm(Severity::Warning, text);
        if let Some(waiter) = waiter {
            cx.push(Action::Tick(waiter.deadline));
        }
        self.interrupted((Some(attempt), known), cx);
        Ok(())
    }
}
