//! The server: what both roles, `coordinator` and `shard`, are made of.
//!
//! `main` reads the `config` and runs a role; `roles` puts a process together from `serve`, `admin`
//! and the role's own module. `coordinator` and `shard` never import each other: they speak over
//! gRPC, also inside one process.

pub mod admin;
pub mod backend;
pub mod config;
mod connection;
pub mod coordinator;
pub mod embedded;
pub mod failure;
pub mod health;
mod identity;
pub mod layers;
mod listing;
pub mod logging;
pub mod metrics;
pub mod optim;
pub mod roles;
pub mod serve;
pub mod shard;
