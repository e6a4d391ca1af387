//! Reading: an incremental parser over network buffers, which accepts arbitrary bytes without
//! panicking.

use bytes::{Buf, Bytes, BytesMut};
use prost::Message;
use zeroshard_loops::int8::TILE_BYTES;
use zeroshard_model::{Error, Result};

use super::{
    Extent, Reference, field,
    prefix::{self, PREFIX},
    wire,
};
use crate::{Wire, pb};

/// The maximum number of bytes before a payload: the prefix, small fields, and an opening message.
const MAX_HEADER: usize = 4 << 10;

/// An event of a stream of messages.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A push begins.
    Begin(pb::PushBegin),
    /// A payload of this number of elements follows.
    Extent(Extent, u64),
    /// The next whole elements of the payload, or whole tiles, at any alignment.
    Payload(Bytes),
    /// The elements of the extent are in the window.
    Reference(Reference),
}

/// Reads messages from buffers with arbitrary boundaries.
#[derive(Debug)]
pub struct Decoder {
    max_message: usize,
    /// The bytes of an incomplete header.
    partial: BytesMut,
    input: Bytes,
    /// An extent whose header has been read.
    extent: Option<(Extent, u64)>,
    /// Where its elements are, if they do not follow.
    reference: Option<Reference>,
    payload: Payload,
}

/// The payload being read.
#[derive(Debug)]
struct Payload {
    /// The number of bytes that have not arrived yet.
    left: usize,
    /// The number of bytes that are decoded together: an element, or a tile.
    grain: usize,
    /// The first bytes of a grain that is split between two buffers.
    cut: [u8; TILE_BYTES],
    cut_len: usize,
}

impl Default for Payload {
    fn default() -> Self {
        Self { left: 0, grain: 1, cut: [0; TILE_BYTES], cut_len: 0 }
    }
}

#[derive(Debug, Default)]
struct Header {
    begin: Option<pb::PushBegin>,
    slice: u32,
    offset: u64,
    dtype: i32,
    reference: Reference,
    payload: Option<usize>,
}

impl Decoder {
    /// Creates a decoder that refuses messages longer than `max_message` bytes.
    pub fn new(max_message: usize) -> Self {
        Self {
            max_message,
            partial: BytesMut::new(),
            input: Bytes::new(),
            extent: None,
            reference: None,
            payload: Payload::default(),
        }
    }

    /// Passes in the next buffer. The previous buffer must have been consumed: [`Self::next`]
    /// returned `None`.
    pub fn feed(&mut self, input: Bytes) {
        debug_assert!(self.input.is_empty(), "the last buffer has been used up");
        self.input = input;
    }

    /// Returns the next event, or `None` if the decoder needs another buffer.
    ///
    /// # Errors
    /// [`Error::Invalid`]; the rest of the stream cannot be read.
    #[expect(clippy::should_implement_trait, reason = "fallible, and None is not the end")]
    pub fn next(&mut self) -> Result<Option<Event>> {
        loop {
            if let Some((extent, elements)) = self.extent.take() {
                return Ok(Some(Event::Extent(extent, elements)));
            }
            if let Some(reference) = self.reference.take() {
                return Ok(Some(Event::Reference(reference)));
            }
            if self.payload.left > 0 {
                match self.payload.take(&mut self.input) {
                    Some(bytes) => return Ok(Some(Event::Payload(bytes))),
                    None if self.input.is_empty() => return Ok(None),
                    None => continue,
                }
            }
            let Some(header) = self.header()? else {
                return Ok(None);
            };
            self.open(&header)?;
            if let Some(begin) = header.begin {
                return Ok(Some(Event::Begin(begin)));
            }
        }
    }

    /// Checks that the stream ended at the end of a message.
    ///
    /// # Errors
    /// [`Error::Refused`] if the last message is truncated.
    pub fn finish(&self) -> Result<()> {
        if self.payload.left > 0 || !self.partial.is_empty() {
            return Err(Error::refused("the stream ended in the middle of a message"));
        }
        Ok(())
    }

