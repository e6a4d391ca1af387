//! Sums of squares in f64, in an order that is the same on every machine and device.
//!
//! Element `i` of a block belongs to lane `i % 128`. A lane adds its elements in order. The lanes
//! are then added as a tree, each to the lane at half the distance, and the blocks are added in
//! order. 128 lanes fill sixteen AVX-512 registers here, and four warps on a GPU. The square of an
//! f32 is exact in f64, and no sum of fewer than 2^750 squares overflows, so the result is finite
//! exactly if every element is finite.

use zeroshard_model::geometry::blocks::BLOCK;

use super::{Level, vectorised};

/// The number of partial sums of a block.
pub const LANES: usize = 128;

/// The partial sums of a block.
#[derive(Clone, Debug)]
pub struct Lanes([f64; LANES]);

impl Default for Lanes {
    fn default() -> Self {
        Lanes([0.0; LANES])
    }
}

impl Lanes {
    /// The sum of the block.
    pub fn total(mut self) -> f64 {
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                self.0[i] += self.0[i + half];
            }
            half /= 2;
        }
        self.0[0]
    }
}

vectorised! {
    /// Adds the squares of `values`, which begin at a multiple of [`LANES`] in their block.
    pub fn add_squares(lanes: &mut Lanes, values: &[f32]) {
        let (rows, rest) = values.as_chunks::<LANES>();
        for row in rows {
            for (lane, &value) in lanes.0.iter_mut().zip(row) {
                *lane += f64::from(value) * f64::from(value);
            }
        }
        for (lane, &value) in lanes.0.iter_mut().zip(rest) {
            *lane += f64::from(value) * f64::from(value);
        }
    }
}

/// The sum of squares of a block.
pub fn of_block(level: Level, block: &[f32]) -> f64 {
    let mut lanes = Lanes::default();
    add_squares(level, &mut lanes, block);
    lanes.total()
}

/// The sum of squares of all `values`.
pub fn of_squares(level: Level, values: &[f32]) -> f64 {
    values.chunks(BLOCK).fold(0.0, |sum, block| sum + of_block(level, block))
}
