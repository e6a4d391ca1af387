//! ZeroShard: client.
