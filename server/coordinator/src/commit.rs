//! The barrier at the end of a step.
//!
//! A step is decided when every rank has committed it and every server with trained slices has
//! reported that its gradients are complete. Votes and reports belong to one (epoch, step,
//! attempt): the round is dropped when one of these changes.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use zeroshard_model::{Attempt, Error, JobSpec, Result, listing::some_of};

use super::{
    context::{Common, Context},
    decisions::Report,
    events::{Action, Caller, Commit, Now, Reply, ServerId, Turn, Waiter},
    figures::Waits,
    leases::check_rank,
    reduce::{Reduced, Reducer, late_servers},
    state::{Job, Open, Phase},
    terms::{Difference, Terms},
    user_data::UserData,
};

/// A rank's commit.
#[derive(Debug)]
struct Vote {
    terms: Terms,
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
    pub(super) attempt: u32,
    votes: BTreeMap<u32, Vote>,
    /// The calls of each rank that has asked to discard the attempt. A request remains after its
    /// calls have timed out. INVARIANT: `discards` or `votes` is empty.
    pub(super) discards: BTreeMap<u32, Vec<Waiter>>,
    /// The reports of the servers with trained slices.
    pub(super) reports: BTreeMap<ServerId, Reduced>,
    /// The calls that wait for the norm of the gradient.
    pub(super) reducers: Vec<Reducer>,
    pub(super) first_vote: Now,
    pub(super) last_vote: Now,
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

    /// Drops all votes and requests, and starts again with attempt 0. Returns the calls that must
    /// be answered.
    pub fn drop_all(&mut self) -> Vec<Waiter> {
        let Self { votes, discards, reducers, .. } = std::mem::take(self);
        let reducers = reducers.into_iter().map(|reducer| reducer.waiter);
        let voters = votes.into_values().flat_map(|vote| vote.waiters);
        voters.chain(discards.into_values().flatten()).chain(reducers).collect()
    }

    /// Drops the requests of a rank, and returns its calls.
    pub(super) fn forget_rank(&mut self, rank: u32) -> Vec<Waiter> {
        let mut waiters = self.withdraw_vote(rank);
        waiters.extend(self.discards.remove(&rank).unwrap_or_default());
        waiters
            .extend(self.reducers.extract_if(.., |r| r.rank == rank).map(|reducer| reducer.waiter));
        waiters
    }

    /// Withdraws the commit of a rank, and returns its calls.
    pub(super) fn withdraw_vote(&mut self, rank: u32) -> Vec<Waiter> {
        self.votes.remove(&rank).map(|vote| vote.waiters).unwrap_or_default()
    }

    /// Withdraws all commits, and returns their calls.
    pub(super) fn withdraw_votes(&mut self) -> Vec<Waiter> {
        std::mem::take(&mut self.votes).into_values().flat_map(|vote| vote.waiters).collect()
    }

    /// Returns whether the rank has sent everything of the open step.
    pub(super) fn has_voted(&self, rank: u32) -> bool {
        self.votes.contains_key(&rank)
    }

    /// The first rank that has committed.
    pub(super) fn first_voter(&self) -> Option<u32> {
        self.votes.first_key_value().map(|(&rank, _)| rank)
    }

    /// The terms of the step, which all votes share, if there are `count` votes.
    pub(super) fn agreed(&self, count: usize) -> Option<&Terms> {
        self.votes.values().next().filter(|_| self.votes.len() == count).map(|vote| &vote.terms)
    }

