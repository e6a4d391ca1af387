//! Axis-aligned boxes of tensors.

use crate::{Error, Result};

/// A rectangular part of a tensor, with an offset and a size along each dimension. Its elements are
/// numbered row-major.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorBox {
    /// The first index along each dimension; empty for a scalar.
    pub offset: Vec<u64>,
    /// The number of indices along each dimension.
    pub size: Vec<u64>,
}

impl TensorBox {
    /// The box that covers a whole tensor of `shape`.
    pub fn whole(shape: &[u64]) -> Self {
        Self { offset: vec![0; shape.len()], size: shape.to_vec() }
    }

    /// The number of elements; 1 for a scalar.
    pub fn numel(&self) -> u64 {
        if self.is_empty() { 0 } else { self.size.iter().product() }
    }

    /// Returns whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.size.contains(&0)
    }

    /// The intersection of both boxes; `None` if it is empty.
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

    /// This box relative to the first element of `outer`, which contains it.
    pub fn within(&self, outer: &Self) -> Self {
        let offset =
            self.offset.iter().zip(&outer.offset).map(|(inner, outer)| inner - outer).collect();
        Self { offset, size: self.size.clone() }
    }

    /// Checks that this is a box of a tensor of `shape`; the error names `tensor`.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check(&self, shape: &[u64], tensor: &str) -> Result<()> {
        let fits = self.offset.len() == shape.len()
            && self.size.len() == shape.len()
            && (0..shape.len()).all(|dim| {
                self.offset[dim].checked_add(self.size[dim]).is_some_and(|end| end <= shape[dim])
            });
        if fits {
            return Ok(());
        }
        let found = format!("at offset {:?} with size {:?}", self.offset, self.size);
        let expected = format!("within the tensor's shape, {shape:?}");
        Err(Error::invalid(format!("box of tensor {tensor:?}"), found, expected))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Generates the shape of a tensor and a box of it.
    pub(in crate::geometry) fn boxes() -> impl Strategy<Value = (Vec<u64>, TensorBox)> {
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

    /// The elements of the flattened tensor that are in the box, computed one by one.
    pub(in crate::geometry) fn elements(shape: &[u64], bounds: &TensorBox) -> Vec<usize> {
        let numel = shape.iter().product::<u64>();
        let inside = |&element: &u64| {
            let mut rest = element;
            (0..shape.len()).rev().all(|dim| {
                let index = rest % shape[dim];
                rest /= shape[dim];
                (bounds.offset[dim]..bounds.offset[dim] + bounds.size[dim]).contains(&index)
            })
        };
        (0..numel).filter(inside).map(|element| element as usize).collect()
    }

    proptest! {
        #[test]
        fn an_intersection_has_the_elements_of_both_boxes((shape, a) in boxes(), dims in any::<[[prop::sample::Index; 2]; 4]>()) {
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
    fn a_box_outside_its_tensor_is_refused() {
        let bounds =
            |offset: &[u64], size: &[u64]| TensorBox { offset: offset.into(), size: size.into() };
        assert!(bounds(&[1, 0], &[1, 3]).check(&[2, 3], "w").is_ok());
        for wrong in [bounds(&[1, 0], &[2, 3]), bounds(&[0], &[2]), bounds(&[u64::MAX, 0], &[1, 1])]
        {
            assert!(matches!(wrong.check(&[2, 3], "w"), Err(Error::Invalid { .. })), "{wrong:?}");
        }
    }
}
