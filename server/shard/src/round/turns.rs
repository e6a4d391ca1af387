//! The contributions to the same elements of a slice: the elements of each rank that have arrived,
//! and the order in which they are added.
//!
//! The order is rank order, cyclic from `slice mod ranks` ([`Ranks::turn`]). Addition is
//! commutative bit for bit, so the first two ranks of the order may come in either order. The
//! others wait, parked, until the elements of all ranks before them are added.
//!
//! [`Ranks::turn`]: zeroshard_model::geometry::Ranks::turn

use std::{ops::Range, sync::Arc};

use bytes::Bytes;
use zeroshard_loops::tally::Tally;
use zeroshard_model::{Error, Result, geometry::SliceContributors};

use super::{Chunk, total::Total};
use crate::{
    budget::{Budget, Space},
    ranges::Ranges,
};
use zeroshard_kernels::Backend;

/// The maximum number of separate ranges of one contribution, so that memory stays bounded. A
/// worker that sends in order needs one or two.
pub(super) const MAX_RANGES: usize = 1024;

/// The memory of a parked chunk in addition to its bytes: the entry in the list, and the overhead
/// of `Bytes` and of the allocator.
pub(super) const PARKED_OVERHEAD: u64 = 128;

/// The contribution of one rank.
#[derive(Debug, Default)]
pub(super) struct Contribution {
    /// The elements that have arrived. Elements that arrive again are skipped.
    pub(super) received: Ranges,
    /// The elements that are in the accumulator. INVARIANT: a subset of `received`; from the third
    /// turn on also a subset of the added elements of the previous turn.
    pub(super) added: Ranges,
    /// INVARIANT: disjoint. A chunk is kept as a whole until all of it has been added, because it
    /// is one allocation.
    pub(super) parked: Vec<(Chunk, Space)>,
    /// `true` if the rank sends nothing more: elements that have not been received count as zeros.
    pub(super) absent: bool,
    /// The rank that has sent inf or NaN, if the contribution is the sum of a group; `Some(None)`:
    /// only the sum is not finite.
    pub(super) overflow: Option<Option<u32>>,
    /// The figures of the elements that have arrived.
    pub(super) tally: Tally,
}

/// The ranks that contribute to the same elements, one after the other.
#[derive(Debug)]
pub(super) struct Turns {
    slice: u32,
    pub(super) of: SliceContributors,
    /// The contributions, by turn.
    pub(super) contributions: Vec<Contribution>,
    /// The number of absent ranks.
    pub(super) absents: usize,
    /// The elements to which the zeros of an absent rank have been added. Adding zero only changes
    /// -0.0, after which the sum is never -0.0 again, so further zeros have no effect there.
    pub(super) zeroed: Ranges,
    /// `true` if elements that arrive again are added again.
    pub(super) lacks_ledger: bool,
}

impl Contribution {
    /// Returns whether the rank has sent elements. Those of an absent rank may all be zeros that
    /// the server has added.
    pub(super) fn has_sent(&self) -> bool {
        !self.received.is_empty() && (!self.absent || self.tally != Tally::default())
    }
}

impl Turns {
    pub(super) fn new(slice: u32, of: &SliceContributors) -> Self {
        let contributions = of.ranks.iter().map(|_| Contribution::default()).collect();
        let zeroed = Ranges::default();
        let of = of.clone();
        Self { slice, of, contributions, absents: 0, zeroed, lacks_ledger: false }
    }

    pub(super) fn reset(&mut self) {
        for contribution in &mut self.contributions {
            contribution.received.clear();
            contribution.added.clear();
            contribution.parked.clear();
            contribution.absent = false;
            contribution.overflow = None;
            contribution.tally = Tally::default();
        }
        self.absents = 0;
        self.zeroed.clear();
    }

    /// The first rank, in the order of addition, whose contribution is incomplete.
    pub(super) fn missing_rank(&self) -> Option<u32> {
        let numel = self.of.elements.numel();
        let turn =
            self.contributions.iter().position(|c| !c.absent && !c.received.is_all(numel))?;
        Some(self.rank(turn))
    }

    pub(super) fn rank(&self, turn: usize) -> u32 {
        self.of.ranks.at_turn(turn, self.slice)
    }

    /// The parts of `range` that have not been received, and whether it is their turn.
    pub(super) fn new_ranges(&self, turn: usize, range: Range<usize>) -> Vec<(Range<usize>, bool)> {
        if self.lacks_ledger {
            return self.in_turn(turn, range);
        }
        let parts = self.contributions[turn].received.split(range).into_iter();
        parts.filter(|(_, known)| !known).flat_map(|(new, _)| self.in_turn(turn, new)).collect()
    }

