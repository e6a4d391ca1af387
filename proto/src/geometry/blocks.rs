//! The two sizes that every sum, checksum and slice is cut by.
//!
//! They are part of the numerical contract: a norm is a sum over blocks, so another block size
//! gives other bits. They depend on nothing that a user can set.

/// Elements in a block: the unit of sums and checksums.
pub const BLOCK: usize = 65_536;

/// Blocks in a slice: the unit of ownership, movement, replication and checkpoint.
pub const SLICE_BLOCKS: usize = 64;

/// Elements in a whole slice (4 Mi): only a tensor's last slice has fewer.
pub const SLICE: usize = BLOCK * SLICE_BLOCKS;
