//! Casts between f32 and the dtypes of the wire, with optional addition and checks.
//!
//! Rounding is to nearest even, with subnormals; NaN stays NaN. The casts use integer arithmetic
//! and exact float additions only, so that every instruction set gives the same bits.

use zeroshard_model::DType;

use crate::{Level, vectorised};

/// The exponent bits of an f32. All of them are set only in infinities and NaN.
const EXPONENT: u32 = 0x7f80_0000;

/// The NaN that replaces all others: quiet, positive, without a payload.
const NAN: u32 = 0x7fc0_0000;

/// An element type in memory: little-endian bytes at any address.
pub trait Element {
    /// One element.
    type Raw: Copy;

    /// The elements in `bytes`.
    fn elements(bytes: &[u8]) -> &[Self::Raw];

    /// The elements in `bytes`, for writing.
    fn elements_mut(bytes: &mut [u8]) -> &mut [Self::Raw];

    /// The exact value.
    fn decode(raw: Self::Raw) -> f32;

    /// The nearest element, ties to even.
    fn encode(value: f32) -> Self::Raw;
}

/// IEEE 754 binary32.
#[derive(Debug)]
pub enum F32 {}

/// The upper half of a binary32.
#[derive(Debug)]
pub enum Bf16 {}

/// IEEE 754 binary16.
#[derive(Debug)]
pub enum F16 {}

macro_rules! elements {
    ($size:literal) => {
        type Raw = [u8; $size];

        #[inline(always)]
        fn elements(bytes: &[u8]) -> &[Self::Raw] {
            let (elements, torn) = bytes.as_chunks();
            assert!(torn.is_empty(), "whole elements only");
            elements
        }

        #[inline(always)]
        fn elements_mut(bytes: &mut [u8]) -> &mut [Self::Raw] {
            let (elements, torn) = bytes.as_chunks_mut();
            assert!(torn.is_empty(), "whole elements only");
            elements
        }
    };
}

impl Element for F32 {
    elements!(4);

    #[inline(always)]
    fn decode(raw: Self::Raw) -> f32 {
        f32::from_le_bytes(raw)
    }

    #[inline(always)]
    fn encode(value: f32) -> Self::Raw {
        value.to_le_bytes()
    }
}

impl Element for Bf16 {
    elements!(2);

    #[inline(always)]
    fn decode(raw: Self::Raw) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes(raw)) << 16)
    }

    #[inline(always)]
    fn encode(value: f32) -> Self::Raw {
        let bits = value.to_bits();
        // The addition of just under half of the last kept place, plus one if that place is odd,
        // carries exactly when rounding goes up. A carry into the exponent gives the correct
        // result, up to infinity.
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet_nan = (bits >> 16) | 0x40;
        let is_nan = bits & !(1 << 31) > EXPONENT;
        (if is_nan { quiet_nan } else { rounded } as u16).to_le_bytes()
    }
}

impl Element for F16 {
    elements!(2);

    #[inline(always)]
    fn decode(raw: Self::Raw) -> f32 {
        const REBIAS: u32 = (127 - 15) << 23;
        let half = u32::from(u16::from_le_bytes(raw));
        let magnitude = (half & 0x7fff) << 13;
        let exponent = magnitude & 0x0f80_0000;
        let normal = magnitude + REBIAS;
        let special = normal + REBIAS;
        // A subnormal is a fraction of 2^-14: add the leading one of that exponent, then subtract
        // it again, which is exact.
        let leading = f32::from_bits(REBIAS + (1 << 23));
        let subnormal = (f32::from_bits(normal + (1 << 23)) - leading).to_bits();
        let bits = match exponent {
            0x0f80_0000 => special,
            0 => subnormal,
            _ => normal,
        };
        f32::from_bits(bits | (half & 0x8000) << 16)
    }

    #[inline(always)]
    fn encode(value: f32) -> Self::Raw {
        /// 2^16, larger than all halves. Values just below it are rounded up to infinity by the
        /// carry.
        const TOO_LARGE: u32 = (127 + 16) << 23;
        /// 2^-14, the smallest normal half.
        const NORMAL: u32 = (127 - 14) << 23;
        /// 0.5: its last place is 2^-24, like that of subnormal halves, so adding it rounds to that
        /// place.
        const HALF: u32 = (127 - 1) << 23;
        let bits = value.to_bits();
        let magnitude = bits & !(1 << 31);
        let odd = (magnitude >> 13) & 1;
        let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0xfff + odd) >> 13;
        let sum = f32::from_bits(magnitude) + f32::from_bits(HALF);
        let subnormal = sum.to_bits().wrapping_sub(HALF);
        let quiet_nan = 0x7e00 | (magnitude >> 13) & 0x3ff;
        let half = if magnitude > EXPONENT {
            quiet_nan
        } else if magnitude >= TOO_LARGE {
            0x7c00
        } else if magnitude < NORMAL {
            subnormal
        } else {
            normal
        };
        ((half | (bits >> 16) & 0x8000) as u16).to_le_bytes()
    }
}

