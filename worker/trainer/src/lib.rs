//! The program `zeroshard-worker`: trains a character-level transformer on burn, with its optimizer
//! on shard servers.
//!
//! - Settings and data: [`cli`] (flags), [`plan`] (the validated settings), [`text`] and
//!   [`batches`] (the data), [`schedule`] (the hyperparameters of each step), [`random`] (random
//!   numbers that depend only on a key).
//! - Computation: [`device`] (the CPU or a GPU), [`model`] (the parameters), [`network`] (the
//!   part of the model on one rank), [`segments`] (forward and backward), [`levels`] (one step at
//!   each level of ZeRO), [`sample`].
//! - Transfers: [`transfers`] (pulls and pushes in the background), [`memory`] (the number of bytes
//!   that are held).
//! - Execution: [`launch`] and [`processes`] (servers and workers), [`train`] (the loop of one
//!   rank), [`progress`], [`report`] and [`chart`] (the output).
//!
//! Distributed tensors and the connection to the job are in [`zeroshard_worker::parallel`], the
//! communication among workers is in [`zeroshard_worker::collectives`].

pub mod batches;
pub mod chart;
pub mod cli;
pub mod device;
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
pub mod transfers;
