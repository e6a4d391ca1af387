//! Spikes: the policy of a job judges each step before it is decided.
//!
//! ```text
//! Open --spike, skip--> Open, the step is skipped
//! Open --spike, rewind--> searching --found--> Waiting (see `restore`), on a new line
//! Open --spike, stop--> Failed
//! ```
//!
//! While a checkpoint is searched, the step stays undecided. If its attempt ends meanwhile, because
//! a rank was lost, the next attempt is judged again.

use std::{collections::BTreeMap, fmt::Write};

use zeroshard_model::{
    Error, JobSpec, Line, RecentSteps, Result, Spike, SpikeAction, SpikePolicy, StepFigures,
    spikes::SpikeCause,
};

use crate::{
    cluster::context::Context,
    job::{Job, Open, Phase},
    operators::history::Severity,
    state::step_options::StepOptions,
    vocabulary::{
        events::{Action, Search, Target},
        gradient::{Largest, Norm},
    },
};

/// A step that all ranks have committed, and what its policy knows.
pub(crate) struct Judging<'a> {
    pub(crate) spec: &'a JobSpec,
    pub(crate) line: &'a Line,
    pub(crate) recent: &'a RecentSteps,
    pub(crate) open: &'a Open,
    pub(crate) options: &'a StepOptions,
}

/// The outcome of a judgement.
pub(crate) enum Verdict<'a> {
    /// The step is decided; it is skipped if it is a spike.
    Decide(Judged<'a>),
    /// The job returns by this number of steps.
    Rewind { steps: u64, spike: Spiked },
    /// The job stops.
    Stop(Spiked),
}

/// A step that is decided.
pub(crate) struct Judged<'a> {
    /// The policy, and the figures of the step; `None` without a policy.
    policy: Option<(&'a SpikePolicy, StepFigures)>,
    recent: &'a RecentSteps,
    /// Why the step is a spike, if it is one.
    pub(crate) spike: Option<String>,
}

/// A spike.
pub(crate) struct Spiked {
    /// Why it is one, with the tensor and the rank of the largest gradient.
    pub(crate) why: String,
    /// The batch of the step.
    pub(crate) batch: u64,
}

impl<'a> Judging<'a> {
    /// Judges the step.
    pub(crate) fn judge(&self) -> Verdict<'a> {
        let Self { spec, line, recent, open, options } = *self;
        let Some(policy) = &spec.spikes else {
            return Verdict::Decide(Judged { policy: None, recent, spike: None });
        };
        let scale = open.scale_of_mean(spec.world, options.loss_scale);
        let norm = open.gradient(spec).norm(spec, scale);
        let batch = line.batch(open.step());
        let figures = StepFigures { norm: norm.value, loss: open.round.loss(), batch };
        let spike = recent.judge(policy, figures);
        let why = spike.map(|Spike { cause, .. }| self.describe(cause, &norm));
        match (spike, why) {
            (Some(Spike { is_over_limit: true, .. }), Some(why)) => {
                let SpikePolicy { limit, limit_batches, .. } = policy;
                let spikes = if *limit == 1 { "spike" } else { "spikes" };
                let over = format!(
                    "{why}. It follows {limit} {spikes} within {limit_batches} batches, the limit of \
                     the policy"
                );
                Verdict::Stop(Spiked { why: over, batch })
            }
            (Some(_), Some(why)) => match policy.action {
                SpikeAction::Skip => Verdict::Decide(Judged {
                    policy: Some((policy, figures)),
                    recent,
                    spike: Some(why),
                }),
                SpikeAction::Rewind { steps } => {
                    Verdict::Rewind { steps, spike: Spiked { why, batch } }
                }
                SpikeAction::Stop => Verdict::Stop(Spiked { why, batch }),
            },
            _ => Verdict::Decide(Judged { policy: Some((policy, figures)), recent, spike: None }),
        }
    }

    /// Names the tensor with the largest gradient, and the rank that contributed most to it.
    fn describe(&self, cause: SpikeCause, norm: &Norm) -> String {
        let Self { spec, open, options, .. } = self;
        let mut text = cause.to_string();
        let tensors = spec.manifest.tensors();
        if let Some(overflow) = norm.overflow {
            let tensor = &spec.manifest.tensor_of(overflow.slice as usize).name;
            let by = overflow.rank.map(|rank| format!(", from {}", spec.describe_rank(rank)));
            let by = by.unwrap_or_default();
            _ = write!(text, "; inf or NaN is in tensor {tensor:?}{by}");
            return text;
        }
        let by_norm = |&(_, a): &(usize, &f64), &(_, b): &(usize, &f64)| a.total_cmp(b);
        let Some((tensor, of_tensor)) = norm.tensors.iter().enumerate().max_by(by_norm) else {
            return text;
        };
        let name = &tensors[tensor].name;
        _ = write!(
            text,
            "; the largest gradient is that of tensor {name:?} (norm {of_tensor:.4e})"
        );
        if let Some((rank, squares)) = open.largest(spec, tensor) {
            let norm = squares.sqrt() / options.loss_scale;
            let by = spec.describe_contributor(rank);
            _ = write!(text, ", to which {by} contributed most (norm {norm:.4e})");
        }
        text
    }
}

