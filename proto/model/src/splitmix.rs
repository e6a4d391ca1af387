//! SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA
//! 2014), for random numbers that depend on their position alone: number i of the sequence that
//! begins with a key is `mixed(key + i * GOLDEN)`.

/// The increment: 2^64 divided by the golden ratio.
pub const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The output function, a bijection.
pub const fn mixed(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix64_gives_its_published_numbers() {
        // The first outputs of the reference implementation (splitmix64.c of Vigna) for seed 0.
        let outputs = [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f];
        for (i, expected) in (1..).zip(outputs) {
            assert_eq!(mixed(GOLDEN.wrapping_mul(i)), expected);
        }
    }
}
