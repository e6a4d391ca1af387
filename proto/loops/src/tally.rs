//! Tallies an array that arrives in parts: its sum of squares, and a hash.
//!
//! The hash is linear: element `i` with the bits `b` adds `b * key(i)` modulo 2^64, so that parts
//! may arrive in any size and order. A key is a random number of 32 bits for the position within a
//! tile of 256 elements, times a random odd number for the tile. Equal arrays have equal hashes. If
//! two arrays differ by chance, their hashes are equal with a probability of about 2^-32. Somebody
//! who chooses the values can make them equal.
//!
//! A tile adds its squares in f32, which is twice as fast as f64 and has a relative error of at
//! most 2^-19. If the sum is close to the smallest or the largest f32, the tile adds them in f64
//! instead. The tiles' sums add up in f64, in the order of arrival.

use std::ops::Range;

use zeroshard_model::{
    DType,
    splitmix::{GOLDEN, mixed},
};

use crate::{
    Level,
    convert::{Bf16, Element, F16, F32},
    vectorised,
};

/// The number of elements with keys of their own.
const TILE: usize = 256;

/// The number of partial sums. With 16, the compiler takes the hash apart into single products,
/// which is five times slower.
const LANES: usize = 8;

/// The range in which a sum of squares in f32 is reliable: no square that matters was rounded to
/// zero, and none has overflowed.
const EXACT: Range<f32> = 1e-30..1e37;

/// The keys of the positions within a tile.
static KEYS: [u32; TILE] = {
    let mut keys = [0; TILE];
    let mut i = 0;
    while i < TILE {
        keys[i] = (mixed((i as u64 + 1).wrapping_mul(GOLDEN)) >> 32) as u32;
        i += 1;
    }
    keys
};

/// The sum of squares and the hash of some elements.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    /// The sum of squares.
    pub squares: f64,
    /// The hash of positions and values, as f32.
    pub hash: u64,
}

impl Tally {
    /// Tallies consecutive elements. `bytes` has whole little-endian elements of `dtype`. `first`:
    /// the number of the first element.
    pub fn of(level: Level, bytes: &[u8], dtype: DType, first: u64) -> Self {
        match dtype {
            DType::F32 => tally::<F32>(level, bytes, first),
            DType::Bf16 => tally::<Bf16>(level, bytes, first),
            DType::F16 => tally::<F16>(level, bytes, first),
        }
    }

    /// Adds the tally of other elements in the same array.
    pub fn add(&mut self, other: Self) {
        self.squares += other.squares;
        self.hash = self.hash.wrapping_add(other.hash);
    }
}

fn tally<E: Element>(level: Level, bytes: &[u8], first: u64) -> Tally {
    let size = size_of::<E::Raw>();
    let mut sum = Tally::default();
    let (mut rest, mut at) = (bytes, first);
    while !rest.is_empty() {
        let within = (at % TILE as u64) as usize;
        let (part, later) = rest.split_at(rest.len().min((TILE - within) * size));
        let numel = part.len() / size;
        let (squares, hash) = tile::<E>(level, part, &KEYS[within..within + numel]);
        let squares = match EXACT.contains(&squares) {
            true => f64::from(squares),
            false => squares_of::<E>(part),
        };
        // An odd factor is invertible, so that no bit of the sum is lost.
        let factor = mixed(at / TILE as u64) | 1;
        sum.add(Tally { squares, hash: hash.wrapping_mul(factor) });
        (rest, at) = (later, at + numel as u64);
    }
    sum
}

