//! Reading: an incremental parser over network buffers, which accepts arbitrary bytes without
//! panicking.

use bytes::{Buf, Bytes, BytesMut};
use prost::Message;
use zeroshard_model::{Error, Result};

use super::{
    Extent, field,
    prefix::{self, PREFIX},
    wire,
};
use crate::{convert, pb};

/// The maximum number of bytes before a payload: the prefix, small fields, and an opening message.
const MAX_HEADER: usize = 4 << 10;

/// An event of a stream of messages.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A push begins.
    Begin(pb::PushBegin),
    /// A payload of this number of elements follows.
    Extent(Extent, u64),
    /// The next whole elements of the payload, little endian, at any alignment.
    Payload(Bytes),
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
    payload: Payload,
}

/// The payload being read.
#[derive(Debug, Default)]
struct Payload {
    /// The number of bytes that have not arrived yet.
    left: usize,
    element: usize,
    /// The first bytes of an element that is split between two buffers.
    cut: [u8; 4],
    cut_len: usize,
}

#[derive(Debug, Default)]
struct Header {
    begin: Option<pb::PushBegin>,
    slice: u32,
    offset: u64,
    dtype: i32,
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
    /// [`Error::Invalid`] if the last message is truncated.
    pub fn finish(&self) -> Result<()> {
        if self.payload.left > 0 || !self.partial.is_empty() {
            return Err(Error::invalid("last message of the stream", "truncated", "complete"));
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
            None if self.partial.len() == MAX_HEADER => Err(Error::invalid(
                "size of the fields before `payload`",
                format!("more than {MAX_HEADER} bytes"),
                format!("at most {MAX_HEADER} bytes; `payload` must be the last field"),
            )),
            None => {
                self.input.advance(more);
                Ok(None)
            }
        }
    }

    fn open(&mut self, header: &Header) -> Result<()> {
        let Some(bytes) = header.payload else {
            return Ok(());
        };
        let what = |field: &str| format!("{field} of an extent of slice {}", header.slice);
        let dtype = convert::dtype(header.dtype)
            .ok_or_else(|| Error::invalid(what("dtype"), header.dtype, "f32, bf16 or f16"))?;
        let element = dtype.size();
        if bytes == 0 || bytes % element != 0 {
            let expected = format!("one or more elements of {element} bytes");
            return Err(Error::invalid(what("payload"), format!("{bytes} bytes"), expected));
        }
        let extent = Extent { slice: header.slice, offset: header.offset, dtype };
        self.extent = Some((extent, (bytes / element) as u64));
        self.payload = Payload { left: bytes, element, ..Payload::default() };
        Ok(())
    }
}

impl Payload {
    /// Takes the whole elements at the beginning of `input`, and stores the bytes of a split
    /// element.
    fn take(&mut self, input: &mut Bytes) -> Option<Bytes> {
        if self.cut_len > 0 {
            let more = (self.element - self.cut_len).min(input.len());
            self.cut[self.cut_len..][..more].copy_from_slice(&input.split_to(more));
            self.cut_len += more;
            self.left -= more;
            if self.cut_len < self.element {
                return None;
            }
            self.cut_len = 0;
            return Some(Bytes::copy_from_slice(&self.cut[..self.element]));
        }
        let available = input.len().min(self.left);
        let whole = available - available % self.element;
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
                        return Err(malformed(
                            "a message with a field after `payload`",
                            "a message whose last field is `payload`",
                        ));
                    }
                    self.payload = Some(length);
                    return Ok(Some(()));
                }
                let Some(value) = cursor.take(length) else {
                    return Ok(None);
                };
                if number == field::BEGIN {
                    let begin = pb::PushBegin::decode(value).map_err(|e| {
                        malformed(format!("an invalid `begin` ({e})"), "a valid PushBegin")
                    })?;
                    self.begin = Some(begin);
                }
            }
            (_, wire::FIXED64) => return cursor.skip(8),
            (_, wire::FIXED32) => return cursor.skip(4),
            (_, other) => {
                return Err(malformed(format!("a field of wire type {other}"), "0, 1, 2 or 5"));
            }
        }
        Ok(Some(()))
    }
}

fn malformed(found: impl std::fmt::Display, expected: &str) -> Error {
    Error::invalid("encoding of a data-plane message", found, expected)
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
        Err(malformed(
            "an invalid varint",
            "a varint of at most 10 bytes that ends inside the message",
        ))
    }

    fn checked(&self, length: u64) -> Result<usize> {
        let room = self.end - self.at;
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > room {
            return Err(malformed(
                format!("a field of {length} bytes"),
                &format!("a field of at most {room} bytes, the rest of the message"),
            ));
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
