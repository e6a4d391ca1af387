//! Tiles of 8-bit optimizer state: a [`Code`] of 1 byte for each element, and a common power of
//! two, as in the microscaling formats of the Open Compute Project (OCP MX 1.0, 2023).
//!
//! A code is a small float with an offset, as in the companding of telephony (ITU-T G.711): of the
//! f32 `BIAS + x` it keeps the lowest bits of the exponent and the highest of the mantissa. So 0 is
//! code 0, and small values need no case of their own.
//!
//! The largest magnitude of a tile decides the exponent: the smallest one with which it has a code.
//! There are only integer operations, products with powers of two, and one addition, so that every
//! instruction set and every GPU gives the same bits.
//!
//! A step rounds stochastically, to either neighbour with a probability that makes the expectation
//! the value itself: a slow average moves by 0.1% in a step, neighbours are 3 to 12% apart, and
//! rounding to nearest would keep it where it is for ever. Values from outside are rounded to
//! nearest, ties to even. Values that were decoded are encoded without a change, so that state that
//! is saved, moved or uploaded again keeps its bits: if the largest magnitude was rounded down so
//! far that it has a code with a smaller exponent, the other values are found with the next one.
//!
//! A tile with inf, NaN, a magnitude of more than 1.87 * 2^127, or a negative value of
//! [`Code::Positive`] decodes to NaN in all elements. The smallest magnitude that is not 0 is at
//! least 2^-126.

use zeroshard_model::geometry::blocks::TILE;
#[cfg(doc)]
use zeroshard_model::optimizer::Code;

use super::vectorised;

pub mod step;

/// The bits of the mantissa of an f32.
const MANTISSA: u32 = 23;
/// The exponent field of an f32 that stands for the exponent byte 0 of a tile. With it, all factors
/// below are normal numbers.
const LOWEST: u32 = 35;
/// The exponent field of the largest finite numbers.
const HIGHEST: u32 = 254;
/// The exponent field of the number that is added. The bits of it that a code keeps are 0.
const BIAS: u32 = 128;
/// The exponent field of 1.
const ONE: u32 = 127;
/// The exponent byte of a tile whose elements are NaN.
const NOT_A_NUMBER: u8 = 255;

/// A code as a type, for loops that the compiler can vectorise.
pub trait Format {
    /// The number of bits of the mantissa.
    const BITS: u32;
    /// The number of bits of the exponent.
    const EXPONENT: u32;
    /// Returns whether the highest bit of the byte is a sign.
    const IS_SIGNED: bool;
    /// Which of the random numbers of an element its rounding uses. The state tensors of an
    /// optimizer have different codes.
    const RANDOM: usize;

    /// The largest magnitude, as bits of the byte.
    const LARGEST: u32 = (1 << (Self::BITS + Self::EXPONENT)) - 1;
    /// The bits of an f32's mantissa that the code does not have.
    const SHIFT: u32 = MANTISSA - Self::BITS;
    /// The exponent field of the largest elements, after the multiplication that makes all tiles
    /// alike.
    const SCALED: u32 = BIAS + (1 << Self::EXPONENT) - 1;
    /// The mantissa of the largest magnitude: 2, less a unit of the mantissa, less the bias.
    const MOST: u32 = {
        let bias =
            if Self::SCALED - BIAS > MANTISSA { 0 } else { 1 << (MANTISSA + BIAS - Self::SCALED) };
        (1 << MANTISSA) - (1 << Self::SHIFT) - bias
    };
}

/// [`Code::Signed`].
#[derive(Debug)]
pub enum Signed {}

/// [`Code::Positive`].
#[derive(Debug)]
pub enum Positive {}

impl Format for Signed {
    const BITS: u32 = 4;
    const EXPONENT: u32 = 3;
    const IS_SIGNED: bool = true;
    const RANDOM: usize = 0;
}

impl Format for Positive {
    const BITS: u32 = 3;
    const EXPONENT: u32 = 5;
    const IS_SIGNED: bool = false;
    const RANDOM: usize = 1;
}

// The number that is added has no bits in a code.
const _: () = assert!((BIAS << Signed::BITS).trailing_zeros() >= u8::BITS);
const _: () = assert!((BIAS << Positive::BITS).trailing_zeros() >= u8::BITS);

/// The power of two with an exponent field.
#[inline(always)]
const fn power_of_two(field: u32) -> f32 {
    f32::from_bits(field << MANTISSA)
}

/// The bits of a value without the sign that the code stores apart. A negative value that has no
/// code has more than any that has one.
#[inline(always)]
fn magnitude<F: Format>(value: f32) -> u32 {
    if F::IS_SIGNED { value.to_bits() & 0x7fff_ffff } else { value.to_bits() }
}

/// The code of a value that is multiplied by `scale`. `rounding`: what is added to the bits that
/// are cut off, given all bits. A positive value may have the code 0: see [`at_least_one`].
#[inline(always)]
fn coded<F: Format>(value: f32, scale: f32, rounding: impl FnOnce(u32) -> u32) -> u8 {
    let magnitude = f32::from_bits(magnitude::<F>(value));
    let bits = (magnitude * scale + power_of_two(BIAS)).to_bits();
    let rounded = (bits + rounding(bits)) >> F::SHIFT;
    let sign = if F::IS_SIGNED { (value.to_bits() >> 24) & 0x80 } else { 0 };
    (rounded | sign) as u8
}

