//! Boxes of tensors: what a rank holds of one, and how its elements lie in the flattened tensor.

use std::ops::Range;

use crate::{Error, Result, pb};

/// A rectangular part of a tensor: from `offset`, of `size`, along each dimension. Its elements are
/// numbered row-major.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorBox {
    /// First index along each dimension; empty for a scalar.
    pub offset: Vec<u64>,
    /// Number of indices along each dimension.
    pub size: Vec<u64>,
}

impl TensorBox {
    /// All of a tensor of `shape`.
    pub fn whole(shape: &[u64]) -> Self {
        Self { offset: vec![0; shape.len()], size: shape.to_vec() }
    }

    /// Number of elements; 1 for a scalar.
    pub fn numel(&self) -> u64 {
        if self.is_empty() { 0 } else { self.size.iter().product() }
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.size.contains(&0)
    }

    /// What both have; `None` if that is nothing.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        let (mut offset, mut size) = (Vec::new(), Vec::new());
        for dim in 0..self.offset.len() {
            let first = self.offset[dim].max(other.offset[dim]);
            let end = (self.offset[dim] + self.size[dim]).min(other.offset[dim] + other.size[dim]);
            offset.push(first);
            size.push(end.checked_sub(first).filter(|&size| size > 0)?);
        }
        Some(Self { offset, size })
    }

    /// This box as it lies in `outer`, which has all of it: with offsets from `outer`'s first
    /// element.
    pub fn within(&self, outer: &Self) -> Self {
        let offset =
            self.offset.iter().zip(&outer.offset).map(|(inner, outer)| inner - outer).collect();
        Self { offset, size: self.size.clone() }
    }

    /// # Errors
    /// [`Error::Invalid`] unless it is a box of a tensor of `shape`; `tensor` is whose it would be.
    pub fn check(&self, shape: &[u64], tensor: &str) -> Result<()> {
        let fits = self.offset.len() == shape.len()
            && self.size.len() == shape.len()
            && (0..shape.len()).all(|dim| {
                self.offset[dim].checked_add(self.size[dim]).is_some_and(|end| end <= shape[dim])
            });
        if fits {
            return Ok(());
        }
        let found = format!("at {:?} of size {:?}", self.offset, self.size);
        let expected = format!("within the tensor's shape, {shape:?}");
        Err(Error::invalid(format!("box of tensor {tensor:?}"), found, expected))
    }

    /// The message, of tensor number `tensor`.
    pub fn to_wire(&self, tensor: usize) -> pb::Box {
        let dim = |(&offset, &size): (&u64, &u64)| pb::BoxDim { offset, size };
        let dims = self.offset.iter().zip(&self.size).map(dim);
        pb::Box { tensor: tensor as u32, dims: dims.collect() }
    }

    /// The box of a message.
    pub fn from_wire(message: &pb::Box) -> Self {
        let (offset, size) = message.dims.iter().map(|dim| (dim.offset, dim.size)).unzip();
        Self { offset, size }
    }
}

/// How a box lies in its flattened tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoxView {
    /// The fewest dimensions that say the same: those that the box has all of are one with the
    /// dimension before.
    dims: Vec<Dim>,
    numel: usize,
}

/// A dimension of tensor and box.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Dim {
    /// Of the tensor.
    shape: usize,
    offset: usize,
    size: usize,
}

/// Consecutive elements, of a box and of its tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The first one's number in the flattened tensor.
    pub at: usize,
    /// The first one's number in the box.
    pub first: usize,
    /// How many.
    pub numel: usize,
}

impl BoxView {
    /// `area`, which [`TensorBox::check`] accepts, in a tensor of `shape`.
    pub fn new(shape: &[u64], area: &TensorBox) -> Self {
        let mut dims: Vec<Dim> = Vec::with_capacity(shape.len().max(1));
        if area.is_empty() {
            return Self { dims: vec![Dim { shape: 1, offset: 0, size: 0 }], numel: 0 };
        }
        for dim in 0..shape.len() {
            let [shape, offset, size] =
                [shape[dim], area.offset[dim], area.size[dim]].map(|n| n as usize);
            match dims.last_mut() {
                Some(last) if size == shape => {
                    *last = Dim {
                        shape: last.shape * size,
                        offset: last.offset * size,
                        size: last.size * size,
                    };
                }
                _ => dims.push(Dim { shape, offset, size }),
            }
        }
        if dims.is_empty() {
            dims.push(Dim { shape: 1, offset: 0, size: 1 });
        }
        Self { dims, numel: area.numel() as usize }
    }

    /// Number of elements of the box.
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// Whether the box's elements follow each other in the tensor.
    pub fn is_contiguous(&self) -> bool {
        self.dims[..self.dims.len() - 1].iter().all(|dim| dim.size <= 1)
    }

    /// How many of the box's elements come before element `at` of the flattened tensor.
    pub fn before(&self, at: usize) -> usize {
        let mut stride: usize = self.dims.iter().map(|dim| dim.shape).product();
        let (mut rest, mut inner, mut count) = (at, self.numel, 0);
        for dim in &self.dims {
            if dim.size == 0 {
                return 0;
            }
            stride /= dim.shape;
            inner /= dim.size;
            let index = rest / stride;
            rest %= stride;
            count +=
                index.clamp(dim.offset, dim.offset + dim.size).saturating_sub(dim.offset) * inner;
            if index < dim.offset || index >= dim.offset + dim.size {
                break;
            }
        }
        count
    }

    /// Number of the box's element `index` in the flattened tensor.
    fn at(&self, index: usize) -> usize {
        let (mut rest, mut at, mut stride) = (index, 0, 1);
        for dim in self.dims.iter().rev() {
            at += (dim.offset + rest % dim.size) * stride;
            rest /= dim.size;
            stride *= dim.shape;
        }
        at
    }

