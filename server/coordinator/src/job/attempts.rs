//! Attempts at a step: all ranks discard the gradients of the open attempt, and the next attempt
//! opens.

use zeroshard_model::{Attempt, Result, listing::some_of};

use crate::{
    calls::{Discard, Reply, check_rank},
    commands::Command,
    context::Context,
    events::Action,
    ids::{Caller, JobRef, Waiter},
    job::{Job, Phase, commit::missing_ranks},
};

impl Job {
    pub(crate) fn discard(&mut self, caller: Caller, discard: Discard, cx: &mut Context<'_>) {
        match self.try_discard(caller, &discard, cx) {
            Ok(None) => self.advance(cx),
            Ok(Some(attempt)) => {
                let waiter = Waiter::new(caller, cx.now, discard.wait);
                self.answer_attempt(vec![waiter], Reply::Discarded { attempt }, cx);
            }
            Err(error) => cx.push(Action::Answer(caller, Err(error))),
        }
    }

    /// Registers the request. Returns the open attempt if it directly follows the attempt of the
    /// request.
    fn try_discard(
        &mut self,
        caller: Caller,
        discard: &Discard,
        cx: &mut Context<'_>,
    ) -> Result<Option<u32>> {
        let Discard { turn, wait } = discard;
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
        let waiters = open.round.discards.entry(turn.rank).or_default();
        waiters.push(Waiter::new(caller, cx.now, *wait));
        Ok(None)
    }

    /// Opens the next attempt when every rank has asked to discard the open one.
    pub(crate) fn discard_if_all_have(&mut self, cx: &mut Context<'_>) {
        let Self { name, spec, id, epoch, phase: Phase::Open(open), .. } = self else { return };
        let active = open.active(spec.world);
        let round = &mut open.round;
        if round.discards.is_empty() || round.discards.len() != active {
            return;
        }
        let discards = std::mem::take(&mut round.discards);
        let discarded = open.attempt(*epoch);
        let reducers = open.round.drop_all();
        let attempt = Attempt { number: discarded.number.saturating_add(1), ..discarded };
        open.round.attempt = attempt.number;
        let job = JobRef { name: spec.name.clone(), id: *id };
        open.send(&Command::NewAttempt { job, attempt, rested: None }, cx.out);
        cx.refuse(reducers, &discarded.refusal(name, attempt));
        let reply = Reply::Discarded { attempt: attempt.number };
        self.answer_attempt(discards.into_values().flatten().collect(), reply, cx);
    }

    /// Answers calls when the servers know the new attempt.
    pub(crate) fn answer_attempt(
        &mut self,
        waiters: Vec<Waiter>,
        reply: Reply,
        cx: &mut Context<'_>,
    ) {
        let what = format!("a new attempt of job {:?}", self.name);
        cx.answer_when_received(waiters, reply, self.servers(cx.common), what);
    }

    /// Answers ranks at their deadline with the ranks that have not asked to discard the attempt.
    /// The request remains registered.
    pub(crate) fn expire_discards(&mut self, cx: &mut Context<'_>) {
        let Phase::Open(open) = &mut self.phase else { return };
        let mut expired = Vec::new();
        for waiters in open.round.discards.values_mut() {
            expired.extend(waiters.extract_if(.., |waiter| waiter.deadline <= cx.now));
        }
        if expired.is_empty() {
            return;
        }
        let waiting_for = self.discards_wait_for();
        cx.time_out(expired, &waiting_for);
    }

    fn discards_wait_for(&self) -> String {
        let Self { name, spec, epoch, phase: Phase::Open(open), .. } = self else {
            return String::new();
        };
        let round = &open.round;
        let late = "ranks that have not discarded it";
        let parts = some_of(missing_ranks(spec, open, &round.discards, late));
        let (attempt, step) = (round.attempt, open.step());
        format!(
            "attempt {attempt} at step {step} of job {name:?} (epoch {epoch}) to be discarded: {parts}"
        )
    }
}
