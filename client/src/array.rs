//! Arrays for parameters, which a server on the same host can show without a copy.

use std::fmt;

use zeroshard_model::DType;
use zeroshard_shm::{Memory, SHARED_FROM};

use crate::Slots;

/// A destination of pulls: the bytes of values of one dtype, little endian. If a server on this
/// host has the parameters in shared memory, a [pull](crate::Job::pull) of a whole tensor makes its
/// pages appear here, and moves no values. Writing to the array copies the pages that are written;
/// the parameters of the server do not change.
pub struct Array {
    /// INVARIANT: whole values.
    kind: Kind,
    dtype: DType,
}

enum Kind {
    Shown(Memory),
    Own(Vec<u8>),
}

impl Array {
    /// An array of `len` zeros.
    pub fn zeros(len: usize, dtype: DType) -> Self {
        let bytes = len.saturating_mul(dtype.size());
        let memory = (bytes >= SHARED_FROM).then(|| Memory::new(bytes).ok()).flatten();
        Self { kind: memory.map_or_else(|| Kind::Own(vec![0; bytes]), Kind::Shown), dtype }
    }

    /// The dtype of the values.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The values.
    pub fn bytes(&self) -> &[u8] {
        match &self.kind {
            Kind::Shown(memory) => memory,
            Kind::Own(bytes) => bytes,
        }
    }

    /// The values, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.kind {
            Kind::Shown(memory) => memory,
            Kind::Own(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Array of {} bytes of {}", self.bytes().len(), self.dtype)
    }
}

impl<'a> From<&'a mut Array> for Slots<'a> {
    fn from(array: &'a mut Array) -> Self {
        let slots = match &mut array.kind {
            Kind::Shown(memory) => {
                let (bytes, pane) = memory.to_show();
                Slots::new(bytes, array.dtype).and_then(|slots| slots.in_pane(pane))
            }
            Kind::Own(bytes) => Slots::new(bytes, array.dtype),
        };
        slots.expect("whole values, in the pane")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_is_filled_and_written_whether_it_can_be_shown_or_not() {
        for len in [0, 3, SHARED_FROM / 2 - 1, SHARED_FROM / 2 + 1] {
            for dtype in [DType::F32, DType::Bf16] {
                let mut array = Array::zeros(len, dtype);
                let mut values: Vec<u8> = (0..len * dtype.size()).map(|at| at as u8).collect();
                Slots::from(&mut array).fill(0..len, &values, dtype).unwrap();
                assert_eq!(array.bytes(), values);
                values.fill(7);
                array.bytes_mut().copy_from_slice(&values);
                assert_eq!((array.bytes(), array.dtype()), (&*values, dtype));
            }
        }
    }
}