vectorised! {
    /// Converts `src` to f32. Returns whether all values are finite.
    pub fn decode<E: Element>(src: &[u8], dst: &mut [f32]) -> bool {
        let src = E::elements(src);
        let n = dst.len();
        let src = &src[..n];
        let mut special = 0;
        for i in 0..n {
            dst[i] = E::decode(src[i]);
            special |= u32::from(dst[i].to_bits() & EXPONENT == EXPONENT);
        }
        special == 0
    }
}

vectorised! {
    /// Copies elements. Returns whether all values are finite.
    pub fn copy<E: Element>(src: &[u8], dst: &mut [u8]) -> bool {
        let (src, dst) = (E::elements(src), E::elements_mut(dst));
        let n = dst.len();
        let src = &src[..n];
        let mut special = 0;
        for i in 0..n {
            dst[i] = src[i];
            special |= u32::from(E::decode(src[i]).to_bits() & EXPONENT == EXPONENT);
        }
        special == 0
    }
}

vectorised! {
    /// Converts `src` to f32 and adds it to `dst`. Returns whether all values of `src` are finite.
    pub fn accumulate<E: Element>(src: &[u8], dst: &mut [f32]) -> bool {
        let src = E::elements(src);
        let n = dst.len();
        let src = &src[..n];
        let mut special = 0;
        for i in 0..n {
            let value = E::decode(src[i]);
            special |= u32::from(value.to_bits() & EXPONENT == EXPONENT);
            dst[i] += value;
        }
        special == 0
    }
}

vectorised! {
    /// Replaces every NaN by the same one.
    pub fn canonicalise(values: &mut [f32]) {
        for value in values {
            let bits = value.to_bits();
            let is_nan = bits & !(1 << 31) > EXPONENT;
            *value = f32::from_bits(if is_nan { NAN } else { bits });
        }
    }
}

vectorised! {
    /// Converts f32 to the nearest elements.
    pub fn encode<E: Element>(src: &[f32], dst: &mut [u8]) {
        let dst = E::elements_mut(dst);
        let n = src.len();
        let dst = &mut dst[..n];
        for i in 0..n {
            dst[i] = E::encode(src[i]);
        }
    }
}

vectorised! {
    /// Converts elements to the nearest ones of another type. Returns whether all values are
    /// finite.
    pub fn recode<From: Element, To: Element>(src: &[u8], dst: &mut [u8]) -> bool {
        let (src, dst) = (From::elements(src), To::elements_mut(dst));
        let n = dst.len();
        let src = &src[..n];
        let mut special = 0;
        for i in 0..n {
            let value = From::decode(src[i]);
            special |= u32::from(value.to_bits() & EXPONENT == EXPONENT);
            dst[i] = To::encode(value);
        }
        special == 0
    }
}

/// Converts elements of any dtype to any other, through f32. `dst` has the same number of elements.
/// Returns whether all values are finite.
pub fn cast(level: Level, src: &[u8], from: DType, dst: &mut [u8], to: DType) -> bool {
    let convert = match (from, to) {
        (DType::F32, DType::F32) => copy::<F32>,
        (DType::F32, DType::Bf16) => recode::<F32, Bf16>,
        (DType::F32, DType::F16) => recode::<F32, F16>,
        (DType::Bf16, DType::F32) => recode::<Bf16, F32>,
        (DType::Bf16, DType::Bf16) => recode::<Bf16, Bf16>,
        (DType::Bf16, DType::F16) => recode::<Bf16, F16>,
        (DType::F16, DType::F32) => recode::<F16, F32>,
        (DType::F16, DType::Bf16) => recode::<F16, Bf16>,
        (DType::F16, DType::F16) => recode::<F16, F16>,
    };
    convert(level, src, dst)
}

/// Elements that [`append`] converts at a time.
const PART: usize = 4_096;

/// Appends elements of any dtype, converted to any other like [`cast`]. Returns whether all values
/// are finite.
pub fn append(level: Level, src: &[u8], from: DType, dst: &mut Vec<u8>, to: DType) -> bool {
    dst.reserve(src.len() / from.size() * to.size());
    // A part is still in the cache when it is written for the second time.
    src.chunks(PART * from.size()).fold(true, |finite, src| {
        let start = dst.len();
        dst.resize(start + src.len() / from.size() * to.size(), 0);
        cast(level, src, from, &mut dst[start..], to) & finite
    })
}

#[cfg(test)]
mod tests;
