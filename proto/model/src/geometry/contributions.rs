//! The ranks that contribute to each box of a tensor, and the order of their contributions.

use std::sync::Arc;

use super::{Elements, Ranks, SliceSpec, StridedBox, shares::Sharers};

/// A box of a tensor, and the ranks whose contributions to it are added.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contributors {
    /// The box; not empty.
    pub of: Arc<StridedBox>,
    /// The ranks.
    pub ranks: Ranks,
    /// The ranks that push each share of the contributions.
    pub(crate) sharers: Sharers,
}

impl Contributors {
    /// Contributions of `ranks` that are not divided.
    pub(super) fn new(of: Arc<StridedBox>, ranks: Vec<u32>) -> Self {
        let ranks = Ranks::new(ranks);
        Self { of, sharers: Sharers::new(&ranks, 1), ranks }
    }
}

/// Elements of a slice, and the ranks whose contributions to them are added. Contributions number
/// these elements from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceContributors {
    /// INVARIANT: not empty.
    pub elements: Elements,
    /// INVARIANT: no rank contributes twice to a slice.
    pub ranks: Ranks,
}

/// The contributions to a tensor's gradient.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contributions {
    /// INVARIANT: the boxes are disjoint, and their union is the tensor; an empty tensor has none.
    pub contributors: Vec<Contributors>,
    /// The divisor of the sum.
    pub divisor: u64,
}

impl Contributions {
    /// The mean of the whole gradients of all ranks, for a tensor without a layout.
    pub fn mean(shape: &[u64], world: u32) -> Self {
        let of = Arc::new(StridedBox::whole(shape));
        let all = Contributors::new(of, (0..world).collect());
        let contributors = if all.of.numel() == 0 { vec![] } else { vec![all] };
        Self { contributors, divisor: world.into() }
    }

    /// The contributors that include `rank`.
    pub fn of_rank(&self, rank: u32) -> Option<&Contributors> {
        self.contributors.iter().find(|contributors| contributors.ranks.contains(rank))
    }

    /// The contributions to a tensor of which `rank` pushes new values, if it is not the uploader.
    pub(crate) fn replaced_by(mut self, rank: Option<u32>) -> Self {
        for of in &mut self.contributors {
            of.ranks = of.ranks.clone().replaced_by(rank);
        }
        self
    }

    /// The contributions of groups of `group_size` ranks: see [`crate::JobSpec::group_size`].
    pub(crate) fn grouped(mut self, group_size: u32) -> Self {
        for Contributors { ranks, sharers, .. } in &mut self.contributors {
            *sharers = Sharers::new(ranks, group_size);
        }
        self
    }

    /// The contributors to `slice`, a slice of this tensor.
    pub fn of_slice(&self, slice: &SliceSpec) -> Arc<[SliceContributors]> {
        let cut = |Contributors { of, ranks, .. }: &Contributors| {
            let elements = of.elements(slice);
            (elements.numel() > 0).then(|| SliceContributors { elements, ranks: ranks.clone() })
        };
        self.contributors.iter().filter_map(cut).collect()
    }

