//! The contributions to one lane of a slice: which elements of which rank are in, and in what order
//! they are added.
//!
//! The order is rank order, cyclic from `slice mod ranks in the lane`, so that servers need not
//! wait for the lowest rank everywhere at once. The first two of the order commute exactly (a + b =
//! b + a, bit for bit), so either may come first; later ones wait, parked, until all before them
//! are in, element by element.

use std::{ops::Range, sync::Arc};

use bytes::Bytes;
use zeroshard_proto::{Error, Result};

use super::{Piece, total::Total};
use crate::{
    backend::Backend,
    shard::{
        budget::{Budget, Space},
        lane::Lane,
        ranges::Ranges,
    },
};

/// The most separate ranges of one contribution: nobody who sends in order comes near, and memory
/// stays bounded.
pub(super) const MAX_PIECES: usize = 1024;

/// What a parked piece costs beside its bytes: the entry in the list, and what `Bytes` and the
/// allocator keep of each allocation.
pub(super) const PARKED_OVERHEAD: u64 = 128;

/// One rank's.
#[derive(Debug, Default)]
pub(super) struct Contribution {
    /// What has come; a part that comes again is skipped.
    pub(super) received: Ranges,
    /// What is in the accumulator. INVARIANT: a subset of `received`; from the third position on
    /// also of what is added of the position before.
    pub(super) added: Ranges,
    /// INVARIANT: disjoint. A piece stays as a whole until all of it has been added: it is one
    /// allocation.
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
    /// Where the zeros of an absent rank have been added. Zeros change -0.0 only, and what they
    /// have been added to is never -0.0 again, so further zeros change nothing there.
    pub(super) zeroed: Ranges,
}

impl Turns {
    pub(super) fn new(slice: u32, lane: &Lane) -> Self {
        let contributions = lane.ranks.iter().map(|_| Contribution::default()).collect();
        Self { slice, lane: lane.clone(), contributions, absents: 0, zeroed: Ranges::default() }
    }

    pub(super) fn reset(&mut self) {
        for contribution in &mut self.contributions {
            contribution.received.clear();
            contribution.added.clear();
            contribution.parked.clear();
            contribution.absent = false;
        }
        self.absents = 0;
        self.zeroed.clear();
    }

    /// The first rank, in the order of addition, whose gradient is not all here.
    pub(super) fn missing_rank(&self) -> Option<u32> {
        let numel = self.lane.area.numel();
        let position =
            self.contributions.iter().position(|c| !c.absent && !c.received.is_all(numel))?;
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

    /// Adds what is new of `piece`, or parks it if its turn has not come. Returns how many elements
    /// were new.
    ///
    /// # Errors
    /// As [`super::Round::contribute`].
    pub(super) fn take<B: Backend>(
        &mut self,
        total: &mut Total<'_, B>,
        position: usize,
        piece: &Piece,
        budget: &Arc<Budget>,
    ) -> Result<u64> {
        if self.contributions[position].absent {
            return Ok(0); // too late: it counts as zeros
        }
        let taken = self.take_new(total, position, piece, budget);
        self.unpark(total, position);
        taken
    }

    fn take_new<B: Backend>(
        &mut self,
        total: &mut Total<'_, B>,
        position: usize,
        piece: &Piece,
        budget: &Arc<Budget>,
    ) -> Result<u64> {
        let mut new = 0;
        let cut = self.contributions[position].received.split(piece.range());
        for (range, _) in cut.into_iter().filter(|(_, known)| !known) {
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
                    self.add(total, position, range.clone(), Some(&part));
                } else {
                    self.park(position, part, budget)?;
                }
                new += range.len() as u64;
                self.contributions[position].received.insert(range);
            }
        }
        Ok(new)
    }

    /// Keeps a piece whose turn has not come, in memory of its own: in that of the network buffer
    /// it would keep all of the buffer.
    fn park(&mut self, position: usize, piece: Piece, budget: &Arc<Budget>) -> Result<()> {
        let Some(space) = budget.take(piece.bytes.len() as u64 + PARKED_OVERHEAD) else {
            let range = piece.range();
            let waiting_for =
                (0..position).find(|&before| !self.contributions[before].added.contains(&range));
            return Err(Error::ParkingFull {
                slice: self.slice,
                rank: piece.rank,
                offset: piece.offset as u64,
                waiting_for: self.rank(waiting_for.unwrap_or(0)),
                budget: budget.limit(),
            });
        };
        let piece = Piece { bytes: Bytes::copy_from_slice(&piece.bytes), ..piece };
        self.contributions[position].parked.push((piece, space));
        Ok(())
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

    /// Whether something of the rank at `position` may have its turn: something of all before it
    /// has been added.
    fn is_reached(&self, position: usize) -> bool {
        let has_added = |position: usize| self.contributions[position].added.pieces() > 0;
        match position {
            0 | 1 => true,
            2 => has_added(0) && has_added(1),
            later => has_added(later - 1),
        }
    }

    /// Adds elements whose turn it is: those of `piece`, or nothing but zeros to where zeros have
    /// been added before.
    pub(super) fn add<B: Backend>(
        &mut self,
        total: &mut Total<'_, B>,
        position: usize,
        range: Range<usize>,
        piece: Option<&Piece>,
    ) {
        let parts = match position {
            0 | 1 => match self.contributions.get(1 - position) {
                Some(other) => other.added.split(range.clone()),
                None => vec![(range.clone(), false)],
            },
            _ => vec![(range.clone(), true)],
        };
        for (range, something) in parts {
            if let Some(piece) = piece {
                total.add(&self.lane.area, &piece.part(range.clone()), !something);
            }
            let is_last = match self.contributions.len() {
                1 => true,
                // They come in either order.
                2 => something,
                // The last of the order is added only where all before it are.
                ranks => position + 1 == ranks,
            };
            if is_last {
                total.complete(&self.lane.area, &range);
            }
        }
        self.contributions[position].added.insert(range);
    }

    /// Adds what was parked behind `position`, as far as its turn has come.
    pub(super) fn unpark<B: Backend>(&mut self, total: &mut Total<'_, B>, position: usize) {
        for later in (position + 1).max(2)..self.contributions.len() {
            if !self.is_reached(later) {
                return; // nor is any after it
            }
            let mut parked = std::mem::take(&mut self.contributions[later].parked);
            parked.retain(|(piece, _)| {
                let waiting = self.contributions[later].added.split(piece.range());
                let mut all = true;
                for (range, _) in waiting.into_iter().filter(|(_, added)| !added) {
                    for (range, in_turn) in self.turns(later, range) {
                        match in_turn {
                            true => self.add(total, later, range.clone(), Some(&piece.part(range))),
                            false => all = false,
                        }
                    }
                }
                !all
            });
            self.contributions[later].parked = parked;
            self.add_zeros(total, later);
        }
    }
}
