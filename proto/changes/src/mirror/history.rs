//! Keeps the changes that a mirror has received, for readers that are behind.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;

use crate::SliceChange;

/// The changes from one version of the mirror to its next one.
#[derive(Debug)]
struct Step {
    from: u64,
    to: u64,
    slices: BTreeMap<u32, SliceChange>,
    bytes: u64,
}

/// Consecutive steps.
#[derive(Debug)]
pub(super) struct History {
    steps: VecDeque<Step>,
    /// The size of all changes in bytes.
    bytes: u64,
    /// The maximum of `bytes`.
    limit: u64,
}

impl History {
    pub(super) fn new(limit: u64) -> Self {
        Self { steps: VecDeque::new(), bytes: 0, limit }
    }

    /// Appends a step, and drops the oldest ones that exceed the limit. Drops all steps before a
    /// step that does not follow the last one.
    pub(super) fn push(&mut self, [from, to]: [u64; 2], slices: BTreeMap<u32, SliceChange>) {
        if self.steps.back().is_some_and(|last| last.to != from) {
            self.clear();
        }
        let bytes = slices.values().map(|of| of.change.len() as u64).sum();
        self.bytes += bytes;
        self.steps.push_back(Step { from, to, slices, bytes });
        while self.bytes > self.limit
            && let Some(oldest) = self.steps.pop_front()
        {
            self.bytes -= oldest.bytes;
        }
    }

    pub(super) fn clear(&mut self) {
        self.steps.clear();
        self.bytes = 0;
    }

    /// Returns the changes of a slice between two versions, one per step, and the hash after them.
    /// Returns `None` if the mirror does not have them: a reader with another version than those of
    /// the mirror needs a full copy.
    pub(super) fn between(&self, slice: u32, [from, to]: [u64; 2]) -> Option<(Vec<Bytes>, u64)> {
        let first = self.steps.iter().position(|step| step.from == from)?;
        let (mut changes, mut hash) = (Vec::new(), None);
        for step in self.steps.range(first..).take_while(|step| step.to <= to) {
            let of = step.slices.get(&slice)?;
            changes.push(of.change.clone());
            hash = Some((step.to, of.hash));
        }
        let (last, hash) = hash?;
        (last == to).then_some((changes, hash))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(bytes: usize, hash: u64) -> BTreeMap<u32, SliceChange> {
        let change = vec![hash as u8; bytes].into();
        [(7, SliceChange { change, hash })].into()
    }

    #[test]
    fn steps_between_two_versions_are_found_and_the_oldest_are_dropped() {
        let mut history = History::new(10);
        history.push([3, 4], step(4, 40));
        history.push([4, 6], step(4, 60)); // the mirror has skipped version 5
        let hashes = |history: &History, versions| {
            let found = history.between(7, versions);
            found.map(|(changes, hash)| (changes.len(), hash))
        };
        assert_eq!(hashes(&history, [3, 6]), Some((2, 60)));
        assert_eq!(hashes(&history, [3, 4]), Some((1, 40)));
        assert_eq!(hashes(&history, [4, 6]), Some((1, 60)));
        for unknown in [[2, 6], [3, 5], [5, 6], [3, 7], [6, 6]] {
            assert_eq!(hashes(&history, unknown), None, "{unknown:?}");
        }
        assert!(history.between(8, [3, 4]).is_none());
        history.push([6, 7], step(4, 70));
        assert_eq!(hashes(&history, [3, 7]), None, "there is no room for the first step");
        assert_eq!(hashes(&history, [4, 7]), Some((2, 70)));
        history.push([9, 10], step(4, 100));
        assert_eq!(hashes(&history, [6, 7]), None, "no step leads from 7 to 9");
        assert_eq!(hashes(&history, [9, 10]), Some((1, 100)));
        history.push([10, 11], step(11, 110));
        assert_eq!(hashes(&history, [10, 11]), None, "it does not fit");
        history.push([11, 12], step(1, 120));
        assert_eq!(hashes(&history, [11, 12]), Some((1, 120)));
    }
}
