//! The contributions to one slice in one attempt.
//!
//! Floating-point sums depend on their order, so the order is fixed: see `Turns`. INVARIANT: the
//! sum does not depend on the chunks in which contributions arrive, nor on their order of arrival.

use std::{ops::Range, sync::Arc};

use bytes::Bytes;
use zeroshard_kernels::Backend;
use zeroshard_loops::{Level, tally::Tally};
use zeroshard_model::{DType, Error, Result, geometry::SliceContributors};

use super::budget::Budget;
use recorder::Recorder;
use total::{Figures, Total};
use turns::{MAX_RANGES, Turns};

mod absent;
mod contribution;
mod recorder;
mod total;
mod turns;

pub use absent::Absent;
pub use contribution::{Contributed, Largest};
pub use recorder::Recorded;
pub(crate) use recorder::exhausted;

/// Consecutive elements of one rank's contribution, from the network buffer.
#[derive(Debug, Clone)]
pub struct Chunk {
    pub rank: u32,
    /// The first element, counted among the slice's elements to which the rank contributes.
    pub offset: usize,
    pub dtype: DType,
    /// Whole elements, little endian.
    pub bytes: Bytes,
}

impl Chunk {
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.bytes.len() / self.dtype.size()
    }

    /// The elements of `range`, which the chunk contains.
    pub fn select(&self, range: Range<usize>) -> Self {
        let size = self.dtype.size();
        let start = (range.start - self.offset) * size;
        let bytes = self.bytes.slice(start..start + range.len() * size);
        Self { offset: range.start, bytes, ..*self }
    }
}

/// The contributions to one slice, separately for each set of contributors.
#[derive(Debug)]
pub struct Round {
    slice: u32,
    turns: Vec<Turns>,
    figures: Figures,
    /// `true` if any rank has sent elements. INVARIANT: nothing is added before.
    touched: bool,
    /// The instruction set that computes the figures of contributions.
    level: Level,
    /// Keeps the contributions, while somebody captures a step.
    recorder: Option<Recorder>,
}

impl Round {
    /// The round of slice number `slice` with `numel` elements.
    pub fn new(slice: u32, numel: usize, contributors: &[SliceContributors]) -> Self {
        let turns = contributors.iter().map(|each| Turns::new(slice, each)).collect();
        let (figures, level) = (Figures::new(numel), Level::best());
        Self { slice, turns, figures, touched: false, level, recorder: None }
    }

    /// Adds gradients that have arrived already again, from now on.
    pub(crate) fn drop_ledger(&mut self) {
        self.turns.iter_mut().for_each(|turns| turns.lacks_ledger = true);
    }

    /// Drops all contributions, for the next attempt.
    pub fn reset(&mut self) {
        self.turns.iter_mut().for_each(Turns::reset);
        self.figures.reset();
        self.touched = false;
        self.recorder.iter_mut().for_each(Recorder::restart);
    }

    /// Returns whether any rank has sent elements, so that there is a sum.
    pub fn is_touched(&self) -> bool {
        self.touched
    }

    /// Returns whether every rank has contributed, or no rank has a gradient.
    pub fn is_complete(&self) -> bool {
        self.figures.are_complete() || self.is_absent_everywhere()
    }

    /// The sum of squares of the reduced gradient: block sums, added in order.
    pub fn sum_of_squares(&self) -> f64 {
        self.figures.sum_of_squares()
    }

    /// The lowest rank that sent inf or NaN.
    pub fn overflow(&self) -> Option<u32> {
        self.figures.overflow()
    }

    /// The first rank, in the order of addition, whose contribution is incomplete.
    pub fn missing_rank(&self) -> Option<u32> {
        self.turns.iter().find_map(Turns::missing_rank)
    }

    /// Adds the elements of `chunk` that have not been received before, or parks them if it is not
    /// their turn. The chunk's rank must contribute to this slice. Returns the number of new
    /// elements.
    ///
    /// # Errors
    /// [`Error::ParkingFull`]: the rest of the chunk can be sent again later. [`Error::Invalid`]
    /// for a contribution in too many separate ranges. Elements accepted before the error are kept.
    /// [`Error::Device`], after which the sum is undefined.
    pub fn contribute<B: Backend>(
        &mut self,
        backend: &B,
        accumulator: &mut B::Buffer,
        chunk: &Chunk,
        budget: &Arc<Budget>,
    ) -> Result<u64> {
        let (of, turn) = self.find(chunk.rank).expect("the caller checked the contributors");
        let turns = &mut self.turns[of];
        if turns.contributions[turn].absent {
            return Ok(0); // The rank has declared that the rest counts as zeros.
        }
        let total = &mut Total { backend, sum: accumulator, figures: &mut self.figures };
        let (mut new, mut refused) = (0, Ok(()));
        for (range, in_turn) in turns.new_ranges(turn, chunk.range()) {
            if turns.contributions[turn].received.len() >= MAX_RANGES {
                refused = Err(too_many_ranges(self.slice, chunk.rank));
                break;
            }
            let part = chunk.select(range.clone());
            // The elements are in cache.
            let first = contribution::first_element(self.slice) + range.start as u64;
            let tally = Tally::of(self.level, &part.bytes, part.dtype, first);
            let recorded = self.recorder.is_some().then(|| part.clone());
            if in_turn {
                turns.add(total, turn, range.clone(), Some(&part))?;
            } else if let Err(full) = turns.park(turn, part, budget) {
                refused = Err(full);
                break;
            }
            if let Some((recorder, part)) = self.recorder.as_mut().zip(recorded) {
                recorder.record(&part);
            }
            new += range.len() as u64;
            let contribution = &mut turns.contributions[turn];
            contribution.received.insert(range);
            contribution.tally.add(tally);
        }
        turns.unpark(total, turn)?;
        if !self.touched && !turns.contributions[turn].received.is_empty() {
            // From now on there is a sum to which the zeros of absent ranks can be added.
            self.touched = true;
            self.turns.iter_mut().try_for_each(|turns| turns.fill_in(total))?;
        }
        refused.map(|()| new)
    }

    /// Names the rank whose gradient is not finite in what `pusher` sends, the sum of a group; none
    /// if only the sum is not.
    pub fn name_overflow(&mut self, pusher: u32, rank: Option<u32>) {
        if let Some((of, turn)) = self.find(pusher) {
            self.turns[of].contributions[turn].overflow = Some(rank);
        }
    }

    /// The set of contributors that contains `rank`, and the turn of the rank in it.
    fn find(&self, rank: u32) -> Option<(usize, usize)> {
        let mut turns = self.turns.iter().enumerate();
        turns.find_map(|(of, turns)| Some((of, turns.of.ranks.turn(rank, self.slice)?)))
    }
}

fn too_many_ranges(slice: u32, rank: u32) -> Error {
    Error::refused(format!(
        "rank {rank} sent the gradient of slice {slice} in more than {MAX_RANGES} separate ranges; \
         send it in order"
    ))
}

#[cfg(test)]
mod contribution_tests;
#[cfg(test)]
mod contributors_tests;
#[cfg(test)]
#[path = "round_tests.rs"]
mod tests;
