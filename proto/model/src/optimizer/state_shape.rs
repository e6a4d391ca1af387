//! The shapes of state tensors.

use std::ops::Range;

/// The elements of a state tensor of a parameter: a value for each element, each row, or each
/// column of its matrices. (The last two dimensions of a parameter are its matrices; the others
/// number them.)
///
/// Transfers of state have the parameter's shape in any case. A state tensor with a value for each
/// row or column is repeated along the row or column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateShape {
    /// The parameter does not have this state tensor.
    Absent,
    /// The parameter's shape.
    Elements,
    /// One value for each row.
    Rows {
        /// The length of a row.
        columns: usize,
    },
    /// One value for each column.
    Columns {
        /// The length of a column.
        rows: usize,
        /// The length of a row.
        columns: usize,
    },
}

impl StateShape {
    /// The number of elements of the state tensor of `numel` consecutive elements of a parameter,
    /// which are the whole parameter if the shape is not [`StateShape::Elements`].
    pub const fn numel(self, numel: usize) -> usize {
        match self {
            Self::Absent => 0,
            Self::Elements => numel,
            Self::Rows { columns } => numel / columns,
            Self::Columns { rows, .. } => numel / rows,
        }
    }

    /// The positions in the state tensor of a range of the parameter's elements, in order: ranges
    /// of the parameter's elements, and where the state tensor has the value of their first
    /// element. The values of the further elements follow it, or are equal to it for
    /// [`StateShape::Rows`].
    pub fn segments(self, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
        let width = match self {
            Self::Absent | Self::Elements => usize::MAX,
            Self::Rows { columns } | Self::Columns { columns, .. } => columns,
        };
        let mut start = range.start;
        std::iter::from_fn(move || {
            let segment =
                start..range.end.min((start / width).saturating_add(1).saturating_mul(width));
            start = segment.end;
            (!segment.is_empty()).then(|| (segment.clone(), self.position(segment.start)))
        })
    }

    const fn position(self, element: usize) -> usize {
        match self {
            Self::Absent | Self::Elements => element,
            Self::Rows { columns } => element / columns,
            Self::Columns { rows, columns } => {
                element / (rows * columns) * columns + element % columns
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Adafactor, Optimizer},
        *,
    };

    fn shapes(parameter: &[u64]) -> Vec<StateShape> {
        Optimizer::Adafactor(Adafactor::default()).state_shapes(parameter)
    }

    #[test]
    fn matrices_have_a_value_for_each_row_and_column() {
        let sizes = |shape: &[u64]| {
            let numel = shape.iter().product::<u64>() as usize;
            shapes(shape).into_iter().map(|of| of.numel(numel)).collect::<Vec<_>>()
        };
        assert_eq!(sizes(&[]), [0, 0, 1]);
        assert_eq!(sizes(&[5]), [0, 0, 5]);
        assert_eq!(sizes(&[3, 4]), [3, 4, 0]);
        assert_eq!(sizes(&[2, 3, 4]), [6, 8, 0]);
        assert_eq!(sizes(&[2, 5, 3, 4]), [30, 40, 0]);
        assert_eq!(sizes(&[0, 4]), [0, 0, 0]);
        let adamw: Optimizer = "adamw".parse().unwrap();
        assert_eq!(adamw.state_shapes(&[3, 4]), [StateShape::Elements; 2]);
    }

    #[test]
    fn segments_find_the_value_of_every_element() {
        let [rows, columns, _] = shapes(&[2, 3, 4])[..] else { unreachable!() };
        for range in [0..24, 5..19, 6..7, 8..8] {
            let (mut of_rows, mut of_columns) = (Vec::new(), Vec::new());
            for (segment, position) in rows.segments(range.clone()) {
                of_rows.extend(segment.map(|_| position));
            }
            for (segment, position) in columns.segments(range.clone()) {
                of_columns.extend(segment.clone().map(|i| position + i - segment.start));
            }
            assert_eq!(of_rows, range.clone().map(|i| i / 4).collect::<Vec<_>>());
            let column = |i| i / 12 * 4 + i % 4;
            assert_eq!(of_columns, range.clone().map(column).collect::<Vec<_>>());
        }
        let whole: Vec<_> = StateShape::Elements.segments(3..9).collect();
        assert_eq!(whole, [(3..9, 3)]);
    }
}
