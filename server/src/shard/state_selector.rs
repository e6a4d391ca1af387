//! The part of a slice's state that a message names.

use zeroshard_model::{Error, JobSpec, Result};
use zeroshard_proto::pb::{self, state_selector};
use zeroshard_shard::state_selector::StateSelector;

/// The part that `message` names, in slices of tensor number `tensor`; without a message, the
/// parameters.
///
/// # Errors
/// [`Error::Invalid`] for an unknown part; [`Error::Refused`] for optimizer state of a tensor that
/// is not trained.
pub(crate) fn of(
    message: Option<&pb::StateSelector>,
    spec: &JobSpec,
    tensor: usize,
) -> Result<StateSelector> {
    let Some(message) = message else { return Ok(StateSelector::Parameters) };
    match &message.part {
        Some(state_selector::Part::Parameters(_)) => Ok(StateSelector::Parameters),
        Some(state_selector::Part::MasterWeights(_)) => Ok(StateSelector::Master),
        Some(state_selector::Part::GradientSum(_)) => Ok(StateSelector::GradientSum),
        Some(state_selector::Part::OptimizerState(name)) => {
            let of = &spec.manifest.tensors()[tensor].name;
            let Some(optimizer) = spec.optimizer_of(tensor) else {
                return Err(Error::refused(format!(
                    "tensor {of:?} is not trained and has no optimizer state; leave it out"
                )));
            };
            spec.state_position(tensor, name).map(StateSelector::State).ok_or_else(|| {
                let what = format!("optimizer state of tensor {of:?}");
                let state: Vec<_> =
                    spec.state_of(tensor).into_iter().map(|(name, _)| name).collect();
                let expected = format!("one of the state tensors of {optimizer}, {state:?}");
                Error::invalid(what, format!("{name:?}"), expected)
            })
        }
        None => Err(Error::refused(
            "the part of the state is unknown; name the parameters, the master weights, optimizer \
             state or the sum of the gradients",
        )),
    }
}

#[cfg(test)]
mod tests {
    use zeroshard_model::{Manifest, TensorSpec, optimizer::StateShape};

    use super::*;

    #[test]
    fn the_parts_are_those_of_the_optimizer_of_the_tensor() {
        let tensor = |name: &str, group| TensorSpec { group, ..TensorSpec::new(name, [4]) };
        let frozen = TensorSpec { frozen: true, ..tensor("frozen", 0) };
        let manifest = Manifest::new(vec![tensor("w", 0), tensor("v", 1), frozen]).unwrap();
        let groups = ["adamw", "adagrad"].map(|name| name.parse().unwrap());
        let spec = JobSpec::new("job", manifest, groups.into());
        let part_of = |tensor, part| of(Some(&pb::StateSelector { part }), &spec, tensor);
        let part = |part| part_of(0, part);
        let state_of = |tensor, name: &str| {
            part_of(tensor, Some(state_selector::Part::OptimizerState(name.to_owned())))
        };
        let state = |name: &str| state_of(0, name);
        assert_eq!(of(None, &spec, 0), Ok(StateSelector::Parameters));
        assert_eq!(
            part(Some(state_selector::Part::Parameters(Default::default()))),
            Ok(StateSelector::Parameters)
        );
        assert_eq!(
            part(Some(state_selector::Part::MasterWeights(Default::default()))),
            Ok(StateSelector::Master)
        );
        assert_eq!(
            part(Some(state_selector::Part::GradientSum(Default::default()))),
            Ok(StateSelector::GradientSum)
        );
        assert_eq!(state("exp_avg_sq"), Ok(StateSelector::State(1)));
        assert_eq!(state_of(1, "sum"), Ok(StateSelector::State(0)));
        assert!(matches!(state_of(1, "exp_avg"), Err(Error::Invalid { .. })));
        assert!(matches!(state_of(2, "exp_avg"), Err(Error::Refused { .. })));
        for unknown in ["", "sum", "momentum_buffer", "max_exp_avg_sq", "Exp_avg"] {
            assert!(matches!(state(unknown), Err(Error::Invalid { .. })), "{unknown}");
        }
        assert!(matches!(part(None), Err(Error::Refused { .. })));
        let check = |part: StateSelector, trains, shape| part.check(trains, shape, "w");
        assert!(check(StateSelector::State(0), true, StateShape::Elements).is_ok());
        assert!(check(StateSelector::Master, false, StateShape::Elements).is_ok());
        for (part, trains, shape) in [
            (StateSelector::State(0), true, StateShape::Absent),
            (StateSelector::GradientSum, false, StateShape::Elements),
        ] {
            assert!(matches!(check(part, trains, shape), Err(Error::Refused { .. })));
        }
    }
}
