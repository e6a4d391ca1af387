//! Ranks that rest: they have no more batches, and contribute nothing until every rank rests, as in
//! torch's `Join`.
//!
//! A resting rank keeps its lease. The servers count its elements as zeros, and the steps of the
//! other ranks need neither its commits nor its discards. When every rank rests, all take part
//! again, in a new attempt. The end of any lease ends all rests with an error.

use zeroshard_model::{Error, JobSpec, Result, listing::some_of};

use crate::{
    cluster::context::Context,
    job::{Job, Open, Phase, commit::missing_ranks},
    vocabulary::{
        calls::{Reply, Rest, Rested, check_rank},
        commands::{Begins, Command},
        ids::{Caller, JobRef, Waiter},
    },
};

/// Checks that every rank has whole tensors: otherwise the other ranks lack what only the resting
/// one has.
///
/// # Errors
/// [`Error::Refused`].
fn check_replicated(spec: &JobSpec) -> Result<()> {
    let distributed = spec.manifest.tensors().iter().find(|tensor| tensor.layout.is_some());
    distributed.map_or(Ok(()), |tensor| {
        Err(Error::refused(format!(
            "tensor {:?} is distributed over a mesh; give every rank the same number of batches",
            tensor.name
        )))
    })
}

impl Open {
    /// The loss scale by which the mean gradient over all ranks is divided, so that the result is
    /// the mean over the ranks that are not excluded.
    pub(crate) fn scale_of_mean(&self, world: u32, loss_scale: f64) -> f64 {
        let excluded = self.uneven_inputs.excluded();
        loss_scale * (f64::from(world) - excluded as f64) / f64::from(world)
    }
}

impl Job {
    pub(crate) fn rest(&mut self, caller: Caller, rest: Rest, cx: &mut Context<'_>) {
        let waiter = Waiter::new(caller, cx.now, rest.wait);
        match self.try_rest(waiter, &rest, cx) {
            Ok(None) => self.advance(cx),
            Ok(Some(rested)) => self.answer_attempt(vec![waiter], Reply::Rested(rested), cx),
            Err(error) => cx.answer(waiter, Err(error)),
        }
    }

    /// Registers the call. Returns the end of the rest if all ranks have rested already.
    fn try_rest(
        &mut self,
        waiter: Waiter,
        rest: &Rest,
        cx: &mut Context<'_>,
    ) -> Result<Option<Rested>> {
        let Rest { turn, excluded, .. } = rest;
        let (name, rank) = (&turn.job.name, turn.rank);
        let Self { spec, epoch, phase, .. } = self;
        let open = phase.open_mut(name)?;
        check_rank(name, rank, spec.world)?;
        check_replicated(spec)?;
        open.check_lease(turn)?;
        let current = open.attempt(*epoch);
        if open.uneven_inputs.repeated(rank, waiter) {
            return Ok(None);
        }
        if let Some(rested) = open.uneven_inputs.ended(current)
            && turn.attempt < current
        {
            return Ok(Some(rested));
        }
        open.check_turn(turn, current)?;
        open.uneven_inputs.check_alike(turn, *excluded)?;
        let withdrawn = open.round.forget_rank(rank);
        cx.refuse(withdrawn, &Error::LeaseLost { job: name.clone(), rank });
        let begins = Begins { since: current.step, excluded: *excluded };
        open.uneven_inputs.insert(rank, begins, vec![waiter]);
        let begins = Some(begins);
        open.send(&Command::RankRests { job: turn.job.clone(), rank, begins }, cx.out);
        Ok(None)
    }

    /// When every rank rests, all take part again in a new attempt.
    pub(crate) fn resume_if_all_rest(&mut self, cx: &mut Context<'_>) {
        let Self { name, spec, id, epoch, phase: Phase::Open(open), .. } = self else { return };
        let Some(last) = open.uneven_inputs.last_to_rest() else { return };
        if open.active(spec.world) > 0 {
            return;
        }
        let (ranks, waiters) = open.uneven_inputs.end();
        let ended = open.attempt(*epoch);
        let calls = open.round.open_attempt(ended.number.saturating_add(1));
        let attempt = open.attempt(*epoch);
        cx.refuse(calls, &ended.refusal(name, attempt));
        let job = JobRef { name: spec.name.clone(), id: *id };
        for rank in ranks {
            open.send(&Command::RankRests { job: job.clone(), rank, begins: None }, cx.out);
        }
        open.send(&Command::NewAttempt { job, attempt, rested: Some(last) }, cx.out);
        let rested = Rested { attempt, last };
        open.uneven_inputs.set_ended(rested);
        self.answer_attempt(waiters, Reply::Rested(rested), cx);
    }

    /// Answers resting ranks at their deadline with the ranks that still take part. They continue
    /// to rest.
    pub(crate) fn expire_rests(&mut self, cx: &mut Context<'_>) {
        let Self { name, spec, epoch, phase: Phase::Open(open), .. } = self else { return };
        let expired = open.uneven_inputs.expire(cx.now);
        cx.time_out(expired, |_| {
            let rests = |rank| open.uneven_inputs.contains(rank);
            let late = some_of(missing_ranks(spec, open, rests, "ranks that still train"));
            let step = open.step();
            format!("every rank to rest at step {step} of job {name:?} (epoch {epoch}): {late}")
        });
    }
}
