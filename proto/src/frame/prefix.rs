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
/// [`Error::Refused`] for a compressed message.
pub(super) fn parse([compressed, length @ ..]: [u8; PREFIX]) -> Result<usize> {
    match compressed {
        0 => Ok(u32::from_be_bytes(length) as usize),
        _ => Err(Error::refused("the gRPC message is compressed; send it without compression")),
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
/// [`Error::Refused`].
pub fn decode_message<M: Message + Default>(bytes: &[u8]) -> Result<M> {
    let (prefix, message) = bytes
        .split_first_chunk::<PREFIX>()
        .ok_or_else(|| Error::refused("the gRPC message is shorter than its prefix"))?;
    let (length, found) = (parse(*prefix)?, message.len());
    if length != found {
        let sentence = format!("the gRPC message has {found} bytes, but its prefix says {length}");
        return Err(Error::refused(sentence));
    }
    M::decode(message).map_err(|e| Error::refused(format!("a message cannot be decoded: {e}")))
}
