//! The part of a slice's state that a transfer reads or writes.

use zeroshard_model::{Error, Result, optimizer::StateShape};

/// A part of a slice's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
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
    /// Checks that the tensor has this part, of this shape; the error names `tensor`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for optimizer state or the gradient of a slice that is not trained, and
    /// for a state tensor that tensors of another number of dimensions have.
    pub fn check(self, trains: bool, shape: StateShape, tensor: &str) -> Result<()> {
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
