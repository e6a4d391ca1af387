//! The barrier at the end of a step.
//!
//! A step is decided when every rank has committed it and every server with trained slices has
//! reported that its gradients are complete. Votes and reports belong to one (epoch, step,
//! attempt): the round is dropped when one of these changes.

use zeroshard_model::{Attempt, JobSpec, Result, listing::some_of};

use crate::{
    cluster::context::{Common, Context},
    job::{Job, Open, Phase, reduce::late_servers},
    state::step_options::StepOptions,
    vocabulary::{
        calls::{Commit, Reply, check_rank},
        events::Action,
        gradient::{Reduced, check_report},
        ids::{Caller, ServerId, Waiter},
    },
};

impl Open {
    /// Drops the call of a rank whose caller has disconnected. The rank's requests remain.
    pub(crate) fn forget_caller(&mut self, rank: u32, caller: Caller) {
        self.round.forget_caller(rank, caller);
        self.uneven_inputs.forget_caller(rank, caller);
        if let Some(last) = self.version.last_mut() {
            last.forget_caller(caller);
        }
    }
}

impl Job {
    pub(crate) fn commit(&mut self, caller: Caller, commit: Commit, cx: &mut Context<'_>) {
        match self.try_commit(caller, &commit, cx).transpose() {
            None => self.advance(cx),
            Some(answer) => cx.push(Action::Answer(caller, answer)),
        }
    }

    /// Registers the commit. Returns the report if the step was decided and every server has stored
    /// the decision.
    fn try_commit(
        &mut self,
        caller: Caller,
        commit: &Commit,
        cx: &mut Context<'_>,
    ) -> Result<Option<Reply>> {
        let Commit { turn, .. } = commit;
        let name = &turn.job.name;
        let Self { spec, epoch, phase, .. } = self;
        let open = phase.open_mut(name)?;
        check_rank(name, turn.rank, spec.world)?;
        let waiter = Waiter::new(caller, cx.now, commit.wait);
        // This check precedes the checks of the membership, so that a decided step is never
        // reported as aborted.
        if let Some(decided) = open.decided(turn.attempt.step) {
            let report = decided.report_to(waiter);
            return Ok(report.map(|report| Reply::Report(report, *epoch)));
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
        if let Err(what) = check_report(&report, open.plan.trainable.get(&server), self.spec.world)
        {
            let step = open.step();
            let reason =
                format!("{} reported {what} at step {step}; this is a bug", cx.name(server));
            return self.fail(&reason, cx);
        }
        // A server without trained slices does not have to report.
        if open.awaits(server) && open.replicas.is_current(server, report.copies) {
            open.round.report(server, report);
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
        let expired = open.round.expire_commits(cx.now);
        let Self { name, epoch, phase: Phase::Open(open), .. } = &*self else { return };
        cx.time_out(expired, |common| {
            let (step, parts) = (open.step(), some_of(self.step_lacks(open, common)));
            format!("step {step} of job {name:?} (epoch {epoch}): {parts}")
        });
    }

    /// Describes the missing input of the open step: ranks, and the input that servers wait for.
    pub(crate) fn step_lacks(&self, open: &Open, common: &Common) -> Vec<String> {
        let late = "ranks that have not committed";
        let mut parts = missing_ranks(&self.spec, open, |rank| open.round.has_voted(rank), late);
        parts.extend(late_servers(self.id, open, &common.servers));
        parts
    }
}

/// Describes the ranks that take part and have not called: ranks with a worker with the text
/// `late`, and ranks without a worker.
pub(crate) fn missing_ranks(
    spec: &JobSpec,
    open: &Open,
    has_called: impl Fn(u32) -> bool,
    late: &str,
) -> Vec<String> {
    let (here, absent) = open.missing(spec.world, has_called);
    let lists = [(here, late), (absent, "ranks without a worker")];
    let list = |(ranks, what): (Vec<u32>, &str)| {
        format!("{what} ({})", some_of(ranks.into_iter().map(|rank| spec.describe_rank(rank))))
    };
    lists.into_iter().filter(|(ranks, _)| !ranks.is_empty()).map(list).collect()
}
