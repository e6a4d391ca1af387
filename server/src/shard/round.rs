//! The contributions to one slice at one step: which elements of which rank are in, and in what order they are
//! added.
//!
//! Floating-point sums depend on their order, so it is fixed: rank order, cyclic from `slice mod world`, so that
//! servers need not wait for rank 0 everywhere at once. The first two of the order commute exactly
//! (a + b = b + a, bit for bit), so either may come first; later ones wait, parked, until all before them are
//! in, element by element. INVARIANT: what is added never depends on how the bytes were cut or when they came.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::Bytes;
use zeroshard_proto::{DType, Error, Result, blocks::BLOCK};

use super::ranges::Ranges;
use crate::backend::Backend;

mod absent;

pub(crate) use absent::Absent;

/// The most separate ranges of one contribution: nobody who sends in order comes near, and memory stays bounded.
const MAX_PIECES: usize = 1024;

/// How many bytes of early gradients a server keeps, over all of its slices.
#[derive(Debug)]
pub(crate) struct ParkingBudget {
    limit: u64,
    used: AtomicU64,
}

impl ParkingBudget {
    pub(crate) fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicU64::new(0) })
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    fn take(self: &Arc<Self>, bytes: u64) -> Option<Space> {
        let fits = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= self.limit);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        Some(Space { budget: self.clone(), bytes })
    }
}

/// A part of the budget, given back when dropped.
#[derive(Debug)]
struct Space {
    budget: Arc<ParkingBudget>,
    bytes: u64,
}

impl Drop for Space {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Consecutive elements of one rank's gradient, from the network buffer.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    pub(crate) rank: u32,
    /// First element, within the slice.
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

#[derive(Debug, Default)]
struct Contribution {
    /// What has come; a part that comes again is skipped.
    received: Ranges,
    /// What is in the accumulator. INVARIANT: a subset of `received`; from the third position on also of what
    /// is added of the position before.
    added: Ranges,
    parked: Vec<(Piece, Space)>,
    /// Nothing more comes: what has not been received is zeros.
    absent: bool,
}

/// The open step of one slice.
#[derive(Debug)]
pub(crate) struct Round {
    slice: u32,
    numel: usize,
    /// By position in the order of addition.
    contributions: Vec<Contribution>,
    /// The sum of squares of each block that every rank's gradient is in.
    block_sums: Vec<Option<f64>>,
    /// How many blocks have none yet.
    open_blocks: usize,
    /// The lowest rank that sent inf or NaN.
    overflow: Option<u32>,
    /// How many ranks are absent.
    absents: usize,
}

impl Round {
    pub(crate) fn new(slice: u32, numel: usize, world: u32) -> Self {
        let contributions = (0..world).map(|_| Contribution::default()).collect();
        let open_blocks = numel.div_ceil(BLOCK);
        let block_sums = vec![None; open_blocks];
        Self { slice, numel, contributions, block_sums, open_blocks, overflow: None, absents: 0 }
    }

    /// Forgets everything: the next step, or the same one in a new epoch.
    pub(crate) fn reset(&mut self) {
        for contribution in &mut self.contributions {
            contribution.received.clear();
            contribution.added.clear();
            contribution.parked.clear();
            contribution.absent = false;
        }
        self.block_sums.fill(None);
        self.open_blocks = self.block_sums.len();
        self.overflow = None;
        self.absents = 0;
    }

    /// Whether every rank's gradient is in, or no rank has one.
    pub(crate) fn is_complete(&self) -> bool {
        self.open_blocks == 0 || self.is_absent_everywhere()
    }

    /// The sum of squares of the reduced gradient: block sums, added in order.
    pub(crate) fn sum_of_squares(&self) -> f64 {
        self.block_sums.iter().flatten().fold(0.0, |sum, block| sum + block)
    }

    /// The lowest rank that sent inf or NaN.
    pub(crate) fn overflow(&self) -> Option<u32> {
        self.overflow
    }

    /// The first rank, in the order of addition, whose gradient is not all here.
    pub(crate) fn missing_rank(&self) -> Option<u32> {
        let position = self.contributions.iter().position(|c| !c.absent && !c.received.is_all(self.numel))?;
        Some(self.rank(position))
    }

