//! Clusters of real processes, for tests and benches: the shipped binaries, on port 0, on this machine.

mod cluster;
mod process;

pub use cluster::Cluster;
pub use process::{Process, binary};
