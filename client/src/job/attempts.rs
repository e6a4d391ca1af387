//! The attempts of a job that may be open, and how each has ended.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::sync::watch;
use zeroshard_model::Error;

/// The attempts of a job that may be open.
#[derive(Debug, Default)]
pub(super) struct Attempts {
    /// By step. The last decided step is kept, and no earlier one.
    by_step: Mutex<BTreeMap<u64, Arc<State>>>,
    /// The latest epoch that an error has named.
    named_epoch: AtomicU64,
}

/// The identity of an attempt, and its end once it has ended.
#[derive(Debug)]
pub(super) struct State {
    pub(super) lease: u64,
    pub(super) epoch: u64,
    pub(super) step: u64,
    pub(super) number: u32,
    pub(super) end: watch::Sender<Option<End>>,
}

/// The end of an attempt.
#[derive(Debug, Clone)]
pub(super) struct End {
    /// The error that its pushes receive.
    pub(super) error: Error,
    /// The number of the next attempt in this epoch.
    pub(super) next: u32,
}

impl Attempts {
    /// An error of a call has named this epoch.
    pub(super) fn know(&self, epoch: u64) {
        self.named_epoch.fetch_max(epoch, Ordering::AcqRel);
    }

    /// Returns the latest epoch that this rank knows, the latest step with an attempt in it, and
    /// the number of the latest attempt there that may be open. `epoch` is that of the last
    /// membership. An error may have named a later epoch: this rank waits for it, and a new
    /// coordinator may not know it.
    pub(super) fn latest(&self, epoch: u64) -> (u64, u64, u32) {
        let epoch = epoch.max(self.named_epoch.load(Ordering::Acquire));
        let attempts = self.lock();
        let of_epoch = attempts.values().filter(|state| state.epoch == epoch);
        let latest = of_epoch.map(|state| {
            let end = state.end.borrow();
            (state.step, end.as_ref().map_or(state.number, |end| end.next))
        });
        let (step, number) = latest.max().unwrap_or_default();
        (epoch, step, number)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<State>>> {
        self.by_step.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Ends the attempt, unless it has ended before, and returns the error of its end.
    pub(super) fn end(&self, error: Error, next: u32) -> Error {
        let mut ended = error.clone();
        self.end.send_if_modified(|end| match end {
            Some(end) => {
                ended = end.error.clone();
                false
            }
            None => {
                *end = Some(End { error, next });
                true
            }
        });
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_coordinator_is_told_of_the_latest_epoch_that_an_error_has_named() {
        let attempts = Attempts::default();
        assert_eq!(attempts.latest(3), (3, 0, 0));
        attempts.know(5);
        attempts.know(4);
        assert_eq!(attempts.latest(3), (5, 0, 0), "the membership of epoch 5 has not arrived");
        assert_eq!(attempts.latest(6), (6, 0, 0));
    }
}
