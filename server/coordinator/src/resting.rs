//! Ranks that rest: they have no more batches, and contribute nothing until every rank rests, as in
//! torch's `Join`.
//!
//! A resting rank keeps its lease. The servers count its elements as zeros, and the steps of the
//! other ranks need neither its commits nor its discards. When every rank rests, all take part
//! again, in a new attempt. The end of any lease ends all rests with an error.

use std::collections::BTreeMap;

use zeroshard_model::{Attempt, Error, JobSpec, Result, listing::some_of};

use super::{
    commit::missing_ranks,
    context::Context,
    events::{Action, Caller, Command, JobRef, Now, Reply, Rest, Turn, Waiter},
    leases::check_rank,
    state::{Job, Open, Phase},
};

/// A resting rank.
#[derive(Debug)]
pub(super) struct Rester {
    /// The step that was open when the rank began to rest.
    pub(super) since: u64,
    /// `true` if mean gradients are over the other ranks.
    pub(super) excluded: bool,
    /// More than one if the rank has repeated its call.
    pub(super) waiters: Vec<Waiter>,
}

/// The beginning of a rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Begins {
    /// The step that is open.
    pub since: u64,
    /// `true` if mean gradients are over the other ranks.
    pub excluded: bool,
}

/// The ranks that rest.
#[derive(Debug, Default)]
pub struct Resting {
    ranks: BTreeMap<u32, Rester>,
    /// The end of the last rest, for repeated calls.
    pub(super) last: Option<Rested>,
}

/// All ranks have rested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rested {
    /// The attempt in which all ranks take part again.
    pub attempt: Attempt,
    /// The highest rank that took part in the last step.
    pub last: u32,
}

impl Resting {
    pub(super) fn len(&self) -> usize {
        self.ranks.len()
    }

    pub(super) fn insert(&mut self, rank: u32, rester: Rester) {
        self.ranks.insert(rank, rester);
    }

    pub(super) fn contains(&self, rank: u32) -> bool {
        self.ranks.contains_key(&rank)
    }

    /// The step in which a rank began to rest, if it rests.
    pub(super) fn since(&self, rank: u32) -> Option<u64> {
        self.ranks.get(&rank).map(|rester| rester.since)
    }

    /// The beginning of the rest of a rank that rests.
    pub(super) fn begins(&self, rank: u32) -> Option<Begins> {
        let &Rester { since, excluded, .. } = self.ranks.get(&rank)?;
        Some(Begins { since, excluded })
    }

    /// The highest rank of the last step, if `attempt` is open because every rank has rested.
    pub(super) fn ended(&self, attempt: Attempt) -> Option<u32> {
        self.last.filter(|rested| rested.attempt == attempt).map(|rested| rested.last)
    }

    /// The ranks, ascending.
    pub fn ranks(&self) -> impl Iterator<Item = u32> + '_ {
        self.ranks.keys().copied()
    }

    /// Ends all rests. Returns the ranks, and the calls that must be answered.
    pub(super) fn end(&mut self) -> (Vec<u32>, Vec<Waiter>) {
        let (ranks, resters): (_, Vec<_>) = std::mem::take(&mut self.ranks).into_iter().unzip();
        (ranks, resters.into_iter().flat_map(|rester| rester.waiters).collect())
    }

    /// Forgets a rank, and returns its calls.
    pub(super) fn forget(&mut self, rank: u32) -> Vec<Waiter> {
        self.ranks.remove(&rank).map(|rester| rester.waiters).unwrap_or_default()
    }

    pub(super) fn forget_caller(&mut self, rank: u32, caller: Caller) {
        if let Some(rester) = self.ranks.get_mut(&rank) {
            rester.waiters.retain(|waiter| waiter.caller != caller);
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Now> {
        self.ranks.values().flat_map(|rester| &rester.waiters).map(|w| w.deadline).min()
    }
}

impl Resting {
    /// # Errors
    /// [`Error::Disagreement`] if another resting rank differs in `excluded`.
    fn check_alike(&self, turn: &Turn, excluded: bool) -> Result<()> {
        let mut others = self.ranks.iter().filter(|(_, rester)| rester.excluded != excluded);
        let Some((&other_rank, _)) = others.next() else { return Ok(()) };
        let value = |excluded| match excluded {
            true => "the ranks that do not rest".to_owned(),
            false => "all ranks".to_owned(),
        };
        Err(Error::Disagreement {
            job: turn.job.name.clone(),
            step: turn.attempt.step,
            what: "the ranks over which gradients are averaged".to_owned(),
            rank: turn.rank,
            value: value(excluded),
            other_rank,
            other_value: value(!excluded),
        })
    }
}

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
    pub(super) fn scale_of_mean(&self, world: u32, loss_scale: f64) -> f64 {
        let excluded = self.resting.ranks.values().filter(|rester| rester.excluded).count();
        loss_scale * (f64::from(world) - excluded as f64) / f64::from(world)
    }
}

impl Job {
    pub(super) fn rest(&mut self, caller: Caller, rest: Rest, cx: &mut Context<'_>) {
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
    pub(super) fn resume_if_all_rest(&mut self, cx: &mut Context<'_>) {
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
    pub(super) fn expire_rests(&mut self, cx: &mut Context<'_>) {
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
