//! Libraries for training programs in Rust, on burn.
//!
//! - [`parallel`]: distributed tensors and layers, data parallelism and ZeRO for burn modules.
//! - [`collectives`]: all-reduce, all-gather and similar operations among the workers of a job.

pub mod collectives;
pub mod parallel;
