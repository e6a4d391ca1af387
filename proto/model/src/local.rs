//! The part of a tensor that one rank holds, and what the rank does for its group.

use std::{ops::Range, sync::Arc};

use crate::{
    JobSpec, StridedBox,
    geometry::{Contributors, Ranks, Sharers},
};

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

    /// The rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Returns whether the rank contributes to the gradient.
    pub fn contributes(&self) -> bool {
        self.ranks.is_some()
    }

    /// Returns whether the rank uploads the initial values of its box.
    pub fn uploads(&self) -> bool {
        self.ranks.as_ref().is_some_and(|ranks| ranks.uploader() == self.rank)
    }

    /// Returns whether the rank pushes the values of its box that replace those of an earlier step.
    pub fn replaces(&self) -> bool {
        self.ranks.as_ref().is_some_and(|ranks| ranks.replacer() == self.rank)
    }

    /// The rank's place in the order in which contributions to slice number `slice` are added.
    pub fn turn(&self, slice: u32) -> Option<usize> {
        self.ranks.as_ref()?.turn(self.rank, slice)
    }

    /// Returns whether the ranks of the group add their gradients before they push them.
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

    /// Returns whether the rank pushes a share of slice number `slice`, in which it holds `numel`
    /// elements.
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
