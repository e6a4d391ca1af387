//! The elements of an array in memory, and their place outside of it: pieces, which are read and
//! written with one request, and begin with a page.

use std::{ops::Range, sync::Arc};

use bytes::Bytes;
use zeroshard_kernels::{Backend, Result};
use zeroshard_model::{DType, StateDType, direct::PAGE, optimizer::Code};

use super::paged::REQUEST;

/// The elements of a piece, a multiple of those of a tile of 8-bit state.
pub(super) const PIECE: usize = REQUEST / DType::F32.size();

/// The number of elements of an array, which are f32, or 8-bit state with a code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    pub numel: usize,
    pub code: Option<Code>,
}

impl Form {
    /// The bytes of an array of f32 in scratch space, or of one of 8-bit state: those of the last
    /// piece are not rounded up to a page.
    pub(super) fn bytes(self) -> u64 {
        let pieces = self.numel / PIECE;
        (self.position(pieces * PIECE) + self.bytes_of(self.numel % PIECE)) as u64
    }

    /// The bytes of some elements of one piece.
    pub(super) fn bytes_of(self, numel: usize) -> usize {
        match self.code {
            None => numel * DType::F32.size(),
            Some(_) => StateDType::Int8.bytes(numel),
        }
    }

    /// The position in scratch space of the first element of a piece.
    pub(super) fn position(self, element: usize) -> usize {
        element / PIECE * self.bytes_of(PIECE).next_multiple_of(PAGE)
    }

    /// The pieces.
    pub(super) fn pieces(self) -> impl Iterator<Item = Range<usize>> {
        (0..self.numel).step_by(PIECE).map(move |start| start..self.numel.min(start + PIECE))
    }

    /// Allocates memory for the elements.
    pub(crate) fn allocate<B: Backend>(self, backend: &B) -> Result<B::Buffer> {
        match self.code {
            None => backend.allocate(DType::F32, self.numel),
            Some(code) => backend.allocate_coded(code, self.numel),
        }
    }

    /// The bytes in scratch space of elements of a buffer, which are a piece.
    pub(super) fn read<B: Backend>(
        self,
        backend: &B,
        from: &Arc<B::Buffer>,
        range: Range<usize>,
    ) -> Result<Bytes> {
        match self.code {
            None => backend.read(from, range, DType::F32),
            Some(_) => backend.read_tiles(from, range),
        }
    }

    /// Stores the bytes of a piece in elements of a buffer.
    pub(super) fn store<B: Backend>(
        self,
        backend: &B,
        to: &mut B::Buffer,
        range: Range<usize>,
        bytes: &[u8],
    ) -> Result<()> {
        match self.code {
            None => backend.store(to, range, bytes, DType::F32).map(drop),
            Some(_) => backend.store_tiles(to, range, bytes),
        }
    }
}
