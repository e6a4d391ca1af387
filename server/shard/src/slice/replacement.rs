//! New values of a tensor that come with a step: the content of a buffer (such as batch-norm
//! statistics), or a parameter that the program has written to.

use zeroshard_kernels::Backend;

use super::received::Received;
use crate::tier::Array;

/// The arrived part of the new values.
pub(super) struct Replacement<B: Backend> {
    pub(super) values: Array<B>,
    /// The elements that have arrived.
    pub(super) received: Received,
}
