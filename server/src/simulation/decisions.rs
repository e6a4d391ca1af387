//! Who has decided about each step: of a step, at most one decision may have an effect.

use std::collections::{BTreeMap, BTreeSet};

use zeroshard_model::Attempt;

/// The decisions of all coordinators of a run. A job is known by its id, and a coordinator by its
/// life.
#[derive(Debug, Default)]
pub(super) struct Decisions {
    /// The decisions that a coordinator has made, and has not learned from servers.
    made: BTreeSet<(u64, u64, Attempt)>,
    /// The coordinators whose decisions servers have received.
    received: BTreeMap<(u64, Attempt), u64>,
    /// The attempt of each step whose decision a rank has seen.
    shown: BTreeMap<(u64, u64), Attempt>,
    /// The returns to a checkpoint: the first epoch afterwards, and the version.
    returns: BTreeSet<(u64, u64, u64)>,
}

impl Decisions {
    /// A coordinator has decided about an attempt.
    pub(super) fn made(&mut self, life: u64, job: u64, attempt: Attempt) {
        self.made.insert((life, job, attempt));
    }

    /// A server has received a decision from a coordinator, which may have learned it.
    pub(super) fn received(&mut self, life: u64, job: u64, attempt: Attempt) -> Result<(), String> {
        if !self.made.contains(&(life, job, attempt)) {
            return Ok(());
        }
        match *self.received.entry((job, attempt)).or_insert(life) {
            first if first == life => Ok(()),
            first => Err(format!("coordinators {first} and {life} have both decided {attempt:?}")),
        }
    }

    /// A rank has received the report of a decision, or what it has led to.
    pub(super) fn shown(&mut self, job: u64, attempt: Attempt) -> Result<(), String> {
        let shown = self.shown.entry((job, attempt.step)).or_insert(attempt);
        let (earlier, later) = ((*shown).min(attempt), (*shown).max(attempt));
        let is_between = |&(of, epoch, version): &(u64, u64, u64)| {
            of == job && version <= attempt.step && earlier.epoch < epoch && epoch <= later.epoch
        };
        if earlier != later && !self.returns.iter().any(is_between) {
            return Err(format!("ranks have seen the decisions {earlier:?} and {later:?}"));
        }
        *shown = later;
        Ok(())
    }

    /// A job has returned to a checkpoint, so that later steps are made again.
    pub(super) fn returned(&mut self, job: u64, (epoch, version): (u64, u64)) {
        self.returns.insert((job, epoch, version));
    }

    /// The number of coordinators whose decisions servers have received.
    pub(super) fn deciders(&self) -> usize {
        self.received.values().collect::<BTreeSet<_>>().len()
    }
}
