//! The part of a slice's state that a message names.

use zeroshard_model::{Error, Optimizer, Result};
use zeroshard_proto::pb::{self, state_part};
use zeroshard_shard::part::Part;

/// The part that `message` names, in slices under `optimizer`; without a message, the
/// parameters.
///
/// # Errors
/// [`Error::Invalid`] for an unknown part.
pub(crate) fn of(message: Option<&pb::StatePart>, optimizer: &Optimizer) -> Result<Part> {
    let Some(message) = message else { return Ok(Part::Parameters) };
    match &message.part {
        Some(state_part::Part::Parameters(_)) => Ok(Part::Parameters),
        Some(state_part::Part::MasterWeights(_)) => Ok(Part::Master),
        Some(state_part::Part::GradientSum(_)) => Ok(Part::GradientSum),
        Some(state_part::Part::OptimizerState(name)) => {
            let state = optimizer.state();
            let position = state.iter().position(|tensor| tensor == name);
            position.map(Part::State).ok_or_else(|| {
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

#[cfg(test)]
mod tests {
    use zeroshard_model::optimizer::StateShape;

    use super::*;

    #[test]
    fn the_parts_are_those_of_the_optimizer() {
        let adamw: Optimizer = "adamw".parse().unwrap();
        let part = |part| of(Some(&pb::StatePart { part }), &adamw);
        let state = |name: &str| part(Some(state_part::Part::OptimizerState(name.to_owned())));
        assert_eq!(of(None, &adamw), Ok(Part::Parameters));
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
