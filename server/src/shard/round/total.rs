//! The sum of all contributions to a slice, and what it comes to.

use std::ops::Range;

use zeroshard_proto::blocks::BLOCK;

use super::Piece;
use crate::{backend::Backend, shard::lane::Area};

/// What the reduced gradient comes to.
#[derive(Debug)]
pub(super) struct Figures {
    /// Of the slice.
    numel: usize,
    /// Of each block, how many elements lack a contribution.
    lacking: Vec<usize>,
    /// The sum of squares of each block that lacks nothing; 0 of the others.
    sums: Vec<f64>,
    /// How many blocks lack something.
    open: usize,
    /// The lowest rank that sent inf or NaN.
    overflow: Option<u32>,
}

impl Figures {
    pub(super) fn new(numel: usize) -> Self {
        let blocks = numel.div_ceil(BLOCK);
        let mut figures = Self {
            numel,
            lacking: vec![0; blocks],
            sums: vec![0.0; blocks],
            open: 0,
            overflow: None,
        };
        figures.reset();
        figures
    }

    pub(super) fn reset(&mut self) {
        for block in 0..self.lacking.len() {
            self.lacking[block] = self.block(block).len();
        }
        self.sums.fill(0.0);
        self.open = self.sums.len();
        self.overflow = None;
    }

    /// Whether no element lacks a contribution.
    pub(super) fn are_complete(&self) -> bool {
        self.open == 0
    }

    /// Block sums, added in order.
    pub(super) fn sum_of_squares(&self) -> f64 {
        self.sums.iter().fold(0.0, |sum, block| sum + block)
    }

    /// The lowest rank that sent inf or NaN.
    pub(super) fn overflow(&self) -> Option<u32> {
        self.overflow
    }

    fn block(&self, block: usize) -> Range<usize> {
        block * BLOCK..self.numel.min((block + 1) * BLOCK)
    }
}

/// An accumulator, for as long as something is added to it.
pub(super) struct Total<'a, B: Backend> {
    pub(super) backend: &'a B,
    pub(super) sum: &'a mut B::Buffer,
    pub(super) figures: &'a mut Figures,
}

impl<B: Backend> Total<'_, B> {
    /// Adds a piece of a contribution to `area`, or stores it where there is nothing yet, so that
    /// the accumulator need not be cleared.
    pub(super) fn add(&mut self, area: &Area, piece: &Piece, is_first: bool) {
        let at = area.elements(piece.range());
        let finite = match is_first {
            false => self.backend.accumulate(self.sum, at.clone(), &piece.bytes, piece.dtype),
            true => self.backend.store(self.sum, at.clone(), &piece.bytes, piece.dtype),
        };
        if !finite {
            // What is finite makes no NaN of what is not: this is the only place where NaN can come
            // in.
            self.backend.canonicalise(self.sum, at);
            let overflow = &mut self.figures.overflow;
            *overflow = Some(overflow.map_or(piece.rank, |rank| rank.min(piece.rank)));
        }
    }

    /// Counts elements that lack nothing any more, and sums the squares of the blocks that they
    /// complete, while they are in cache.
    pub(super) fn complete(&mut self, area: &Area, range: &Range<usize>) {
        if range.is_empty() {
            return;
        }
        let figures = &mut *self.figures;
        for block in area.place(range.start) / BLOCK..=area.place(range.end - 1) / BLOCK {
            let elements = figures.block(block);
            let inside = area.among(&elements);
            let complete = inside.end.min(range.end).saturating_sub(inside.start.max(range.start));
            figures.lacking[block] -= complete;
            if complete > 0 && figures.lacking[block] == 0 {
                figures.sums[block] = self.backend.sum_of_squares(self.sum, elements);
                figures.open -= 1;
            }
        }
    }
}
