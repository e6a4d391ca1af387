//! Helpers for tests and benchmarks: clusters of real processes (the shipped binaries, on port 0,
//! on this machine), jobs without a model, a proxy that breaks connections, and a client that is
//! generated from the protocol.

#![expect(clippy::panic, reason = "helpers of tests and benchmarks panic if they cannot continue")]

mod cluster;
mod etcd;
pub mod gpu;
pub mod groups;
pub mod phase;
mod process;
mod proxy;
pub mod stock;
pub mod synthetic;
pub mod training;

pub use cluster::Cluster;
pub use etcd::Etcd;
pub use process::{Process, binary, run};
pub use proxy::FaultProxy;
pub use training::{Trained, Training};
