//! The five bytes before each gRPC message: a compression flag and the length of the message.

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;
use zeroshard_model::{Error, Result};

/// The length of the prefix.
pub(super) const PREFIX: usize = 5;

/// Writes the prefix of a message of `length` bytes.
pub(super) fn put(buffer: &mut BytesMut, length: usize) {
    buffer.put_u8(0);
    buffer.put_u32(length as u32);
}

/// Returns the length of the message that follows a prefix.
///
/// # Errors
/// [`Error::Invalid`] for a compressed message.
pub(super) fn parse([compressed, length @ ..]: [u8; PREFIX]) -> Result<usize> {
    match compressed {
        0 => Ok(u32::from_be_bytes(length) as usize),
        _ => Err(Error::invalid("gRPC message", "compressed", "not compressed")),
    }
}

/// Encodes `message` with its prefix.
pub fn encode_message(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX + length);
    put(&mut bytes, length);
    message.encode_raw(&mut bytes);
    bytes.freeze()
}

/// Decodes a body that consists of exactly one message with its prefix.
///
/// # Errors
/// [`Error::Invalid`].
pub fn decode_message<M: Message + Default>(bytes: &[u8]) -> Result<M> {
    let malformed = |found: String| Error::invalid("gRPC message", found, "one complete message");
    let (prefix, message) = bytes
        .split_first_chunk::<PREFIX>()
        .ok_or_else(|| malformed(format!("{} bytes, less than its prefix", bytes.len())))?;
    let length = parse(*prefix)?;
    if length != message.len() {
        return Err(malformed(format!("{} bytes with a length of {length}", message.len())));
    }
    M::decode(message).map_err(|e| malformed(e.to_string()))
}