    /// The elements `range` of the box as the fewest runs, in order.
    pub fn runs(&self, range: Range<usize>) -> impl Iterator<Item = Run> + '_ {
        let inner = self.dims[self.dims.len() - 1].size;
        let contiguous = self.is_contiguous();
        let mut first = range.start;
        std::iter::from_fn(move || {
            let left = range.end.checked_sub(first).filter(|&left| left > 0)?;
            let numel = if contiguous { left } else { left.min(inner - first % inner) };
            let run = Run { at: self.at(first), first, numel };
            first += numel;
            Some(run)
        })
    }

    /// The box's elements that lie in `slice` of the flattened tensor, by their numbers in the box.
    pub fn part(&self, slice: Range<usize>) -> Range<usize> {
        self.before(slice.start)..self.before(slice.end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A tensor's shape, and a box of it.
    fn boxes() -> impl Strategy<Value = (Vec<u64>, TensorBox)> {
        let dim = (0u64..6).prop_flat_map(|shape| (Just(shape), 0..=shape)).prop_flat_map(
            |(shape, offset)| {
                (Just(shape), Just(offset), prop_oneof![Just(shape - offset), 0..=shape - offset])
            },
        );
        prop::collection::vec(dim, 0..4).prop_map(|dims| {
            let shape = dims.iter().map(|dim| dim.0).collect();
            let offset = dims.iter().map(|dim| dim.1).collect();
            (shape, TensorBox { offset, size: dims.iter().map(|dim| dim.2).collect() })
        })
    }

    /// The flattened tensor's elements that are in the box, one by one.
    fn elements(shape: &[u64], area: &TensorBox) -> Vec<usize> {
        let numel = shape.iter().product::<u64>();
        let inside = |&element: &u64| {
            let mut rest = element;
            (0..shape.len()).rev().all(|dim| {
                let index = rest % shape[dim];
                rest /= shape[dim];
                (area.offset[dim]..area.offset[dim] + area.size[dim]).contains(&index)
            })
        };
        (0..numel).filter(inside).map(|element| element as usize).collect()
    }

    proptest! {
        #[test]
        fn a_view_says_where_each_element_is((shape, area) in boxes(), cut in any::<[prop::sample::Index; 2]>()) {
            let view = BoxView::new(&shape, &area);
            let expected = elements(&shape, &area);
            prop_assert_eq!(view.numel(), expected.len());
            for at in 0..=shape.iter().product::<u64>() as usize {
                prop_assert_eq!(view.before(at), expected.iter().filter(|&&e| e < at).count());
            }
            let mut range = cut.map(|cut| cut.index(expected.len() + 1));
            range.sort_unstable();
            let runs: Vec<Run> = view.runs(range[0]..range[1]).collect();
            let elements: Vec<usize> = runs.iter().flat_map(|run| run.at..run.at + run.numel).collect();
            prop_assert_eq!(&elements[..], &expected[range[0]..range[1]]);
            for pair in runs.windows(2) {
                prop_assert!(pair[0].at + pair[0].numel < pair[1].at, "runs that could be one: {:?}", pair);
                prop_assert_eq!(pair[0].first + pair[0].numel, pair[1].first);
            }
        }

        #[test]
        fn an_intersection_has_what_both_have((shape, a) in boxes(), dims in any::<[[prop::sample::Index; 2]; 4]>()) {
            let (mut offset, mut size) = (Vec::new(), Vec::new());
            for (&shape, cut) in shape.iter().zip(dims) {
                let mut ends = cut.map(|cut| cut.index(shape as usize + 1) as u64);
                ends.sort_unstable();
                offset.push(ends[0]);
                size.push(ends[1] - ends[0]);
            }
            let b = TensorBox { offset, size };
            let in_b = elements(&shape, &b);
            let both: Vec<usize> = elements(&shape, &a).into_iter().filter(|e| in_b.contains(e)).collect();
            match a.intersection(&b) {
                None => prop_assert_eq!(both, Vec::<usize>::new()),
                Some(common) => {
                    prop_assert_eq!(elements(&shape, &common), both);
                    prop_assert!(common.within(&a).check(&a.size, "a").is_ok());
                }
            }
        }
    }

    #[test]
    fn a_box_outside_of_its_tensor_is_refused() {
        let area =
            |offset: &[u64], size: &[u64]| TensorBox { offset: offset.into(), size: size.into() };
        assert!(area(&[1, 0], &[1, 3]).check(&[2, 3], "w").is_ok());
        for wrong in [area(&[1, 0], &[2, 3]), area(&[0], &[2]), area(&[u64::MAX, 0], &[1, 1])] {
            assert!(matches!(wrong.check(&[2, 3], "w"), Err(Error::Invalid { .. })), "{wrong:?}");
        }
    }

    #[test]
    fn rows_are_one_run_and_columns_one_a_row() {
        let rows = TensorBox { offset: vec![2, 0], size: vec![2, 4] };
        let view = BoxView::new(&[4, 4], &rows);
        assert_eq!(view.runs(0..8).collect::<Vec<_>>(), [Run { at: 8, first: 0, numel: 8 }]);
        assert!(view.is_contiguous());
        let columns = TensorBox { offset: vec![0, 2], size: vec![4, 2] };
        let view = BoxView::new(&[4, 4], &columns);
        assert_eq!(
            view.runs(1..8).map(|run| (run.at, run.numel)).collect::<Vec<_>>(),
            [(3, 1), (6, 2), (10, 2), (14, 2)]
        );
        assert_eq!(view.part(4..12), 2..6);
    }
}
