//! Distributed tensors and layers on burn, with the names that torch and Paddle use.
//!
//! A [`World`] is the set of ranks of a job, connected by [`crate::collectives`]; a [`Mesh`] is an
//! array of some of them. A [`DistTensor`] is a tensor of which each rank holds a part. Autograd
//! differentiates through collectives, so gradients have the placements that the layers need.
//!
//! A burn module is a struct, and its layers cannot be intercepted. Therefore a module consists of
//! layers that can be distributed ([`ParallelLinear`], [`ParallelEmbedding`], [`ParallelNorm`]) and
//! lists them by name ([`Parallelize`]). A plan of styles ([`parallelize_module`]) or a function
//! ([`shard_layer`]) distributes them. Without either they behave like burn's own layers.
//!
//! This module and the trainer share [`remote`], the connection of a rank to a job on the shard
//! servers, and [`background`], which pushes gradients while the computation continues.
//!
//! ```no_run
//! use burn::tensor::{Tensor, activation::relu};
//! use zeroshard_worker::parallel::*;
//!
//! #[derive(burn::module::Module, Debug)]
//! struct Mlp<B: burn::tensor::backend::Backend> {
//!     up: ParallelLinear<B>,
//!     down: ParallelLinear<B>,
//! }
//!
//! impl<B: ParallelBackend> Parallelize<B> for Mlp<B> {
//!     fn layers(&mut self) -> Vec<(String, Layer<'_, B>)> {
//!         vec![("up".into(), (&mut self.up).into()), ("down".into(), (&mut self.down).into())]
//!     }
//! }
//!
//! impl<B: ParallelBackend> Mlp<B> {
//!     fn forward(&self, x: Tensor<B, 2>) -> Result<Tensor<B, 2>> {
//!         let hidden = self.up.forward(x)?.map::<2>(relu)?;
//!         self.down.forward(hidden)?.local()
//!     }
//! }
//!
//! fn parallel<B: ParallelBackend>(mlp: Mlp<B>, world: &World) -> Result<Mlp<B>> {
//!     let mesh = world.mesh(ProcessMesh::dense([2], ["tp"])?)?;
//!     let (up, down) = (ColwiseParallel::default(), RowwiseParallel::default());
//!     parallelize_module(mlp, &mesh, &[("up", &up), ("down", &down)])
//! }
//! ```

mod backend;
pub mod background;
mod buffers;
mod data_parallel;
mod dist_model;
mod dist_tensor;
mod embedding;
mod error;
mod exchanges;
mod group_sharded;
mod hooks;
mod host;
mod layer;
mod level;
mod linear;
mod norm;
mod parameters;
mod placed;
mod plan;
mod prepare;
mod program;
pub mod remote;
mod server_optimizer;
mod shard_layer;
mod styles;
#[cfg(test)]
mod tests;
mod transfer;
mod world;

pub use backend::{Exchange, ParallelBackend};
pub use data_parallel::{DataParallel, DataParallelOptions, Forward};
pub use dist_model::{Batch, DistModel, Loss, Outcome, StaticLayer, to_static};
pub use dist_tensor::{DistTensor, LAST, PARTIAL, Value, shard_tensor};
pub use embedding::{ParallelEmbedding, lookup};
pub use error::{Error, Result};
pub use group_sharded::{GroupSharded, group_sharded_parallel};
pub use hooks::Hooks;
pub use host::HostValues;
pub use layer::{Layer, Parallelize};
pub use level::{Level, UnknownLevel};
pub use linear::ParallelLinear;
pub use norm::ParallelNorm;
pub use parameters::accumulate;
pub use plan::parallelize_module;
pub use prepare::{
    PrepareInput, PrepareOutput, make_input_replicate_1d, make_input_reshard_replicate,
    make_input_shard_1d, make_input_shard_1d_last_dim, make_output_replicate_1d,
    make_output_reshard_tensor, make_output_shard_1d, make_output_tensor,
    make_sharded_output_tensor,
};
pub use program::{Kind, Mode, Operation, Part, Program, Scope};
pub use remote::JobOptions;
pub use server_optimizer::{ServerOptimizer, ServerOptions, StateTensor, shard_optimizer};
pub use shard_layer::{Convert, ShardedLayer, shard_layer};
pub use styles::{
    ColwiseParallel, PairwiseParallel, ParallelStyle, PrepareModuleInput, PrepareModuleInputOutput,
    PrepareModuleOutput, RowwiseParallel, SequenceParallel,
};
pub use world::{Call, Mesh, World};

pub use zeroshard_model::DimPlacement as Placement;
pub use zeroshard_model::DimPlacement::{Partial, Replicate, Shard};
pub use zeroshard_model::{ProcessMesh, Reduction};
