//! ZeroShard: worker.
