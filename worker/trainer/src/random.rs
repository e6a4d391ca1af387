//! A counter-based random number generator. The numbers are a pure function of a key, such as
//! (seed, purpose, step).
//!
//! Therefore a rank can draw its part of a batch without drawing the parts of other ranks, and a
//! step that is run again draws the same numbers. The mixing function is that of SplitMix64
//! (Steele, Lea, Flood 2014).

use zeroshard_model::splitmix::{GOLDEN, mixed};

/// A stream of random numbers.
#[derive(Debug, Clone)]
pub struct Stream {
    state: u64,
}

impl Stream {
    /// The stream of a key. Different keys give unrelated streams.
    pub fn new(key: &[u64]) -> Self {
        let state =
            key.iter().fold(GOLDEN, |state, &part| mixed(state ^ mixed(part.wrapping_add(GOLDEN))));
        Self { state }
    }

    /// The same stream without its next `count` numbers.
    pub fn after(&self, count: u64) -> Self {
        Self { state: self.state.wrapping_add(GOLDEN.wrapping_mul(count)) }
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN);
        mixed(self.state)
    }

    /// A uniform number in `[0, 1)` with 24 random bits, which is exact in f32.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// A uniform number in `0..bound`, where `bound` is at least 1, computed by multiplication
    /// (Lemire 2019). The bias is below `bound / 2^64`.
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.bits()) * bound as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_key_gives_the_same_stream() {
        let draw = |key: &[u64]| {
            let mut stream = Stream::new(key);
            (0..8).map(|_| stream.bits()).collect::<Vec<_>>()
        };
        assert_eq!(draw(&[1, 2]), draw(&[1, 2]));
        assert_ne!(draw(&[1, 2]), draw(&[2, 1]));
        assert_ne!(draw(&[1]), draw(&[1, 0]));
    }

    #[test]
    fn a_stream_can_skip_numbers() {
        let mut stream = Stream::new(&[3]);
        let mut later = stream.after(5);
        (0..5).for_each(|_| _ = stream.bits());
        assert_eq!(stream.bits(), later.bits());
    }

    #[test]
    fn numbers_are_uniform() {
        let mut stream = Stream::new(&[7]);
        let count = 20_000;
        let mean = (0..count).map(|_| f64::from(stream.unit())).sum::<f64>() / f64::from(count);
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
        let mut seen = [0; 5];
        for _ in 0..count {
            seen[stream.below(5)] += 1;
        }
        assert!(seen.iter().all(|&n| (3_800..4_200).contains(&n)), "{seen:?}");
    }
}
