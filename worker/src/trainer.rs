//! The program `zeroshard-worker`: trains a character-level transformer on burn, with its optimizer
//! on shard servers.
//!
//! - What a run is: [`cli`] (flags), [`plan`] (the checked settings), [`text`] and [`batches`] (the
//!   data), [`schedule`] (the optimizers of each step), [`random`] (numbers by key).
//! - What is computed: [`model`] (the parameters), [`network`] (the part of it that a rank has),
//!   [`segments`] (forward and backward), [`levels`] (one step at each level of ZeRO), [`sample`].
//! - What travels: [`travel`] (pulls ahead, pushes behind), [`memory`] (the bytes that are held).
//! - What runs it: [`launch`] and [`processes`] (servers and workers), [`train`] (the loop of one
//!   rank), [`progress`], [`report`] and [`chart`] (the output).
//!
//! Distributed tensors and the job on the servers are in [`crate::parallel`], the transport among
//! workers is in [`crate::collectives`].

pub mod batches;
pub mod chart;
pub mod cli;
pub mod error;
pub mod evaluate;
pub mod launch;
pub mod levels;
pub mod memory;
pub mod model;
pub mod network;
pub mod parallelism;
pub mod plan;
pub mod processes;
pub mod progress;
pub mod random;
pub mod report;
pub mod sample;
pub mod schedule;
pub mod segments;
pub mod text;
pub mod train;
pub mod travel;
