//! The sum of all contributions to a slice, and its sum of squares.

use std::ops::Range;

use zeroshard_kernels::{Backend, Result};
use zeroshard_model::{Elements, geometry::blocks::BLOCK};

/// The properties of the reduced gradient.
#[derive(Debug)]
pub(super) struct Figures {
    /// The number of elements of the slice.
    numel: usize,
    /// For each block, the number of elements that lack a contribution.
    lacking: Vec<usize>,
    /// The sum of squares of each complete block; 0 for the others. On a device that sums blocks
    /// late, 0 until all of them are complete.
    sums: Vec<f64>,
    /// The number of incomplete blocks.
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

    /// Returns whether all elements are complete.
    pub(super) fn are_complete(&self) -> bool {
        self.open == 0
    }

    /// The sum of the block sums, added in order.
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

/// An accumulator during an addition.
pub(super) struct Total<'a, B: Backend> {
    pub(super) backend: &'a B,
    pub(super) sum: &'a mut B::Buffer,
    pub(super) figures: &'a mut Figures,
}

impl<B: Backend> Total<'_, B> {
    /// Records that `rank` sent inf or NaN for these elements.
    pub(super) fn note_overflow(&mut self, elements: Elements, rank: Option<u32>) -> Result<()> {
        // The addition of finite values never produces a NaN, so this is the only place where one
        // can appear.
        self.backend.canonicalise(self.sum, elements)?;
        let overflow = &mut self.figures.overflow;
        *overflow = overflow.iter().copied().chain(rank).min();
        Ok(())
    }

    /// Counts elements of the slice to which every rank has contributed, and adds the squares of
    /// blocks that are complete.
    pub(super) fn complete(&mut self, elements: &Elements, range: &Range<usize>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let figures = &mut *self.figures;
        let first = elements.position(range.start) / BLOCK;
        for block in first..=elements.position(range.end - 1) / BLOCK {
            let positions = figures.block(block);
            let inside = elements.within(&positions);
            let complete = inside.end.min(range.end).saturating_sub(inside.start.max(range.start));
            figures.lacking[block] -= complete;
            if complete > 0 && figures.lacking[block] == 0 {
                if B::SUMS_EARLY {
                    figures.sums[block] = self.backend.block_sums(self.sum, positions)?[0];
                }
                figures.open -= 1;
            }
        }
        if figures.open == 0 && !B::SUMS_EARLY {
            // If it fails, the job ends with the error on this server, and the sums are not used.
            figures.sums = self.backend.block_sums(self.sum, 0..figures.numel)?;
        }
        Ok(())
    }
}