impl Judged<'_> {
    /// The figures for the policy after this step.
    pub(crate) fn recent_after(&self, applied: bool) -> RecentSteps {
        let Some((policy, figures)) = self.policy else { return RecentSteps::default() };
        let mut recent = self.recent.clone();
        recent.add(policy, figures, applied);
        if self.spike.is_some() {
            recent.add_spike(policy, figures.batch);
            recent.nonfinite = 0;
        }
        recent
    }
}

impl Open {
    /// The rank whose contributions to a tensor are the largest, and the sum of their squares over
    /// the slices in which they are.
    fn largest(&self, spec: &JobSpec, tensor: usize) -> Option<(u32, f64)> {
        let slices = spec.manifest.slices_of(tensor);
        let reports = self.round.reports().values();
        let of_tensor = reports.flat_map(|report| &report.largest);
        let mut ranks = BTreeMap::<u32, f64>::new();
        for Largest { rank, squares, .. } in
            of_tensor.filter(|largest| slices.contains(&(largest.slice as usize)))
        {
            *ranks.entry(*rank).or_default() += squares;
        }
        ranks.into_iter().max_by(|a, b| a.1.total_cmp(&b.1))
    }
}

impl Job {
    /// Searches for the checkpoint to which the job returns after a spike at the open step.
    pub(crate) fn search(&mut self, steps: u64, spike: Spiked, cx: &mut Context<'_>) {
        let completed = cx.common.saves.number_completed();
        let job = self.reference();
        let Self { name, spec, line, epoch, recent, phase: Phase::Open(open), .. } = self else {
            return;
        };
        let Spiked { why, batch } = spike;
        let (attempt, step) = (open.attempt(*epoch), open.step());
        if cx.common.saves.completes(name) {
            return; // it may be the checkpoint, or remove it; the end of the save decides again
        }
        if let Some(policy) = &spec.spikes
            && !recent.spikes.contains(&batch)
        {
            recent.add_spike(policy, batch);
            cx.push(Action::Spiked { job: spec.name.clone() });
            cx.alarm(
                Severity::Warning,
                format!("job {name:?} rewinds at step {step}, because {why}"),
            );
        }
        let until = (step + 1).saturating_sub(steps);
        let skip = line.batch(until)..batch.saturating_add(1);
        open.spike = Some(attempt);
        let (spec, line) = (spec.clone(), line.clone());
        cx.push(Action::Search(Search { job, spec, line, attempt, until, skip, completed }));
    }

    /// A search has ended. The job returns to the checkpoint, unless the attempt has ended
    /// meanwhile. It stops if there is none.
    pub(crate) fn searched(
        &mut self,
        search: &Search,
        found: Result<Target>,
        cx: &mut Context<'_>,
    ) {
        let Self { epoch, phase: Phase::Open(open), .. } = self else { return };
        let Some(attempt) = open.spike.take_if(|of| *of == search.attempt) else { return };
        if open.attempt(*epoch) != attempt {
            return;
        }
        let returned = match found {
            Ok(_) if cx.common.saves.number_completed() != search.completed => {
                return self.decide(cx);
            }
            Ok(Target { to, skips }) => self.return_to(to, skips, None, "because of a spike", cx),
            Err(error) => Err(error),
        };
        if let Err(error) = returned {
            let step = attempt.step;
            let none = matches!(error, Error::NoCheckpoint { .. });
            let advice = if none { "; save more often, or skip such steps" } else { "" };
            let why = format!("it cannot rewind after the spike at step {step}: {error}{advice}");
            self.fail(&why, cx);
        }
    }

    /// Stops the job at a spike.
    pub(crate) fn stop(&mut self, spike: &Spiked, cx: &mut Context<'_>) {
        let Phase::Open(open) = &self.phase else { return };
        let reason = format!(
            "its policy on spikes stopped it at step {}, because {}; resume it from a checkpoint",
            open.step(),
            spike.why
        );
        cx.push(Action::Spiked { job: self.spec.name.clone() });
        self.fail(&reason, cx);
    }
}
