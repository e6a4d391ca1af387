//! The decision about a step, which the servers carry out, and the report about it.

use zeroshard_model::{Attempt, JobSpec, Optimizer, RecentSteps};

use crate::vocabulary::gradient::{Absent, Gradient, Norm};

/// The decision about a step, which the servers carry out.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// The attempt whose gradients are applied.
    pub attempt: Attempt,
    /// `None`: the step is skipped.
    pub update: Option<Update>,
    pub figures: Figures,
    /// `None` in a job without replicas.
    pub replicated: Option<Box<Replicated>>,
}

/// The part of a decision that only a job with replicas needs, because backups do not have the
/// figures of their primaries.
#[derive(Debug, Clone, PartialEq)]
pub struct Replicated {
    /// The slices for which no rank had a gradient, ascending.
    pub absent: Vec<u32>,
    /// The report, without the norms of tensors.
    pub report: Report,
}

/// What the report of a step contains beside the reduced gradient. The servers keep it, so that a
/// coordinator that is restarted can repeat the report.
#[derive(Debug, Clone, PartialEq)]
pub struct Figures {
    /// The divisor of the mean gradient.
    pub scale: f64,
    pub clip_coefficient: f64,
    pub loss: Option<f64>,
    /// The ranks that rested, ascending.
    pub resting: Vec<u32>,
    /// The ranks with data for checkpoints, ascending.
    pub user_data: Vec<u32>,
    /// Why the step is a spike, if it is one.
    pub spike: Option<String>,
    /// The figures of the steps up to this one, for the policy on spikes.
    pub recent: RecentSteps,
}

/// The update that a decision applies.
#[derive(Debug, Clone, PartialEq)]
pub struct Update {
    /// The hyperparameters of each parameter group.
    pub groups: Vec<Optimizer>,
    /// The factor of the mean gradient: the clip coefficient divided by the loss scale.
    pub coefficient: f64,
    /// The same factor for tensors that are not clipped.
    pub unclipped: f64,
    /// Further factors, one for each tensor; empty: all are 1.
    pub gradient_factors: Vec<f64>,
}

/// The result of a step, which the ranks are told.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The version that the step has produced.
    pub version: u64,
    /// `true` if the step was applied and not skipped.
    pub applied: bool,
    pub norm: Norm,
    pub clip_coefficient: f64,
    /// The mean loss of the ranks, if each of them passed one.
    pub loss: Option<f64>,
    pub world: u32,
    /// One entry for each tensor with absent ranks, in manifest order.
    pub absent: Vec<Absent>,
    /// The ranks that rested, ascending.
    pub resting: Vec<u32>,
    /// Why the policy on spikes skipped the step, if it did.
    pub spike: Option<String>,
}

impl Decision {
    /// The report of the step, whose reduced gradient is `gradient`.
    pub(crate) fn report(&self, spec: &JobSpec, gradient: Gradient) -> Report {
        let Figures { scale, clip_coefficient, loss, ref resting, ref spike, .. } = self.figures;
        Report {
            version: self.attempt.step + 1,
            applied: self.update.is_some(),
            norm: gradient.norm(spec, scale),
            clip_coefficient,
            loss,
            world: spec.world,
            absent: gradient.absent,
            resting: resting.clone(),
            spike: spike.clone(),
        }
    }
}