    /// Adds what is new of `piece`, or parks it if its turn has not come. Returns how many elements were new.
    ///
    /// # Errors
    /// [`Error::ParkingFull`]: the rest of the piece may be sent again later. [`Error::Invalid`] for
    /// a contribution in too many pieces. What was taken before the error stays.
    pub(crate) fn contribute<B: Backend>(
        &mut self,
        backend: &B,
        accumulator: &mut B::Buffer,
        piece: &Piece,
        budget: &Arc<ParkingBudget>,
    ) -> Result<u64> {
        let position = self.position(piece.rank);
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
                    self.add(backend, accumulator, position, &part);
                } else {
                    let space = budget.take(part.bytes.len() as u64).ok_or(Error::ParkingFull {
                        slice: self.slice,
                        rank: piece.rank,
                        budget: budget.limit,
                    })?;
                    self.contributions[position].parked.push((part, space));
                }
                new += range.len() as u64;
                self.contributions[position].received.insert(range);
            }
        }
        self.unpark(backend, accumulator, position);
        self.fill_in(backend, accumulator);
        Ok(new)
    }

    fn position(&self, rank: u32) -> usize {
        let world = self.contributions.len() as u32;
        ((rank + world - self.slice % world) % world) as usize
    }

    fn rank(&self, position: usize) -> u32 {
        let world = self.contributions.len() as u32;
        (position as u32 + self.slice % world) % world
    }

    /// Cuts `range` by whether all before `position` are in.
    fn turns(&self, position: usize, range: Range<usize>) -> Vec<(Range<usize>, bool)> {
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

    /// Adds a piece whose turn it is; the first of the first two to come is stored, so that the accumulator
    /// need not be cleared.
    fn add<B: Backend>(&mut self, backend: &B, sum: &mut B::Buffer, position: usize, piece: &Piece) {
        let pieces = match position {
            0 | 1 => match self.contributions.get(1 - position) {
                Some(other) => other.added.split(piece.range()),
                None => vec![(piece.range(), false)],
            },
            _ => vec![(piece.range(), true)],
        };
        let mut finite = true;
        for (range, has_other) in pieces {
            let part = piece.part(range);
            finite &= match has_other {
                true => backend.accumulate(sum, part.offset, &part.bytes, part.dtype),
                false => backend.store(sum, part.offset, &part.bytes, part.dtype),
            };
        }
        if !finite {
            self.overflow = Some(self.overflow.map_or(piece.rank, |rank| rank.min(piece.rank)));
        }
        self.contributions[position].added.insert(piece.range());
        self.sum_blocks(backend, sum, &piece.range());
    }

    /// Sums the squares of the blocks that `range` completes, while they are in cache.
    fn sum_blocks<B: Backend>(&mut self, backend: &B, sum: &B::Buffer, range: &Range<usize>) {
        // The last of the order is added only where all before it are; the first two come in either order.
        let (first, last) =
            (&self.contributions[0].added, &self.contributions[self.contributions.len() - 1].added);
        for block in range.start / BLOCK..range.end.div_ceil(BLOCK) {
            let elements = block * BLOCK..self.numel.min((block + 1) * BLOCK);
            if first.contains(&elements) && last.contains(&elements) {
                self.block_sums[block] = Some(backend.sum_of_squares(sum, elements));
                self.open_blocks -= 1;
            }
        }
    }

    /// Adds what was parked behind `position`, as far as its turn has come.
    fn unpark<B: Backend>(&mut self, backend: &B, accumulator: &mut B::Buffer, position: usize) {
        for later in (position + 1).max(2)..self.contributions.len() {
            let parked = std::mem::take(&mut self.contributions[later].parked);
            for (piece, mut space) in parked {
                for (range, in_turn) in self.turns(later, piece.range()) {
                    let part = piece.part(range);
                    if in_turn {
                        self.add(backend, accumulator, later, &part);
                    } else {
                        let rest = part.bytes.len() as u64;
                        let budget = space.budget.clone();
                        space.bytes -= rest;
                        self.contributions[later].parked.push((part, Space { budget, bytes: rest }));
                    }
                }
            }
            self.add_zeros(backend, accumulator, later);
        }
    }
}

#[cfg(test)]
#[path = "round_tests.rs"]
mod tests;
