//! The contributions to one lane of a slice: which elements of which rank are in, and in what order they are added.
//!
//! The order is rank order, cyclic from `slice mod ranks in the lane`, so that servers need not wait for the lowest
//! rank everywhere at once. The first two of the order commute exactly (a + b = b + a, bit for bit), so either may
//! come first; later ones wait, parked, until all before them are in, element by element.

use std::{ops::Range, sync::Arc};

use zeroshard_proto::{Error, Result};

use super::{
    Piece,
    parking::{ParkingBudget, Space},
    total::{Before, Total},
};
use crate::{
    backend::Backend,
    shard::{lane::Lane, ranges::Ranges},
};

/// The most separate ranges of one contribution: nobody who sends in order comes near, and memory stays bounded.
pub(super) const MAX_PIECES: usize = 1024;

/// One rank's.
#[derive(Debug, Default)]
pub(super) struct Contribution {
    /// What has come; a part that comes again is skipped.
    pub(super) received: Ranges,
    /// What is in the accumulator. INVARIANT: a subset of `received`; from the third position on also of what
    /// is added of the position before.
    pub(super) added: Ranges,
    pub(super) parked: Vec<(Piece, Space)>,
    /// Nothing more comes: what has not been received is zeros.
    pub(super) absent: bool,
}

/// The ranks of a lane, which take turns.
#[derive(Debug)]
pub(super) struct Turns {
    slice: u32,
    pub(super) lane: Lane,
    /// By position in the order of addition.
    pub(super) contributions: Vec<Contribution>,
    /// How many ranks are absent.
    pub(super) absents: usize,
}

impl Turns {
    pub(super) fn new(slice: u32, lane: &Lane) -> Self {
        let contributions = lane.ranks.iter().map(|_| Contribution::default()).collect();
        Self { slice, lane: lane.clone(), contributions, absents: 0 }
    }

    pub(super) fn reset(&mut self) {
        for contribution in &mut self.contributions {
            contribution.received.clear();
            contribution.added.clear();
            contribution.parked.clear();
            contribution.absent = false;
        }
        self.absents = 0;
    }

    /// The first rank, in the order of addition, whose gradient is not all here.
    pub(super) fn missing_rank(&self) -> Option<u32> {
        let numel = self.lane.area.numel();
        let position = self.contributions.iter().position(|c| !c.absent && !c.received.is_all(numel))?;
        Some(self.rank(position))
    }

    /// The place of `rank` in the order of addition, if it contributes.
    pub(super) fn position(&self, rank: u32) -> Option<usize> {
        let ranks = self.contributions.len();
        Some((self.lane.position(rank)? + ranks - self.slice as usize % ranks) % ranks)
    }

    pub(super) fn rank(&self, position: usize) -> u32 {
        let ranks = self.contributions.len();
        self.lane.ranks[(position + self.slice as usize) % ranks]
    }

    /// Adds what is new of `piece`, or parks it if its turn has not come. Returns how many elements were new.
    ///
    /// # Errors
    /// As [`super::Round::contribute`].
    pub(super) fn take<B: Backend>(
        &mut self,
        total: &mut Total<'_, B>,
        position: usize,
        piece: &Piece,
        budget: &Arc<ParkingBudget>,
    ) -> Result<u64> {
        if self.contributions[position].absent {
            return Ok(0); // too late: it counts as zeros
        }
        let mut new = 0;
        for (range, known) in self.contributions[position].received.split(piece.range()) {
            if known {
                continue;
            }
            if self.contributions[position].received.pieces() >= MAX_PIECES {
                return Err(Error::invalid(
                    format!("gradient of slice {} from rank {}", self.slice, piece.rank),
                    format!("in more than {MAX_PIECES} separate ranges"),
                    "sent in order",
                ));
            }
            for (range, in_turn) in self.turns(position, range) {
                let part = piece.part(range.clone());
                if in_turn {
                    self.add(total, position, &part);
                } else {
                    let space = budget.take(part.bytes.len() as u64).ok_or(Error::ParkingFull {
                        slice: self.slice,
                        rank: piece.rank,
                        offset: range.start as u64,
                        waiting_for: piece.rank,
                        budget: budget.limit,
                    })?;
                    self.contributions[position].parked.push((part, space));
                }
                new += range.len() as u64;
                self.contributions[position].received.insert(range);
            }
        }
        self.unpark(total, position);
        Ok(new)
    }

    /// Cuts `range` by whether all before `position` are in.
    pub(super) fn turns(&self, position: usize, range: Range<usize>) -> Vec<(Range<usize>, bool)> {
        let added = |position: usize| &self.contributions[position].added;
        match position {
            0 | 1 => vec![(range, true)],
            // The first two come in either order: both must be in.
            2 => {
                let cut = added(0).split(range).into_iter();
                cut.flat_map(|(range, first)| {
                    let cut = added(1).split(range).into_iter();
                    cut.map(move |(range, second)| (range, first && second))
                })
                .collect()
            }
            later => added(later - 1).split(range),
        }
    }

    /// Adds a piece whose turn it is.
    pub(super) fn add<B: Backend>(&mut self, total: &mut Total<'_, B>, position: usize, piece: &Piece) {
        let pieces = match position {
            0 | 1 => match self.contributions.get(1 - position) {
                Some(other) => other.added.split(piece.range()),
                None => vec![(piece.range(), false)],
            },
            _ => vec![(piece.range(), true)],
        };
        for (range, something) in pieces {
            let all_others = match self.contributions.len() {
                1 => true,
                // They come in either order.
                2 => something,
                // The last of the order is added only where all before it are.
                ranks => position + 1 == ranks,
            };
            total.add(&self.lane.area, &piece.part(range), Before { something, all_others });
        }
        self.contributions[position].added.insert(piece.range());
    }

    /// Adds what was parked behind `position`, as far as its turn has come.
    pub(super) fn unpark<B: Backend>(&mut self, total: &mut Total<'_, B>, position: usize) {
        for later in (position + 1).max(2)..self.contributions.len() {
            let parked = std::mem::take(&mut self.contributions[later].parked);
            for (piece, mut space) in parked {
                for (range, in_turn) in self.turns(later, piece.range()) {
                    let part = piece.part(range);
                    if in_turn {
                        self.add(total, later, &part);
                    } else {
                        let rest = space.split_off(part.bytes.len() as u64);
                        self.contributions[later].parked.push((part, rest));
                    }
                }
            }
            self.add_zeros(total, later);
        }
    }
}
