//! Paddle's `shard_layer`: distributes the parameters of a module with a function.

use std::fmt;

use zeroshard_model::DimPlacement as Placement;

use super::backend::ParallelBackend;
use super::dist_tensor::Value;
use super::error::Result;
use super::layer::{Layer, Parallelize, walk};
use super::world::Mesh;

/// A function that converts the inputs or outputs of a module.
pub type Convert<B> = Box<dyn Fn(Vec<Value<B>>, &Mesh) -> Result<Vec<Value<B>>> + Send + Sync>;

/// A module with distributed parameters, and the functions that convert its inputs and outputs.
pub struct ShardedLayer<B: ParallelBackend, M> {
    /// The module.
    pub layer: M,
    mesh: Mesh,
    input: Option<Convert<B>>,
    output: Option<Convert<B>>,
}

/// Distributes a module over a mesh. `shard_fn(name, layer, mesh)` is called for the module itself,
/// with the name "", and for every layer in it. It distributes parameters with [`Layer::shard`];
/// the other parameters are replicated. `input_fn` and `output_fn` convert the inputs and outputs.
///
/// # Errors
/// Those of `shard_fn`, and of [`Layer::shard`].
pub fn shard_layer<B: ParallelBackend, M: Parallelize<B>>(
    mut layer: M,
    mesh: &Mesh,
    mut shard_fn: impl FnMut(&str, &mut Layer<'_, B>, &Mesh) -> Result<()>,
    input_fn: Option<Convert<B>>,
    output_fn: Option<Convert<B>>,
) -> Result<ShardedLayer<B, M>> {
    let replicated = vec![Placement::Replicate; mesh.process_mesh().ndim()];
    walk("", Layer::Module(&mut layer), &mut |path, layer| {
        shard_fn(path, layer, mesh)?;
        let rest: Vec<_> =
            layer.parameters().into_iter().filter(|(_, distributed)| !distributed).collect();
        rest.iter().try_for_each(|(name, _)| layer.shard(name, mesh, &replicated))
    })?;
    Ok(ShardedLayer { layer, mesh: mesh.clone(), input: input_fn, output: output_fn })
}

impl<B: ParallelBackend, M> ShardedLayer<B, M> {
    /// Runs `input_fn`, then `forward` with the module, then `output_fn`.
    ///
    /// # Errors
    /// Those of the three functions.
    pub fn forward(
        &self,
        inputs: Vec<Value<B>>,
        forward: impl FnOnce(&M, Vec<Value<B>>) -> Result<Vec<Value<B>>>,
    ) -> Result<Vec<Value<B>>> {
        let convert = |function: &Option<Convert<B>>, values| match function {
            Some(function) => function(values, &self.mesh),
            None => Ok(values),
        };
        let outputs = forward(&self.layer, convert(&self.input, inputs)?)?;
        convert(&self.output, outputs)
    }
}

impl<B: ParallelBackend, M: fmt::Debug> fmt::Debug for ShardedLayer<B, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedLayer")
            .field("layer", &self.layer)
            .field("mesh", &self.mesh)
            .finish_non_exhaustive()
    }
}
