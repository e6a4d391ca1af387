//! The open attempt at a step: what ranks and servers have sent for it.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use zeroshard_model::{Attempt, Error, JobSpec, Result};

use crate::{
    operators::metrics_view::Waits,
    state::{
        step_options::{Difference, StepOptions},
        user_data::UserData,
    },
    vocabulary::{
        calls::{Commit, Turn},
        events::Action,
        gradient::Reduced,
        ids::{Caller, Now, ServerId, Waiter, expire},
    },
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
    pub(crate) fn side_with_commits(&mut self, turn: &Turn, out: &mut Vec<Action>) -> Result<()> {
        let own = self.discards.remove(&turn.rank).unwrap_or_default();
        let others = std::mem::take(&mut self.discards);
        let other = others.first_key_value().map(|(&rank, _)| rank);
        let error = disagreement(turn, "a commit", other, "a discard");
        settle(error, own.into_iter().chain(others.into_values().flatten()), other, out)
    }

    /// Resolves conflicts before `turn.rank` discards the attempt, in the same way as
    /// [`Self::side_with_commits`].
    pub(crate) fn side_with_discards(&mut self, turn: &Turn, out: &mut Vec<Action>) -> Result<()> {
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

/// A rank's commit.
#[derive(Debug)]
struct Vote {
    options: StepOptions,
    loss: Option<f64>,
    user_data: Bytes,
    user_data_follows: bool,
    /// More than one if the rank has repeated its call.
    waiters: Vec<Waiter>,
    /// The time of its first call.
    since: Now,
}

/// The state of the open attempt at the open step.
#[derive(Debug, Default)]
pub struct Round {
    attempt: u32,
    votes: BTreeMap<u32, Vote>,
    /// The calls of each rank that has asked to discard the attempt. A request remains after its
    /// calls have timed out. INVARIANT: `discards` or `votes` is empty.
    discards: BTreeMap<u32, Vec<Waiter>>,
    /// The reports of the servers with trained slices.
    reports: BTreeMap<ServerId, Reduced>,
    /// The calls that wait for the norm of the gradient, with their loss scales.
    reducers: Vec<Reducer>,
    first_vote: Now,
    last_vote: Now,
}

/// A call that waits for the norm of the gradient.
#[derive(Debug)]
struct Reducer {
    rank: u32,
    waiter: Waiter,
    loss_scale: f64,
}

impl Round {
    pub fn is_empty(&self) -> bool {
        let Self { votes, discards, reports, reducers, .. } = self;
        votes.is_empty() && discards.is_empty() && reports.is_empty() && reducers.is_empty()
    }

    pub fn next_deadline(&self) -> Option<Now> {
        let voters = self.votes.values().flat_map(|vote| &vote.waiters);
        let waiters = voters.chain(self.discards.values().flatten());
        waiters.chain(self.reducers.iter().map(|reducer| &reducer.waiter)).map(|w| w.deadline).min()
    }

    /// Returns the number of the open attempt at the step.
    pub(crate) fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Opens the attempt with this number. Drops everything that was sent for the previous one, and
    /// returns the calls that must be answered.
    pub(crate) fn open_attempt(&mut self, number: u32) -> Vec<Waiter> {
        let waiters = self.drop_all();
        self.attempt = number;
        waiters
    }

    /// Drops all votes and requests, and starts again with attempt 0. Returns the calls that must
    /// be answered.
    pub fn drop_all(&mut self) -> Vec<Waiter> {
        let Self { votes, discards, reducers, .. } = std::mem::take(self);
        let reducers = reducers.into_iter().map(|reducer| reducer.waiter);
        let voters = votes.into_values().flat_map(|vote| vote.waiters);
        voters.chain(discards.into_values().flatten()).chain(reducers).collect()
    }

    /// Drops the requests of a rank, and returns its calls.
    pub(crate) fn forget_rank(&mut self, rank: u32) -> Vec<Waiter> {
        let mut waiters = self.withdraw_vote(rank);
        waiters.extend(self.discards.remove(&rank).unwrap_or_default());
        waiters
            .extend(self.reducers.extract_if(.., |r| r.rank == rank).map(|reducer| reducer.waiter));
        waiters
    }

    /// Withdraws the commit of a rank, and returns its calls.
    pub(crate) fn withdraw_vote(&mut self, rank: u32) -> Vec<Waiter> {
        self.votes.remove(&rank).map(|vote| vote.waiters).unwrap_or_default()
    }

    /// Withdraws all commits, and returns their calls.
    pub(crate) fn withdraw_votes(&mut self) -> Vec<Waiter> {
        std::mem::take(&mut self.votes).into_values().flat_map(|vote| vote.waiters).collect()
    }

    /// Returns whether the rank has sent everything of the open step.
    pub(crate) fn has_voted(&self, rank: u32) -> bool {
        self.votes.contains_key(&rank)
    }

    /// The first rank that has committed.
    pub(crate) fn first_voter(&self) -> Option<u32> {
        self.votes.first_key_value().map(|(&rank, _)| rank)
    }

    /// The options of the step, which all votes share, if there are `count` votes.
    pub(crate) fn agreed(&self, count: usize) -> Option<&StepOptions> {
        self.votes.values().next().filter(|_| self.votes.len() == count).map(|vote| &vote.options)
    }

    /// Registers a vote. A rank counts once, even if it commits repeatedly.
    ///
    /// # Errors
    /// [`Error::Disagreement`], also for the calls of the other ranks, if their options differ. All
    /// votes are withdrawn.
    pub(crate) fn vote(
        &mut self,
        waiter: Waiter,
        commit: &Commit,
        options: StepOptions,
        spec: &JobSpec,
        out: &mut Vec<Action>,
    ) -> Result<()> {
        let Turn { job, rank, attempt, .. } = &commit.turn;
        // All votes have the same options.
        if let Some((&other_rank, first)) = self.votes.first_key_value()
            && let Some(Difference { what, values }) = options.difference(&first.options, spec)
        {
            let [value, other_value] = values;
            let error = Error::Disagreement {
                job: job.name.clone(),
                step: attempt.step,
                what,
                rank: *rank,
                value,
                other_rank,
                other_value,
            };
            let waiters = self.withdraw_votes().into_iter();
            out.extend(waiters.map(|waiter| Action::Answer(waiter.caller, Err(error.clone()))));
            return Err(error);
        }
        if self.votes.is_empty() {
            self.first_vote = waiter.since;
        }
        let vote = self.votes.entry(*rank).or_insert_with(|| {
            let since = waiter.since;
            self.last_vote = since;
            let &Commit { loss, ref user_data, user_data_follows, .. } = commit;
            let user_data = user_data.clone();
            Vote { options, loss, user_data, user_data_follows, waiters: Vec::new(), since }
        });
        vote.waiters.push(waiter);
        Ok(())
    }

    /// Removes the commits whose deadline has come. The votes remain, because the gradients have
    /// been pushed and the ranks may repeat their calls.
    pub(crate) fn expire_commits(&mut self, now: Now) -> Vec<Waiter> {
        expire(self.votes.values_mut().map(|vote| &mut vote.waiters), now)
    }

    /// Registers the request of a rank to discard the attempt.
    pub(crate) fn discard(&mut self, rank: u32, waiter: Waiter) {
        self.discards.entry(rank).or_default().push(waiter);
    }

    /// Returns whether the rank has asked to discard the attempt.
    pub(crate) fn has_discarded(&self, rank: u32) -> bool {
        self.discards.contains_key(&rank)
    }

    /// Removes the requests to discard the attempt if there are `count` of them. Returns their
    /// calls.
    pub(crate) fn take_discards(&mut self, count: usize) -> Option<Vec<Waiter>> {
        if self.discards.is_empty() || self.discards.len() != count {
            return None;
        }
        Some(std::mem::take(&mut self.discards).into_values().flatten().collect())
    }

    /// Removes the discards whose deadline has come. The requests remain.
    pub(crate) fn expire_discards(&mut self, now: Now) -> Vec<Waiter> {
        expire(self.discards.values_mut(), now)
    }

    /// Registers a call that waits for the norm of the gradient.
    pub(crate) fn await_norm(&mut self, rank: u32, waiter: Waiter, loss_scale: f64) {
        self.reducers.push(Reducer { rank, waiter, loss_scale });
    }

    /// Returns whether a call waits for the norm of the gradient.
    pub(crate) fn awaits_norm(&self) -> bool {
        !self.reducers.is_empty()
    }

    /// Removes the calls that wait for the norm, and returns them with their loss scales.
    pub(crate) fn take_reducers(&mut self) -> impl Iterator<Item = (Waiter, f64)> + use<> {
        let reducers = std::mem::take(&mut self.reducers);
        reducers.into_iter().map(|reducer| (reducer.waiter, reducer.loss_scale))
    }

    /// Removes the calls that wait for the norm and whose deadline has come.
    pub(crate) fn expire_reducers(&mut self, now: Now) -> Vec<Waiter> {
        let late = |reducer: &mut Reducer| reducer.waiter.deadline <= now;
        self.reducers.extract_if(.., late).map(|reducer| reducer.waiter).collect()
    }

    /// Drops the calls of a caller that has disconnected. The requests of its rank remain.
    pub(crate) fn forget_caller(&mut self, rank: u32, caller: Caller) {
        let others = |waiter: &Waiter| waiter.caller != caller;
        if let Some(vote) = self.votes.get_mut(&rank) {
            vote.waiters.retain(others);
        }
        if let Some(discard) = self.discards.get_mut(&rank) {
            discard.retain(others);
        }
        self.reducers.retain(|reducer| others(&reducer.waiter));
    }

    /// Records that a server has all gradients of the attempt.
    pub(crate) fn report(&mut self, server: ServerId, report: Reduced) {
        self.reports.insert(server, report);
    }

    /// Drops the report of a server, which now needs more gradients.
    pub(crate) fn drop_report(&mut self, server: ServerId) {
        self.reports.remove(&server);
    }

    /// Returns the reports of the servers that have all gradients of the attempt.
    pub(crate) fn reports(&self) -> &BTreeMap<ServerId, Reduced> {
        &self.reports
    }

    /// How much later than the first rank each rank has committed.
    pub(crate) fn lateness(&self) -> Vec<(u32, Duration)> {
        let late = |vote: &Vote| vote.since.saturating_sub(self.first_vote);
        self.votes.iter().map(|(&rank, vote)| (rank, late(vote))).collect()
    }

    /// The time for which a step waited that is decided `now`.
    pub(crate) fn waits(&self, now: Now) -> Waits {
        let mut lateness: Vec<_> = self.lateness().into_iter().map(|(_, late)| late).collect();
        // The first rank is not late.
        lateness.sort_unstable();
        lateness.drain(..lateness.len().min(1));
        Waits {
            lateness,
            ranks: self.last_vote.saturating_sub(self.first_vote),
            servers: now.saturating_sub(self.last_vote),
        }
    }

    /// The data of the ranks for a checkpoint.
    pub(crate) fn user_data(&self) -> UserData {
        let sent = self.votes.iter().filter(|(_, vote)| !vote.user_data.is_empty());
        let awaited = self.votes.iter().filter(|(_, vote)| vote.user_data_follows);
        let sent = sent.map(|(&rank, vote)| (rank, vote.user_data.clone()));
        UserData::committed(sent.collect(), awaited.map(|(&rank, _)| rank).collect())
    }

    /// The mean loss over the ranks that committed, in rank order; `None` unless each of them
    /// passed one.
    pub(crate) fn loss(&self) -> Option<f64> {
        let sum: Option<f64> = self.votes.values().map(|vote| vote.loss).sum();
        sum.map(|sum| sum / self.votes.len() as f64)
    }
}
