//! The attempt at a step to which a message belongs.

use crate::Error;

/// One attempt at a step's gradients. Later attempts replace earlier ones: the gradients of an
/// earlier attempt are dropped, and never count in a later one. While the initial parameters are
/// uploaded, the attempt is that of step 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Attempt {
    /// The epoch.
    pub epoch: u64,
    /// The step.
    pub step: u64,
    /// The number of the attempt at the step in this epoch, from 0.
    pub number: u32,
}

impl Attempt {
    /// The first attempt at `step` in `epoch`.
    pub fn first(epoch: u64, step: u64) -> Self {
        Self { epoch, step, number: 0 }
    }

    /// The error for a message of this attempt while `current` is open.
    pub fn refusal(self, job: &str, current: Self) -> Error {
        let Self { epoch, step, number: attempt } = self;
        let job = job.to_owned();
        if epoch != current.epoch {
            Error::StaleEpoch { job, epoch, current: current.epoch }
        } else if step != current.step {
            Error::StepMismatch { job, step, current: current.step }
        } else {
            Error::StaleAttempt { job, step, attempt, current: current.number }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_epochs_steps_and_numbers_are_later_attempts() {
        let at = |epoch, step, number| Attempt { epoch, step, number };
        let ordered = [at(1, 5, 0), at(1, 5, 1), at(1, 6, 0), at(2, 6, 0), at(3, 0, 9)];
        assert!(ordered.is_sorted());
    }

    #[test]
    fn a_refusal_names_the_first_difference() {
        let current = Attempt { epoch: 2, step: 5, number: 1 };
        let refusal = |epoch, step, number| Attempt { epoch, step, number }.refusal("job", current);
        assert!(matches!(refusal(1, 4, 0), Error::StaleEpoch { epoch: 1, current: 2, .. }));
        assert!(matches!(refusal(2, 4, 0), Error::StepMismatch { step: 4, current: 5, .. }));
        assert!(matches!(
            refusal(2, 5, 0),
            Error::StaleAttempt { step: 5, attempt: 0, current: 1, .. }
        ));
    }
}
