//! The numbers that the coordinator gives out: epochs, and the numbers of saves.

use std::collections::BTreeMap;

/// The number of low bits of a term that are random in a coordinator without an election, so that
/// two of them that have met different servers hardly ever have the same term.
pub const RANDOM: u32 = 24;

/// The number of epochs that a restoration skips. The servers that are left may not know the last
/// epochs of the job, which its workers know.
const SKIPPED_EPOCHS: u64 = 1024;

/// Assigns epochs from one counter, so that no two jobs share one.
#[derive(Debug, Default)]
pub struct Epochs {
    /// The last epoch that was given to a job.
    last: u64,
    /// The low bits of the term. Two coordinators have different ones.
    lane: u64,
}

impl Epochs {
    /// A new epoch. No job has had it before.
    pub(crate) fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// No job gets this epoch or an earlier one any more.
    pub(crate) fn see(&mut self, epoch: u64) {
        self.last = self.last.max(epoch);
    }

    /// A restoration begins in an epoch that no worker knows, if servers know this one. If two
    /// coordinators restore the job at the same time, on different servers, they use different
    /// epochs. Otherwise the descriptions by these servers would seem to fit together.
    pub(crate) fn skip(&mut self, known: u64) {
        self.see(known.saturating_add(SKIPPED_EPOCHS + self.lane));
    }

    /// Restorations under this term use epochs that differ from those of other terms.
    pub(crate) fn set_term(&mut self, term: u64) {
        self.lane = term & ((1 << RANDOM) - 1);
    }
}

/// Numbers saves, and remembers which of them have a manifest that is being written.
#[derive(Debug, Default)]
pub struct SaveNumbers {
    last: u64,
    /// By number: the name of the job.
    completing: BTreeMap<u64, String>,
    /// The number of saves whose manifest has been written, or could not be written.
    completed: u64,
}

impl SaveNumbers {
    /// Numbers saves differently from coordinators of other terms.
    pub(crate) fn set_term(&mut self, term: u64) {
        self.last = term << 20;
    }

    /// The number of a new save; never 0.
    pub(crate) fn next(&mut self) -> u64 {
        self.last = self.last.wrapping_add(1).max(1);
        self.last
    }

    /// The manifest of a save is being written.
    pub(crate) fn complete(&mut self, save: u64, job: &str) {
        self.completing.insert(save, job.to_owned());
    }

    /// The manifest of a save has been written, or could not be written.
    pub(crate) fn completed(&mut self, save: u64) {
        self.completing.remove(&save);
        self.completed += 1;
    }

    /// Returns the number of saves whose manifest has been written, or could not be written. If it
    /// has grown since you read a checkpoint, that checkpoint may be gone.
    pub fn number_completed(&self) -> u64 {
        self.completed
    }

    /// Returns whether the manifest of a save of the job is being written.
    pub(crate) fn completes(&self, job: &str) -> bool {
        self.completing.values().any(|name| name == job)
    }
}
