//! The protocol, and everything else on which both of its sides must agree.
//!
//! Generated messages ([`pb`]) are converted on receipt into the types of this crate, whose values
//! are always valid.

pub mod checkpoint;
pub mod codec;
pub mod deadline;
pub mod dtype;
pub mod error;
pub mod frame;
pub mod geometry;
pub mod job;
pub mod limits;
pub mod manifest;
pub mod memory;
pub mod optimizer;
pub mod placement;
pub mod quota;
pub mod reloaded;
pub mod role;
pub mod size;
pub mod succession;
pub mod token;
pub mod trace;
pub mod transport;
pub mod version;

pub use checkpoint::{CheckpointPolicy, OnLoss, OnMemoryShortage, Restore, RestoreVersion};
pub use deadline::Deadline;
pub use dtype::DType;
pub use error::Error;
pub use geometry::{
    DimPlacement, Elements, Layout, ProcessMesh, Reduction, StridedBox, TensorBox, TensorLayout,
};
pub use job::{Departure, JobSpec};
pub use manifest::{Manifest, Policy, SliceSpec, TensorId, TensorSpec};
pub use optimizer::{AppliedSteps, Optimizer};
pub use placement::{Placement, Server};
pub use role::{Credential, Role, Tokens};
pub use succession::{JobVersion, Succession, successor_name};
pub use token::Token;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Generated from `zeroshard/v1/*.proto`, where the messages are documented.
#[expect(clippy::all, reason = "generated")]
pub mod pb {
    tonic::include_proto!("zeroshard.v1");

    /// The encoded `FileDescriptorSet`, for the reflection service.
    pub const FILE_DESCRIPTOR_SET: &[u8] =
        include_bytes!(concat!(env!("OUT_DIR"), "/zeroshard.bin"));
}
