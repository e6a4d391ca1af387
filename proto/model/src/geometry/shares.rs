//! The division of a contribution among the ranks of a group, which add their gradients before they
//! push them: each rank pushes one share of every slice.
//!
//! INVARIANT: with one group of all ranks, the sums have the bits that they have without groups,
//! because the ranks of a group are added in the order of the servers.

use std::{ops::Range, sync::Arc};

use super::ranks::Ranks;

/// Shares begin at multiples of this number of elements, so that small slices are not cut.
const GRAIN: usize = 1024;

/// The ranks that push the same share of a slice: one of each group.
///
/// One list with all ranks stands for contributions that are not divided: the groups have one rank
/// each, or hold different numbers of these ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sharers(Arc<[Ranks]>);

impl Sharers {
    /// The sharers of `ranks`, which contribute to the same elements. Ranks
    /// `n * group_size..(n + 1) * group_size` are a group.
    pub(crate) fn new(ranks: &Ranks, group_size: u32) -> Self {
        let groups: Vec<&[u32]> = ranks.chunk_by(|a, b| a / group_size == b / group_size).collect();
        let members = groups[0].len();
        if members == 1 || groups.iter().any(|group| group.len() != members) {
            return Self([ranks.clone()].into());
        }
        let share = |member| Ranks::new(groups.iter().map(|group| group[member]).collect());
        Self((0..members).map(share).collect())
    }

    /// The ranks that push each non-empty share of `numel` elements of slice number `slice`, and
    /// the elements, counted from 0.
    pub(crate) fn of(
        &self,
        slice: u32,
        numel: usize,
    ) -> impl Iterator<Item = (&Ranks, Range<usize>)> {
        let shares = self.0.len();
        let each = match shares {
            1 => numel,
            _ => numel.div_ceil(shares).next_multiple_of(GRAIN),
        };
        let share =
            move |number: usize| (number * each).min(numel)..((number + 1) * each).min(numel);
        (0..shares).filter_map(move |number| {
            let elements = share(number);
            // Otherwise one rank would push all slices that are smaller than the grain.
            let ranks = &self.0[(number + slice as usize) % shares];
            (!elements.is_empty()).then_some((ranks, elements))
        })
    }

    /// Returns whether contributions are divided.
    pub(crate) fn are_several(&self) -> bool {
        self.0.len() > 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(
        ranks: &[u32],
        group_size: u32,
        slice: u32,
        numel: usize,
    ) -> Vec<(Vec<u32>, Range<usize>)> {
        let sharers = Sharers::new(&Ranks::new(ranks.to_vec()), group_size);
        sharers.of(slice, numel).map(|(ranks, share)| (ranks.to_vec(), share)).collect()
    }

    #[test]
    fn each_rank_of_a_group_pushes_one_share_of_a_slice() {
        let expected = [(vec![0, 2], 0..3072), (vec![1, 3], 3072..5000)];
        assert_eq!(shares(&[0, 1, 2, 3], 2, 0, 5000), expected);
        let expected = [(vec![1, 3], 0..3072), (vec![0, 2], 3072..5000)];
        assert_eq!(shares(&[0, 1, 2, 3], 2, 1, 5000), expected);
    }

    #[test]
    fn small_slices_are_not_cut_and_are_pushed_by_one_rank_after_the_other() {
        for slice in 0..6 {
            assert_eq!(shares(&[0, 1, 2], 3, slice, 7), [(vec![slice % 3], 0..7)]);
        }
    }

    #[test]
    fn ranks_that_are_alone_or_in_unequal_numbers_push_whole_contributions() {
        for (ranks, group_size) in [(vec![0, 1], 1), (vec![0, 4], 4), (vec![0, 1, 4], 4)] {
            assert_eq!(shares(&ranks, group_size, 3, 9000), [(ranks, 0..9000)]);
        }
    }

    #[test]
    fn a_mesh_within_a_group_is_divided_among_the_ranks_of_each_box() {
        // Tensor parallelism over two ranks, in groups of four: ranks 0 and 2 hold the same box.
        let expected = [(vec![0, 4], 0..4096), (vec![2, 6], 4096..8192)];
        assert_eq!(shares(&[0, 2, 4, 6], 4, 0, 8192), expected);
    }
}
