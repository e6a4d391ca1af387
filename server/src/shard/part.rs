//! What of a slice a transfer is about.

use zeroshard_proto::{Error, Optimizer, Result};

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
    /// The part of that name, of slices under `optimizer`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is none.
    pub(crate) fn parse(name: &str, optimizer: &Optimizer) -> Result<Self> {
        if name.is_empty() {
            return Ok(Self::Parameters);
        }
        if name == "master" {
            return Ok(Self::Master);
        }
        let state = optimizer.state();
        match state.iter().position(|tensor| *tensor == name) {
            Some(position) => Ok(Self::State(position)),
            None => {
                let expected = format!("empty, master or a state tensor of {optimizer}: {state:?}");
                Err(Error::invalid("part", format!("{name:?}"), expected))
            }
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
                    "asked for or uploaded",
                    "left out: the tensor does not train",
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
        assert_eq!(Part::parse("", &adamw), Ok(Part::Parameters));
        assert_eq!(Part::parse("master", &adamw), Ok(Part::Master));
        assert_eq!(Part::parse("exp_avg_sq", &adamw), Ok(Part::State(1)));
        for unknown in ["momentum_buffer", "max_exp_avg_sq", "Master"] {
            assert!(
                matches!(Part::parse(unknown, &adamw), Err(Error::Invalid { .. })),
                "{unknown}"
            );
        }
        assert!(Part::State(0).check(true, "w").is_ok() && Part::Master.check(false, "w").is_ok());
        assert!(matches!(Part::State(0).check(false, "w"), Err(Error::Invalid { .. })));
    }
}
