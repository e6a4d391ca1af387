//! What of a slice a transfer is about.

use zeroshard_proto::{
    Error, Optimizer, Result,
    pb::{self, slice_array::Array},
};

/// A part of a slice's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// The parameters, as they are published.
    Parameters,
    /// The f32 master weights; of a slice that does not train its parameters.
    Master,
    /// The optimizer's state tensor at this position.
    State(usize),
}

impl Part {
    /// The part that is `array` in slices under `optimizer`; without a message, the parameters.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is none.
    pub(crate) fn of(array: Option<&pb::SliceArray>, optimizer: &Optimizer) -> Result<Self> {
        let Some(array) = array else { return Ok(Self::Parameters) };
        match &array.array {
            Some(Array::Parameters(_)) => Ok(Self::Parameters),
            Some(Array::MasterWeights(_)) => Ok(Self::Master),
            Some(Array::OptimizerState(name)) => {
                let state = optimizer.state();
                let position = state.iter().position(|tensor| tensor == name);
                position.map(Self::State).ok_or_else(|| {
                    let expected = format!("one of the state tensors of {optimizer}, {state:?}");
                    Error::invalid("optimizer state", format!("{name:?}"), expected)
                })
            }
            None => Err(Error::invalid(
                "array of a slice",
                "unknown",
                "the parameters, the master weights or optimizer state",
            )),
        }
    }

    /// # Errors
    /// [`Error::Invalid`] for state of a slice that does not train; `tensor` is whose it is.
    pub(crate) fn check(self, trains: bool, tensor: &str) -> Result<()> {
        match self {
            Self::State(_) if !trains => {
                let what = format!("optimizer state of tensor {tensor:?}");
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
    fn parts_are_those_of_the_optimizer() {
        let adamw: Optimizer = "adamw".parse().unwrap();
        let part = |array| Part::of(Some(&pb::SliceArray { array }), &adamw);
        let state = |name: &str| part(Some(Array::OptimizerState(name.to_owned())));
        assert_eq!(Part::of(None, &adamw), Ok(Part::Parameters));
        assert_eq!(part(Some(Array::Parameters(Default::default()))), Ok(Part::Parameters));
        assert_eq!(part(Some(Array::MasterWeights(Default::default()))), Ok(Part::Master));
        assert_eq!(state("exp_avg_sq"), Ok(Part::State(1)));
        for unknown in ["", "momentum_buffer", "max_exp_avg_sq", "Exp_avg"] {
            assert!(matches!(state(unknown), Err(Error::Invalid { .. })), "{unknown}");
        }
        assert!(matches!(part(None), Err(Error::Invalid { .. })));
        assert!(Part::State(0).check(true, "w").is_ok() && Part::Master.check(false, "w").is_ok());
        assert!(matches!(Part::State(0).check(false, "w"), Err(Error::Invalid { .. })));
    }
}
