//! ZeroShard: proto.
