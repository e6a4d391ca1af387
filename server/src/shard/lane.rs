//! The lanes of a slice: which of its elements the same ranks contribute.
//!
//! A lane's elements that lie in one slice are numbered 0, 1, ... in the order of the flattened
//! tensor: extents count in these numbers.

use std::{ops::Range, sync::Arc};

use zeroshard_proto::{BoxView, JobSpec, SliceSpec, TensorBox};

use crate::backend::Elements;

/// How the elements of a box that lie in one slice lie there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Area {
    /// They are consecutive.
    Dense {
        /// The first one, within the slice.
        start: usize,
        numel: usize,
    },
    /// They are in several runs.
    Strided {
        view: Arc<BoxView>,
        /// Of all of the box's elements.
        part: Range<usize>,
        /// The slice's first element, within the flattened tensor.
        origin: usize,
    },
}

impl Area {
    /// All of a slice of `numel` elements.
    pub(crate) fn whole(numel: usize) -> Self {
        Self::Dense { start: 0, numel }
    }

    /// What a box has of `slice`; that may be nothing.
    pub(crate) fn of(view: &Arc<BoxView>, slice: &SliceSpec) -> Self {
        let origin = slice.offset;
        let part = view.part(origin..origin + slice.numel);
        match view.runs(part.clone()).next() {
            None => Self::Dense { start: 0, numel: 0 },
            Some(run) if run.numel == part.len() => {
                Self::Dense { start: run.at - origin, numel: run.numel }
            }
            Some(_) => Self::Strided { view: view.clone(), part, origin },
        }
    }

    /// How many elements.
    pub(crate) fn numel(&self) -> usize {
        match self {
            Self::Dense { numel, .. } => *numel,
            Self::Strided { part, .. } => part.len(),
        }
    }

    /// The elements of `range`, within the slice.
    pub(crate) fn elements(&self, range: Range<usize>) -> Elements<'_> {
        match self {
            Self::Dense { start, .. } => Elements::Range(start + range.start..start + range.end),
            Self::Strided { view, part, origin } => Elements::Box {
                view,
                part: part.start + range.start..part.start + range.end,
                origin: *origin,
            },
        }
    }

    /// Where element `index` is within the slice.
    pub(crate) fn place(&self, index: usize) -> usize {
        let element = self.elements(index..index + 1);
        element.runs().next().expect("one element is one run").start
    }

    /// Those of its elements that are among `elements` of the slice.
    pub(crate) fn among(&self, elements: &Range<usize>) -> Range<usize> {
        match self {
            Self::Dense { start, numel } => {
                let before = |end: usize| end.saturating_sub(*start).min(*numel);
                before(elements.start)..before(elements.end)
            }
            Self::Strided { view, part, origin } => {
                let inside = view.part(origin + elements.start..origin + elements.end);
                inside.start - part.start..inside.end - part.start
            }
        }
    }
}

/// Elements of a slice, and who contributes them.
#[derive(Debug, Clone)]
pub(crate) struct Lane {
    /// INVARIANT: not empty.
    pub(crate) area: Area,
    /// INVARIANT: ascending, 1 or more; no rank is in two lanes of a slice.
    pub(crate) ranks: Arc<[u32]>,
}

impl Lane {
    /// Who uploads what it begins with, and a buffer's next content.
    pub(crate) fn uploader(&self) -> u32 {
        self.ranks[0]
    }

    /// The position of `rank` among those that contribute.
    pub(crate) fn position(&self, rank: u32) -> Option<usize> {
        self.ranks.binary_search(&rank).ok()
    }
}

/// The lanes of a tensor, to be cut at its slices.
#[derive(Debug)]
pub(crate) struct Lanes {
    pub(crate) tensor: usize,
    lanes: Vec<Uncut>,
}

/// A lane of a tensor.
#[derive(Debug)]
struct Uncut {
    /// How its box lies in the tensor; `None` if that is the tensor, as it is without a layout.
    view: Option<Arc<BoxView>>,
    ranks: Arc<[u32]>,
}

impl Lanes {
    /// Those of tensor number `tensor`.
    pub(crate) fn new(job: &JobSpec, tensor: usize) -> Self {
        let shape = &job.manifest.tensors()[tensor].shape;
        let whole = TensorBox::whole(shape);
        let lanes = job.contributions(tensor).lanes.into_iter().map(|lane| {
            let view = (lane.area != whole).then(|| Arc::new(BoxView::new(shape, &lane.area)));
            Uncut { view, ranks: lane.ranks.into() }
        });
        Self { tensor, lanes: lanes.collect() }
    }

    /// Those that have something of `slice`, which is one of the tensor's.
    pub(crate) fn of(&self, slice: &SliceSpec) -> Arc<[Lane]> {
        let cut = |Uncut { view, ranks }: &Uncut| {
            let area = match view {
                None => Area::whole(slice.numel),
                Some(view) => Area::of(view, slice),
            };
            Lane { area, ranks: ranks.clone() }
        };
        self.lanes.iter().map(cut).filter(|lane| lane.area.numel() > 0).collect()
    }
}

#[cfg(test)]
#[path = "lane_tests.rs"]
pub(crate) mod tests;
