//! Layouts of tensors on a mesh: the box that each rank holds, and the ranks that contribute to it.
//!
//! The rules are those of torch's DTensor. A sharded dimension is split like `torch.chunk`: the
//! size of the pieces is rounded up, and the last pieces may be shorter, or empty. Where several
//! mesh dimensions shard the same tensor dimension, the earlier one splits first.

use std::{collections::BTreeMap, sync::Arc};

use super::{Contributions, Contributors, ProcessMesh, StridedBox, TensorBox};
use crate::{Error, Result};

/// The placement of a tensor along one dimension of a mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DimPlacement {
    /// Each rank holds a piece: the tensor is split along this dimension of its own.
    Shard(usize),
    /// Each rank holds the whole tensor.
    Replicate,
    /// Each rank holds a partial value; the reduction of all of them is the tensor.
    Partial(Reduction),
}

/// The reduction that turns partial values into the tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Reduction {
    /// The sum.
    #[default]
    Sum,
    /// The mean.
    Avg,
    /// The maximum of each element.
    Max,
}

impl std::fmt::Display for DimPlacement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Shard(dim) => write!(f, "Shard({dim})"),
            Self::Replicate => write!(f, "Replicate"),
            Self::Partial(Reduction::Sum) => write!(f, "Partial(sum)"),
            Self::Partial(Reduction::Avg) => write!(f, "Partial(avg)"),
            Self::Partial(Reduction::Max) => write!(f, "Partial(max)"),
        }
    }
}

/// The placements of a tensor on a mesh.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Layout {
    mesh: Arc<ProcessMesh>,
    /// INVARIANT: one placement for each dimension of the mesh.
    placements: Vec<DimPlacement>,
}

impl Layout {
    /// # Errors
    /// [`Error::Invalid`] unless there is one placement for each dimension of the mesh.
    pub fn new(mesh: Arc<ProcessMesh>, placements: Vec<DimPlacement>) -> Result<Self> {
        if placements.len() != mesh.ndim() {
            let found = format!("{} ({})", placements.len(), list(&placements));
            let expected = format!(
                "one for each of the {} dimensions of the mesh ({})",
                mesh.ndim(),
                mesh.names().join(", ")
            );
            return Err(Error::invalid("number of placements", found, expected));
        }
        Ok(Self { mesh, placements })
    }

    /// The mesh.
    pub fn mesh(&self) -> &Arc<ProcessMesh> {
        &self.mesh
    }

    /// The placements, one for each dimension of the mesh.
    pub fn placements(&self) -> &[DimPlacement] {
        &self.placements
    }

    /// Checks that the layout fits a tensor of `shape`; the error names `tensor`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a placement shards a dimension that the shape does not have.
    pub fn check(&self, shape: &[u64], tensor: &str) -> Result<()> {
        for placement in &self.placements {
            if let &DimPlacement::Shard(dim) = placement
                && dim >= shape.len()
            {
                let what = format!("placement of tensor {tensor:?}");
                let expected =
                    format!("along one of the {} dimensions of its shape {shape:?}", shape.len());
                return Err(Error::invalid(what, placement, expected));
            }
        }
        Ok(())
    }

    /// The box that `rank` holds of a tensor of `shape`, which [`Self::check`] accepts; `None` if
    /// the rank is not in the mesh.
    pub fn local_box(&self, shape: &[u64], rank: u32) -> Option<TensorBox> {
        Some(self.box_at(shape, &self.mesh.coordinate(rank)?))
    }

    fn box_at(&self, shape: &[u64], coordinate: &[usize]) -> TensorBox {
        let mut bounds = TensorBox::whole(shape);
        for ((placement, &pieces), &place) in
            self.placements.iter().zip(self.mesh.shape()).zip(coordinate)
        {
            if let &DimPlacement::Shard(dim) = placement {
                let (offset, size) = chunk(bounds.size[dim], pieces as u64, place as u64);
                bounds.offset[dim] += offset;
                bounds.size[dim] = size;
            }
        }
        bounds
    }

