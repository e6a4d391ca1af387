//! ZeroShard's workers in Rust: a trainer, and the parts that other training programs on burn can
//! use.
//!
//! - [`trainer`]: the program `zeroshard-worker`, a decoder-only transformer whose optimizer state,
//!   gradients and (level by level) parameters live on the shard servers.
//! - [`parallel`]: distributed tensors and layers, data parallelism and ZeRO for burn modules.
//! - [`collectives`]: all-reduce, all-gather and similar operations among the workers of a job.
//!
//! Dependencies point one way: `trainer -> parallel -> collectives`.

pub mod collectives;
pub mod parallel;
pub mod trainer;
