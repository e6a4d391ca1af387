//! Memory that processes of one host share, without networking, tasks or a clock.
//!
//! The server creates every [`Segment`], so that it can be neither shortened nor charged to it by
//! surprise, and passes its descriptor to a worker ([`descriptors`]). A worker maps a segment as a
//! [`View`], which it only reads, or as [`Pieces`], which it fills and the server reads. A
//! [`Pane`] shows parts of a view instead of a tensor's own memory.
//! An [`Arena`] divides a segment into the arrays of a job.
//!
//! Segments are anonymous files (`memfd_create`): they end with the last process that maps them,
//! however it ends.

mod arena;
pub mod descriptors;
mod memory;
mod pagemap;
mod pane;
mod pieces;
mod segment;
mod view;

pub use arena::{Arena, Block};
pub use memory::Memory;
pub use pane::{Keeper, Pane};
pub use pieces::{Piece, Pieces};
pub use segment::Segment;
pub use view::View;

/// The unit in which segments are divided, a multiple of the size of a page.
pub const PAGE: usize = 4096;

/// From this number of bytes on, an array can be in an arena, and be shown. A smaller array would
/// waste part of its last page, and sending it takes no longer than referring to it.
pub const SHARED_FROM: usize = 64 << 10;
