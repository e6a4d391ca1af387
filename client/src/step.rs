//! A rank's vote about a step, and the report of the step.

use bytes::Bytes;
#[cfg(doc)]
use zeroshard_model::checkpoint::MAX_USER_DATA;
use zeroshard_model::{Manifest, Optimizer, TensorId};
use zeroshard_proto::pb;

/// A rank's vote about a step, after it has pushed all gradients.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Commit {
    /// The hyperparameters of this step, one entry for each parameter group; empty: those of the
    /// job.
    pub groups: Vec<Optimizer>,
    /// The factor by which the loss, and therefore the gradients, were multiplied.
    pub loss_scale: f64,
    /// The maximum global norm of the mean gradient, for clipping.
    pub max_norm: Option<f64>,
    /// The loss of this rank; the report contains the mean over the ranks.
    pub loss: Option<f64>,
    /// The factors by which mean gradients are multiplied before they are clipped, one for each
    /// tensor of the job; empty: all are 1.
    pub gradient_factors: Vec<f64>,
    /// Hashes of the values that the program has written to parameters since the last step,
    /// one for each tensor of the job, 0 for others; empty: all are 0. They must be equal on all
    /// ranks.
    pub written: Vec<u64>,
    /// Data of this rank for a checkpoint of the version that the step makes, for example its
    /// random state: at most [`MAX_USER_DATA`] bytes.
    pub user_data: Bytes,
    /// `true` if this rank sends that data after the step, with [`crate::Job::send_user_data`].
    pub user_data_follows: bool,
}

impl Default for Commit {
    /// The job's hyperparameters, without loss scale, factors or clipping.
    fn default() -> Self {
        Self {
            groups: Vec::new(),
            loss_scale: 1.0,
            max_norm: None,
            loss: None,
            gradient_factors: Vec::new(),
            written: Vec::new(),
            user_data: Bytes::new(),
            user_data_follows: false,
        }
    }
}

impl Commit {
    /// Sets [`Self::groups`].
    #[must_use]
    pub fn groups(self, groups: Vec<Optimizer>) -> Self {
        Self { groups, ..self }
    }

    /// Sets [`Self::loss_scale`].
    #[must_use]
    pub fn loss_scale(self, loss_scale: f64) -> Self {
        Self { loss_scale, ..self }
    }

    /// Sets [`Self::max_norm`].
    #[must_use]
    pub fn max_norm(self, max_norm: impl Into<Option<f64>>) -> Self {
        Self { max_norm: max_norm.into(), ..self }
    }

    /// Sets [`Self::loss`].
    #[must_use]
    pub fn loss(self, loss: impl Into<Option<f64>>) -> Self {
        Self { loss: loss.into(), ..self }
    }

    /// Sets [`Self::gradient_factors`].
    #[must_use]
    pub fn gradient_factors(self, gradient_factors: Vec<f64>) -> Self {
        Self { gradient_factors, ..self }
    }

    /// Sets [`Self::written`].
    #[must_use]
    pub fn written(self, written: Vec<u64>) -> Self {
        Self { written, ..self }
    }

    /// Sets [`Self::user_data`].
    #[must_use]
    pub fn user_data(self, user_data: impl Into<Bytes>) -> Self {
        Self { user_data: user_data.into(), ..self }
    }

    /// Sets [`Self::user_data_follows`].
    #[must_use]
    pub fn user_data_follows(self, user_data_follows: bool) -> Self {
        Self { user_data_follows, ..self }
    }
}

