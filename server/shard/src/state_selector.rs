//! The part of a slice's state that a transfer reads or writes.

use zeroshard_model::{Error, Result, optimizer::StateShape};

/// A part of a slice's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StateSelector {
    /// The published parameters.
    Parameters,
    /// The f32 master weights; for a slice that is not trained, its parameters.
    Master,
    /// The optimizer state tensor at this position.
    State(usize),
    /// The sum of the gradients of the step that follows the version.
    GradientSum,
}

impl StateSelector {
    /// Checks that the tensor has this part, of this shape; the error names `tensor`.
    ///
    /// # Errors
    /// [`Error::Refused`] for the gradient of a slice that is not trained, and for a state tensor
    /// that tensors of another number of dimensions have.
    pub fn check(self, trains: bool, shape: StateShape, tensor: &str) -> Result<()> {
        match self {
            Self::State(_) if shape == StateShape::Absent => Err(Error::refused(format!(
                "tensor {tensor:?} does not have this optimizer state, because of its number of \
                 dimensions; leave it out"
            ))),
            Self::GradientSum if !trains => Err(Error::refused(format!(
                "tensor {tensor:?} is not trained and has no gradient; leave it out"
            ))),
            _ => Ok(()),
        }
    }
}
