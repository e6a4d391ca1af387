//! A CUDA driver for tests that has no GPU, and is more hostile than one that has.
//!
//! It is a library with the functions of `libcuda.so` that the server calls. Kernels run for real:
//! the text of their PTX is interpreted (`run`), or for long runs of programs the same source,
//! compiled for the host, is called ([`compiled`]). Streams run late, and in any order that the
//! calls of the program allow (`device`). Device memory has addresses that the host cannot access
//! (`memory`). Every access of a copy or an interpreted kernel is checked: the driver finds uses of
//! freed memory, accesses out of bounds, copies from and to memory that is not pinned or changes
//! meanwhile, and accesses that no event orders (`order`). It names them on the standard error
//! stream, and keeps them for [`control`]. Calls fail on request.
//!
//! The library also has the functions of NCCL that workers call (`nccl`).
//!
//! What it does not do: it has no textures, graphs, cooperative launches or clusters, threads of a
//! launch that race with each other are not found, and it says nothing about speed.

// The functions of the driver have C's types, and the kernels access memory.
#![allow(unsafe_code)]
// The functions of the C interface are documented by CUDA.
#![allow(missing_docs)]

mod api;
mod codes;
mod communicator;
pub mod compiled;
pub mod control;
mod device;
mod driver;
mod fault;
mod lanes;
mod memory;
mod nccl;
mod order;
mod ptx;
mod random;
mod run;

pub use device::Figures;