/// The result of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// The version that the step produced.
    pub version: u64,
    /// `true` if the step was applied. A step is skipped if a gradient is inf or NaN (never with
    /// [`Optimizer::Average`]), or because of a spike.
    pub applied: bool,
    /// The global L2 norm of the mean, unscaled gradient of all tensors without `no_clip`, before
    /// [`Commit::gradient_factors`] and clipping.
    pub gradient_norm: f64,
    /// The clip coefficient; 1 if the gradient was not clipped.
    pub clip_coefficient: f64,
    /// The origin of inf or NaN in the gradient, if there is one. The step is then skipped, except
    /// with [`Optimizer::Average`].
    pub overflow: Option<Overflow>,
    /// The mean loss over the ranks, if all of them passed a loss.
    pub loss: Option<f64>,
    /// The number of ranks.
    pub world: u32,
    /// The tensors for which at least one rank had no gradient, in manifest order.
    pub absent: Vec<Absent>,
    /// The ranks that rested (see [`crate::Attempt::rest`]), ascending.
    pub resting: Vec<u32>,
    /// The reason why the job's policy on spikes skipped the step, if it did. It completes the
    /// sentence "The step was skipped, because ...".
    pub spike: Option<String>,
}

/// A tensor for which at least one rank has declared that it has no gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Absent {
    /// The tensor.
    pub tensor: TensorId,
    /// The lowest rank without a gradient.
    pub rank: u32,
    /// `true` if no rank had any gradient of the tensor, so that it was not stepped.
    pub everywhere: bool,
}

/// The origin of inf or NaN in a step's gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overflow {
    /// The first tensor in manifest order with inf or NaN.
    pub tensor: TensorId,
    /// The lowest rank that sent one; `None`: only the sum over the ranks was not finite.
    pub rank: Option<u32>,
}

/// The properties of a step's reduced gradient, before the step is decided.
#[derive(Debug, Clone, PartialEq)]
pub struct Reduced {
    /// The same as [`StepReport::gradient_norm`].
    pub gradient_norm: f64,
    /// The same as [`StepReport::overflow`].
    pub overflow: Option<Overflow>,
    /// The L2 norm of the mean, unscaled gradient of each tensor, in manifest order; 0 for a tensor
    /// that is not trained or for which no rank has a gradient.
    pub tensor_norms: Vec<f64>,
    /// The same as [`StepReport::absent`].
    pub absent: Vec<Absent>,
    /// The same as [`StepReport::resting`].
    pub resting: Vec<u32>,
}

/// The end of a rest, from which on all ranks take part again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rested {
    /// The open step, which equals the current version.
    pub step: u64,
    /// The highest rank of those that took part in the last step.
    pub last: u32,
}

impl StepReport {
    pub(crate) fn new(report: &pb::CommitResponse, manifest: &Manifest) -> Self {
        Self {
            version: report.version,
            applied: report.applied,
            gradient_norm: report.gradient_norm,
            clip_coefficient: report.clip_coefficient,
            overflow: overflow(report.overflow, manifest),
            loss: report.loss,
            world: report.world,
            absent: absent(&report.absent, manifest),
            resting: report.resting.clone(),
            spike: Some(report.spike.clone()).filter(|why| !why.is_empty()),
        }
    }
}

impl Reduced {
    pub(crate) fn new(report: &pb::ReduceResponse, manifest: &Manifest) -> Self {
        Self {
            gradient_norm: report.gradient_norm,
            overflow: overflow(report.overflow, manifest),
            tensor_norms: report.tensor_norms.clone(),
            absent: absent(&report.absent, manifest),
            resting: report.resting.clone(),
        }
    }
}

fn absent(absent: &[pb::Absent], manifest: &Manifest) -> Vec<Absent> {
    let of = |&pb::Absent { slice, rank, everywhere }: &pb::Absent| {
        Some(Absent { tensor: tensor_of(manifest, slice)?, rank, everywhere })
    };
    absent.iter().filter_map(of).collect()
}

fn overflow(overflow: Option<pb::Overflow>, manifest: &Manifest) -> Option<Overflow> {
    let pb::Overflow { slice, rank } = overflow?;
    Some(Overflow { tensor: tensor_of(manifest, slice)?, rank })
}

fn tensor_of(manifest: &Manifest, slice: u32) -> Option<TensorId> {
    Some(TensorId::new(manifest.slices().get(slice as usize)?.tensor))
}
