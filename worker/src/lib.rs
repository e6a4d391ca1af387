//! ZeroShard's trainer on burn: a decoder-only transformer whose optimizer state, gradients and
//! (level by level) parameters live on the shard servers.

pub mod batches;
pub mod chart;
pub mod cli;
pub mod collectives;
pub mod error;
pub mod evaluate;
pub mod launch;
pub mod levels;
pub mod memory;
pub mod model;
pub mod parallel;
pub mod processes;
pub mod progress;
pub mod random;
pub mod remote;
pub mod report;
pub mod sample;
pub mod schedule;
pub mod segments;
pub mod tensor_parallel;
pub mod text;
pub mod train;
pub mod travel;