    /// Registers a vote. A rank counts once, even if it commits repeatedly.
    ///
    /// # Errors
    /// [`Error::Disagreement`], also for the calls of the other ranks, if their terms differ. All
    /// votes are withdrawn.
    fn vote(
        &mut self,
        waiter: Waiter,
        commit: &Commit,
        terms: Terms,
        spec: &JobSpec,
        out: &mut Vec<Action>,
    ) -> Result<()> {
        let Turn { job, rank, attempt, .. } = &commit.turn;
        // All votes have the same terms.
        if let Some((&other_rank, first)) = self.votes.first_key_value()
            && let Some(Difference { what, values }) = terms.difference(&first.terms, spec)
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
            Vote { terms, loss, user_data, user_data_follows, waiters: Vec::new(), since }
        });
        vote.waiters.push(waiter);
        Ok(())
    }

    fn expire(&mut self, now: Now) -> Vec<Waiter> {
        let mut expired = Vec::new();
        for vote in self.votes.values_mut() {
            // The vote remains: the gradients have been pushed, and the rank may repeat its call.
            expired.extend(vote.waiters.extract_if(.., |waiter| waiter.deadline <= now));
        }
        expired
    }

    /// How much later than the first rank each rank has committed.
    pub(super) fn lateness(&self) -> Vec<(u32, Duration)> {
        let late = |vote: &Vote| vote.since.saturating_sub(self.first_vote);
        self.votes.iter().map(|(&rank, vote)| (rank, late(vote))).collect()
    }

    /// The time for which a step waited that is decided `now`.
    pub(super) fn waits(&self, now: Now) -> Waits {
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
    pub(super) fn user_data(&self) -> UserData {
        let sent = self.votes.iter().filter(|(_, vote)| !vote.user_data.is_empty());
        let awaited = self.votes.iter().filter(|(_, vote)| vote.user_data_follows);
        UserData {
            ranks: sent.map(|(&rank, vote)| (rank, vote.user_data.clone())).collect(),
            awaited: awaited.map(|(&rank, _)| rank).collect(),
            ..UserData::default()
        }
    }

    /// The mean loss over the ranks that committed, in rank order; `None` unless each of them
    /// passed one.
    pub(super) fn loss(&self) -> Option<f64> {
        let sum: Option<f64> = self.votes.values().map(|vote| vote.loss).sum();
        sum.map(|sum| sum / self.votes.len() as f64)
    }
}

impl Open {
    /// Drops the call of a rank whose caller has disconnected. The rank's requests remain.
    pub(super) fn forget_caller(&mut self, rank: u32, caller: Caller) {
        let others = |waiter: &Waiter| waiter.caller != caller;
        if let Some(vote) = self.round.votes.get_mut(&rank) {
            vote.waiters.retain(others);
        }
        if let Some(discard) = self.round.discards.get_mut(&rank) {
            discard.retain(others);
        }
        self.round.reducers.retain(|reducer| others(&reducer.waiter));
        self.resting.forget_caller(rank, caller);
        if let Some(last) = &mut self.last {
            last.waiters.retain(others);
        }
    }
}

impl Job {
    pub(super) fn commit(&mut self, caller: Caller, commit: Commit, cx: &mut Context<'_>) {
        match self.try_commit(caller, &commit, cx) {
            Ok(None) => self.advance(cx),
            Ok(Some(report)) => {
                cx.push(Action::Answer(caller, Ok(Reply::Report(report, self.epoch))));
            }
            Err(error) => cx.push(Action::Answer(caller, Err(error))),
        }
    }

    /// Registers the commit. Returns the report if the step was decided and every server has stored
    /// the decision.
    fn try_commit(
        &mut self,
        caller: Caller,
        commit: &Commit,
        cx: &mut Context<'_>,
    ) -> Result<Option<Report>> {
        let Commit { turn, .. } = commit;
        let name = &turn.job.name;
        let Self { spec, epoch, phase, .. } = self;
        let open = phase.open_mut(name)?;
        check_rank(name, turn.rank, spec.world)?;
        let waiter = Waiter::new(caller, cx.now, commit.wait);
        // This check precedes the checks of the membership, so that a decided step is never
        // reported as aborted.
        if let Some(decided) = open.decided(turn.attempt.step) {
            return Ok(decided.report_to(waiter));
        }
        open.check_turn(turn, open.attempt(*epoch))?;
        let terms = Terms::of(commit, spec)?;
        open.round.side_with_commits(turn, cx.out)?;
        open.round.vote(waiter, commit, terms, spec, cx.out)?;
        Ok(None)
    }

