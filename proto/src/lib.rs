//! The wire, and whatever both of its sides must agree on.
//!
//! Generated messages ([`pb`]) stop at the border: they are converted on receipt into the types of
//! this crate, which cannot be wrong.

pub mod blocks;
pub mod deadline;
pub mod dtype;
pub mod error;
pub mod frame;
pub mod job;
pub mod layout;
pub mod manifest;
pub mod mesh;
pub mod optimizer;
pub mod placement;
pub mod redistribute;
pub mod tensor_box;
pub mod token;
pub mod transport;

pub use deadline::Deadline;
pub use dtype::DType;
pub use error::Error;
pub use job::{Departure, JobSpec};
pub use layout::{Contributions, DimPlacement, Layout, Reduction, TensorLayout};
pub use manifest::{Manifest, Policy, SliceSpec, TensorSpec};
pub use mesh::ProcessMesh;
pub use optimizer::Optimizer;
pub use placement::{Placement, Server};
pub use tensor_box::{BoxView, TensorBox};
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
