//! The state of a shard server: the slices of its jobs, the gradients that they accumulate, the
//! memory that they take, and the steps that they apply.
//!
//! `job` finds the slice, `slice` computes on a backend, and `round` adds the gradients of a step
//! in the order of the ranks. `tier` decides where arrays are: in memory, in host memory, or on
//! disk. `budget` limits bytes, and `fair` shares the time of the server among jobs. `replay`
//! applies a captured step again.
//!
//! This crate knows neither messages nor the network, and no clock: a job gets the time and tells
//! its events through [`job::Host`]. It waits for nothing but memory, disks and turns. The server
//! converts messages, waits with deadlines, copies slices from other servers and writes
//! checkpoints.

#![allow(missing_docs, reason = "only the server and the simulation use this crate")]

pub mod budget;
pub mod device;
pub mod events;
pub mod fair;
#[cfg(test)]
mod instrumented;
pub mod job;
mod ranges;
pub mod replay;
pub mod round;
pub mod senders;
pub mod slice;
pub mod state_selector;
#[cfg(test)]
mod test_jobs;
pub mod tier;
