//! The step of a tile with 8-bit state: one loop decodes the state and steps, and one for each
//! state tensor encodes the result.

use super::{
    Format, NOT_A_NUMBER, Positive, Signed, TILE, at_least_one, coded, decoded, magnitude, scale,
    zero,
};
use crate::{
    loops::{
        prefetch::{LINE, prefetch_behind},
        vectorised,
    },
    random::TileKey,
};

/// The step of an optimizer with one state tensor, of [`Signed`].
pub trait OneState {
    /// The new parameter and state of an element.
    fn step(&self, parameter: f32, state: f32, gradient: f32) -> (f32, f32);
}

/// The step of an optimizer with two state tensors, of [`Signed`] and [`Positive`].
pub trait TwoStates {
    /// The new parameter and state of an element.
    fn step(&self, parameter: f32, state: (f32, f32), gradient: f32) -> (f32, (f32, f32));
}

/// The values of a tile between a step and their encoding. All tiles use the same memory: setting
/// it to 0 for each one would take a tenth of the time. It is aligned like the widest vectors,
/// which then do not cross cache lines.
#[derive(Debug)]
#[repr(align(64))]
pub struct Stepped {
    /// Of the first and the second state tensor.
    values: [[f32; TILE]; 2],
    /// The random numbers of the tile.
    pub(crate) key: TileKey,
}

impl Stepped {
    pub(crate) fn new(key: TileKey) -> Self {
        Self { values: [[0.0; TILE]; 2], key }
    }
}

/// The elements between which a step prefetches. 16 and 64 were slower.
const PART: usize = 32;

/// The prefetch distance in elements: between the 256 that are too few for the latency of memory,
/// and the 512 and 1,024 (half a page and a page of f32), which were slower than other distances.
const AHEAD: usize = 448;

/// Prefetches, at a part of a tile, the lines of a later tile. Memory keeps up better with a few
/// lines for each part than with all lines of a tile at once: the step is 4% faster.
#[inline(always)]
fn prefetch_part<T>(tile: &[T; TILE], part: usize) {
    // The first part on a line prefetches it.
    if (part * size_of::<T>()).is_multiple_of(LINE) {
        prefetch_behind(&tile[part..part + PART], AHEAD);
    }
}

/// The bits of the largest magnitude.
#[inline(always)]
fn largest<F: Format>(values: &[f32; TILE]) -> u32 {
    values.iter().fold(0, |largest, &value| largest.max(magnitude::<F>(value)))
}

vectorised! {
    /// A step over a tile with one state tensor, which has this exponent byte. Returns the new
    /// exponent byte.
    pub fn step_one<S: OneState>(
        s: &S,
        parameter: &mut [f32; TILE],
        codes: &mut [u8; TILE],
        exponent: u8,
        gradient: &[f32; TILE],
        stepped: &mut Stepped,
    ) -> u8 {
        let Stepped { values: [m, _], key } = stepped;
        let zero = zero::<Signed>(exponent);
        for part in (0..TILE).step_by(PART) {
            prefetch_part(parameter, part);
            prefetch_part(gradient, part);
            prefetch_part(codes, part);
            for i in part..part + PART {
                let before = decoded::<Signed>(codes[i], zero);
                (parameter[i], m[i]) = s.step(parameter[i], before, gradient[i]);
            }
        }
        encoded::<Signed>(m, *key, codes)
    }
}

vectorised! {
    /// A step over a tile with two state tensors, which have these exponent bytes. Returns the new
    /// ones.
    pub fn step_two<S: TwoStates>(
        s: &S,
        parameter: &mut [f32; TILE],
        codes: [&mut [u8; TILE]; 2],
        exponents: [u8; 2],
        gradient: &[f32; TILE],
        stepped: &mut Stepped,
    ) -> [u8; 2] {
        let (Stepped { values: [m, v], key }, [first, second]) = (stepped, codes);
        let zeros = (zero::<Signed>(exponents[0]), zero::<Positive>(exponents[1]));
        for part in (0..TILE).step_by(PART) {
            prefetch_part(parameter, part);
            prefetch_part(gradient, part);
            prefetch_part(first, part);
            prefetch_part(second, part);
            for i in part..part + PART {
                let before =
                    (decoded::<Signed>(first[i], zeros.0), decoded::<Positive>(second[i], zeros.1));
                let (p, after) = s.step(parameter[i], before, gradient[i]);
                parameter[i] = p;
                (m[i], v[i]) = after;
            }
        }
        [encoded::<Signed>(m, *key, first), encoded::<Positive>(v, *key, second)]
    }
}

/// Encodes the values of a tile after a step. Returns the exponent byte.
#[inline(always)]
fn encoded<F: Format>(values: &[f32; TILE], key: TileKey, codes: &mut [u8; TILE]) -> u8 {
    let Some((exponent, scale)) = scale::<F>(largest::<F>(values)) else {
        codes.fill(0);
        return NOT_A_NUMBER;
    };
    let random = key.bits(F::RANDOM);
    for i in 0..TILE {
        codes[i] = coded::<F>(values[i], scale, |_| random(i) >> (u32::BITS - F::SHIFT));
    }
    at_least_one::<F>(values, codes);
    exponent
}