    /// A server has received all gradients of the attempt.
    pub(super) fn ready(
        &mut self,
        server: ServerId,
        attempt: Attempt,
        report: Reduced,
        cx: &mut Context<'_>,
    ) {
        let open = match &mut self.phase {
            Phase::Recovering(recovery) => return recovery.ready(server, attempt, report),
            Phase::Open(open) => open,
            _ => return,
        };
        if attempt != open.attempt(self.epoch) {
            return;
        }
        if let Err(what) = check_report(&report, open.trainable.get(&server)) {
            let step = open.step();
            let reason =
                format!("{} reported {what} at step {step}; this is a bug", cx.name(server));
            return self.fail(&reason, cx);
        }
        // A server without trained slices does not have to report.
        if open.awaits(server) && open.replicas.is_current(server, report.copies) {
            open.round.reports.insert(server, report);
        }
        self.advance(cx);
    }

    /// Advances the open step as far as the registered votes and reports allow.
    pub(super) fn advance(&mut self, cx: &mut Context<'_>) {
        self.resume_if_all_rest(cx);
        self.answer_reducers(cx);
        self.discard_if_all_have(cx);
        self.decide(cx);
    }

    pub(super) fn expire_commits(&mut self, cx: &mut Context<'_>) {
        let Phase::Open(open) = &mut self.phase else { return };
        let expired = open.round.expire(cx.now);
        if expired.is_empty() {
            return;
        }
        let waiting_for = self.commits_wait_for(cx.common);
        cx.time_out(expired, &waiting_for);
    }

    /// Describes the missing input: ranks, and servers with the input that they wait for.
    fn commits_wait_for(&self, common: &Common) -> String {
        let Self { name, epoch, phase: Phase::Open(open), .. } = self else {
            return String::new();
        };
        let (step, parts) = (open.step(), self.step_lacks(open, common));
        format!("step {step} of job {name:?} (epoch {epoch}): {}", some_of(parts))
    }

    /// Describes the missing input of the open step: ranks, and the input that servers wait for.
    pub(super) fn step_lacks(&self, open: &Open, common: &Common) -> Vec<String> {
        let late = "ranks that have not committed";
        let mut parts = missing_ranks(&self.spec, open, &open.round.votes, late);
        parts.extend(late_servers(self.id, open, &common.servers));
        parts
    }
}

/// Describes the ranks without a call in `present`: ranks with a worker with the text `late`, and
/// ranks without a worker.
pub(super) fn missing_ranks<T>(
    spec: &JobSpec,
    open: &Open,
    present: &BTreeMap<u32, T>,
    late: &str,
) -> Vec<String> {
    let (here, absent) = open.missing(spec.world, present);
    let lists = [(here, late), (absent, "ranks without a worker")];
    let list = |(ranks, what): (Vec<u32>, &str)| {
        format!("{what} ({})", some_of(ranks.into_iter().map(|rank| spec.describe_rank(rank))))
    };
    lists.into_iter().filter(|(ranks, _)| !ranks.is_empty()).map(list).collect()
}

/// Checks that a server reports exactly its trained slices.
pub(super) fn check_report(report: &Reduced, expected: Option<&Vec<u32>>) -> Result<(), String> {
    let expected = expected.map_or(&[][..], Vec::as_slice);
    // The list is ascending: a server may have 100,000 slices.
    let is_own = |slice: u32| expected.binary_search(&slice).is_ok();
    if !report.sums.iter().map(|(slice, _)| slice).eq(expected) {
        let (slices, own) = (report.sums.len(), expected.len());
        return Err(format!(
            "gradients of {slices} slices, but holds {own} slices that are trained"
        ));
    }
    if let Some(absent) = report.absent.iter().find(|absent| !is_own(absent.slice)) {
        return Err(format!("absent ranks for slice {}, which it does not hold", absent.slice));
    }
    match report.overflow {
        Some(overflow) if !is_own(overflow.slice) => {
            Err(format!("an overflow in slice {}, which it does not hold", overflow.slice))
        }
        _ => Ok(()),
    }
}
