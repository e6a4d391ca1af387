//! Boxes in their flattened tensor.

use std::{ops::Range, sync::Arc};

use super::{Elements, SliceSpec, TensorBox};

/// A box and the strides of its tensor. The elements of the box are numbered 0, 1, ... in row-major
/// order, which is also their order in the flattened tensor. The elements that lie in one slice
/// therefore have consecutive numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StridedBox {
    bounds: TensorBox,
    /// The dimensions of the tensor and the box, outermost first. A dimension that the box covers
    /// completely is merged with the dimension before it.
    dims: Vec<Dim>,
    numel: usize,
    is_whole: bool,
}

/// A dimension of the tensor and the box.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Dim {
    /// The size of the tensor along this dimension.
    shape: usize,
    offset: usize,
    size: usize,
}

impl StridedBox {
    /// Creates the box `bounds`, which [`TensorBox::check`] accepts, of a tensor of `shape`.
    pub fn new(shape: &[u64], bounds: TensorBox) -> Self {
        let mut dims: Vec<Dim> = Vec::with_capacity(shape.len().max(1));
        let is_empty = bounds.is_empty();
        for dim in (0..shape.len()).filter(|_| !is_empty) {
            let [shape, offset, size] =
                [shape[dim], bounds.offset[dim], bounds.size[dim]].map(|n| n as usize);
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
            dims.push(Dim { shape: 1, offset: 0, size: usize::from(!is_empty) });
        }
        let is_whole = bounds.size == shape;
        Self { numel: bounds.numel() as usize, bounds, dims, is_whole }
    }

    /// The box that covers a whole tensor of `shape`.
    pub fn whole(shape: &[u64]) -> Self {
        Self::new(shape, TensorBox::whole(shape))
    }

    /// The bounds of the box.
    pub fn bounds(&self) -> &TensorBox {
        &self.bounds
    }

    /// The number of elements of the box.
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// Returns whether the box is the whole tensor.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Returns whether the box's elements are consecutive in the flattened tensor.
    pub fn is_contiguous(&self) -> bool {
        self.dims[..self.dims.len() - 1].iter().all(|dim| dim.size <= 1)
    }

    /// The elements of the box that lie in `slice`, by their numbers in the box.
    pub fn in_slice(&self, slice: &SliceSpec) -> Range<usize> {
        self.in_tensor(slice.offset..slice.offset + slice.numel)
    }

    /// The elements of the box that lie in `slice`, by their positions in the slice.
    pub fn elements(self: &Arc<Self>, slice: &SliceSpec) -> Elements {
        let numbers = self.in_slice(slice);
        match self.runs(numbers.clone()).next() {
            None => Elements::Range(0..0),
            Some((_, run)) if run.len() == numbers.len() => {
                Elements::Range(run.start - slice.offset..run.end - slice.offset)
            }
            Some(_) => Elements::Strided { of: self.clone(), numbers, origin: slice.offset },
        }
    }

    /// The elements with these numbers in the box, as the smallest number of ranges of the
    /// flattened tensor, in order. Each range is returned with the number of its first element.
    pub fn runs(&self, numbers: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        let inner = self.dims[self.dims.len() - 1].size;
        let contiguous = self.is_contiguous();
        let mut first = numbers.start;
        std::iter::from_fn(move || {
            let left = numbers.end.checked_sub(first).filter(|&left| left > 0)?;
            let numel = if contiguous { left } else { left.min(inner - first % inner) };
            let (number, start) = (first, self.position(first));
            first += numel;
            Some((number, start..start + numel))
        })
    }

    /// The elements of the box that lie in this range of the flattened tensor, by their numbers.
    pub(super) fn in_tensor(&self, range: Range<usize>) -> Range<usize> {
        self.count_before(range.start)..self.count_before(range.end)
    }

    /// The number of elements of the box before element `end` of the flattened tensor.
    fn count_before(&self, end: usize) -> usize {
        let mut stride: usize = self.dims.iter().map(|dim| dim.shape).product();
        let (mut rest, mut inner, mut count) = (end, self.numel, 0);
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

    /// The position of element `number` of the box in the flattened tensor.
    fn position(&self, number: usize) -> usize {
        let (mut rest, mut position, mut stride) = (number, 0, 1);
        for dim in self.dims.iter().rev() {
            position += (dim.offset + rest % dim.size) * stride;
            rest /= dim.size;
            stride *= dim.shape;
        }
        position
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::tensor_box::tests::*, *};

    proptest! {
        #[test]
        fn a_box_knows_the_position_of_each_element(
            (shape, bounds) in boxes(),
            cut in any::<[prop::sample::Index; 2]>(),
        ) {
            let strided = StridedBox::new(&shape, bounds.clone());
            let expected = elements(&shape, &bounds);
            prop_assert_eq!(strided.numel(), expected.len());
            prop_assert_eq!(strided.is_whole(), bounds == TensorBox::whole(&shape));
            for end in 0..=shape.iter().product::<u64>() as usize {
                let before = expected.iter().filter(|&&element| element < end).count();
                prop_assert_eq!(strided.in_tensor(0..end), 0..before);
            }
            let mut range = cut.map(|cut| cut.index(expected.len() + 1));
            range.sort_unstable();
            let runs: Vec<_> = strided.runs(range[0]..range[1]).collect();
            let elements: Vec<usize> = runs.iter().flat_map(|(_, run)| run.clone()).collect();
            prop_assert_eq!(&elements[..], &expected[range[0]..range[1]]);
            for pair in runs.windows(2) {
                let [(first, run), (next, after)] = pair else { unreachable!() };
                prop_assert!(run.end < after.start, "ranges that could be one: {:?}", pair);
                prop_assert_eq!(first + run.len(), *next);
            }
        }
    }

    #[test]
    fn rows_are_one_range_and_columns_one_range_per_row() {
        let rows = TensorBox { offset: vec![2, 0], size: vec![2, 4] };
        let strided = StridedBox::new(&[4, 4], rows);
        assert_eq!(strided.runs(0..8).collect::<Vec<_>>(), [(0, 8..16)]);
        assert!(strided.is_contiguous());
        let columns = TensorBox { offset: vec![0, 2], size: vec![4, 2] };
        let strided = StridedBox::new(&[4, 4], columns);
        assert_eq!(
            strided.runs(1..8).collect::<Vec<_>>(),
            [(1, 3..4), (2, 6..8), (4, 10..12), (6, 14..16)]
        );
        assert_eq!(strided.in_slice(&SliceSpec { tensor: 0, offset: 4, numel: 8 }), 2..6);
    }
}
