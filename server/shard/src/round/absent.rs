//! Ranks without a gradient.
//!
//! The elements of a slice that an absent rank has not sent count as zeros, which are added in its
//! turn. The result has the same bits as if the rank had sent zeros, but needs no network traffic
//! and no parking. The zeros are added once, regardless of the number of absent ranks. As long as
//! no rank has sent any element of the slice, no memory is accessed, and a slice without any
//! gradient is not stepped.

use bytes::Bytes;
use zeroshard_kernels::{Backend, Result};
use zeroshard_model::{DType, geometry::blocks::BLOCK};

use super::{Chunk, Round, total::Total, turns::Turns};

/// A block of zeros, in the smallest dtype.
static ZEROS: [u8; 2 * BLOCK] = [0; 2 * BLOCK];

/// The ranks that lack all or a part of a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Absent {
    /// The lowest such rank; one that still takes part, if there is one.
    pub rank: u32,
    /// `true` if no rank has any element of the slice.
    pub everywhere: bool,
}

impl Round {
    /// Records that `rank` sends nothing more. Returns whether this changes anything: it does not
    /// if the rank has sent everything, or does not contribute to this slice.
    pub fn absent<B: Backend>(
        &mut self,
        backend: &B,
        accumulator: &mut B::Buffer,
        rank: u32,
    ) -> Result<bool> {
        let Some((of, turn)) = self.note_absent(rank) else { return Ok(false) };
        if self.touched {
            let total = &mut Total { backend, sum: accumulator, figures: &mut self.figures };
            let turns = &mut self.turns[of];
            turns.add_zeros(total, turn)?;
            turns.unpark(total, turn)?;
        }
        Ok(true)
    }

    /// The part of [`Self::absent`] that does not need the accumulator: everything, if no rank has
    /// sent elements. Returns the set of contributors and the turn of the rank; `None` if nothing
    /// changes.
    pub fn note_absent(&mut self, rank: u32) -> Option<(usize, usize)> {
        let (of, turn) = self.find(rank)?;
        let turns = &mut self.turns[of];
        let contribution = &mut turns.contributions[turn];
        if contribution.absent || contribution.received.is_all(turns.of.elements.numel()) {
            return None;
        }
        contribution.absent = true;
        turns.absents += 1;
        Some((of, turn))
    }

    /// The absent ranks, if there are any. `done`: ranks that are absent from every attempt.
    pub fn absentees(&self, done: &[u32]) -> Option<Absent> {
        let absent = self.turns.iter().flat_map(Turns::absent);
        let rank = absent.min_by_key(|rank| (done.contains(rank), *rank))?;
        Some(Absent { rank, everywhere: self.is_absent_everywhere() })
    }

    /// Returns all absent ranks, in any order.
    pub fn absents(&self) -> impl Iterator<Item = u32> {
        self.turns.iter().flat_map(Turns::absent)
    }

    /// Returns whether all ranks are absent and have sent nothing.
    pub fn is_absent_everywhere(&self) -> bool {
        !self.touched && self.turns.iter().all(|turns| turns.absents == turns.contributions.len())
    }
}

impl Turns {
    fn absent(&self) -> impl Iterator<Item = u32> {
        let turns = if self.absents == 0 { 0 } else { self.contributions.len() };
        (0..turns).filter(|&turn| self.contributions[turn].absent).map(|turn| self.rank(turn))
    }

    /// Adds the zeros of absent ranks whose turn has come. The sum must contain a contribution.
    pub(super) fn fill_in<B: Backend>(&mut self, total: &mut Total<'_, B>) -> Result<()> {
        if self.absents == 0 {
            return Ok(());
        }
        for turn in 0..self.contributions.len().min(2) {
            self.add_zeros(total, turn)?;
        }
        self.unpark(total, 0)
    }

    /// Adds zeros in place of the elements that have not been received at `turn`, if its rank is
    /// absent and its turn has come.
    pub(super) fn add_zeros<B: Backend>(
        &mut self,
        total: &mut Total<'_, B>,
        turn: usize,
    ) -> Result<()> {
        if !self.contributions[turn].absent {
            return Ok(());
        }
        let missing = self.new_ranges(turn, 0..self.of.elements.numel());
        for (range, _) in missing.into_iter().filter(|(_, in_turn)| *in_turn) {
            for (range, zeroed) in self.zeroed.split(range.clone()) {
                if zeroed {
                    self.add(total, turn, range, None)?;
                    continue;
                }
                for offset in range.clone().step_by(BLOCK) {
                    let numel = (range.end - offset).min(BLOCK);
                    let bytes = Bytes::from_static(&ZEROS[..2 * numel]);
                    let zeros = Chunk { rank: self.rank(turn), offset, dtype: DType::Bf16, bytes };
                    self.add(total, turn, zeros.range(), Some(&zeros))?;
                }
            }
            self.zeroed.insert(range.clone());
            self.contributions[turn].received.insert(range);
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "absent_tests.rs"]
mod tests;
