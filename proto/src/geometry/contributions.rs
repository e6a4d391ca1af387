//! The ranks that contribute to each box of a tensor, and the order of their contributions.

use std::{ops::Range, sync::Arc};

use super::{Elements, StridedBox, shares::Sharers};
use crate::{JobSpec, SliceSpec};

/// The ranks that contribute to the same elements, in ascending order; at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranks(Arc<[u32]>);

impl Ranks {
    /// Creates the list from distinct ranks.
    pub fn new(mut ranks: Vec<u32>) -> Self {
        ranks.sort_unstable();
        Self(ranks.into())
    }

    /// Whether `rank` contributes.
    pub fn contains(&self, rank: u32) -> bool {
        self.0.binary_search(&rank).is_ok()
    }

    /// The first rank, which uploads the initial values and those that replace them.
    pub fn uploader(&self) -> u32 {
        self.0[0]
    }

    /// The position of `rank` in the order in which contributions to slice number `slice` are
    /// added. The order is cyclic from `slice` modulo the number of ranks, so that servers do not
    /// wait for the lowest rank in all slices at once.
    pub fn turn(&self, rank: u32, slice: u32) -> Option<usize> {
        let place = self.0.binary_search(&rank).ok()?;
        Some((place + self.0.len() - slice as usize % self.0.len()) % self.0.len())
    }

    /// The rank at position `turn` in the order of addition for slice number `slice`.
    pub fn at_turn(&self, turn: usize, slice: u32) -> u32 {
        self.0[(turn + slice as usize) % self.0.len()]
    }
}

impl std::ops::Deref for Ranks {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.0
    }
}

/// A box of a tensor, and the ranks whose contributions to it are added.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contributors {
    /// The box; not empty.
    pub of: Arc<StridedBox>,
    /// The ranks.
    pub ranks: Ranks,
    /// The ranks that push each share of the contributions.
    sharers: Sharers,
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

    /// The contributions of groups of `group_size` ranks: see [`JobSpec::group_size`].
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

/// A share of a group's contributions to a slice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupShare {
    /// The rank that pushes it.
    pub rank: u32,
    /// The place of the push in the order in which the servers add them.
    pub turn: usize,
    /// The elements, counted among those that the ranks hold of the slice.
    pub elements: Range<usize>,
}

/// The part of a tensor that one rank holds.
#[derive(Debug, Clone)]
pub struct LocalTensor {
    /// The box; empty if the rank is not in the tensor's mesh.
    pub of: Arc<StridedBox>,
    rank: u32,
    /// The rank's group.
    group: Range<u32>,
    /// The ranks that contribute to the box, if this rank is one of them.
    ranks: Option<Ranks>,
    /// The ranks that push each share of their contributions.
    sharers: Option<Sharers>,
    /// The ranks of the group that hold the box.
    holders: Ranks,
    /// The rank that pulls each part of the parameters for the holders.
    pullers: Sharers,
}

impl LocalTensor {
    /// The part of `rank` according to the job's layout of the tensor.
    pub fn new(job: &JobSpec, tensor: usize, rank: u32) -> Self {
        let group = job.group_of(rank);
        let holders = Ranks::new(match job.manifest.tensors()[tensor].layout {
            None => group.clone().collect(),
            Some(_) => {
                let own = job.local_box(tensor, rank);
                group.clone().filter(|&other| job.local_box(tensor, other) == own).collect()
            }
        });
        let pullers = Sharers::new(&holders, job.group_size);
        match job.contributions(tensor).of_rank(rank) {
            Some(Contributors { of, ranks, sharers }) => {
                let (ranks, sharers) = (Some(ranks.clone()), Some(sharers.clone()));
                Self { of: of.clone(), rank, group, ranks, sharers, holders, pullers }
            }
            None => {
                let shape = &job.manifest.tensors()[tensor].shape;
                let of = Arc::new(StridedBox::new(shape, job.local_box(tensor, rank)));
                Self { of, rank, group, ranks: None, sharers: None, holders, pullers }
            }
        }
    }

    /// The parts of all tensors that `rank` holds, in manifest order.
    pub fn all(job: &JobSpec, rank: u32) -> Vec<Self> {
        let mut locals: Vec<Self> = Vec::with_capacity(job.manifest.tensors().len());
        for tensor in 0..job.manifest.tensors().len() {
            let mut local = Self::new(job, tensor, rank);
            // Most tensors have the same contributors as the previous tensor and share its list.
            if let Some(before) = locals.last().filter(|before| before.ranks == local.ranks) {
                local.ranks.clone_from(&before.ranks);
                local.sharers.clone_from(&before.sharers);
            }
            if let Some(before) = locals.last().filter(|before| before.holders == local.holders) {
                local.holders.clone_from(&before.holders);
                local.pullers.clone_from(&before.pullers);
            }
            locals.push(local);
        }
        locals
    }

    /// Whether the rank contributes to the gradient.
    pub fn contributes(&self) -> bool {
        self.ranks.is_some()
    }

    /// Whether the rank uploads the initial values of its box.
    pub fn uploads(&self) -> bool {
        self.ranks.as_ref().is_some_and(|ranks| ranks.uploader() == self.rank)
    }

    /// The rank's place in the order in which contributions to slice number `slice` are added.
    pub fn turn(&self, slice: u32) -> Option<usize> {
        self.ranks.as_ref()?.turn(self.rank, slice)
    }

    /// Whether the ranks of the group add their gradients before they push them.
    pub fn is_shared(&self) -> bool {
        self.sharers.as_ref().is_some_and(Sharers::are_several)
    }

    /// The shares of the contributions of this rank's group to slice number `slice`, in which the
    /// rank holds `numel` elements. Without groups, everything is this rank's share.
    pub fn shares(&self, slice: u32, numel: usize) -> Vec<GroupShare> {
        let Some(sharers) = &self.sharers else { return Vec::new() };
        let share = |(ranks, elements): (&Ranks, Range<usize>)| {
            let rank = match sharers.are_several() {
                true => *ranks.iter().find(|rank| self.group.contains(rank))?,
                false => self.rank,
            };
            Some(GroupShare { rank, turn: ranks.turn(rank, slice)?, elements })
        };
        sharers.of(slice, numel).filter_map(share).collect()
    }

    /// Whether the rank pushes a share of slice number `slice`, in which it holds `numel` elements.
    pub fn pushes(&self, slice: u32, numel: usize) -> bool {
        self.shares(slice, numel).iter().any(|share| share.rank == self.rank)
    }

    /// The ranks of the group that hold the box.
    pub fn holders(&self) -> &Ranks {
        &self.holders
    }

    /// The rank that pulls each part of the parameters in slice number `slice` for the holders, of
    /// which this rank holds `numel` elements, and the elements, counted from 0.
    pub fn pulls(&self, slice: u32, numel: usize) -> Vec<(u32, Range<usize>)> {
        self.pullers.of(slice, numel).map(|(ranks, elements)| (ranks[0], elements)).collect()
    }

    /// The ranks of the group that contribute to the box, in the order in which they are added for
    /// slice number `slice`.
    pub fn in_order(&self, slice: u32) -> Vec<u32> {
        let Some(ranks) = &self.ranks else { return Vec::new() };
        let order = (0..ranks.len()).map(|turn| ranks.at_turn(turn, slice));
        order.filter(|rank| self.group.contains(rank)).collect()
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
