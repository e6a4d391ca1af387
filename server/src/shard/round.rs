//! The contributions to one slice at one step, lane by lane.
//!
//! Floating-point sums depend on their order, so it is fixed: `turns` has it, for each lane on its
//! own. INVARIANT: what is added never depends on how the bytes were cut or when they came.

use std::{ops::Range, sync::Arc};

use bytes::Bytes;
use zeroshard_proto::{DType, Result};

use super::{budget::Budget, lane::Lane};
use crate::backend::Backend;
use total::{Figures, Total};
use turns::Turns;

mod absent;
mod total;
mod turns;

pub(crate) use absent::Absent;

/// Consecutive elements of one rank's contribution, from the network buffer.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    pub(crate) rank: u32,
    /// First element, of those that the rank's lane has of the slice.
    pub(crate) offset: usize,
    pub(crate) dtype: DType,
    /// Whole elements, little endian.
    pub(crate) bytes: Bytes,
}

impl Piece {
    pub(crate) fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.bytes.len() / self.dtype.size()
    }

    pub(crate) fn part(&self, range: Range<usize>) -> Self {
        let size = self.dtype.size();
        let start = (range.start - self.offset) * size;
        let bytes = self.bytes.slice(start..start + range.len() * size);
        Self { offset: range.start, bytes, ..*self }
    }
}

/// The open step of one slice.
#[derive(Debug)]
pub(crate) struct Round {
    lanes: Vec<Turns>,
    figures: Figures,
    /// Whether anybody has sent anything. INVARIANT: as long as nobody has, nothing is added
    /// either.
    touched: bool,
}

impl Round {
    /// Of slice number `slice`, of `numel` elements, which `lanes` are all of.
    pub(crate) fn new(slice: u32, numel: usize, lanes: &[Lane]) -> Self {
        let lanes = lanes.iter().map(|lane| Turns::new(slice, lane)).collect();
        Self { lanes, figures: Figures::new(numel), touched: false }
    }

    /// Forgets everything: the next step, or the same one in a new epoch.
    pub(crate) fn reset(&mut self) {
        self.lanes.iter_mut().for_each(Turns::reset);
        self.figures.reset();
        self.touched = false;
    }

    /// Whether every rank's gradient is in, or no rank has one.
    pub(crate) fn is_complete(&self) -> bool {
        self.figures.are_complete() || self.is_absent_everywhere()
    }

    /// The sum of squares of the reduced gradient: block sums, added in order.
    pub(crate) fn sum_of_squares(&self) -> f64 {
        self.figures.sum_of_squares()
    }

    /// The lowest rank that sent inf or NaN.
    pub(crate) fn overflow(&self) -> Option<u32> {
        self.figures.overflow()
    }

    /// The first rank, lane by lane and in the order of addition, whose gradient is not all here.
    pub(crate) fn missing_rank(&self) -> Option<u32> {
        self.lanes.iter().find_map(Turns::missing_rank)
    }

    /// Adds what is new of `piece`, whose rank contributes to this slice, or parks it if its turn
    /// has not come. Returns how many elements were new.
    ///
    /// # Errors
    /// [`zeroshard_proto::Error::ParkingFull`]: the rest of the piece may be sent again later.
    /// [`zeroshard_proto::Error::Invalid`] for a contribution in too many pieces. What was taken
    /// before the error stays.
    pub(crate) fn contribute<B: Backend>(
        &mut self,
        backend: &B,
        accumulator: &mut B::Buffer,
        piece: &Piece,
        budget: &Arc<Budget>,
    ) -> Result<u64> {
        let (lane, position) = self.find(piece.rank).expect("the caller asked who contributes");
        let total = &mut Total { backend, sum: accumulator, figures: &mut self.figures };
        let taken = self.lanes[lane].take(total, position, piece, budget);
        if !self.touched && self.lanes[lane].contributions[position].received.pieces() > 0 {
            // From now on there is something that zeros can be added to, in every lane.
            self.touched = true;
            self.lanes.iter_mut().for_each(|turns| turns.fill_in(total));
        }
        taken
    }

    /// The lane that `rank` contributes to, and its place in the order of addition there.
    fn find(&self, rank: u32) -> Option<(usize, usize)> {
        let mut lanes = self.lanes.iter().enumerate();
        lanes.find_map(|(lane, turns)| Some((lane, turns.position(rank)?)))
    }
}

#[cfg(test)]
mod lane_tests;
#[cfg(test)]
#[path = "round_tests.rs"]
mod tests;
