//! The wire: the messages of the protocol, their conversion to the types of the model, and errors
//! as the status of a call.

pub mod changes;
pub mod codec;
pub mod convert;
pub mod frame;
pub mod status;
mod wire;

pub use wire::Wire;

/// Generated from `zeroshard/v1/*.proto`, where the messages are documented.
#[expect(clippy::all, reason = "generated")]
pub mod pb {
    tonic::include_proto!("zeroshard.v1");

    /// The encoded `FileDescriptorSet`, for the reflection service.
    pub const FILE_DESCRIPTOR_SET: &[u8] =
        include_bytes!(concat!(env!("OUT_DIR"), "/zeroshard.bin"));
}