    /// The contributions to the gradient of a tensor of `shape`, which [`Self::check`] accepts.
    pub fn contributions(&self, shape: &[u64]) -> Contributions {
        let mut ranks: BTreeMap<TensorBox, Vec<u32>> = BTreeMap::new();
        let places = self.contributing();
        let mut coordinate = vec![0; places.len()];
        for position in 0..places.iter().product() {
            let mut rest = position;
            for (place, &size) in coordinate.iter_mut().zip(&places).rev() {
                *place = rest % size;
                rest /= size;
            }
            let bounds = self.box_at(shape, &coordinate);
            if !bounds.is_empty() {
                let rank =
                    self.mesh.rank_at(&coordinate).expect("it is within the shape of the mesh");
                ranks.entry(bounds).or_default().push(rank);
            }
        }
        let contributors = |(bounds, ranks): (TensorBox, Vec<u32>)| {
            Contributors::new(Arc::new(StridedBox::new(shape, bounds)), ranks)
        };
        let contributors = ranks.into_iter().map(contributors).collect();
        Contributions { contributors, divisor: self.divisor() }
    }

    /// The number of contributing coordinates along each dimension of the mesh. Along a dimension
    /// with replicas, only the first coordinate contributes.
    fn contributing(&self) -> Vec<usize> {
        let dims = self.placements.iter().zip(self.mesh.shape());
        dims.map(|(placement, &size)| if *placement == DimPlacement::Replicate { 1 } else { size })
            .collect()
    }

    /// An upper bound of the number of contributions to a tensor with this number of slices,
    /// computed without listing them.
    pub(crate) fn most_contributions(&self, slices: u64) -> u64 {
        let (mut rows, mut others) = (1u64, 1u64);
        for (placement, size) in self.placements.iter().zip(self.contributing()) {
            // Pieces along the first dimension are consecutive in the tensor, as slices are.
            let factor = if *placement == DimPlacement::Shard(0) { &mut rows } else { &mut others };
            *factor *= size as u64;
        }
        if rows == 1 { others.saturating_mul(slices) } else { others.saturating_mul(slices + rows) }
    }

    /// The divisor of a sum over the ranks.
    pub(crate) fn divisor(&self) -> u64 {
        let dims = self.placements.iter().zip(self.mesh.shape());
        let averaged = dims.filter(|(p, _)| matches!(p, DimPlacement::Partial(Reduction::Avg)));
        averaged.map(|(_, &size)| size as u64).product()
    }
}

/// Piece number `place` of a dimension of `size` indices that is split into `pieces`: its first
/// index and its size.
fn chunk(size: u64, pieces: u64, place: u64) -> (u64, u64) {
    let step = size.div_ceil(pieces);
    let first = step.saturating_mul(place).min(size);
    (first, step.min(size - first))
}

