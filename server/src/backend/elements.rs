//! Which elements of a buffer an operation is about.

use std::ops::Range;

use zeroshard_proto::BoxView;

/// Elements of a buffer, in the order in which their values come or go.
#[derive(Debug, Clone)]
pub enum Elements<'a> {
    /// Consecutive ones.
    Range(Range<usize>),
    /// Those of a box of a tensor.
    Box {
        /// How the box lies in the flattened tensor.
        view: &'a BoxView,
        /// Which of the box's elements; the buffer has all of them.
        part: Range<usize>,
        /// The buffer's first element, within the flattened tensor.
        origin: usize,
    },
}

impl Elements<'_> {
    /// How many there are.
    pub fn numel(&self) -> usize {
        match self {
            Self::Range(range) => range.len(),
            Self::Box { part, .. } => part.len(),
        }
    }

    /// The same as consecutive elements of the buffer, the fewest, in order.
    pub fn runs(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let (one, many) = match self {
            Self::Range(range) => (Some(range.clone()), None),
            Self::Box { view, part, origin } => {
                let runs = view.runs(part.clone());
                (None, Some(runs.map(move |run| run.at - origin..run.at - origin + run.numel)))
            }
        };
        one.into_iter().chain(many.into_iter().flatten())
    }
}

impl From<Range<usize>> for Elements<'_> {
    fn from(range: Range<usize>) -> Self {
        Self::Range(range)
    }
}