/// Gives positive values that have the code 0 the code 1, because a step divides by the root of
/// them. Most tiles have none, so the loops that encode do not look for them in each element.
#[inline(always)]
fn at_least_one<F: Format>(values: &[f32], codes: &mut [u8]) {
    let values = &values[..codes.len()];
    if F::IS_SIGNED || !codes.iter().fold(false, |any, &code| any | (code == 0)) {
        return;
    }
    for i in 0..codes.len() {
        codes[i] = codes[i].max(without_sign::<F>(values[i]).to_bits().min(1) as u8);
    }
}

/// The exponent byte and the factor of a tile whose largest magnitude has these bits; `None` if
/// not all of its values have a code.
#[inline(always)]
fn scale<F: Format>(largest: u32) -> Option<(u8, f32)> {
    if largest > (HIGHEST << MANTISSA | F::MOST) {
        return None;
    }
    let above = u32::from(largest & ((1 << MANTISSA) - 1) > F::MOST);
    let exponent = ((largest >> MANTISSA) + above).max(LOWEST);
    Some(((exponent - LOWEST) as u8, power_of_two(ONE + F::SCALED - exponent)))
}

/// The f32 to which a tile adds the magnitudes of its codes.
#[derive(Clone, Copy)]
struct Zero {
    bits: u32,
    value: f32,
}

/// The [`Zero`] of a tile with this exponent byte: the number that is added, divided by the factor
/// of [`scale`]. It is a normal number, and so are all that are decoded: decoding rounds as with
/// the number itself, and needs no product. NaN for a tile of NaN.
#[inline(always)]
fn zero<F: Format>(exponent: u8) -> Zero {
    match exponent {
        NOT_A_NUMBER => Zero { bits: BIAS << MANTISSA, value: f32::from_bits(0x7fc0_0000) },
        _ => {
            let value = power_of_two(u32::from(exponent) + LOWEST + BIAS - F::SCALED);
            Zero { bits: value.to_bits(), value }
        }
    }
}

/// The value of a code. `zero` is that of its tile.
#[inline(always)]
fn decoded<F: Format>(code: u8, zero: Zero) -> f32 {
    // Extending the sign leaves it where the f32 has it, and saves the loop a second extension.
    let code = if F::IS_SIGNED { code.cast_signed() as u32 } else { u32::from(code) };
    let bits = ((code & F::LARGEST) << F::SHIFT) + zero.bits;
    let value = f32::from_bits(bits) - zero.value;
    if F::IS_SIGNED { f32::from_bits(value.to_bits() | (code & 0x8000_0000)) } else { value }
}

vectorised! {
    /// Encodes the values of a tile, rounded to nearest even. Returns the exponent byte.
    pub fn encode<F: Format>(values: &[f32], codes: &mut [u8]) -> u8 {
        let codes = &mut codes[..values.len()];
        let largest =
            values.iter().fold(0, |largest, &of| largest.max(magnitude::<F>(without_sign::<F>(of))));
        let Some((exponent, scale)) = scale::<F>(largest) else {
            codes.fill(0);
            return NOT_A_NUMBER;
        };
        let is_exact = encode_nearest::<F>(values, exponent, scale, codes);
        if is_exact || u32::from(exponent) == HIGHEST - LOWEST {
            return exponent;
        }
        if encode_nearest::<F>(values, exponent + 1, scale * 0.5, codes) {
            return exponent + 1;
        }
        encode_nearest::<F>(values, exponent, scale, codes);
        exponent
    }
}

/// Only values from outside can be -0 where there are no signs. The sum is 0.
#[inline(always)]
fn without_sign<F: Format>(value: f32) -> f32 {
    if F::IS_SIGNED { value } else { value + 0.0 }
}

/// Encodes values with an exponent. Returns whether decoding gives the same values.
#[inline(always)]
fn encode_nearest<F: Format>(values: &[f32], exponent: u8, scale: f32, codes: &mut [u8]) -> bool {
    let (zero, mut difference) = (zero::<F>(exponent), 0);
    for i in 0..values.len() {
        let value = without_sign::<F>(values[i]);
        let to_even = |bits: u32| (1 << (F::SHIFT - 1)) - 1 + ((bits >> F::SHIFT) & 1);
        codes[i] = coded::<F>(value, scale, to_even);
        difference |= decoded::<F>(codes[i], zero).to_bits() ^ value.to_bits();
    }
    at_least_one::<F>(values, codes);
    difference == 0
}

vectorised! {
    /// Decodes consecutive elements of a tile.
    pub fn decode<F: Format>(codes: &[u8], exponent: u8, values: &mut [f32]) {
        let codes = &codes[..values.len()];
        let zero = zero::<F>(exponent);
        for i in 0..values.len() {
            values[i] = decoded::<F>(codes[i], zero);
        }
    }
}

#[cfg(test)]
mod tests;
