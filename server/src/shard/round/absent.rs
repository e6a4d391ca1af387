//! Ranks without a gradient. What of a slice has not come from an absent rank counts as zeros, added in its turn
//! like any other: the same bits as if it had sent them. Only that needs no network, no parking, and as long as
//! nobody has sent anything no memory is touched; a slice that nobody sends anything of is not stepped.

use bytes::Bytes;
use zeroshard_proto::{DType, blocks::BLOCK};

use super::{Piece, Round};
use crate::backend::Backend;

/// A block of zeros, in the smallest dtype.
static ZEROS: [u8; 2 * BLOCK] = [0; 2 * BLOCK];

/// Who had nothing, or not all, of a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Absent {
    /// The lowest such rank.
    pub(crate) rank: u32,
    /// No rank had anything of it.
    pub(crate) everywhere: bool,
}

impl Round {
    /// Notes that `rank` sends no more. Returns whether that is news: not if it has sent everything.
    pub(crate) fn absent<B: Backend>(&mut self, backend: &B, accumulator: &mut B::Buffer, rank: u32) -> bool {
        let position = self.position(rank);
        let contribution = &mut self.contributions[position];
        if contribution.absent || contribution.received.is_all(self.numel) {
            return false;
        }
        contribution.absent = true;
        self.absents += 1;
        self.fill_in(backend, accumulator);
        true
    }

    /// Who is absent, if anybody is.
    pub(crate) fn absentees(&self) -> Option<Absent> {
        let positions = (0..self.contributions.len()).filter(|&p| self.contributions[p].absent);
        let rank = positions.map(|position| self.rank(position)).min()?;
        Some(Absent { rank, everywhere: self.is_absent_everywhere() })
    }

    /// Whether all ranks are absent and have sent nothing.
    pub(crate) fn is_absent_everywhere(&self) -> bool {
        self.absents == self.contributions.len() && self.is_untouched()
    }

    fn is_untouched(&self) -> bool {
        self.contributions.iter().all(|contribution| contribution.received.pieces() == 0)
    }

    /// Adds the zeros of absent ranks, as far as their turn has come, once there is something to add them to.
    pub(super) fn fill_in<B: Backend>(&mut self, backend: &B, accumulator: &mut B::Buffer) {
        if self.absents == 0 || self.is_untouched() {
            return;
        }
        for position in 0..self.contributions.len().min(2) {
            self.add_zeros(backend, accumulator, position);
        }
        self.unpark(backend, accumulator, 0);
    }

    /// Adds zeros where nothing came from the rank at `position`, if it is absent, as far as its turn has come.
    pub(super) fn add_zeros<B: Backend>(
        &mut self,
        backend: &B,
        accumulator: &mut B::Buffer,
        position: usize,
    ) {
        if !self.contributions[position].absent {
            return;
        }
        let cut = self.contributions[position].received.split(0..self.numel);
        let gaps = cut.into_iter().filter(|(_, received)| !received);
        let turns: Vec<_> = gaps.flat_map(|(gap, _)| self.turns(position, gap)).collect();
        for (range, _) in turns.into_iter().filter(|(_, in_turn)| *in_turn) {
            for offset in range.clone().step_by(BLOCK) {
                let numel = (range.end - offset).min(BLOCK);
                let bytes = Bytes::from_static(&ZEROS[..2 * numel]);
                let zeros = Piece { rank: self.rank(position), offset, dtype: DType::Bf16, bytes };
                self.add(backend, accumulator, position, &zeros);
            }
            self.contributions[position].received.insert(range);
        }
    }
}

#[cfg(test)]
#[path = "absent_tests.rs"]
mod tests;
