//! ZeroShard: server.

pub mod admin;
pub mod config;
pub mod health;
pub mod layers;
pub mod metrics;
pub mod serve;
