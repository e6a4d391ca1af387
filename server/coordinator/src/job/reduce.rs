//! The reduced gradient of a step according to the servers' reports: for the decision, and for
//! ranks that request its norm before the decision.

use zeroshard_model::{JobSpec, Result, listing::some_of};

use crate::{
    cluster::{context::Context, servers::Servers},
    job::{Job, Open, Phase},
    vocabulary::{
        calls::{Reduce, Reply, check_rank},
        decision::Report,
        events::Action,
        gradient::Gradient,
        ids::{Caller, ServerId, Waiter},
    },
};

impl Job {
    pub(crate) fn reduce(&mut self, caller: Caller, reduce: Reduce, cx: &mut Context<'_>) {
        match self.try_reduce(caller, &reduce, cx).transpose() {
            None => self.answer_reducers(cx),
            Some(answer) => cx.push(Action::Answer(caller, answer)),
        }
    }

    /// Registers the call. Returns the answer if the step was decided.
    fn try_reduce(
        &mut self,
        caller: Caller,
        reduce: &Reduce,
        cx: &mut Context<'_>,
    ) -> Result<Option<Reply>> {
        let Reduce { turn, loss_scale, wait } = reduce;
        let Self { spec, epoch, phase, .. } = self;
        let open = phase.open_mut(&turn.job.name)?;
        check_rank(&turn.job.name, turn.rank, spec.world)?;
        if let Some(decided) = open.decided(turn.attempt.step) {
            let Report { norm, absent, resting, .. } = decided.report().clone();
            return Ok(Some(Reply::Reduced { norm, absent, resting }));
        }
        open.check_turn(turn, open.attempt(*epoch))?;
        let waiter = Waiter::new(caller, cx.now, *wait);
        open.round.await_norm(turn.rank, waiter, *loss_scale);
        Ok(None)
    }

    /// Answers the calls that wait for the norm, if all gradients of the open step are complete.
    pub(crate) fn answer_reducers(&mut self, cx: &mut Context<'_>) {
        let Self { spec, phase: Phase::Open(open), .. } = self else { return };
        if !open.round.awaits_norm() || !open.is_reduced() {
            return;
        }
        let gradient = open.gradient(spec);
        for (waiter, loss_scale) in open.round.take_reducers() {
            let norm = gradient.norm(spec, open.scale_of_mean(spec.world, loss_scale));
            let (absent, resting) = (gradient.absent.clone(), open.uneven_inputs.ranks().collect());
            cx.answer(waiter, Ok(Reply::Reduced { norm, absent, resting }));
        }
    }

    pub(crate) fn expire_reducers(&mut self, cx: &mut Context<'_>) {
        let Self { name, id, epoch, phase: Phase::Open(open), .. } = self else { return };
        let expired = open.round.expire_reducers(cx.now);
        cx.time_out(expired, |common| {
            let (step, parts) = (open.step(), some_of(late_servers(*id, open, &common.servers)));
            format!("the gradients of step {step} of job {name:?} (epoch {epoch}): {parts}")
        });
    }
}

/// Servers without all parameters or gradients, each with the input that it waits for.
pub(crate) fn late_servers(job_id: u64, open: &Open, servers: &Servers) -> Vec<String> {
    let uninitialised = open.version.uninitialised().iter();
    let uninitialised = uninitialised
        .map(|&server| format!("{}, which waits for initial parameters", servers.name(server)));
    let late = open.servers().filter(|&server| open.awaits(server));
    let late = late.filter(|server| !open.round.reports().contains_key(server));
    let late =
        late.map(|server| format!("{}{}", servers.name(server), lacks(server, job_id, servers)));
    uninitialised.chain(late).collect()
}

/// The missing input according to the server's last report.
pub(crate) fn lacks(server: ServerId, job_id: u64, servers: &Servers) -> String {
    let stats = servers.get(server).and_then(|known| known.stats.as_ref());
    match stats.and_then(|stats| stats.waiting_for(job_id)) {
        Some(missing) => format!(", which waits for {missing}"),
        None => ", which has not reported that its gradients are complete".to_owned(),
    }
}

impl Open {
    /// The reduced gradient of the open step.
    pub(crate) fn gradient(&self, spec: &JobSpec) -> Gradient {
        Gradient::new(spec, self.round.reports(), |rank| self.takes_part(rank))
    }

    /// Returns whether every server has all gradients of the open step.
    pub(crate) fn is_reduced(&self) -> bool {
        let mut awaited = self.servers().filter(|&server| self.awaits(server));
        self.version.is_published()
            && awaited.all(|server| self.round.reports().contains_key(&server))
    }
}
