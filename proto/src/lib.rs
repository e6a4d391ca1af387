//! ZeroShard: proto.

pub mod blocks;
pub mod dtype;
pub mod optimizer;
