//! The messages of the data plane, written and read without copying their payloads.
//!
//! The format on the wire is plain gRPC with the messages `PushRequest` and `PullResponse`
//! (data.proto). A generated encoder copies each payload once, and a generated decoder copies it
//! twice. [`Writer`] places the payload's own `Bytes` between headers, and [`Decoder`] returns
//! pieces of the network buffer as they arrive.

mod decode;
mod encode;
mod prefix;
mod read;
mod spare;

pub use decode::{Decoder, Event};
pub use encode::Writer;
pub use prefix::{decode_message, encode_message};
pub use read::Reader;
pub use spare::Spare;

use crate::Wire;

/// Field numbers of data.proto.
mod field {
    pub(super) const BEGIN: u64 = 1;
    pub(super) const SLICE: u64 = 2;
    pub(super) const OFFSET: u64 = 3;
    pub(super) const DTYPE: u64 = 4;
    pub(super) const LASTS: u64 = 11;
    pub(super) const HOLD: u64 = 12;
    pub(super) const AT: u64 = 13;
    pub(super) const BYTES: u64 = 14;
    pub(super) const PAYLOAD: u64 = 15;
}
/// Protobuf wire types.
mod wire {
    pub(super) const VARINT: u64 = 0;
    pub(super) const FIXED64: u64 = 1;
    pub(super) const BYTES: u64 = 2;
    pub(super) const FIXED32: u64 = 5;
}

/// Elements in a window, instead of a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reference {
    /// The first byte, in the parameters or in the outbox of the window.
    pub at: u64,
    /// The number of bytes.
    pub bytes: u64,
    /// Of a pull: the hold that keeps them. Of a push: the number that the server returns when it
    /// has read them.
    pub hold: u64,
    /// Of a pull: the hold may last until the caller has the next version.
    pub lasts: bool,
}

/// The position of a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Index of the slice in the job.
    pub slice: u32,
    /// The first element, relative to the slice.
    pub offset: u64,
    /// The encoding of the payload. INVARIANT: `offset` is a multiple of its grain, except in
    /// messages that have not been checked.
    pub wire: Wire,
}

#[cfg(test)]
mod tests;
