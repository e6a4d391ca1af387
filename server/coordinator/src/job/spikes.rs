//! Spikes: the coordinator judges each step before it decides it, if the job has a policy.
//!
//! ```text
//! Open --spike, skip--> Open, the step is skipped
//! Open --spike, rewind--> searching --found--> Waiting (see `restore`), on a new line
//! Open --spike, stop--> Failed
//! ```
//!
//! The step stays undecided while the driver searches for a checkpoint. If a rank is lost
//! meanwhile, the attempt ends, and the coordinator judges the next one.

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
        gradient::{Gradient, Largest, Norm},
    },
};

/// A step that all ranks have committed, with everything that its judge needs.
pub(crate) struct Judging<'a> {
    pub(crate) spec: &'a JobSpec,
    pub(crate) line: &'a Line,
    pub(crate) recent: &'a RecentSteps,
    pub(crate) open: &'a Open,
    pub(crate) options: &'a StepOptions,
}

/// The verdict about a step.
pub(crate) enum Verdict<'a> {
    /// Decide the step. If it is a spike, skip it.
    Decide(Judged<'a>),
    /// Return to a checkpoint that is at least this many steps back.
    Rewind { steps: u64, spike: Spiked },
    /// Stop the job.
    Stop(Spiked),
}

/// A step that the coordinator may decide.
pub(crate) struct Judged<'a> {
    /// The policy and the step's figures; `None` if the job has no policy.
    policy: Option<(&'a SpikePolicy, StepFigures)>,
    recent: &'a RecentSteps,
    /// The reason, if the step is a spike.
    pub(crate) spike: Option<String>,
}

/// A spike.
pub(crate) struct Spiked {
    /// The reason, which names the tensor and the rank with the largest gradient.
    pub(crate) why: String,
    /// The batch of the step.
    pub(crate) batch: u64,
}

impl<'a> Judging<'a> {
    /// Judges the step, whose reduced gradient is `gradient`.
    pub(crate) fn judge(&self, gradient: &Gradient) -> Verdict<'a> {
        let Self { spec, line, recent, open, options } = *self;
        let Some(policy) = &spec.spikes else {
            return Verdict::Decide(Judged { policy: None, recent, spike: None });
        };
        let scale = open.scale_of_mean(spec.world, options.loss_scale);
        let norm = gradient.norm(spec, scale);
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
            _ = write!(text, "; there is {}", overflow.describe(spec));
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
    /// Returns the figures that the policy needs after this step.
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
    /// Returns the rank that contributed most to a tensor, and its sum of squares over the slices
    /// where no other rank contributed more.
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
    /// Asks the driver for the checkpoint to which the job returns because of a spike.
    pub(crate) fn search(&mut self, steps: u64, spike: Spiked, cx: &mut Context<'_>) {
        let completed = cx.common.saves.number_completed();
        let job = self.reference();
        let Self { name, spec, line, epoch, recent, phase: Phase::Open(open), .. } = self else {
            return;
        };
        let Spiked { why, batch } = spike;
        let (attempt, step) = (open.attempt(*epoch), open.step());
        if cx.common.saves.completes(name) {
            return; // this save may be the target, or remove it; its end calls `decide` again
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

    /// The driver has searched. Returns the job to the checkpoint, or fails the job if there is
    /// none. Does nothing if the attempt has ended meanwhile.
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