    /// The ranks that push the gradient of `slice`, which is slice number `index` of the job and a
    /// slice of this tensor: of each group one rank pushes the sum of its share.
    pub fn pushes(&self, index: u32, slice: &SliceSpec) -> Arc<[SliceContributors]> {
        let cut = |Contributors { of, sharers, .. }: &Contributors| {
            let elements = of.elements(slice);
            let share = |(ranks, share): (&Ranks, _)| SliceContributors {
                elements: elements.select(share),
                ranks: ranks.clone(),
            };
            sharers.of(index, elements.numel()).map(share).collect::<Vec<_>>()
        };
        self.contributors.iter().flat_map(cut).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{
        super::tensor_box::tests::elements,
        super::{DimPlacement, Layout, ProcessMesh, Reduction},
        *,
    };

    /// Generates a shape and a layout on a mesh of one or two dimensions, with the ranks in any
    /// order.
    fn layouts() -> impl Strategy<Value = (Vec<u64>, Layout)> {
        let shape = prop::collection::vec(1u64..7, 0..4);
        let dims = prop::collection::vec((1usize..5, 0usize..8), 1..3);
        (shape, dims).prop_flat_map(|(shape, dims)| {
            let size: u32 = dims.iter().map(|dim| dim.0 as u32).product();
            let ranks = Just((0..size + 1).collect::<Vec<u32>>()).prop_shuffle();
            let placement = {
                let ndim = shape.len();
                move |kind: usize| match kind {
                    0 | 1 => DimPlacement::Replicate,
                    2 => DimPlacement::Partial(Reduction::Sum),
                    3 => DimPlacement::Partial(Reduction::Avg),
                    _ if ndim == 0 => DimPlacement::Replicate,
                    sharded => DimPlacement::Shard(sharded % ndim),
                }
            };
            ranks.prop_map(move |ranks| {
                let names = (0..dims.len()).map(|dim| format!("d{dim}"));
                let sizes: Vec<usize> = dims.iter().map(|dim| dim.0).collect();
                let mesh = ProcessMesh::new(sizes, &ranks[..size as usize], names).unwrap();
                let placements = dims.iter().map(|dim| placement(dim.1)).collect();
                (shape.clone(), Layout::new(Arc::new(mesh), placements).unwrap())
            })
        })
    }

    proptest! {
        #[test]
        fn each_element_of_a_slice_belongs_to_exactly_one_set_of_contributors(
            (shape, layout) in layouts(),
            cut in any::<[prop::sample::Index; 2]>(),
            some in any::<[prop::sample::Index; 2]>(),
        ) {
            let range = |cut: [prop::sample::Index; 2], numel: usize| {
                let [a, b] = cut.map(|cut| cut.index(numel + 1));
                a.min(b)..a.max(b)
            };
            let within = range(cut, shape.iter().product::<u64>() as usize);
            let slice = SliceSpec { tensor: 0, offset: within.start, numel: within.len() };
            let contributions = layout.contributions(&shape);
            let mut seen = vec![0; slice.numel];
            for contributors in contributions.of_slice(&slice).iter() {
                let of = &contributions.of_rank(contributors.ranks.uploader()).unwrap().of;
                let positions = elements(&shape, of.bounds()).into_iter();
                let expected: Vec<usize> =
                    positions.filter(|e| within.contains(e)).map(|e| e - slice.offset).collect();
                let actual: Vec<usize> = contributors.elements.runs().flatten().collect();
                prop_assert_eq!(&actual, &expected);
                expected.iter().for_each(|&element| seen[element] += 1);
                for (index, &element) in expected.iter().enumerate() {
                    prop_assert_eq!(contributors.elements.position(index), element);
                }
                let some = range(some, slice.numel);
                let inside = contributors.elements.within(&some);
                let both: Vec<usize> = expected.iter().copied().filter(|e| some.contains(e)).collect();
                prop_assert_eq!(&expected[inside], &both[..]);
            }
            prop_assert!(seen.iter().all(|&times| times == 1), "{:?}", seen);
        }

        #[test]
        fn every_rank_has_one_turn_and_the_order_is_cyclic(
            ranks in prop::collection::hash_set(0u32..50, 1..9),
            slice in any::<u32>(),
        ) {
            let ranks = Ranks::new(ranks.into_iter().collect());
            let order: Vec<u32> = (0..ranks.len()).map(|turn| ranks.at_turn(turn, slice)).collect();
            for (turn, &rank) in order.iter().enumerate() {
                prop_assert_eq!(ranks.turn(rank, slice), Some(turn));
            }
            let mut cyclic = ranks.to_vec();
            cyclic.rotate_left(slice as usize % ranks.len());
            prop_assert_eq!(order, cyclic);
            prop_assert_eq!(ranks.turn(50, slice), None);
        }
    }
}
