//! Conversions between messages and the types of the model, whose values are always valid.

mod average;
mod checkpoint;
pub(crate) mod encoded;
mod fork;
mod job;
mod layout;
mod line;
mod manifest;
mod mesh;
mod optimizer;
mod placement;
mod spikes;

pub use layout::{Boxes, box_message, boxes};
pub use manifest::dtype;
pub use optimizer::optimizers;
