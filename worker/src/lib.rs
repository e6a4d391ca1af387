//! ZeroShard's workers in Rust: a trainer, and the libraries that other training programs on burn
//! can use.
//!
//! - [`trainer`]: the program `zeroshard-worker`. It trains a decoder-only transformer whose
//!   optimizer state and, depending on the level, gradients and parameters are on shard servers.
//! - [`parallel`]: distributed tensors and layers, data parallelism and ZeRO for burn modules.
//! - [`collectives`]: all-reduce, all-gather and similar operations among the workers of a job.
//!
//! Dependencies point one way: `trainer -> parallel -> collectives`.

pub mod collectives;
pub mod parallel;
pub mod trainer;
