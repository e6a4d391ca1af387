//! How readers have the values of a tensor.

use std::{ops::Range, sync::Arc};

use super::{Elements, SliceSpec, StridedBox};
use crate::DType;

/// The values of a tensor as a reader has them: rounded to its dtype, and of the whole tensor or of
/// a box. The reader's array has them in row-major order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    dtype: DType,
    /// INVARIANT: the box is not the whole tensor.
    bounds: Option<Arc<StridedBox>>,
}

impl View {
    /// A view of the box `bounds`, or of the whole tensor.
    pub fn new(dtype: DType, bounds: Option<Arc<StridedBox>>) -> Self {
        Self { dtype, bounds: bounds.filter(|of| !of.is_whole()) }
    }

    /// A view of the whole tensor.
    pub fn whole(dtype: DType) -> Self {
        Self { dtype, bounds: None }
    }

    /// The dtype of the reader's values.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The box; `None`: the whole tensor.
    pub fn bounds(&self) -> Option<&StridedBox> {
        self.bounds.as_deref()
    }

    /// The positions of a slice's values in the reader's array. They are consecutive, and continue
    /// those of the tensor's slice before it.
    pub fn positions(&self, slice: &SliceSpec) -> Range<usize> {
        match &self.bounds {
            None => slice.offset..slice.offset + slice.numel,
            Some(of) => of.in_slice(slice),
        }
    }

    /// The same values by their positions in the slice, in the order of the reader's array.
    pub fn elements(&self, slice: &SliceSpec) -> Elements {
        match &self.bounds {
            None => Elements::Range(0..slice.numel),
            Some(of) => of.elements(slice),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::tensor_box::tests::*, *};

    proptest! {
        #[test]
        fn the_slices_of_a_tensor_fill_the_array_of_a_box_in_order(
            (shape, bounds) in boxes(),
            numel in 1usize..20,
        ) {
            let all = elements(&shape, &bounds);
            let of = Arc::new(StridedBox::new(&shape, bounds));
            let view = View::new(DType::Bf16, Some(of.clone()));
            prop_assert_eq!(view.bounds().is_none(), of.is_whole());
            let (size, mut end) = (shape.iter().product::<u64>() as usize, 0);
            for offset in (0..size).step_by(numel) {
                let slice = SliceSpec { tensor: 0, offset, numel: numel.min(size - offset) };
                let positions = view.positions(&slice);
                prop_assert_eq!(positions.start, end);
                end = positions.end;
                let found = view.elements(&slice);
                let found: Vec<usize> = found.runs().flatten().map(|at| offset + at).collect();
                prop_assert_eq!(&found[..], &all[positions]);
            }
            prop_assert_eq!(end, all.len());
        }
    }
}
