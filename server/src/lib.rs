//! ZeroShard: server.
