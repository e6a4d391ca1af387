//! The barrier at the end of a step.
//!
//! A step is decided when every rank has committed it and every server with trained slices has
//! reported that its gradients are complete. Votes and reports belong to one (epoch, step,
//! attempt): the round is dropped when one of these changes.

use std::collections::BTreeMap;

use zeroshard_model::{Attempt, JobSpec, Result, listing::some_of};

use crate::{
    calls::{Commit, Reply, check_rank},
    context::{Common, Context},
    decision::Report,
    events::Action,
    gradient::{Reduced, check_report},
    ids::{Caller, ServerId, Waiter},
    job::{Job, Open, Phase, reduce::late_servers},
    step_options::StepOptions,
};

impl Open {
    /// Drops the call of a rank whose caller has disconnected. The rank's requests remain.
    pub(crate) fn forget_caller(&mut self, rank: u32, caller: Caller) {
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
    pub(crate) fn commit(&mut self, caller: Caller, commit: Commit, cx: &mut Context<'_>) {
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
        let options = StepOptions::of(commit, spec)?;
        open.round.side_with_commits(turn, cx.out)?;
        open.round.vote(waiter, commit, options, spec, cx.out)?;
        Ok(None)
    }

    /// A server has received all gradients of the attempt.
    pub(crate) fn ready(
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
    pub(crate) fn advance(&mut self, cx: &mut Context<'_>) {
        self.resume_if_all_rest(cx);
        self.answer_reducers(cx);
        self.discard_if_all_have(cx);
        self.decide(cx);
    }

    pub(crate) fn expire_commits(&mut self, cx: &mut Context<'_>) {
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
    pub(crate) fn step_lacks(&self, open: &Open, common: &Common) -> Vec<String> {
        let late = "ranks that have not committed";
        let mut parts = missing_ranks(&self.spec, open, &open.round.votes, late);
        parts.extend(late_servers(self.id, open, &common.servers));
        parts
    }
}

/// Describes the ranks without a call in `present`: ranks with a worker with the text `late`, and
/// ranks without a worker.
pub(crate) fn missing_ranks<T>(
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
