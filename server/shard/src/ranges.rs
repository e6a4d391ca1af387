//! Sets of element positions, for example the elements that have been received or added.

use std::ops::Range;

/// Disjoint, ascending, non-adjacent ranges. Transfers are mostly in order, so there is usually one
/// range.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Ranges(Vec<Range<usize>>);

impl Ranges {
    /// The number of separate ranges.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether the set is empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether the set is `0..end`.
    pub(crate) fn is_all(&self, end: usize) -> bool {
        end == 0 || self.0.first() == Some(&(0..end))
    }

    /// Returns whether the set contains all of `range`.
    pub(crate) fn contains(&self, range: &Range<usize>) -> bool {
        let holder = self.0.partition_point(|r| r.end <= range.start);
        range.is_empty()
            || self.0.get(holder).is_some_and(|r| r.start <= range.start && range.end <= r.end)
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    pub(crate) fn insert(&mut self, new: Range<usize>) {
        if new.is_empty() {
            return;
        }
        // Ranges that touch `new` are merged with it.
        let first = self.0.partition_point(|r| r.end < new.start);
        let last = self.0.partition_point(|r| r.start <= new.end);
        let merged = match self.0.get(first..last) {
            Some([one]) => one.start.min(new.start)..one.end.max(new.end),
            Some([one, .., other]) => one.start.min(new.start)..other.end.max(new.end),
            _ => new,
        };
        self.0.splice(first..last, [merged]);
    }

    /// Splits `range` into parts that are completely inside (`true`) or outside (`false`) the set,
    /// in order.
    pub(crate) fn split(&self, range: Range<usize>) -> Vec<(Range<usize>, bool)> {
        let mut parts = Vec::with_capacity(3);
        let mut at = range.start;
        let first = self.0.partition_point(|r| r.end <= range.start);
        for inside in self.0[first..].iter().take_while(|r| r.start < range.end) {
            if at < inside.start {
                parts.push((at..inside.start, false));
            }
            let end = inside.end.min(range.end);
            parts.push((at.max(inside.start)..end, true));
            at = end;
        }
        if at < range.end {
            parts.push((at..range.end, false));
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_set_equals_the_inserted_elements(
            inserted in prop::collection::vec((0usize..60, 0usize..12), 0..20),
            (start, length) in (0usize..70, 0usize..30),
        ) {
            let mut ranges = Ranges::default();
            let mut set = [false; 100];
            for (start, length) in inserted {
                ranges.insert(start..start + length);
                set[start..start + length].fill(true);
            }
            prop_assert!(ranges.0.windows(2).all(|pair| pair[0].end < pair[1].start));

            let mut at = start;
            for (part, inside) in ranges.split(start..start + length) {
                prop_assert_eq!(part.start, at);
                prop_assert!(part.clone().all(|i| set[i] == inside));
                at = part.end;
            }
            prop_assert_eq!(at, start + length);
            let all = (start..start + length).all(|i| set[i]);
            prop_assert_eq!(ranges.contains(&(start..start + length)), all);
            let leading = set.iter().take_while(|&&covered| covered).count();
            prop_assert!(ranges.is_all(leading) || set.iter().filter(|&&c| c).count() > leading);
        }
    }

    #[test]
    fn is_all_requires_every_element() {
        let mut ranges = Ranges::default();
        ranges.insert(0..3);
        ranges.insert(4..8);
        assert!(!ranges.is_all(8));
        ranges.insert(3..4);
        assert!(ranges.is_all(8));
        assert_eq!(ranges.len(), 1);
    }
}
