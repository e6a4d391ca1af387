//! The initial content of a slice that was copied from the predecessor of the job.

use zeroshard_model::AppliedSteps;

/// The copied content besides the master weights, which are always copied.
#[derive(Debug, Clone, Copy)]
pub(super) struct Forked {
    /// `true` if the optimizer state was copied.
    pub(super) state: bool,
    /// The steps applied to the slice.
    pub(super) applied: AppliedSteps,
}
