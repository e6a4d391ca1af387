//! Int8: tiles of 128 elements, each with one scale, rounded stochastically.
//!
//! A tile is the scale, an f32, followed by one signed byte for each element. The scale is the
//! tile's largest absolute value divided by 127, and an element x becomes `floor(x / scale + u)`,
//! where u is uniform in [0, 1). The mean over all u is x, so the rounding adds noise to a training
//! run, and no bias. See "QSGD" (Alistarh et al., NeurIPS 2017), where tiles are called buckets.
//!
//! INVARIANT: the bytes of a tile depend on its values and on [`Rounding`], and on nothing else.
//! Tile k of a slice has elements `128 * k..128 * (k + 1)` of those that the sender has of the
//! slice, and the last tile has the rest. Slices begin at multiples of 128 elements, so tiles
//! follow the tensor, and neither chunks nor servers change a bit.
//!
//! The loops run over arrays of a tile, which the compiler vectorises.

mod random;

pub use random::Rounding;
use zeroshard_model::DType;
pub use zeroshard_model::geometry::blocks::TILE;

use crate::{
    Level,
    convert::{Bf16, Element, F16, F32},
    vectorised,
};

/// The number of bytes of a scale.
const SCALE: usize = 4;

/// The number of bytes of a whole tile.
pub const TILE_BYTES: usize = SCALE + TILE;

/// The largest absolute value of an encoded element of a finite tile.
const MOST: f32 = 127.0;

/// The largest scale. 127 times the next larger number is not finite.
const MAX_SCALE: f32 = f32::from_bits((f32::MAX / MOST).to_bits() - 1);

/// The number of bits of u. `x / scale` is first rounded, to nearest, to a multiple of
/// `2^-FRACTION`, so that the sum with u is exact.
const FRACTION: u32 = 23;

/// The sum of this and a float of at most 2^22 is rounded to a whole number, which is in its lower
/// bits. A conversion of vectors of floats to integers is not an instruction of every machine.
const TO_INTEGER: f32 = (3 << 22) as f32;

/// The encoded NaN of a tile that is not finite. Infinity is 127 or -127.
const NAN: i8 = i8::MIN;

/// The number of bytes of `elements` elements that begin with a tile.
pub const fn bytes_of(elements: usize) -> usize {
    elements + elements.div_ceil(TILE) * SCALE
}

/// The number of elements in `bytes` bytes that begin with a tile; `None` if a tile is incomplete.
pub fn elements_of(bytes: u64) -> Option<u64> {
    let (whole, rest) = (bytes / TILE_BYTES as u64, bytes % TILE_BYTES as u64);
    let last = match rest {
        0 => 0,
        rest => rest.checked_sub(SCALE as u64).filter(|&elements| elements > 0)?,
    };
    Some(whole * TILE as u64 + last)
}

/// Encodes `values`, of `dtype`, little endian, at any alignment, of which the first is element
/// number `first` of the tensor, a multiple of [`TILE`]. `tiles` has the size that [`bytes_of`]
/// returns.
///
/// A tile with an infinite value or a NaN has an infinite scale. Its finite values become 0,
/// because a step with such a gradient is skipped, or reports it. -0.0 becomes 0.0.
pub fn encode(
    level: Level,
    values: &[u8],
    dtype: DType,
    first: u64,
    rounding: &Rounding,
    tiles: &mut [u8],
) {
    debug_assert!(first.is_multiple_of(TILE as u64), "tiles follow the tensor");
    debug_assert_eq!(tiles.len(), bytes_of(values.len() / dtype.size()), "of the size of values");
    let encode = match dtype {
        DType::F32 => encode_from::<F32>,
        DType::Bf16 => encode_from::<Bf16>,
        DType::F16 => encode_from::<F16>,
    };
    encode(level, values, first / TILE as u64, rounding, tiles);
}

