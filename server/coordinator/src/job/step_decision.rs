//! Decisions about steps: they are made, stored by every server, and then reported to the ranks.

use std::collections::BTreeSet;

use zeroshard_model::{Attempt, Error, JobSpec, Optimizer, Result};

use crate::{
    cluster::context::Context,
    job::{
        Job, Open, Phase,
        spikes::{Judged, Judging, Verdict},
    },
    operators::history::{Severity, Step},
    state::{decided::Decided, step_options::StepOptions},
    vocabulary::{
        commands::Command,
        decision::{Decision, Figures, Replicated, Report, Update},
        events::Action,
        gradient::Gradient,
        ids::{JobRef, ServerId},
    },
};

impl Open {
    /// Returns whether every server has stored the last decision.
    pub(crate) fn is_stored(&self) -> bool {
        self.version.last().is_none_or(|last| last.is_stored())
    }

    /// The decision about `step`, if it was the last one.
    pub(crate) fn decided(&mut self, step: u64) -> Option<&mut Decided> {
        self.version.last_mut().filter(|last| last.report().version == step.wrapping_add(1))
    }
}

/// Computes the decision about a step, for the servers, and the report about it, for the ranks.
fn decide(
    &Judging { spec, open, options, .. }: &Judging<'_>,
    epoch: u64,
    gradient: Gradient,
    judged: &Judged<'_>,
) -> (Decision, Report) {
    let attempt = open.attempt(epoch);
    let scale = open.scale_of_mean(spec.world, options.loss_scale);
    let finite = gradient.norm(spec, scale).overflow.is_none();
    // All groups do, or none does.
    let skips = options.groups.iter().all(Optimizer::skips_overflow);
    let apply = !skips || finite && judged.spike.is_none();
    let clip = match options.max_norm {
        Some(max) if apply && finite => {
            let scaled = gradient.norm_of(spec, &options.gradient_factors) / scale;
            max / scaled.max(max)
        }
        _ => 1.0,
    };
    let update = apply.then(|| Update {
        groups: options.groups.clone(),
        coefficient: clip / scale,
        unclipped: 1.0 / scale,
        gradient_factors: options.gradient_factors.clone(),
    });
    let (loss, resting) = (open.round.loss(), open.uneven_inputs.ranks().collect());
    let user_data = open.round.user_data().all().into_iter().collect();
    let recent = judged.recent_after(apply);
    let spike = judged.spike.clone();
    let figures =
        Figures { scale, clip_coefficient: clip, loss, resting, user_data, spike, recent };
    let mut decision = Decision { attempt, update, figures, replicated: None };
    let report = decision.report(spec, gradient);
    if spec.replicas > 1 {
        let absent = open.round.reports().values().flat_map(|report| &report.absent);
        let everywhere = absent.filter(|absent| absent.everywhere).map(|absent| absent.slice);
        let mut absent: Vec<u32> = everywhere.collect();
        absent.sort_unstable();
        decision.replicated = Some(Box::new(Replicated { absent, report: report.clone() }));
    }
    (decision, report)
}

