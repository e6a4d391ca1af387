//! Lists what each rank has contributed to a slice: how large it is, and its hash.

use zeroshard_loops::tally::Tally;
use zeroshard_model::geometry::blocks::SLICE;

use super::{Round, turns::Turns};

/// Returns the number of a slice's first element, for hashes. No two slices share a number.
pub(super) fn first_element(slice: u32) -> u64 {
    u64::from(slice) * SLICE as u64
}

/// One rank's contribution to a slice.
#[derive(Debug, Clone, Copy)]
pub struct Contributed {
    /// The rank that pushed it. In a job with groups, the rank stands for its share.
    pub rank: u32,
    /// Its sum of squares and its hash.
    pub tally: Tally,
}

/// The largest contribution to a slice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Largest {
    /// The rank that pushed it; in a group, that of the share.
    pub rank: u32,
    /// The sum of squares of its elements.
    pub squares: f64,
}

impl Round {
    /// Returns the contributions of ranks that have sent elements, by turn within each set of
    /// contributors.
    pub fn contributions(&self) -> impl Iterator<Item = Contributed> {
        self.turns.iter().flat_map(Turns::contributed)
    }

    /// Returns the contribution with the largest norm. Of equal ones, returns that of the lowest
    /// rank. NaN counts as the largest.
    pub fn largest(&self) -> Option<Largest> {
        let largest = |one: Contributed| Largest { rank: one.rank, squares: one.tally.squares };
        let all = self.contributions().map(largest);
        // NaN is above infinity in this order.
        all.max_by(|a, b| a.squares.abs().total_cmp(&b.squares.abs()).then(b.rank.cmp(&a.rank)))
    }
}

impl Turns {
    fn contributed(&self) -> impl Iterator<Item = Contributed> {
        let turns = self.contributions.iter().enumerate();
        let sent = turns.filter(|(_, one)| one.has_sent());
        sent.map(|(turn, one)| Contributed { rank: self.rank(turn), tally: one.tally })
    }
}