    /// Parses a header from the available bytes, across buffers if necessary.
    fn header(&mut self) -> Result<Option<Header>> {
        if self.input.is_empty() {
            return Ok(None);
        }
        if self.partial.is_empty()
            && let Some((header, used)) = parse(&self.input, self.max_message)?
        {
            self.input.advance(used);
            return Ok(Some(header));
        }
        let before = self.partial.len();
        let more = self.input.len().min(MAX_HEADER - before);
        self.partial.extend_from_slice(&self.input[..more]);
        match parse(&self.partial, self.max_message)? {
            Some((header, used)) => {
                self.input.advance(used - before);
                self.partial.clear();
                Ok(Some(header))
            }
            None if self.partial.len() == MAX_HEADER => Err(Error::refused(format!(
                "the fields before `payload` exceed {MAX_HEADER} bytes; send `payload` last"
            ))),
            None => {
                self.input.advance(more);
                Ok(None)
            }
        }
    }

    fn open(&mut self, header: &Header) -> Result<()> {
        let (bytes, is_reference) = match (header.payload, header.reference.bytes) {
            (Some(_), 1..) => {
                return Err(Error::refused(format!(
                    "an extent of slice {} has a payload and elements in the window; send one",
                    header.slice
                )));
            }
            (Some(payload), 0) => (payload as u64, false),
            (None, 0) => return Ok(()),
            (None, bytes) => (bytes, true),
        };
        let what = |field: &str| format!("{field} of an extent of slice {}", header.slice);
        let wire = Wire::of_message(header.dtype, || what("dtype"))?;
        let Some(elements) = wire.elements(bytes).filter(|&elements| elements > 0) else {
            let expected = match wire {
                Wire::Plain(dtype) => format!("one or more elements of {} bytes", dtype.size()),
                Wire::Int8 => "one or more tiles: 4 bytes and up to 128 elements each".to_owned(),
            };
            return Err(Error::invalid(what("payload"), format!("{bytes} bytes"), expected));
        };
        let extent = Extent { slice: header.slice, offset: header.offset, wire };
        self.extent = Some((extent, elements));
        match is_reference {
            true => self.reference = Some(header.reference),
            false => {
                let (left, grain) = (bytes as usize, wire.grain_bytes());
                self.payload = Payload { left, grain, ..Payload::default() };
            }
        }
        Ok(())
    }
}

impl Payload {
    /// Takes the whole grains at the beginning of `input`, and stores the bytes of a split grain.
    /// The last grain may be a part of a tile.
    fn take(&mut self, input: &mut Bytes) -> Option<Bytes> {
        if self.cut_len > 0 {
            let grain = self.grain.min(self.cut_len + self.left);
            let more = (grain - self.cut_len).min(input.len());
            self.cut[self.cut_len..][..more].copy_from_slice(&input.split_to(more));
            self.cut_len += more;
            self.left -= more;
            if self.cut_len < grain {
                return None;
            }
            self.cut_len = 0;
            return Some(Bytes::copy_from_slice(&self.cut[..grain]));
        }
        let available = input.len().min(self.left);
        let whole = match available == self.left {
            true => available,
            false => available - available % self.grain,
        };
        if whole > 0 {
            self.left -= whole;
            return Some(input.split_to(whole));
        }
        self.cut_len = available;
        self.left -= available;
        self.cut[..available].copy_from_slice(&input.split_to(available));
        None
    }
}

/// Parses the prefix and the fields before the payload. Returns the header and its length, or
/// `None` if `bytes` end before the payload.
fn parse(bytes: &[u8], max_message: usize) -> Result<Option<(Header, usize)>> {
    let Some((prefix, _)) = bytes.split_first_chunk::<PREFIX>() else {
        return Ok(None);
    };
    let length = prefix::parse(*prefix)?;
    if length > max_message {
        let expected = format!("at most {max_message} bytes");
        return Err(Error::invalid(
            "size of a data-plane message",
            format!("{length} bytes"),
            expected,
        ));
    }
    let mut header = Header::default();
    let mut cursor = Cursor { bytes, at: PREFIX, end: PREFIX + length };
    while cursor.at < cursor.end {
        match header.field(&mut cursor)? {
            None => return Ok(None),
            Some(()) if header.payload.is_some() => break,
            Some(()) => {}
        }
    }
    Ok(Some((header, cursor.at)))
}

