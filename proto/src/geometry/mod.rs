//! The arithmetic that workers and servers must agree on: which elements of a tensor belong to
//! which slice, which rank holds which box of it, and in which order contributions are added.
//!
//! A [`TensorBox`] is a region of a tensor, a [`StridedBox`] the same in the flattened tensor, and
//! [`Elements`] are the elements of one slice that lie in it. A [`Layout`] places a tensor on a
//! [`ProcessMesh`]; [`Contributions`] follow from it.

pub mod blocks;
mod contributions;
mod elements;
mod layout;
mod mesh;
pub mod redistribute;
mod strided;
mod tensor_box;

pub use contributions::{Contributions, Contributors, LocalTensor, Ranks, SliceContributors};
pub use elements::Elements;
pub use layout::{DimPlacement, Layout, Reduction, TensorLayout, list};
pub use mesh::{MAX_MESH_DIMS, ProcessMesh};
pub use strided::StridedBox;
pub use tensor_box::TensorBox;