vectorised! {
    /// Encodes elements like [`encode`]. The first tile is number `number` of the tensor.
    pub fn encode_from<E: Element>(
        values: &[u8],
        number: u64,
        rounding: &Rounding,
        tiles: &mut [u8],
    ) {
        let (whole, rest) = E::elements(values).as_chunks::<TILE>();
        let (tiles, last) = tiles.as_chunks_mut::<TILE_BYTES>();
        let mut number = number;
        for (values, tile) in whole.iter().zip(tiles) {
            let mut floats = [0.0; TILE];
            for at in 0..TILE {
                floats[at] = E::decode(values[at]);
            }
            encode_tile(&floats, rounding, number, tile);
            number += 1;
        }
        if !rest.is_empty() {
            let (mut floats, mut tile) = ([0.0; TILE], [0; TILE_BYTES]);
            for (float, value) in floats.iter_mut().zip(rest) {
                *float = E::decode(*value);
            }
            encode_tile(&floats, rounding, number, &mut tile);
            last.copy_from_slice(&tile[..last.len()]);
        }
    }
}

#[inline(always)]
fn encode_tile(
    values: &[f32; TILE],
    rounding: &Rounding,
    number: u64,
    tile: &mut [u8; TILE_BYTES],
) {
    let (scale, elements) = tile.split_first_chunk_mut::<SCALE>().expect("a tile has a scale");
    // The bits of positive floats are ordered as the floats, and those of infinity and NaN are the
    // largest.
    let mut largest = 0;
    for value in values {
        largest = value.abs().to_bits().cast_signed().max(largest);
    }
    let largest = f32::from_bits(largest.cast_unsigned());
    if !largest.is_finite() {
        *scale = f32::INFINITY.to_le_bytes();
        for (element, value) in elements.iter_mut().zip(values) {
            *element = marker(*value).cast_unsigned();
        }
        return;
    }
    // The quotient of a smaller scale could be infinite.
    let by = (largest / MOST).clamp(f32::MIN_POSITIVE, MAX_SCALE);
    *scale = by.to_le_bytes();
    let random = rounding.tile(number);
    let elements: &mut [u8; TILE] = elements.try_into().expect("a tile has 128 elements");
    // Over arrays of one length, since the compiler does not vectorise three iterators together.
    for at in 0..TILE {
        let quotient = values[at] / by;
        let nearest = quotient + TO_INTEGER;
        let rest = (quotient - (nearest - TO_INTEGER)) * (1 << FRACTION) as f32;
        let drawn = (random[at] >> (32 - FRACTION)).cast_signed();
        let carry = (integer(rest + TO_INTEGER) + drawn) >> FRACTION;
        // The division may have rounded up beyond 127.
        elements[at] = (integer(nearest) + carry).clamp(-127, 127) as i8 as u8;
    }
}

/// The whole number to which [`TO_INTEGER`] has been added.
#[inline(always)]
fn integer(sum: f32) -> i32 {
    sum.to_bits().cast_signed() - TO_INTEGER.to_bits().cast_signed()
}

/// An element of a tile that is not finite.
#[inline(always)]
fn marker(value: f32) -> i8 {
    match value {
        value if value.is_nan() => NAN,
        f32::INFINITY => MOST as i8,
        f32::NEG_INFINITY => -(MOST as i8),
        _ => 0,
    }
}

/// Decodes tiles to values of `dtype`, little endian, at any alignment, rounded to nearest even.
/// The number of `values` is that of the elements in `tiles`.
pub fn decode(level: Level, tiles: &[u8], values: &mut [u8], dtype: DType) {
    debug_assert_eq!(tiles.len(), bytes_of(values.len() / dtype.size()), "of the size of values");
    let decode = match dtype {
        DType::F32 => decode_to::<F32>,
        DType::Bf16 => decode_to::<Bf16>,
        DType::F16 => decode_to::<F16>,
    };
    decode(level, tiles, values);
}

vectorised! {
    /// Decodes tiles like [`decode`].
    pub fn decode_to<E: Element>(tiles: &[u8], values: &mut [u8]) {
        let values = E::elements_mut(values);
        for (tile, values) in tiles.chunks(TILE_BYTES).zip(values.chunks_mut(TILE)) {
            let Some((scale, elements)) = tile.split_first_chunk::<SCALE>() else { return };
            let scale = f32::from_le_bytes(*scale);
            let n = values.len();
            let elements = &elements[..n];
            if scale.is_finite() {
                for at in 0..n {
                    values[at] = E::encode(f32::from(elements[at].cast_signed()) * scale);
                }
                continue;
            }
            for at in 0..n {
                values[at] = E::encode(match elements[at].cast_signed() {
                    NAN => f32::NAN,
                    0 => 0.0,
                    element => f32::INFINITY.copysign(f32::from(element)),
                });
            }
        }
    }
}

#[cfg(test)]
mod tests;