    /// Keeps a chunk until its turn, in separate memory, because a part of a network buffer would
    /// keep the whole buffer alive.
    pub(super) fn park(&mut self, turn: usize, chunk: Chunk, budget: &Arc<Budget>) -> Result<()> {
        let Some(space) = budget.take(chunk.bytes.len() as u64 + PARKED_OVERHEAD) else {
            let range = chunk.range();
            let waiting_for =
                (0..turn).find(|&before| !self.contributions[before].added.contains(&range));
            return Err(Error::ParkingFull {
                slice: self.slice,
                rank: chunk.rank,
                offset: chunk.offset as u64,
                waiting_for: self.rank(waiting_for.unwrap_or(0)),
                budget: budget.limit(),
            });
        };
        let chunk = Chunk { bytes: Bytes::copy_from_slice(&chunk.bytes), ..chunk };
        self.contributions[turn].parked.push((chunk, space));
        Ok(())
    }

    /// Splits `range` by whether the contributions of all earlier turns have been added.
    pub(super) fn in_turn(&self, turn: usize, range: Range<usize>) -> Vec<(Range<usize>, bool)> {
        let added = |turn: usize| &self.contributions[turn].added;
        match turn {
            0 | 1 => vec![(range, true)],
            // The first two may come in either order, so both must have been added.
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

    /// Returns whether any element of this turn can be added, because some elements of all earlier
    /// turns have been added.
    fn is_reached(&self, turn: usize) -> bool {
        let has_added = |turn: usize| !self.contributions[turn].added.is_empty();
        match turn {
            0 | 1 => true,
            2 => has_added(0) && has_added(1),
            later => has_added(later - 1),
        }
    }

    /// Adds elements whose turn it is: those of `chunk`; `None` stands for zeros in elements to
    /// which zeros have been added before.
    pub(super) fn add<B: Backend>(
        &mut self,
        total: &mut Total<'_, B>,
        turn: usize,
        range: Range<usize>,
        chunk: Option<&Chunk>,
    ) -> zeroshard_kernels::Result<()> {
        let parts = match turn {
            0 | 1 => match self.contributions.get(1 - turn) {
                Some(other) => other.added.split(range.clone()),
                None => vec![(range.clone(), false)],
            },
            _ => vec![(range.clone(), true)],
        };
        for (range, something) in parts {
            if let Some(chunk) = chunk {
                let (part, at) =
                    (chunk.select(range.clone()), self.of.elements.select(range.clone()));
                let finite = match something {
                    true => {
                        total.backend.accumulate(total.sum, at.clone(), &part.bytes, part.dtype)?
                    }
                    // The first contribution is stored, so that the sum does not have to be
                    // cleared.
                    false => total.backend.store(total.sum, at.clone(), &part.bytes, part.dtype)?,
                };
                if !finite {
                    let rank = self.contributions[turn].overflow.unwrap_or(Some(chunk.rank));
                    total.note_overflow(at, rank)?;
                }
            }
            let is_last = match self.contributions.len() {
                1 => true,
                // The first two come in either order.
                2 => something,
                // The last turn is added only to elements of which all earlier turns have been
                // added.
                ranks => turn + 1 == ranks,
            };
            if is_last {
                total.complete(&self.of.elements, &range)?;
            }
        }
        self.contributions[turn].added.insert(range);
        Ok(())
    }

    /// Adds the parked chunks of the turns after `turn` whose turn has come.
    pub(super) fn unpark<B: Backend>(
        &mut self,
        total: &mut Total<'_, B>,
        turn: usize,
    ) -> zeroshard_kernels::Result<()> {
        for later in (turn + 1).max(2)..self.contributions.len() {
            if !self.is_reached(later) {
                return Ok(()); // later turns cannot be added either
            }
            let parked = std::mem::take(&mut self.contributions[later].parked);
            for (chunk, space) in parked {
                if !self.add_parked(total, later, &chunk)? {
                    self.contributions[later].parked.push((chunk, space));
                }
            }
            self.add_zeros(total, later)?;
        }
        Ok(())
    }

    /// Adds the elements of a parked chunk whose turn has come. Returns whether all of them have
    /// been added.
    fn add_parked<B: Backend>(
        &mut self,
        total: &mut Total<'_, B>,
        turn: usize,
        chunk: &Chunk,
    ) -> zeroshard_kernels::Result<bool> {
        let waiting = self.contributions[turn].added.split(chunk.range());
        let mut all = true;
        for (range, _) in waiting.into_iter().filter(|(_, added)| !added) {
            for (range, in_turn) in self.in_turn(turn, range) {
                match in_turn {
                    true => self.add(total, turn, range.clone(), Some(&chunk.select(range)))?,
                    false => all = false,
                }
            }
        }
        Ok(all)
    }
}