/// Formats placements, such as "Shard(0), Replicate".
pub fn list(placements: &[DimPlacement]) -> String {
    placements.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// The layout of a tensor on one of the job's meshes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorLayout {
    /// Index of the mesh.
    pub mesh: u32,
    /// The placements, one for each dimension of the mesh.
    pub placements: Vec<DimPlacement>,
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::{DimPlacement::*, *};

    pub(crate) fn on(shape: &[usize], placements: &[DimPlacement]) -> Layout {
        let names = (0..shape.len()).map(|dim| format!("d{dim}"));
        Layout::new(Arc::new(ProcessMesh::dense(shape, names).unwrap()), placements.into()).unwrap()
    }

    /// Generates layouts of two-dimensional tensors on meshes of one or two dimensions.
    pub(crate) fn layouts(mesh: Vec<usize>) -> impl Strategy<Value = Layout> {
        let placement = prop_oneof![
            Just(Shard(0)),
            Just(Shard(1)),
            Just(Replicate),
            Just(Partial(Reduction::Sum)),
            Just(Partial(Reduction::Avg)),
        ];
        prop::collection::vec(placement, mesh.len())
            .prop_map(move |placements| on(&mesh, &placements))
    }

    #[test]
    fn pieces_equal_those_of_torch_chunk() {
        let pieces =
            |size, pieces| (0..pieces).map(|place| chunk(size, pieces, place)).collect::<Vec<_>>();
        assert_eq!(pieces(7, 3), [(0, 3), (3, 3), (6, 1)]);
        assert_eq!(pieces(4, 3), [(0, 2), (2, 2), (4, 0)]);
        assert_eq!(pieces(1, 3), [(0, 1), (1, 0), (1, 0)]);
        assert_eq!(pieces(0, 2), [(0, 0), (0, 0)]);
    }

    #[test]
    fn the_earlier_mesh_dimension_splits_first() {
        let layout = on(&[2, 2], &[Shard(0), Shard(0)]);
        let boxes: Vec<_> = (0..4).map(|rank| layout.local_box(&[5, 2], rank).unwrap()).collect();
        assert_eq!(
            boxes.iter().map(|b| (b.offset[0], b.size[0])).collect::<Vec<_>>(),
            [(0, 2), (2, 1), (3, 1), (4, 1)]
        );
    }

    #[test]
    fn the_contributors_follow_from_the_layout() {
        let layout = on(&[2, 2], &[Partial(Reduction::Avg), Shard(1)]);
        let Contributions { contributors, divisor } = layout.contributions(&[4, 6]);
        assert_eq!(divisor, 2);
        assert_eq!(
            contributors.iter().map(|of| of.ranks.to_vec()).collect::<Vec<_>>(),
            [[0, 2], [1, 3]]
        );
        assert_eq!(
            *contributors[1].of.bounds(),
            TensorBox { offset: vec![0, 3], size: vec![4, 3] }
        );

        let layout = on(&[2, 2], &[Partial(Reduction::Sum), Replicate]);
        let contributions = layout.contributions(&[3]);
        assert_eq!(
            (contributions.divisor, contributions.contributors[0].ranks.to_vec()),
            (1, vec![0, 2])
        );
        assert!(contributions.of_rank(2).is_some() && contributions.of_rank(1).is_none());
        // An empty shard has no contributors.
        assert_eq!(on(&[3], &[Shard(0)]).contributions(&[4]).contributors.len(), 2);
    }

    // promise: invalid-input
    #[test]
    fn wrong_layouts_are_refused() {
        let mesh = Arc::new(ProcessMesh::dense([2], ["x"]).unwrap());
        assert!(Layout::new(mesh.clone(), vec![Replicate, Replicate]).is_err());
        let error = Layout::new(mesh, vec![Shard(2)]).unwrap().check(&[4, 4], "w").unwrap_err();
        assert_eq!(
            error.to_string(),
            "placement of tensor \"w\" is Shard(2); it must be along one of the 2 dimensions of \
             its shape [4, 4]"
        );
    }

    proptest! {
        #[test]
        fn there_are_never_more_contributions_than_the_bound(
            layout in prop_oneof![layouts(vec![3]), layouts(vec![2, 3]), layouts(vec![4, 1])],
            shape in [0u64..7, 0u64..7],
            slice in 1u64..9,
        ) {
            let numel = shape.iter().product::<u64>();
            let slices = numel.div_ceil(slice);
            let mut contributions = 0;
            for Contributors { of, ranks, .. } in layout.contributions(&shape).contributors {
                let in_slice = |index: u64| {
                    of.in_tensor((index * slice) as usize..((index + 1) * slice).min(numel) as usize)
                };
                let slices = (0..slices).filter(|&index| !in_slice(index).is_empty()).count();
                contributions += slices * ranks.len();
            }
            prop_assert!(contributions as u64 <= layout.most_contributions(slices));
        }

        #[test]
        fn the_boxes_of_all_contributors_cover_the_tensor(
            layout in prop_oneof![layouts(vec![3]), layouts(vec![2, 3]), layouts(vec![4, 1])],
            shape in [0u64..7, 0u64..7],
        ) {
            let Contributions { contributors, .. } = layout.contributions(&shape);
            let numel: usize = contributors.iter().map(|contributors| contributors.of.numel()).sum();
            prop_assert_eq!(numel as u64, shape.iter().product::<u64>());
            for (i, a) in contributors.iter().enumerate() {
                for b in &contributors[..i] {
                    prop_assert_eq!(a.of.bounds().intersection(b.of.bounds()), None);
                }
                for &rank in a.ranks.iter() {
                    prop_assert_eq!(&layout.local_box(&shape, rank).unwrap(), a.of.bounds());
                }
            }
        }
    }
}
