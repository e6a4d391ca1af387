//! Ranks that contribute to a box, and the order in which their contributions are added.

use std::sync::Arc;

/// The ranks that contribute to the same elements, in ascending order; at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranks {
    all: Arc<[u32]>,
    /// The rank that pushes new values, if it is not the uploader.
    replacer: Option<u32>,
}

impl Ranks {
    /// Creates the list from distinct ranks.
    pub fn new(mut ranks: Vec<u32>) -> Self {
        ranks.sort_unstable();
        Self { all: ranks.into(), replacer: None }
    }

    /// The same ranks, of which `replacer` pushes new values.
    pub(crate) fn replaced_by(self, replacer: Option<u32>) -> Self {
        Self { replacer, ..self }
    }

    /// Returns whether `rank` contributes.
    pub fn contains(&self, rank: u32) -> bool {
        self.binary_search(&rank).is_ok()
    }

    /// The first rank, which uploads the initial values.
    pub fn uploader(&self) -> u32 {
        self[0]
    }

    /// The rank that pushes the values that replace them: the uploader, unless the job names
    /// another one.
    pub fn replacer(&self) -> u32 {
        self.replacer.unwrap_or_else(|| self.uploader())
    }

    /// The position of `rank` in the order in which contributions to slice number `slice` are
    /// added. The order is cyclic from `slice` modulo the number of ranks, so that servers do not
    /// wait for the lowest rank in all slices at once.
    pub fn turn(&self, rank: u32, slice: u32) -> Option<usize> {
        let place = self.binary_search(&rank).ok()?;
        Some((place + self.len() - slice as usize % self.len()) % self.len())
    }

    /// The rank at position `turn` in the order of addition for slice number `slice`.
    pub fn at_turn(&self, turn: usize, slice: u32) -> u32 {
        self[(turn + slice as usize) % self.len()]
    }
}

impl std::ops::Deref for Ranks {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.all
    }
}
