//! What a rank says of a step, and what it is told.

use zeroshard_proto::{Manifest, Optimizer, pb};

/// What a rank says of a step when it has pushed all of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Commit {
    /// This step's hyperparameters, one for each parameter group; empty: those of the job.
    pub groups: Vec<Optimizer>,
    /// Gradients are those of the loss times this.
    pub loss_scale: f64,
    /// Clip by global norm: the largest norm of the mean gradient.
    pub max_norm: Option<f64>,
    /// This rank's loss; the report has the mean over the ranks.
    pub loss: Option<f64>,
}

impl Default for Commit {
    /// With the job's hyperparameters, without loss scale or clipping.
    fn default() -> Self {
        Self { groups: Vec::new(), loss_scale: 1.0, max_norm: None, loss: None }
    }
}

/// What became of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// The version that the step made.
    pub version: u64,
    /// False: skipped, because a gradient was inf or NaN (never with [`Optimizer::Average`]).
    pub applied: bool,
    /// Global L2 norm of the mean, unscaled gradient of all tensors without `no_clip`, before
    /// clipping.
    pub gradient_norm: f64,
    /// 1 where nothing was clipped.
    pub clip_coefficient: f64,
    /// The first tensor in manifest order with inf or NaN, and the lowest rank that sent one
    /// (`None`: only the sum over the ranks was not finite).
    pub overflow: Option<(usize, Option<u32>)>,
    /// Mean over the ranks, if all of them gave one.
    pub loss: Option<f64>,
    /// Number of ranks.
    pub world: u32,
    /// Tensors that some rank had no gradient for, in manifest order.
    pub absent: Vec<Absent>,
}

/// A tensor that some rank had no gradient for, and had said so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Absent {
    /// Its index in the manifest.
    pub tensor: usize,
    /// The lowest rank without.
    pub rank: u32,
    /// No rank had any of it: it was not stepped.
    pub everywhere: bool,
}

/// What a step's gradients come to, before the step is decided.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reduced {
    /// As [`StepReport::gradient_norm`].
    pub gradient_norm: f64,
    /// As [`StepReport::overflow`].
    pub overflow: Option<(usize, Option<u32>)>,
}

impl StepReport {
    pub(crate) fn new(report: &pb::CommitResponse, manifest: &Manifest) -> Self {
        let absent = report.absent.iter().filter_map(|&pb::Absent { slice, rank, everywhere }| {
            Some(Absent { tensor: tensor_of(manifest, slice)?, rank, everywhere })
        });
        Self {
            version: report.version,
            applied: report.applied,
            gradient_norm: report.gradient_norm,
            clip_coefficient: report.clip_coefficient,
            overflow: overflow(report.overflow, manifest),
            loss: report.loss,
            world: report.world,
            absent: absent.collect(),
        }
    }
}

impl Reduced {
    pub(crate) fn new(report: &pb::ReduceResponse, manifest: &Manifest) -> Self {
        Self { gradient_norm: report.gradient_norm, overflow: overflow(report.overflow, manifest) }
    }
}

fn overflow(overflow: Option<pb::Overflow>, manifest: &Manifest) -> Option<(usize, Option<u32>)> {
    let overflow = overflow?;
    Some((tensor_of(manifest, overflow.slice)?, overflow.rank))
}

fn tensor_of(manifest: &Manifest, slice: u32) -> Option<usize> {
    Some(manifest.slices().get(slice as usize)?.tensor)
}
