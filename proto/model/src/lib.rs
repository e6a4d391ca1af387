//! What all parts of ZeroShard agree on: the tensors, optimizer and layout of a job, the placement
//! of its slices, the memory that they need, and errors. Without networking, tasks or a clock.

pub mod attempt;
pub mod average;
pub mod checkpoint;
pub mod direct;
pub mod dtype;
pub mod error;
pub mod fork;
pub mod geometry;
pub mod job;
pub mod limits;
pub mod line;
pub mod listing;
pub mod local;
pub mod manifest;
pub mod memory;
pub mod name;
pub mod optimizer;
pub mod placement;
pub mod quota;
pub mod role;
pub mod size;
pub mod spikes;
pub mod splitmix;
pub mod version;

pub use attempt::Attempt;
pub use average::{RunningAverage, Warmup, Weights};
pub use checkpoint::{CheckpointPolicy, OnLoss, OnMemoryShortage, Restore, RestoreVersion};
pub use dtype::DType;
pub use error::Error;
pub use fork::{Fork, JobVersion, successor_name};
pub use geometry::{
    DimPlacement, Elements, Layout, ProcessMesh, Reduction, SliceSpec, StridedBox, TensorBox,
    TensorLayout, View,
};
pub use job::{Departure, JobSpec};
pub use line::{JobLine, Line, LineVersion};
pub use manifest::{Manifest, Policy, TensorId, TensorSpec};
pub use optimizer::{AppliedSteps, Optimizer, StateDType};
pub use placement::{Placement, Server};
pub use role::Role;
pub use spikes::{RecentSteps, Spike, SpikeAction, SpikePolicy, StepFigures};

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
