//! The parts of a tensor's state that a transfer reads or writes.

use zeroshard_proto::pb::{
    self,
    state_selector::{GradientSum, MasterWeights, Parameters, Part},
};

/// A part of the state of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StateSelector<'a> {
    /// The published parameters, which have the tensor's dtype.
    Parameters,
    /// The f32 master weights; of a tensor that is not trained, its parameters.
    MasterWeights,
    /// The optimizer state tensor with this name, one of [`zeroshard_model::Optimizer::state`].
    /// Only trained tensors have it, and [`zeroshard_model::Optimizer::state_shapes`] says which.
    /// It has the tensor's shape here; a value for a whole row or column is repeated.
    OptimizerState(&'a str),
    /// The sum over the ranks of the gradients of the step that follows the version, as f32. Only
    /// trained tensors have it, and only until the step is decided. A pull waits until the
    /// gradients of every rank have arrived.
    GradientSum,
}

impl From<StateSelector<'_>> for pb::StateSelector {
    fn from(part: StateSelector<'_>) -> Self {
        let part = match part {
            StateSelector::Parameters => Part::Parameters(Parameters {}),
            StateSelector::MasterWeights => Part::MasterWeights(MasterWeights {}),
            StateSelector::OptimizerState(name) => Part::OptimizerState(name.to_owned()),
            StateSelector::GradientSum => Part::GradientSum(GradientSum { attempt: None }),
        };
        Self { part: Some(part) }
    }
}
