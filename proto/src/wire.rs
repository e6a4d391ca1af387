//! How elements are encoded on the wire.

use std::{fmt, str::FromStr};

use zeroshard_loops::int8::{self, TILE, TILE_BYTES};
use zeroshard_model::{DType, Error, Result};

use crate::{convert::dtype, pb};

/// The encoding of gradients or parameters on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wire {
    /// Elements of a dtype, little endian, rounded to nearest even.
    Plain(DType),
    /// Tiles of 128 elements with one scale, rounded stochastically: see [`int8`].
    Int8,
}

impl From<DType> for Wire {
    fn from(dtype: DType) -> Self {
        Self::Plain(dtype)
    }
}

impl fmt::Display for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(dtype) => dtype.fmt(f),
            Self::Int8 => f.pad("int8"),
        }
    }
}

impl FromStr for Wire {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let all = Self::ALL.into_iter();
        all.into_iter().find(|wire| wire.to_string() == name).ok_or_else(|| {
            Error::invalid("encoding on the wire", format!("{name:?}"), "f32, bf16, f16 or int8")
        })
    }
}

impl From<Wire> for pb::Dtype {
    fn from(wire: Wire) -> Self {
        match wire {
            Wire::Plain(dtype) => dtype.into(),
            Wire::Int8 => Self::Int8,
        }
    }
}

impl Wire {
    /// All encodings.
    pub const ALL: [Self; 4] =
        [Self::Plain(DType::F32), Self::Plain(DType::Bf16), Self::Plain(DType::F16), Self::Int8];

    /// Converts the field `dtype` of a message of the data plane.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown number; `what` names the field.
    pub fn of_message(number: i32, what: impl FnOnce() -> String) -> Result<Self> {
        match dtype(number) {
            Some(dtype) => Ok(dtype.into()),
            None if number == pb::Dtype::Int8 as i32 => Ok(Self::Int8),
            None => Err(Error::invalid(what(), number, "f32, bf16, f16 or int8")),
        }
    }

    /// The dtype of the elements when they are decoded: that of [`Self::Plain`], or f32.
    pub fn decoded(self) -> DType {
        match self {
            Self::Plain(dtype) => dtype,
            Self::Int8 => DType::F32,
        }
    }

    /// The number of elements that are decoded together. Every chunk begins at a multiple of it,
    /// counted from the first element that the sender has of the slice.
    pub fn grain(self) -> usize {
        match self {
            Self::Plain(_) => 1,
            Self::Int8 => TILE,
        }
    }

    /// The number of bytes of [`Self::grain`] elements.
    pub fn grain_bytes(self) -> usize {
        match self {
            Self::Plain(dtype) => dtype.size(),
            Self::Int8 => TILE_BYTES,
        }
    }

    /// The number of bytes of `elements` elements, from the beginning of a chunk.
    pub fn bytes(self, elements: usize) -> usize {
        match self {
            Self::Plain(dtype) => elements * dtype.size(),
            Self::Int8 => int8::bytes_of(elements),
        }
    }

    /// The number of elements in `bytes` bytes, from the beginning of a chunk; `None` if the last
    /// element or its tile is incomplete.
    pub fn elements(self, bytes: u64) -> Option<u64> {
        match self {
            Self::Plain(dtype) => {
                bytes.is_multiple_of(dtype.size() as u64).then_some(bytes / dtype.size() as u64)
            }
            Self::Int8 => int8::elements_of(bytes),
        }
    }

    /// The number of elements in a message of at most `bytes` bytes: whole grains, at least one.
    pub fn elements_within(self, bytes: usize) -> usize {
        (bytes / self.grain_bytes()).max(1) * self.grain()
    }

    /// Checks that a chunk of `numel` elements at `offset`, of `all` elements that the sender has
    /// of a slice, is cut where elements can be decoded.
    ///
    /// # Errors
    /// [`Error::Invalid`]; `what` names the chunk.
    pub fn check_cut(
        self,
        offset: u64,
        numel: u64,
        all: u64,
        what: impl FnOnce() -> String,
    ) -> Result<()> {
        let (grain, end) = (self.grain() as u64, offset.saturating_add(numel));
        if offset.is_multiple_of(grain) && (end.is_multiple_of(grain) || end == all) {
            return Ok(());
        }
        let found = format!("{self} elements {offset} to {end} of {all}");
        Err(Error::invalid(what(), found, format!("a cut at multiples of {grain} elements")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_of_messages_survive() {
        for wire in Wire::ALL {
            assert_eq!(wire.to_string().parse(), Ok(wire));
            let number = pb::Dtype::from(wire) as i32;
            assert_eq!(Wire::of_message(number, String::new), Ok(wire));
        }
        let refused = "int4".parse::<Wire>().unwrap_err().to_string();
        assert!(refused.contains("f32, bf16, f16 or int8"), "{refused}");
        for number in [-1, 0, 5] {
            assert!(Wire::of_message(number, String::new).is_err());
        }
    }

    #[test]
    fn bytes_and_elements_are_converted_to_each_other() {
        for wire in Wire::ALL {
            for elements in 0..1000 {
                assert_eq!(wire.elements(wire.bytes(elements) as u64), Some(elements as u64));
            }
            let sizes: Vec<_> = (0..1000).map(|elements| wire.bytes(elements) as u64).collect();
            for bytes in 0..1000 {
                let exists = sizes.contains(&bytes);
                assert_eq!(wire.elements(bytes).is_some(), exists, "{wire}: {bytes}");
            }
            assert!(wire.elements(u64::MAX - 3).is_none_or(|elements| elements < u64::MAX - 3));
        }
        // 0.258 of f32.
        assert_eq!(Wire::Int8.bytes(1 << 20) * 128, 132 << 20);
    }

    #[test]
    fn messages_have_whole_tiles() {
        assert_eq!(
            [0, 131, 132, 263, 264].map(|b| Wire::Int8.elements_within(b)),
            [128, 128, 128, 128, 256]
        );
        assert_eq!(Wire::from(DType::Bf16).elements_within(9), 4);
        let check = |offset, numel| Wire::Int8.check_cut(offset, numel, 300, String::new);
        for (offset, numel) in [(0, 300), (128, 172), (128, 128), (256, 44)] {
            assert_eq!(check(offset, numel), Ok(()));
        }
        for (offset, numel) in [(1, 299), (0, 299), (256, 1), (256, u64::MAX)] {
            assert!(check(offset, numel).is_err());
        }
    }
}
