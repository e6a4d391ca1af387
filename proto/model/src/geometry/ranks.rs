//! Ranks that contribute to a box, and the order in which their contributions are added.

use std::sync::Arc;

/// The ranks that contribute to the same elements, in ascending order; at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranks(Arc<[u32]>);

impl Ranks {
    /// Creates the list from distinct ranks.
    pub fn new(mut ranks: Vec<u32>) -> Self {
        ranks.sort_unstable();
        Self(ranks.into())
    }

    /// Returns whether `rank` contributes.
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
