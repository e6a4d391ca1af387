//! Sets of elements in a slice.

use std::{ops::Range, sync::Arc};

use super::StridedBox;

/// Elements of one slice, in the order in which their values are sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Elements {
    /// Consecutive elements, by their positions in the slice.
    Range(Range<usize>),
    /// Elements of a box that are not consecutive in the slice.
    Strided {
        /// The box.
        of: Arc<StridedBox>,
        /// The numbers of the elements in the box; all of them lie in the slice.
        numbers: Range<usize>,
        /// The position of the slice's first element in the flattened tensor.
        origin: usize,
    },
}

impl Elements {
    /// The number of elements.
    pub fn numel(&self) -> usize {
        match self {
            Self::Range(range) => range.len(),
            Self::Strided { numbers, .. } => numbers.len(),
        }
    }

    /// Selects a range of the elements, counted in this order from 0.
    pub fn select(&self, range: Range<usize>) -> Self {
        let from = |all: &Range<usize>| all.start + range.start..all.start + range.end;
        match self {
            Self::Range(all) => Self::Range(from(all)),
            Self::Strided { of, numbers, origin } => {
                Self::Strided { of: of.clone(), numbers: from(numbers), origin: *origin }
            }
        }
    }

    /// The elements as the smallest number of position ranges in the slice, in order.
    pub fn runs(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let (one, many) = match self {
            Self::Range(range) => (Some(range.clone()), None),
            Self::Strided { of, numbers, origin } => {
                let runs = of.runs(numbers.clone());
                (None, Some(runs.map(move |(_, run)| run.start - origin..run.end - origin)))
            }
        };
        one.into_iter().chain(many.into_iter().flatten())
    }

    /// The position of element `index` in the slice.
    pub fn position(&self, index: usize) -> usize {
        match self {
            Self::Range(range) => range.start + index,
            Self::Strided { .. } => {
                let one = self.select(index..index + 1);
                let position = one.runs().next().map(|run| run.start);
                position.expect("one element is one run")
            }
        }
    }

    /// The range of these elements whose positions are in `positions`.
    pub fn within(&self, positions: &Range<usize>) -> Range<usize> {
        match self {
            Self::Range(range) => {
                let before = |end: usize| end.saturating_sub(range.start).min(range.len());
                before(positions.start)..before(positions.end)
            }
            Self::Strided { of, numbers, origin } => {
                let inside = of.in_tensor(origin + positions.start..origin + positions.end);
                // The positions may contain further elements of the box.
                let among =
                    |number: usize| number.clamp(numbers.start, numbers.end) - numbers.start;
                among(inside.start)..among(inside.end)
            }
        }
    }
}

impl From<Range<usize>> for Elements {
    fn from(range: Range<usize>) -> Self {
        Self::Range(range)
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{SliceSpec, TensorBox},
        *,
    };

    #[test]
    fn a_box_that_is_one_run_of_a_slice_is_a_range() {
        // Rows 2 and 3.
        let slice = SliceSpec { tensor: 0, offset: 8, numel: 8 };
        let elements = |offset: [u64; 2], size: [u64; 2]| {
            let bounds = TensorBox { offset: offset.into(), size: size.into() };
            Arc::new(StridedBox::new(&[6, 4], bounds)).elements(&slice)
        };
        assert_eq!(elements([0, 0], [6, 4]), Elements::Range(0..8));
        assert_eq!(elements([1, 0], [2, 4]), Elements::Range(0..4));
        assert_eq!(elements([3, 1], [2, 2]), Elements::Range(5..7));
        assert!(matches!(elements([0, 1], [6, 2]), Elements::Strided { .. }));
        assert_eq!(elements([4, 0], [2, 4]).numel(), 0);
    }

    #[test]
    fn some_elements_of_a_box_are_found_by_their_positions() {
        // Columns 1 and 2 of four rows, at the positions 1, 2, 5, 6, 9, 10, 13 and 14.
        let slice = SliceSpec { tensor: 0, offset: 0, numel: 16 };
        let bounds = TensorBox { offset: [0, 1].into(), size: [4, 2].into() };
        let all = Arc::new(StridedBox::new(&[4, 4], bounds)).elements(&slice);
        let some = all.select(3..6);
        assert_eq!(some.runs().flatten().collect::<Vec<_>>(), [6, 9, 10]);
        let within = |positions: Range<usize>| some.within(&positions);
        assert_eq!([within(0..16), within(0..8), within(8..16)], [0..3, 0..1, 1..3]);
        assert_eq!([within(0..4), within(12..16)].map(|range| range.len()), [0, 0]);
    }
}