impl Header {
    /// Reads one field; `None` if the bytes end inside the field.
    fn field(&mut self, cursor: &mut Cursor<'_>) -> Result<Option<()>> {
        let Some(tag) = cursor.varint()? else {
            return Ok(None);
        };
        match (tag >> 3, tag & 7) {
            (number, wire::VARINT) => {
                let Some(value) = cursor.varint()? else {
                    return Ok(None);
                };
                match number {
                    field::SLICE => {
                        self.slice = u32::try_from(value).map_err(|_| {
                            Error::invalid("slice of an extent", value, "less than 2^32")
                        })?;
                    }
                    field::OFFSET => self.offset = value,
                    field::LASTS => self.reference.lasts = value != 0,
                    field::HOLD => self.reference.hold = value,
                    field::AT => self.reference.at = value,
                    field::BYTES => self.reference.bytes = value,
                    field::DTYPE => self.dtype = i32::try_from(value).unwrap_or(i32::MAX),
                    _ => {} // a field of a later version
                }
            }
            (number, wire::BYTES) => {
                let Some(length) = cursor.varint()? else {
                    return Ok(None);
                };
                let length = cursor.checked(length)?;
                if number == field::PAYLOAD {
                    if cursor.at + length != cursor.end {
                        return Err(Error::refused(
                            "a field follows `payload`; send `payload` last",
                        ));
                    }
                    self.payload = Some(length);
                    return Ok(Some(()));
                }
                let Some(value) = cursor.take(length) else {
                    return Ok(None);
                };
                if number == field::BEGIN {
                    let begin = pb::PushBegin::decode(value)
                        .map_err(|e| Error::refused(format!("`begin` cannot be decoded: {e}")))?;
                    self.begin = Some(begin);
                }
            }
            (_, wire::FIXED64) => return cursor.skip(8),
            (_, wire::FIXED32) => return cursor.skip(4),
            (_, other) => {
                return Err(Error::refused(format!(
                    "a data-plane message has a field of the unsupported wire type {other}"
                )));
            }
        }
        Ok(Some(()))
    }
}

/// Reads within one message. INVARIANT: at <= end; `bytes` may end before `end`.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    end: usize,
}

impl Cursor<'_> {
    /// Reads a base-128 number; `None` if the bytes end inside the number.
    fn varint(&mut self) -> Result<Option<u64>> {
        let mut value = 0u64;
        for (index, position) in (self.at..self.end).take(10).enumerate() {
            let Some(&byte) = self.bytes.get(position) else {
                return Ok(None);
            };
            if index == 9 && byte > 1 {
                break;
            }
            value |= u64::from(byte & 0x7f) << (7 * index);
            if byte < 0x80 {
                self.at = position + 1;
                return Ok(Some(value));
            }
        }
        Err(Error::refused(
            "a data-plane message has a varint longer than 10 bytes, or one that it cuts off",
        ))
    }

    fn checked(&self, length: u64) -> Result<usize> {
        let room = self.end - self.at;
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > room {
            return Err(Error::refused(format!(
                "a data-plane message with {room} bytes left has a field of {length} bytes"
            )));
        }
        Ok(length)
    }

    fn take(&mut self, length: usize) -> Option<&[u8]> {
        let value = self.bytes.get(self.at..self.at + length)?;
        self.at += length;
        Some(value)
    }

    fn skip(&mut self, length: usize) -> Result<Option<()>> {
        let length = self.checked(length as u64)?;
        Ok(self.take(length).map(|_| ()))
    }
}
