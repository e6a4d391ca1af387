//! The server, with its two roles, `coordinator` and `shard`.
//!
//! `main` reads the `config` and runs a role. `roles` composes a process of `serve`, `admin` and
//! the role's own module. `coordinator` and `shard` never import each other: they communicate over
//! gRPC, even inside one process.

mod access;
pub mod admin;
mod audit;
pub mod cli;
mod clock;
pub mod config;
mod connection;
pub mod coordinator;
pub mod dev_certs;
mod devices;
mod election;
pub mod embedded;
pub mod failure;
pub mod health;
mod identity;
pub mod layers;
pub mod logging;
pub mod memory;
pub mod metrics;
pub mod probe;
mod quota;
pub mod roles;
pub mod serve;
pub mod shard;
pub mod shutdown;
#[cfg(test)]
mod simulation;
