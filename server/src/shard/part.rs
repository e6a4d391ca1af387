//! The part of a slice's state that a transfer reads or writes.

use zeroshard_model::{Error, Optimizer, Result, optimizer::StateShape};
use zeroshard_proto::pb::{self, state_part};

/// A part of a slice's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// The published parameters.
    Parameters,
    /// The f32 master weights; for a slice that is not trained, its parameters.
    Master,
    /// The optimizer state tensor at this position.
    State(usize),
    /// The sum of the gradients of the step that follows the version.
    GradientSum,
}

impl Part {
    /// The part that `message` names, in slices under `optimizer`; without a message, the
    /// parameters.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown part.
    pub(crate) fn of(message: Option<&pb::StatePart>, optimizer: &Optimizer) -> Result<Self> {
        let Some(message) = message else { return Ok(Self::Parameters) };
        match &message.part {
            Some(state_part::Part::Parameters(_)) => Ok(Self::Parameters),
            Some(state_part::Part::MasterWeights(_)) => Ok(Self::Master),
            Some(state_part::Part::GradientSum(_)) => Ok(Self::GradientSum),
            Some(state_part::Part::OptimizerState(name)) => {
                let state = optimizer.state();
                let position = state.iter().position(|tensor| tensor == name);
                position.map(Self::State).ok_or_else(|| {
                    let expected = format!("one of the state tensors of {optimizer}, {state:?}");
                    Error::invalid("optimizer state", format!("{name:?}"), expected)
                })
            }
            None => Err(Error::invalid(
                "part of the state",
                "unknown",
                "the parameters, the master weights, optimizer state or the sum of the gradients",
            )),
        }
    }

    /// Checks that the tensor has this part, of this shape; the error names `tensor`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for optimizer state or the gradient of a slice that is not trained, and
    /// for a state tensor that tensors of another number of dimensions have.
    pub(crate) fn check(self, trains: bool, shape: StateShape, tensor: &str) -> Result<()> {
        match self {
            Self::State(_) if trains && shape == StateShape::Absent => Err(Error::invalid(
                format!("optimizer state of tensor {tensor:?}"),
                "requested or uploaded",
                "omitted, because a tensor with this number of dimensions does not have it",
            )),
            Self::State(_) | Self::GradientSum if !trains => {
                let what = match self {
                    Self::GradientSum => format!("gradient of tensor {tensor:?}"),
                    _ => format!("optimizer state of tensor {tensor:?}"),
                };
                Err(Error::invalid(
                    what,
                    "requested or uploaded",
                    "omitted, because the tensor is not trained",
                ))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_are_those_of_the_optimizer() {
        let adamw: Optimizer = "adamw".parse().unwrap();
        let part = |part| Part::of(Some(&pb::StatePart { part }), &adamw);
        let state = |name: &str| part(Some(state_part::Part::OptimizerState(name.to_owned())));
        assert_eq!(Part::of(None, &adamw), Ok(Part::Parameters));
        assert_eq!(
            part(Some(state_part::Part::Parameters(Default::default()))),
            Ok(Part::Parameters)
        );
        assert_eq!(
            part(Some(state_part::Part::MasterWeights(Default::default()))),
            Ok(Part::Master)
        );
        assert_eq!(
            part(Some(state_part::Part::GradientSum(Default::default()))),
            Ok(Part::GradientSum)
        );
        assert_eq!(state("exp_avg_sq"), Ok(Part::State(1)));
        for unknown in ["", "momentum_buffer", "max_exp_avg_sq", "Exp_avg"] {
            assert!(matches!(state(unknown), Err(Error::Invalid { .. })), "{unknown}");
        }
        assert!(matches!(part(None), Err(Error::Invalid { .. })));
        let check = |part: Part, trains, shape| part.check(trains, shape, "w");
        assert!(check(Part::State(0), true, StateShape::Elements).is_ok());
        assert!(check(Part::Master, false, StateShape::Elements).is_ok());
        for (part, trains, shape) in [
            (Part::State(0), false, StateShape::Elements),
            (Part::State(0), true, StateShape::Absent),
            (Part::GradientSum, false, StateShape::Elements),
        ] {
            assert!(matches!(check(part, trains, shape), Err(Error::Invalid { .. })));
        }
    }
}
