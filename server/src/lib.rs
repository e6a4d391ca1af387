//! ZeroShard: server.

pub mod admin;
pub mod backend;
pub mod config;
pub mod health;
pub mod layers;
pub mod metrics;
pub mod optim;
pub mod serve;
pub mod shard;
