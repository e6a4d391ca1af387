//! Clusters of real processes, for tests and benches: the shipped binaries, on port 0, on this
//! machine; and what tests need to drive them: jobs without a model, a proxy that breaks
//! connections, a stock client.

#![expect(clippy::panic, reason = "how what only tests and benches use tells that it cannot go on")]

mod cluster;
mod process;
mod proxy;
pub mod stock;
pub mod synthetic;
pub mod training;

pub use cluster::Cluster;
pub use process::{Process, binary, run};
pub use proxy::FaultProxy;
pub use training::{Trained, Training};
