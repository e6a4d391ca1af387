//! Conversions between messages and the types of the model, whose values are always valid.

mod checkpoint;
pub(crate) mod encoded;
mod job;
mod layout;
mod manifest;
mod mesh;
mod optimizer;
mod placement;
mod succession;

pub use layout::box_message;
pub use manifest::dtype;
pub use optimizer::optimizers;
