//! The parts of the scratch file that are not in use.

use std::collections::BTreeMap;

/// Free ranges below the end of the used part of the file.
#[derive(Debug, Default)]
pub(super) struct Free {
    /// Lengths by position. INVARIANT: the ranges do not touch each other, and none of them reaches
    /// `end`.
    ranges: BTreeMap<u64, u64>,
    /// The end of the last range in use.
    end: u64,
}

impl Free {
    /// The position of `length` bytes, which are in use from now on: in the first free range that
    /// is long enough, or at the end.
    pub(super) fn take(&mut self, length: u64) -> u64 {
        let found = self.ranges.iter().find(|&(_, &free)| free >= length).map(|(&at, &n)| (at, n));
        let Some((at, free)) = found else {
            let at = self.end;
            self.end += length;
            return at;
        };
        self.ranges.remove(&at);
        if free > length {
            self.ranges.insert(at + length, free - length);
        }
        at
    }

    /// Returns a range that was taken.
    pub(super) fn give(&mut self, mut at: u64, mut length: u64) {
        if let Some(next) = self.ranges.remove(&(at + length)) {
            length += next;
        }
        if let Some((&before, &free)) = self.ranges.range(..at).next_back()
            && before + free == at
        {
            self.ranges.remove(&before);
            (at, length) = (before, free + length);
        }
        if at + length == self.end {
            self.end = at;
        } else if length > 0 {
            self.ranges.insert(at, length);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranges_in_use_never_overlap_and_nothing_is_lost(
            changes in prop::collection::vec((1u64..9, any::<prop::sample::Index>(), any::<bool>()), 1..200),
        ) {
            let (mut free, mut used) = (Free::default(), Vec::<(u64, u64)>::new());
            for (length, chosen, gives) in changes {
                if gives && !used.is_empty() {
                    let (at, length) = used.swap_remove(chosen.index(used.len()));
                    free.give(at, length);
                } else {
                    let at = free.take(length);
                    prop_assert!(used.iter().all(|&(other, n)| at + length <= other || other + n <= at));
                    used.push((at, length));
                }
                let all: u64 = used.iter().map(|(_, length)| length).sum();
                prop_assert_eq!(all + free.ranges.values().sum::<u64>(), free.end);
            }
            used.into_iter().for_each(|(at, length)| free.give(at, length));
            prop_assert_eq!((free.end, free.ranges.len()), (0, 0));
        }
    }
}
