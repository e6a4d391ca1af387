//! The layout of a buffer in memory.

use zeroshard_model::{DType, StateDType, optimizer::Code};

/// The meaning of the bytes of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Elements of a dtype.
    Values(DType),
    /// 8-bit state: the codes of all elements, followed by the exponent bytes of all tiles.
    Codes(Code),
}

impl Layout {
    /// The dtype of the elements for callers of the backend.
    pub(crate) fn dtype(self) -> DType {
        match self {
            Self::Values(dtype) => dtype,
            Self::Codes(_) => DType::F32,
        }
    }

    /// The code of 8-bit state.
    pub(crate) fn code(self) -> Option<Code> {
        match self {
            Self::Values(_) => None,
            Self::Codes(code) => Some(code),
        }
    }

    /// The size of `numel` elements; `None` if it exceeds the address space.
    pub(crate) fn bytes(self, numel: usize) -> Option<usize> {
        match self {
            Self::Values(dtype) => numel.checked_mul(dtype.size()),
            Self::Codes(_) => {
                Some(StateDType::Int8.bytes(numel)).filter(|_| numel < usize::MAX / 2)
            }
        }
    }
}
