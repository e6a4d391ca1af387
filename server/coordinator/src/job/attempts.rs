//! Attempts at a step: all ranks discard the gradients of the open attempt, and the next attempt
//! opens.

use zeroshard_model::{Attempt, Result, listing::some_of};

use crate::{
    cluster::context::Context,
    job::{Job, Phase, commit::missing_ranks},
    vocabulary::{
        calls::{Discard, Reply, Turn, check_rank},
        commands::Command,
        ids::{Caller, JobRef, Waiter},
    },
};

impl Job {
    pub(crate) fn discard(&mut self, caller: Caller, discard: Discard, cx: &mut Context<'_>) {
        let waiter = Waiter::new(caller, cx.now, discard.wait);
        match self.try_discard(waiter, &discard.turn, cx) {
            Ok(None) => self.advance(cx),
            Ok(Some(attempt)) => {
                self.answer_attempt(vec![waiter], Reply::Discarded { attempt }, cx);
            }
            Err(error) => cx.answer(waiter, Err(error)),
        }
    }

    /// Registers the request. Returns the open attempt if it directly follows the attempt of the
    /// request.
    fn try_discard(
        &mut self,
        waiter: Waiter,
        turn: &Turn,
        cx: &mut Context<'_>,
    ) -> Result<Option<u32>> {
        let name = &turn.job.name;
        let Self { spec, epoch, phase, .. } = self;
        let open = phase.open_mut(name)?;
        check_rank(name, turn.rank, spec.world)?;
        let current = open.attempt(*epoch);
        let number = turn.attempt.number;
        if number.checked_add(1) == Some(current.number) {
            open.check_turn(turn, Attempt { number, ..current })?;
            return Ok(Some(current.number));
        }
        open.check_turn(turn, current)?;
        open.round.side_with_discards(turn, cx.out)?;
        open.round.discard(turn.rank, waiter);
        Ok(None)
    }

    /// Opens the next attempt when every rank has asked to discard the open one.
    pub(crate) fn discard_if_all_have(&mut self, cx: &mut Context<'_>) {
        let Self { name, spec, id, epoch, phase: Phase::Open(open), .. } = self else { return };
        let active = open.active(spec.world);
        let Some(discards) = open.round.take_discards(active) else { return };
        let discarded = open.attempt(*epoch);
        let attempt = Attempt { number: discarded.number.saturating_add(1), ..discarded };
        let reducers = open.round.open_attempt(attempt.number);
        let job = JobRef { name: spec.name.clone(), id: *id };
        open.send(&Command::NewAttempt { job, attempt, rested: None }, cx.out);
        cx.refuse(reducers, &discarded.refusal(name, attempt));
        let reply = Reply::Discarded { attempt: attempt.number };
        self.answer_attempt(discards, reply, cx);
    }

    /// Answers calls when the servers know the new attempt.
    pub(crate) fn answer_attempt(
        &mut self,
        waiters: Vec<Waiter>,
        reply: Reply,
        cx: &mut Context<'_>,
    ) {
        let what = format!("a new attempt of job {:?}", self.name);
        let servers = self.servers(cx.common);
        cx.common.answer_when_received(waiters, reply, servers, what, cx.out);
    }

    /// Answers ranks at their deadline with the ranks that have not asked to discard the attempt.
    /// The request remains registered.
    pub(crate) fn expire_discards(&mut self, cx: &mut Context<'_>) {
        let Self { name, spec, epoch, phase: Phase::Open(open), .. } = self else { return };
        let expired = open.round.expire_discards(cx.now);
        cx.time_out(expired, |_| {
            let has_called = |rank| open.round.has_discarded(rank);
            let late = "ranks that have not discarded it";
            let parts = some_of(missing_ranks(spec, open, has_called, late));
            let Attempt { step, number, .. } = open.attempt(*epoch);
            format!(
                "attempt {number} at step {step} of job {name:?} (epoch {epoch}) to be discarded: \
                 {parts}"
            )
        });
    }
}
