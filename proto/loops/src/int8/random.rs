//! The random numbers of the rounding: a pure function of what is rounded.

use zeroshard_model::splitmix::{GOLDEN, mixed};

use super::TILE;

/// The number of counters of a tile. Each gives four numbers.
const COUNTERS: usize = TILE / 4;

/// The last word of the counter for parameters, which belong to no rank.
const NO_RANK: u32 = u32::MAX;

/// Decides how elements of a tensor are rounded.
///
/// INVARIANT: nothing of a run is part of it, such as the job's id, the epoch or the attempt, so
/// that a gradient that is sent again after a fault, or in another cluster, has the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rounding {
    key: [u32; 2],
    rank: u32,
    tensor: u32,
}

impl Rounding {
    /// The rounding of a gradient of tensor number `tensor` at `step`, in a job with this seed.
    /// `rank` is the rank to which it belongs; of a sum over ranks, the lowest of them.
    pub fn of_gradient(seed: u64, step: u64, tensor: u32, rank: u32) -> Self {
        // `mixed` is a bijection, so the keys of two steps of a job differ.
        let start = mixed(seed.wrapping_add(GOLDEN));
        let key = mixed(start.wrapping_add(step).wrapping_add(GOLDEN));
        Self { key: [key as u32, (key >> 32) as u32], rank, tensor }
    }

    /// The rounding of the parameters of tensor number `tensor` at `version`, the same for all
    /// ranks.
    pub fn of_parameters(seed: u64, version: u64, tensor: u32) -> Self {
        Self::of_gradient(seed, version, tensor, NO_RANK)
    }

    /// 32 random bits for each element of tile number `tile`. Element e has word `e / 32` of the
    /// block of Philox4x32-10 with the counter
    /// `[low, high, tensor, rank]` of the number `32 * tile + e % 32`.
    #[inline(always)]
    pub(super) fn tile(&self, tile: u64) -> [u32; TILE] {
        let [mut a, mut b, mut c, mut d] = [[0; COUNTERS]; 4];
        let first = tile.wrapping_mul(COUNTERS as u64);
        for at in 0..COUNTERS {
            let block = philox(first + at as u64, [self.tensor, self.rank], self.key);
            [a[at], b[at], c[at], d[at]] = block;
        }
        let mut random = [0; TILE];
        for (words, of) in random.chunks_exact_mut(COUNTERS).zip([a, b, c, d]) {
            words.copy_from_slice(&of);
        }
        random
    }
}

/// The block of Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC
/// 2011) whose counter begins with the words of `first`.
///
/// The words are in the lower halves of larger numbers, whose upper halves are never cleared: a
/// multiplication of lower halves is one instruction of every x86-64 for two blocks.
#[inline(always)]
fn philox(first: u64, rest: [u32; 2], key: [u32; 2]) -> [u32; 4] {
    const LOW: u64 = u32::MAX as u64;
    let [mut a, mut b, mut c, mut d] = [first, first >> 32, rest[0].into(), rest[1].into()];
    let [mut low, mut high] = key;
    for _ in 0..10 {
        let of_a = (a & LOW) * 0xd251_1f53;
        let of_c = (c & LOW) * 0xcd9e_8d57;
        [a, b, c, d] =
            [(of_c >> 32) ^ b ^ u64::from(low), of_c, (of_a >> 32) ^ d ^ u64::from(high), of_a];
        low = low.wrapping_add(0x9e37_79b9);
        high = high.wrapping_add(0xbb67_ae85);
    }
    [a as u32, b as u32, c as u32, d as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of Random123 1.14 (`kat_vectors`): counter, key, block.
    #[test]
    fn the_generator_gives_the_known_answers_of_its_authors() {
        let answers = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in answers {
            let first = u64::from(counter[0]) | u64::from(counter[1]) << 32;
            assert_eq!(philox(first, [counter[2], counter[3]], key), expected);
        }
    }

    #[test]
    fn steps_tensors_ranks_tiles_and_seeds_have_other_numbers() {
        let of = Rounding::of_gradient(7, 3, 0, 1);
        let mut all: Vec<u32> = [
            of.tile(5),
            of.tile(6),
            Rounding::of_gradient(7, 3, 1, 1).tile(5),
            Rounding::of_gradient(7, 4, 0, 1).tile(5),
            Rounding::of_gradient(7, 3, 0, 2).tile(5),
            Rounding::of_gradient(8, 3, 0, 1).tile(5),
            Rounding::of_parameters(7, 3, 0).tile(5),
        ]
        .concat();
        assert_eq!(of.tile(5), Rounding::of_gradient(7, 3, 0, 1).tile(5));
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 7 * TILE);
    }
}