impl Job {
    /// Decides the open step, if every rank has committed it and every server is ready.
    pub(crate) fn decide(&mut self, cx: &mut Context<'_>) {
        let Self { name, spec, id, epoch, line, recent, progress, phase, .. } = self;
        let Phase::Open(open) = phase else { return };
        if open.spike == Some(open.attempt(*epoch)) {
            return; // the driver searches for the checkpoint to which the job returns
        }
        // A rank that is done or rests counts as having committed. If all ranks are done, the job
        // has ended.
        let voters = open.active(spec.world);
        let stored = open.is_stored();
        let Some(options) = open
            .round
            .agreed(voters)
            .filter(|_| stored && open.is_reduced() && !open.replicas.is_copying())
        else {
            return;
        };
        if let Err(error) = check_written(name, spec, open, options) {
            return cx.refuse(open.round.withdraw_votes(), &error);
        }
        let gradient = open.gradient(spec);
        let step = Judging { spec, line, recent, open, options };
        let judged = match step.judge(&gradient) {
            Verdict::Decide(judged) => judged,
            Verdict::Rewind { steps, spike } => return self.search(steps, spike, cx),
            Verdict::Stop(spike) => return self.stop(&spike, cx),
        };
        let (decision, report) = decide(&step, *epoch, gradient, &judged);
        *recent = decision.figures.recent.clone();
        if let Some(spike) = &report.spike {
            let skipped =
                format!("step {} of job {name:?} is skipped, because {spike}", open.step());
            cx.push(Action::Spiked { job: spec.name.clone() });
            cx.alarm(Severity::Warning, skipped);
        }
        let job = JobRef { name: spec.name.clone(), id: *id };
        open.send(&Command::Decide { job: job.clone(), decision: decision.clone() }, cx.out);
        let pending: BTreeSet<ServerId> = open.servers().collect();
        open.lateness.add(&open.round.lateness());
        let &Report { version, applied, loss, ref norm, .. } = &report;
        let waits = open.round.waits(cx.now);
        let (attempt, began) = (decision.attempt, progress.since());
        let step = Step { version, attempt, began, applied, loss, norm: norm.value, waits };
        cx.push(Action::Decided { job, step });
        let by_overflow = !report.applied && report.spike.is_none();
        if let Some(overflow) = report.norm.overflow.filter(|_| by_overflow) {
            let (step, what) = (open.step(), overflow.describe(spec));
            cx.note(format!("step {step} of job {name:?} is skipped: {what}"));
        }
        open.saves.stepped(open.round.user_data());
        let waiters = open.round.drop_all();
        let mut decided = Box::new(Decided::new(decision, report, pending, waiters));
        decided.answer(*epoch, cx.out);
        open.version.decided(decided);
        // A rank sends its data before it commits the next step.
        if let Some((save, error)) = open.saves.without_data_of(name, |_| true) {
            self.save_ended(save, Err(error), cx);
        }
        self.save_if_due(cx);
    }

    /// A server has stored the decision about a step.
    pub(crate) fn stored(&mut self, server: ServerId, epoch: u64, step: u64, cx: &mut Context<'_>) {
        let Phase::Open(open) = &mut self.phase else { return };
        let Some(decided) = open.decided(step).filter(|of| of.decision().attempt.epoch == epoch)
        else {
            return;
        };
        if decided.stored_by(server) {
            // The ranks have not been told yet, so none has begun the next step.
            self.continue_drains(cx);
            if let Phase::Open(open) = &mut self.phase
                && let Some(decided) = open.version.last_mut()
            {
                decided.answer(self.epoch, cx.out);
            }
            self.serve_version(cx);
            self.copy_next(cx);
            self.advance(cx);
        }
    }

    /// Answers commits at their deadline with the servers that have not stored the decision.
    pub(crate) fn expire_stored(&mut self, cx: &mut Context<'_>) {
        let Self { name, phase: Phase::Open(open), .. } = self else { return };
        let Some(last) = open.version.last_mut() else { return };
        let expired = last.expire(cx.now);
        let Attempt { step, epoch, .. } = last.decision().attempt;
        cx.time_out(expired, |common| {
            let servers = common.servers.names_of(last.pending());
            format!(
                "{servers} to store the decision about step {step} of job {name:?} (epoch {epoch})"
            )
        });
    }
}

/// Checks that the values that the program has written have been sent: rank 0 sends those of
/// tensors that every rank has.
///
/// # Errors
/// [`Error::Refused`].
fn check_written(name: &str, spec: &JobSpec, open: &Open, options: &StepOptions) -> Result<()> {
    let mut tensors = spec.manifest.tensors().iter().zip(&options.written);
    let written = tensors.find(|(tensor, hash)| tensor.layout.is_none() && **hash != 0);
    let Some((tensor, _)) = written.filter(|_| !open.takes_part(0)) else { return Ok(()) };
    Err(Error::refused(format!(
        "the program wrote to tensor {:?} at step {} of job {name:?}, and rank 0, which sends new \
         values, has no more batches",
        tensor.name,
        open.step()
    )))
}
