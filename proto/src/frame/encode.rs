//! Writing: headers are gathered, and large payloads are passed on without a copy.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};
use prost::{Message, encoding::encode_varint};

use super::{
    Extent, Reference, field,
    prefix::{self, PREFIX},
    wire,
};
use crate::pb;

/// Payloads of up to this many bytes are copied beside their header. A separate HTTP/2 frame for
/// each would cost more (about 2 µs, the time to copy 16 KiB).
const SMALL: usize = 16 << 10;
/// Gathered small messages are sent when they reach this number of bytes.
const GATHERED: usize = 256 << 10;
/// The maximum length of an extent's header: prefix, three varints with their tags, and either tag
/// and length of the payload or four more varints.
const MAX_EXTENT_HEADER: usize = PREFIX + 3 * 11 + 4 * 11;

/// Converts extents into the data frames of a gRPC stream.
#[derive(Debug, Default)]
pub struct Writer {
    gathered: BytesMut,
    frames: VecDeque<Bytes>,
}

impl Writer {
    /// Writes the message that opens a push.
    pub fn begin(&mut self, begin: pb::PushBegin) {
        let message = pb::PushRequest { begin: Some(begin), ..Default::default() };
        prefix::put(&mut self.gathered, message.encoded_len());
        message.encode_raw(&mut self.gathered);
    }

    /// Writes a message with one extent. The payload must be shorter than 4 GiB, which is gRPC's
    /// limit.
    pub fn extent(&mut self, extent: Extent, payload: Bytes) {
        self.header(extent, |rest| {
            encode_varint(field::PAYLOAD << 3 | wire::BYTES, rest);
            encode_varint(payload.len() as u64, rest);
            payload.len()
        });
        if payload.len() <= SMALL {
            self.gathered.extend_from_slice(&payload);
            if self.gathered.len() >= GATHERED {
                self.flush();
            }
        } else {
            self.flush();
            self.frames.push_back(payload);
        }
    }

    /// Writes a message with one extent whose elements are in a window.
    pub fn reference(&mut self, extent: Extent, reference: Reference) {
        let Reference { at, bytes, hold, lasts } = reference;
        let lasts = (field::LASTS, u64::from(lasts));
        let fields = [lasts, (field::HOLD, hold), (field::AT, at), (field::BYTES, bytes)];
        self.header(extent, |rest| {
            for (field, value) in fields {
                encode_varint(field << 3 | wire::VARINT, rest);
                encode_varint(value, rest);
            }
            0
        });
        if self.gathered.len() >= GATHERED {
            self.flush();
        }
    }

    /// Returns the next data frame if a complete one is available.
    pub fn next_frame(&mut self) -> Option<Bytes> {
        self.frames.pop_front()
    }

    /// Makes a frame of the gathered messages. Call it at the end of the stream, or before waiting.
    pub fn flush(&mut self) {
        if !self.gathered.is_empty() {
            self.frames.push_back(self.gathered.split().freeze());
        }
    }

    /// Writes the position of an extent, and what `end` adds, which returns the length of what
    /// follows.
    fn header(&mut self, extent: Extent, end: impl FnOnce(&mut &mut [u8]) -> usize) {
        let mut fields = [0u8; MAX_EXTENT_HEADER];
        let mut rest = &mut fields[..];
        let numbers = [
            (field::SLICE, u64::from(extent.slice)),
            (field::OFFSET, extent.offset),
            (field::DTYPE, pb::Dtype::from(extent.wire) as u64),
        ];
        for (field, value) in numbers {
            encode_varint(field << 3 | wire::VARINT, &mut rest);
            encode_varint(value, &mut rest);
        }
        let payload = end(&mut rest);
        let length = MAX_EXTENT_HEADER - rest.len();

        self.gathered.reserve(PREFIX + length);
        prefix::put(&mut self.gathered, length + payload);
        self.gathered.extend_from_slice(&fields[..length]);
    }
}
