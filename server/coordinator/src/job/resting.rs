//! Ranks that rest: they have no more batches, and contribute nothing until every rank rests, as in
//! torch's `Join`.
//!
//! A resting rank keeps its lease. The servers count its elements as zeros, and the steps of the
//! other ranks need neither its commits nor its discards. When every rank rests, all take part
//! again, in a new attempt. The end of any lease ends all rests with an error.

use zeroshard_model::{Error, JobSpec, Result, listing::some_of};

use crate::{
    calls::{Reply, Rest, Rested, check_rank},
    commands::{Begins, Command},
    context::Context,
    events::Action,
    ids::{Caller, JobRef, Waiter},
    job::{Job, Open, Phase, commit::missing_ranks},
    resting::Rester,
};

/// Checks that every rank has whole tensors: otherwise the other ranks lack what only the resting
/// one has.
///
/// # Errors
/// [`Error::Invalid`].
fn check_replicated(spec: &JobSpec) -> Result<()> {
    let distributed = spec.manifest.tensors().iter().find(|tensor| tensor.layout.is_some());
    distributed.map_or(Ok(()), |tensor| {
        let what = format!("the layout of tensor {:?}", tensor.name);
        Err(Error::invalid(what, "a mesh", "none, for ranks with different numbers of batches"))
    })
}

impl Open {
    /// The loss scale by which the mean gradient over all ranks is divided, so that the result is
    /// the mean over the ranks that are not excluded.
    pub(crate) fn scale_of_mean(&self, world: u32, loss_scale: f64) -> f64 {
        let excluded = self.resting.ranks.values().filter(|rester| rester.excluded).count();
        loss_scale * (f64::from(world) - excluded as f64) / f64::from(world)
    }
}

impl Job {
    pub(crate) fn rest(&mut self, caller: Caller, rest: Rest, cx: &mut Context<'_>) {
        match self.try_rest(caller, &rest, cx) {
            Ok(None) => self.advance(cx),
            Ok(Some(rested)) => {
                let waiter = Waiter::new(caller, cx.now, rest.wait);
                self.answer_attempt(vec![waiter], Reply::Rested(rested), cx);
            }
            Err(error) => cx.push(Action::Answer(caller, Err(error))),
        }
    }

    /// Registers the call. Returns the end of the rest if all ranks have rested already.
    fn try_rest(
        &mut self,
        caller: Caller,
        rest: &Rest,
        cx: &mut Context<'_>,
    ) -> Result<Option<Rested>> {
        let Rest { turn, excluded, wait } = rest;
        let (name, rank) = (&turn.job.name, turn.rank);
        let Self { spec, epoch, phase, .. } = self;
        let open = phase.open_mut(name)?;
        check_rank(name, rank, spec.world)?;
        check_replicated(spec)?;
        open.check_lease(turn)?;
        let (current, waiter) = (open.attempt(*epoch), Waiter::new(caller, cx.now, *wait));
        if let Some(rester) = open.resting.ranks.get_mut(&rank) {
            rester.waiters.push(waiter);
            return Ok(None);
        }
        if let Some(rested) = open.resting.last.filter(|rested| rested.attempt == current)
            && turn.attempt < current
        {
            return Ok(Some(rested));
        }
        open.check_turn(turn, current)?;
        open.resting.check_alike(turn, *excluded)?;
        let withdrawn = open.round.forget_rank(rank);
        cx.refuse(withdrawn, &Error::LeaseLost { job: name.clone(), rank });
        let (since, excluded) = (current.step, *excluded);
        open.resting.ranks.insert(rank, Rester { since, excluded, waiters: vec![waiter] });
        let begins = Some(Begins { since, excluded });
        open.send(&Command::RankRests { job: turn.job.clone(), rank, begins }, cx.out);
        Ok(None)
    }

    /// When every rank rests, all take part again in a new attempt.
    pub(crate) fn resume_if_all_rest(&mut self, cx: &mut Context<'_>) {
        let Self { name, spec, id, epoch, phase: Phase::Open(open), .. } = self else { return };
        let resters = &open.resting.ranks;
        if resters.is_empty() || open.active(spec.world) > 0 {
            return;
        }
        // The ranks that began to rest last have made the last step.
        let last = resters.iter().max_by_key(|&(&rank, rester)| (rester.since, rank));
        let last = last.map_or(0, |(&rank, _)| rank);
        let (ranks, waiters) = open.resting.end();
        let ended = open.attempt(*epoch);
        let calls = open.round.drop_all();
        open.round.attempt = ended.number.saturating_add(1);
        let attempt = open.attempt(*epoch);
        cx.refuse(calls, &ended.refusal(name, attempt));
        let job = JobRef { name: spec.name.clone(), id: *id };
        for rank in ranks {
            open.send(&Command::RankRests { job: job.clone(), rank, begins: None }, cx.out);
        }
        open.send(&Command::NewAttempt { job, attempt, rested: Some(last) }, cx.out);
        let rested = Rested { attempt, last };
        open.resting.last = Some(rested);
        self.answer_attempt(waiters, Reply::Rested(rested), cx);
    }

    /// Answers resting ranks at their deadline with the ranks that still take part. They continue
    /// to rest.
    pub(crate) fn expire_rests(&mut self, cx: &mut Context<'_>) {
        let Self { name, spec, epoch, phase: Phase::Open(open), .. } = self else { return };
        let mut expired = Vec::new();
        for rester in open.resting.ranks.values_mut() {
            expired.extend(rester.waiters.extract_if(.., |waiter| waiter.deadline <= cx.now));
        }
        if expired.is_empty() {
            return;
        }
        let late = missing_ranks(spec, open, &open.resting.ranks, "ranks that still train");
        let (step, late) = (open.step(), some_of(late));
        let waiting_for =
            format!("every rank to rest at step {step} of job {name:?} (epoch {epoch}): {late}");
        cx.time_out(expired, &waiting_for);
    }
}
