//! ZeroShard: server.

pub mod admin;
pub mod config;
pub mod coordinator;
pub mod embedded;
pub mod health;
pub mod layers;
pub mod logging;
pub mod metrics;
pub mod roles;
pub mod serve;