vectorised! {
    /// Returns the sum of squares of the elements, and the sum of their bits times their keys.
    pub fn tile<E: Element>(bytes: &[u8], keys: &[u32]) -> (f32, u64) {
        let elements = &E::elements(bytes)[..keys.len()];
        let (mut squares, mut hashes) = ([0.0f32; LANES], [0u64; LANES]);
        let (rows, rest) = elements.as_chunks::<LANES>();
        let (key_rows, rest_keys) = keys.as_chunks::<LANES>();
        for (row, keys) in rows.iter().zip(key_rows) {
            for lane in 0..LANES {
                let value = E::decode(row[lane]);
                squares[lane] += value * value;
                let product = u64::from(value.to_bits()) * u64::from(keys[lane]);
                hashes[lane] = hashes[lane].wrapping_add(product);
            }
        }
        for (lane, (&raw, key)) in rest.iter().zip(rest_keys).enumerate() {
            let value = E::decode(raw);
            squares[lane] += value * value;
            let product = u64::from(value.to_bits()) * u64::from(*key);
            hashes[lane] = hashes[lane].wrapping_add(product);
        }
        (squares.iter().sum(), hashes.iter().fold(0, |sum: u64, hash| sum.wrapping_add(*hash)))
    }
}

/// The sum of squares in f64.
fn squares_of<E: Element>(bytes: &[u8]) -> f64 {
    let square = |&raw: &E::Raw| f64::from(E::decode(raw)) * f64::from(E::decode(raw));
    E::elements(bytes).iter().map(square).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn values(numel: usize) -> Vec<f32> {
        (0..numel).map(|i| ((i * 7919) as f32).sin()).collect()
    }

    #[test]
    fn parts_add_up_to_the_whole_at_every_level() {
        let values = values(3000);
        let bytes = bytes(&values);
        let whole = Tally::of(Level::best(), &bytes, DType::F32, 77);
        let expected: f64 = values.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
        assert!((whole.squares - expected).abs() < 1e-6 * expected);
        for level in Level::all() {
            for cuts in [vec![1, 2, 255, 257, 1024], vec![179, 180, 2999], vec![]] {
                let mut ends = cuts.clone();
                ends.push(values.len());
                let mut parts: Vec<_> = [0].into_iter().chain(cuts).zip(ends).collect();
                parts.reverse(); // the order of arrival does not matter
                let mut sum = Tally::default();
                for (from, to) in parts {
                    let part = &bytes[4 * from..4 * to];
                    sum.add(Tally::of(level, part, DType::F32, 77 + from as u64));
                }
                assert_eq!(sum.hash, whole.hash);
                assert!((sum.squares - whole.squares).abs() < 1e-6 * whole.squares);
            }
        }
    }

    #[test]
    fn one_changed_or_moved_element_changes_the_hash() {
        let mut values = values(600);
        let hash = |values: &[f32], first| {
            Tally::of(Level::best(), &bytes(values), DType::F32, first).hash
        };
        let before = hash(&values, 0);
        assert_ne!(before, hash(&values, 1), "the position counts");
        values.swap(3, 259);
        assert_ne!(before, hash(&values, 0), "equal positions of other tiles have other keys");
        values.swap(3, 259);
        values[599] = f32::from_bits(values[599].to_bits() ^ 1);
        assert_ne!(before, hash(&values, 0));
    }

    #[test]
    fn squares_beyond_the_range_of_f32_are_added_in_f64() {
        for value in [1e-25f32, 1e30, 0.0, 1e-30] {
            let sum = Tally::of(Level::best(), &bytes(&[value; 300]), DType::F32, 0).squares;
            let expected = 300.0 * f64::from(value) * f64::from(value);
            assert!((sum - expected).abs() <= 1e-6 * expected, "{value}: {sum}");
        }
        let nan = Tally::of(Level::best(), &bytes(&[1.0, f32::NAN]), DType::F32, 0).squares;
        assert!(nan.is_nan());
    }

    #[test]
    fn narrow_elements_have_the_hash_of_their_values() {
        let values = [1.0f32, -2.5, 0.0, -0.0, f32::INFINITY];
        let half: Vec<u8> =
            values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect();
        let wide = Tally::of(Level::best(), &bytes(&values), DType::F32, 5);
        assert_eq!(wide, Tally::of(Level::best(), &half, DType::Bf16, 5));
        assert_eq!(wide.squares, f64::INFINITY);
    }
}
