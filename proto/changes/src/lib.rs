//! The change of a slice from one version to a later one, as bytes, and the hash that proves that a
//! reader has applied it to the right values.
//!
//! A server records a change while a step has the old and the new values in cache ([`Recorder`]). A
//! reader checks it ([`apply::hash_change`]) and applies it ([`apply::apply`]). Changes of
//! consecutive versions are added without the values ([`merge`]). All three are functions of values
//! and positions only, so that every server and every path through versions gives the same bytes.
//!
//! The float bits of an element are mapped to integers of the same order ([`ordered`]). The change
//! of an element is the difference of two such integers modulo 2^16 or 2^32: one unit in the last
//! place is 1, also across zero and between two exponents. [`block`] codes the differences.
//!
//! This crate knows no messages, and the decoder trusts no bytes.

pub mod apply;
mod bits;
pub mod block;
pub mod hash;
mod merge;
pub mod ordered;
mod record;

pub use block::{Blocks, Malformed};
pub use merge::merge;
pub use record::{Recorded, Recorder};

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]
mod tests;
