//! Helpers for tests and benchmarks: clusters of real processes (the shipped binaries, on port 0,
//! on this machine), jobs without a model, a proxy that breaks connections, and a client that is
//! generated from the protocol.

#![expect(clippy::panic, reason = "helpers of tests and benchmarks panic if they cannot continue")]

mod bystander;
mod cluster;
mod etcd;
pub mod gpu;
pub mod groups;
pub mod phase;
mod process;
mod proxy;
pub mod safetensors;
pub mod stock;
pub mod synthetic;
pub mod training;
pub mod window;

use std::time::Duration;

pub use bystander::Bystander;
pub use cluster::Cluster;
pub use etcd::Etcd;
pub use process::{Process, binary, run};
pub use proxy::FaultProxy;
pub use training::{Trained, Training};

/// The deadline of calls that are expected to succeed, which ends a test that would otherwise hang.
pub fn timeout() -> Duration {
    Duration::from_secs(if cfg!(feature = "long") { 150 } else { 30 })
}
