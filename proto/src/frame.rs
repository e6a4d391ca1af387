//! The data plane's messages, written and read without a copy of their payloads.
//!
//! What goes over the wire is plain gRPC of `PushRequest` and `PullResponse` (data.proto). A
//! generated encoder copies each payload once, and a decoder twice; these do not: [`Writer`] puts
//! the payload's own `Bytes` between headers, and [`Decoder`] hands out pieces of the network
//! buffer as they come.

mod decode;
mod encode;
mod prefix;
mod read;

pub use decode::{Decoder, Event};
pub use encode::Writer;
pub use prefix::{decode_message, encode_message};
pub use read::Reader;

use crate::DType;

/// Field numbers of data.proto.
mod field {
    pub(super) const BEGIN: u64 = 1;
    pub(super) const SLICE: u64 = 2;
    pub(super) const OFFSET: u64 = 3;
    pub(super) const DTYPE: u64 = 4;
    pub(super) const PAYLOAD: u64 = 15;
}
/// Protobuf wire types.
mod wire {
    pub(super) const VARINT: u64 = 0;
    pub(super) const FIXED64: u64 = 1;
    pub(super) const BYTES: u64 = 2;
    pub(super) const FIXED32: u64 = 5;
}

/// Where a payload belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Index of the slice in the job.
    pub slice: u32,
    /// First element, within the slice.
    pub offset: u64,
    /// Element type of the payload.
    pub dtype: DType,
}

#[cfg(test)]
mod tests;
