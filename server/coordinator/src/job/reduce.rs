//! The reduced gradient of a step according to the servers' reports: for the decision, and for
//! ranks that request its norm before the decision.

use zeroshard_model::{JobSpec, Result, listing::some_of};

use crate::{
    calls::{Reduce, Reply, check_rank},
    context::{Common, Context},
    decision::Report,
    events::Action,
    gradient::Gradient,
    ids::{Caller, ServerId, Waiter},
    job::{Job, Open, Phase},
    round::Reducer,
    servers::Servers,
};

impl Job {
    pub(crate) fn reduce(&mut self, caller: Caller, reduce: Reduce, cx: &mut Context<'_>) {
        match self.try_reduce(caller, &reduce, cx) {
            Ok(None) => self.answer_reducers(cx),
            Ok(Some(reply)) => cx.push(Action::Answer(caller, Ok(reply))),
            Err(error) => cx.push(Action::Answer(caller, Err(error))),
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
            let Report { norm, resting, .. } = &decided.report;
            return Ok(Some(Reply::Reduced(norm.clone(), resting.clone())));
        }
        open.check_turn(turn, open.attempt(*epoch))?;
        let waiter = Waiter::new(caller, cx.now, *wait);
        open.round.reducers.push(Reducer { rank: turn.rank, waiter, loss_scale: *loss_scale });
        Ok(None)
    }

    /// Answers the calls that wait for the norm, if all gradients of the open step are complete.
    pub(crate) fn answer_reducers(&mut self, cx: &mut Context<'_>) {
        let Self { spec, phase: Phase::Open(open), .. } = self else { return };
        if open.round.reducers.is_empty() || !open.is_reduced() {
            return;
        }
        let gradient = open.gradient(spec);
        for Reducer { waiter, loss_scale, .. } in std::mem::take(&mut open.round.reducers) {
            let norm = gradient.norm(spec, open.scale_of_mean(spec.world, loss_scale));
            let reply = Reply::Reduced(norm, open.resting.ranks().collect());
            cx.answer(waiter, Ok(reply));
        }
    }

    pub(crate) fn expire_reducers(&mut self, cx: &mut Context<'_>) {
        let Phase::Open(open) = &mut self.phase else { return };
        let late = |reducer: &mut Reducer| reducer.waiter.deadline <= cx.now;
        let expired: Vec<Reducer> = open.round.reducers.extract_if(.., late).collect();
        if expired.is_empty() {
            return;
        }
        let waiting_for = self.gradients_wait_for(cx.common);
        cx.time_out(expired.into_iter().map(|reducer| reducer.waiter), &waiting_for);
    }

    fn gradients_wait_for(&self, common: &Common) -> String {
        let Self { name, id, epoch, phase: Phase::Open(open), .. } = self else {
            return String::new();
        };
        let parts = some_of(late_servers(*id, open, &common.servers));
        format!("the gradients of step {} of job {name:?} (epoch {epoch}): {parts}", open.step())
    }
}

/// Servers without all parameters or gradients, each with the input that it waits for.
pub(crate) fn late_servers(job_id: u64, open: &Open, servers: &Servers) -> Vec<String> {
    let uninitialised = open.uninitialised.iter();
    let uninitialised = uninitialised
        .map(|&server| format!("{}, which waits for initial parameters", servers.name(server)));
    let late = open.servers().filter(|&server| open.awaits(server));
    let late = late.filter(|server| !open.round.reports.contains_key(server));
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
        Gradient::new(spec, &self.round.reports, |rank| self.takes_part(rank))
    }

    /// Returns whether every server has all gradients of the open step.
    pub(crate) fn is_reduced(&self) -> bool {
        let mut awaited = self.servers().filter(|&server| self.awaits(server));
        self.version.is_some() && awaited.all(|server| self.round.reports.contains_key(&server))
    }
}
