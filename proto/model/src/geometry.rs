//! The arithmetic that workers and servers share: the elements of a tensor that belong to each
//! slice, the box that each rank holds, and the order in which contributions are added.
//!
//! A [`TensorBox`] is a region of a tensor, a [`StridedBox`] is that region in the flattened
//! tensor, and [`Elements`] are the elements of one slice that lie in it. A [`View`] is what a
//! reader has of a tensor. A [`Layout`] places a tensor on a [`ProcessMesh`] and determines its
//! [`Contributions`].

pub mod blocks;
mod contributions;
mod elements;
mod layout;
mod mesh;
mod ranks;
pub mod redistribute;
mod shares;
mod slice;
mod strided;
mod tensor_box;
mod view;

pub use contributions::{Contributions, Contributors, SliceContributors};
pub use elements::Elements;
pub use layout::{DimPlacement, Layout, Reduction, TensorLayout, list};
pub use mesh::ProcessMesh;
pub use ranks::Ranks;
pub(crate) use shares::Sharers;
pub use slice::SliceSpec;
pub use strided::StridedBox;
pub use tensor_box::TensorBox;
pub use view::View;
