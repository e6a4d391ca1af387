//! Ranks that rest until all ranks have run out of data.

use std::collections::BTreeMap;

use zeroshard_model::{Attempt, Error, Result};

use crate::vocabulary::{
    calls::{Rested, Turn},
    commands::Begins,
    ids::{Caller, Now, Waiter, expire},
};

/// A resting rank.
#[derive(Debug)]
struct Rester {
    /// The step that was open when the rank began to rest.
    since: u64,
    /// `true` if mean gradients are over the other ranks.
    excluded: bool,
    /// More than one if the rank has repeated its call.
    waiters: Vec<Waiter>,
}

/// The ranks that rest.
#[derive(Debug, Default)]
pub struct UnevenInputs {
    ranks: BTreeMap<u32, Rester>,
    /// The end of the last rest, for repeated calls.
    last: Option<Rested>,
}

impl UnevenInputs {
    pub(crate) fn len(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the number of resting ranks that mean gradients exclude.
    pub(crate) fn excluded(&self) -> usize {
        self.ranks.values().filter(|rester| rester.excluded).count()
    }

    /// Records that a rank rests. `waiters`: its calls, which wait for the end of the rest.
    pub(crate) fn insert(&mut self, rank: u32, begins: Begins, waiters: Vec<Waiter>) {
        let Begins { since, excluded } = begins;
        self.ranks.insert(rank, Rester { since, excluded, waiters });
    }

    /// Adds a repeated call of a resting rank. Returns `false` if the rank does not rest.
    pub(crate) fn repeated(&mut self, rank: u32, waiter: Waiter) -> bool {
        let rester = self.ranks.get_mut(&rank);
        rester.map(|rester| rester.waiters.push(waiter)).is_some()
    }

    /// Returns the highest rank of the last step. Its ranks are those that began to rest last.
    pub(crate) fn last_to_rest(&self) -> Option<u32> {
        let last = self.ranks.iter().max_by_key(|&(&rank, rester)| (rester.since, rank));
        last.map(|(&rank, _)| rank)
    }

    pub(crate) fn contains(&self, rank: u32) -> bool {
        self.ranks.contains_key(&rank)
    }

    /// The step in which a rank began to rest, if it rests.
    pub(crate) fn since(&self, rank: u32) -> Option<u64> {
        self.ranks.get(&rank).map(|rester| rester.since)
    }

    /// The beginning of the rest of a rank that rests.
    pub(crate) fn begins(&self, rank: u32) -> Option<Begins> {
        let &Rester { since, excluded, .. } = self.ranks.get(&rank)?;
        Some(Begins { since, excluded })
    }

    /// Returns the end of the last rest if it opened `attempt`.
    pub(crate) fn ended(&self, attempt: Attempt) -> Option<Rested> {
        self.last.filter(|rested| rested.attempt == attempt)
    }

    /// Records the end of a rest.
    pub(crate) fn set_ended(&mut self, rested: Rested) {
        self.last = Some(rested);
    }

    /// Removes the calls whose deadline has come. Their ranks continue to rest.
    pub(crate) fn expire(&mut self, now: Now) -> Vec<Waiter> {
        expire(self.ranks.values_mut().map(|rester| &mut rester.waiters), now)
    }

    /// The ranks, ascending.
    pub fn ranks(&self) -> impl Iterator<Item = u32> + '_ {
        self.ranks.keys().copied()
    }

    /// Ends all rests. Returns the ranks, and the calls that must be answered.
    pub(crate) fn end(&mut self) -> (Vec<u32>, Vec<Waiter>) {
        let (ranks, resters): (_, Vec<_>) = std::mem::take(&mut self.ranks).into_iter().unzip();
        (ranks, resters.into_iter().flat_map(|rester| rester.waiters).collect())
    }

    /// Forgets a rank, and returns its calls.
    pub(crate) fn forget(&mut self, rank: u32) -> Vec<Waiter> {
        self.ranks.remove(&rank).map(|rester| rester.waiters).unwrap_or_default()
    }

    pub(crate) fn forget_caller(&mut self, rank: u32, caller: Caller) {
        if let Some(rester) = self.ranks.get_mut(&rank) {
            rester.waiters.retain(|waiter| waiter.caller != caller);
        }
    }

    pub(crate) fn next_deadline(&self) -> Option<Now> {
        self.ranks.values().flat_map(|rester| &rester.waiters).map(|w| w.deadline).min()
    }
}

impl UnevenInputs {
    /// # Errors
    /// [`Error::Disagreement`] if another resting rank differs in `excluded`.
    pub(crate) fn check_alike(&self, turn: &Turn, excluded: bool) -> Result<()> {
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
