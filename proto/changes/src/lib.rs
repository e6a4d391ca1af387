//! Encodes how a slice changes from one version to a later one, and hashes its values, so that a
//! reader can check that it applies a change to the right values.
//!
//! A server records a change while a step has the old and the new values in cache ([`Recorder`]).
//! A reader applies it ([`apply::apply`]), and takes it back if the hash is wrong. [`merge`] adds
//! the changes of consecutive versions without the values. The bytes depend only on old values, new
//! values and positions, so every server and every path through the versions gives the same bytes.
//!
//! [`ordered`] maps the bits of a float to an integer, and larger floats to larger integers. The
//! difference of an element is the new integer minus the old one, modulo 2^16 or 2^32. One unit in
//! the last place is therefore always 1 or -1, also across zero and between two exponents.
//! [`block`] encodes the differences.
//!
//! [`Reader`] and [`Gathering`] are what a reader decides: which changes lead to one version, and
//! when it needs a full copy. [`Mirror`] decides what a mirror sends to its readers, and [`vouch`]
//! and [`MirrorCopy`] what they take from it. The client, mirrors and the simulation of a cluster
//! make the calls.
//!
//! This crate knows no messages. Its decoder accepts any bytes, and refuses malformed ones.

pub mod apply;
mod bits;
pub mod block;
mod decode;
mod gather;
pub mod hash;
mod merge;
mod mirror;
pub mod ordered;
mod reader;
mod record;
mod vouched;

pub use block::{Blocks, Malformed};
pub use gather::{Gathering, Known, SliceChange};
pub use merge::{merge, sum};
pub use mirror::{Mirror, Sent, Wanted};
pub use reader::{Copied, Part, Reader};
pub use record::{Recorded, Recorder};
pub use vouched::{MirrorCopy, vouch};

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]
mod tests;
