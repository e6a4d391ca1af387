//! The random numbers of stochastic rounding: counter-based, so that a number depends on its
//! position alone. The same step of the same element has the same number on every server and
//! device, in every tier, after a fault, and in another cluster.
//!
//! A step of a tensor has a key, and a tile of it a number of the sequence of SplitMix64 that
//! begins with the key (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
//! 2014). From each half of that number on, the elements of the tile have the multiples of the
//! golden ratio modulo 1: a sequence that fills the interval evenly, with a random beginning
//! (Cranley and Patterson, "Randomization of Number Theoretic Methods for Multiple Integration",
//! 1976). So each number is uniform, and those of one element are independent from step to step.
//! A hash of each element would take longer than the step. `cuda/kernels/code.cuh` has the same
//! functions.

use zeroshard_model::{
    geometry::blocks::TILE,
    splitmix::{GOLDEN, mixed},
};

/// The key of a step of a tensor: `step` is the number of applied steps including this one, and
/// `tensor` the index of the tensor in its job.
pub(crate) fn key(step: u64, tensor: u64) -> u64 {
    mixed(mixed(step.wrapping_add(GOLDEN)).wrapping_add(tensor))
}

/// The multiples of the golden ratio, in units of 2^-32. A loop that loads them is faster than one
/// that multiplies, because a vector of integers takes two products.
static MULTIPLES: Aligned<[u32; TILE]> = {
    let (mut multiples, mut i) = ([0; TILE], 0);
    while i < TILE {
        multiples[i] = (i as u32).wrapping_mul((GOLDEN >> 32) as u32);
        i += 1;
    }
    Aligned(multiples)
};

/// The alignment of the widest vectors.
#[repr(align(64))]
struct Aligned<T>(T);

/// The random numbers of a tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileKey([u32; 2]);

impl TileKey {
    pub(crate) fn new(key: u64, tile: u64) -> Self {
        let number = mixed(key.wrapping_add(tile.wrapping_mul(GOLDEN)));
        Self([number as u32, (number >> 32) as u32])
    }

    /// 32 random bits for each element of the tile, by its position, for the first or the second
    /// state tensor. The highest bits are the most random ones.
    #[inline(always)]
    pub(crate) fn bits(self, state: usize) -> impl Fn(usize) -> u32 + Copy {
        let first = self.0[state];
        move |position| first.wrapping_add(MULTIPLES.0[position])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_tensor_tile_and_state_change_about_half_of_the_bits() {
        let bits = |step, tensor, tile, state| TileKey::new(key(step, tensor), tile).bits(state)(7);
        let mut changed = [0u32; 4];
        const NUMBERS: u64 = 1_000;
        for i in 0..NUMBERS {
            let base = bits(i, 3, 5, 0);
            let others =
                [bits(i + 1, 3, 5, 0), bits(i, 4, 5, 0), bits(i, 3, 6, 0), bits(i, 3, 5, 1)];
            for (changed, other) in changed.iter_mut().zip(others) {
                *changed += (base ^ other).count_ones();
            }
        }
        // The standard deviation is 89.
        assert!(changed.iter().all(|&bits| bits.abs_diff(16_000) < 500), "{changed:?}");
    }

    #[test]
    fn the_numbers_of_a_tile_are_evenly_distributed() {
        for tile in 0..100 {
            let bits = TileKey::new(key(1, 2), tile).bits(1);
            let mut sixteenths = [0u32; 16];
            (0..TILE).for_each(|position| sixteenths[(bits(position) >> 28) as usize] += 1);
            assert!(sixteenths.iter().all(|&count| count.abs_diff(8) <= 2), "{sixteenths:?}");
        }
    }
}
