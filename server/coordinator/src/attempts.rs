//! Attempts at a step: all ranks discard the gradients of the open attempt, and the next attempt
//! opens.

use zeroshard_model::{Attempt, Error, Result, listing::some_of};

use super::{
    commit::{Round, missing_ranks},
    context::Context,
    events::{Action, Caller, Command, Discard, JobRef, Reply, Turn, Waiter},
    leases::check_rank,
    state::{Job, Phase},
};

/// `turn.rank` has sent `ours` for the attempt, and the other rank, or the same one before,
/// `theirs`.
fn disagreement(turn: &Turn, ours: &str, other: Option<u32>, theirs: &str) -> Error {
    let Attempt { step, number, .. } = turn.attempt;
    Error::Disagreement {
        job: turn.job.name.clone(),
        step,
        what: format!("whether attempt {number} is committed or discarded"),
        rank: turn.rank,
        value: ours.to_owned(),
        other_rank: other.unwrap_or(turn.rank),
        other_value: theirs.to_owned(),
    }
}

impl Round {
    /// Resolves conflicts before `turn.rank` commits. A request of the same rank to discard the
    /// attempt is withdrawn. If another rank has asked to discard the attempt, the requests of both
    /// sides are dropped.
    ///
    /// # Errors
    /// [`Error::Disagreement`], also for the calls of the other ranks, if another rank discards the
    /// attempt.
    pub(super) fn side_with_commits(&mut self, turn: &Turn, out: &mut Vec<Action>) -> Result<()> {
        let own = self.discards.remove(&turn.rank).unwrap_or_default();
        let others = std::mem::take(&mut self.discards);
        let other = others.first_key_value().map(|(&rank, _)| rank);
        let error = disagreement(turn, "a commit", other, "a discard");
        settle(error, own.into_iter().chain(others.into_values().flatten()), other, out)
    }

    /// Resolves conflicts before `turn.rank` discards the attempt, in the same way as
    /// [`Self::side_with_commits`].
    fn side_with_discards(&mut self, turn: &Turn, out: &mut Vec<Action>) -> Result<()> {
        let own = self.withdraw_vote(turn.rank);
        let other = self.first_voter();
        let error = disagreement(turn, "a discard", other, "a commit");
        settle(error, own.into_iter().chain(self.withdraw_votes()), other, out)
    }
}

/// Answers `waiters`, and the caller if there is an `other` rank, with the disagreement.
fn settle(
    error: Error,
    waiters: impl Iterator<Item = Waiter>,
    other: Option<u32>,
    out: &mut Vec<Action>,
) -> Result<()> {
    out.extend(waiters.map(|waiter| Action::Answer(waiter.caller, Err(error.clone()))));
    if other.is_some() { Err(error) } else { Ok(()) }
}

impl Job {
    pub(super) fn discard(&mut self, caller: Caller, discard: Discard, cx: &mut Context<'_>) {
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
    pub(super) fn discard_if_all_have(&mut self, cx: &mut Context<'_>) {
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
    pub(super) fn answer_attempt(
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
    pub(super) fn expire_discards(&mut self, cx: &mut Context<'_>) {
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
