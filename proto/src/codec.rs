//! Encodes and decodes the messages of all generated services.
//!
//! A message of many megabytes takes tenths of a second. On a thread of a runtime with several
//! threads, the other tasks of the thread continue on another one meanwhile.

use std::{any::TypeId, marker::PhantomData};

use bytes::Buf;
use prost::Message;
use tokio::runtime::{Handle, RuntimeFlavor};
use tonic::{
    Status,
    codec::{self, BufferSettings, DecodeBuf, EncodeBuf},
};
use tonic_prost::ProstCodec;
use zeroshard_model::Error;

use crate::{convert::encoded::check_encoded, pb::CreateJobRequest, status::to_status};

/// The size of messages from which on the other tasks of the thread are moved, in bytes: about a
/// millisecond.
const LARGE: usize = 256 << 10;

/// The codec of messages of type `T` to the peer, and of type `U` from it.
#[derive(Debug)]
pub struct Codec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Codec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> codec::Codec for Codec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = Encoder<T, U>;
    type Decoder = Decoder<T, U>;

    fn encoder(&mut self) -> Self::Encoder {
        Encoder(ProstCodec::<T, U>::raw_encoder(BufferSettings::default()))
    }

    fn decoder(&mut self) -> Self::Decoder {
        Decoder(ProstCodec::<T, U>::raw_decoder(BufferSettings::default()))
    }
}

/// The encoder of a [`Codec`].
#[derive(Debug)]
pub struct Encoder<T, U>(<ProstCodec<T, U> as codec::Codec>::Encoder)
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static;

impl<T, U> codec::Encoder for Encoder<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        // The length is computed a second time by the encoder, which takes a tenth of its time.
        beside_other_tasks(item.encoded_len(), || self.0.encode(item, buffer))
    }
}

/// The decoder of a [`Codec`].
#[derive(Debug)]
pub struct Decoder<T, U>(<ProstCodec<T, U> as codec::Codec>::Decoder)
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static;

impl<T, U> codec::Decoder for Decoder<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        beside_other_tasks(buffer.remaining(), || {
            // Smaller messages are decoded within a few milliseconds.
            let is_large = buffer.remaining() >= LARGE;
            if is_large && TypeId::of::<U>() == TypeId::of::<CreateJobRequest>() {
                check_encoded(buffer.chunk()).map_err(to_status)?;
            }
            // prost reports this error with the code of a bug, and without details.
            self.0.decode(buffer).map_err(|status| {
                let cause = status.message();
                to_status(Error::refused(format!("the request cannot be decoded: {cause}")))
            })
        })
    }
}

/// Encodes or decodes a message of this size.
fn beside_other_tasks<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    if bytes < LARGE {
        return work();
    }
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}
