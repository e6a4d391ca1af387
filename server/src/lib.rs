//! ZeroShard: server.

pub mod backend;
pub mod optim;
