//! The sizes of blocks and slices.
//!
//! They are part of the numerical contract: a norm is a sum over blocks, so a different block size
//! gives different bits. They do not depend on any user setting.

/// Elements in a block, the unit of sums and checksums.
pub const BLOCK: usize = 65_536;

/// Blocks in a slice, the unit of ownership, movement, replication and checkpointing.
pub const SLICE_BLOCKS: usize = 64;

/// Elements in a full slice (4 Mi). Only the last slice of a tensor has fewer.
pub const SLICE: usize = BLOCK * SLICE_BLOCKS;

/// The elements of a tile, counted from the beginning of the tensor: 8-bit optimizer state has one
/// exponent for each, and int8 on the wire one scale. Blocks, and therefore slices, have whole
/// tiles.
pub const TILE: usize = 128;
