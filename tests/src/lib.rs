//! ZeroShard: cluster tests.
