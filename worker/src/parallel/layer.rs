//! References to the layers that a plan or a function can distribute, and the trait with which a
//! module lists them. The layers are in `linear`, `embedding` and `norm`; the placements of their
//! parameters are in `placed`.

use burn::module::ParamId;
use burn::tensor::backend::Backend;
use zeroshard_model::DimPlacement as Placement;

use super::backend::ParallelBackend;
use super::embedding::ParallelEmbedding;
use super::error::{Error, Result};
use super::hooks::Hooks;
use super::linear::ParallelLinear;
use super::norm::ParallelNorm;
use super::placed::{Placed, PlacedParameter, shard};
use super::prepare::{PrepareInput, PrepareOutput};
use super::world::Mesh;

/// A module that lists its layers, so that [`super::parallelize_module`] and [`super::shard_layer`]
/// can distribute them.
pub trait Parallelize<B: Backend> {
    /// The direct layers of this module with their names, which may consist of several tokens, such
    /// as `blocks.0`.
    fn layers(&mut self) -> Vec<(String, Layer<'_, B>)>;

    /// The hooks for the inputs and outputs of this module, if it has any.
    fn hooks(&mut self) -> Option<&mut Hooks> {
        None
    }
}

/// A layer of a module.
pub enum Layer<'a, B: Backend> {
    /// A linear layer.
    Linear(&'a mut ParallelLinear<B>),
    /// An embedding.
    Embedding(&'a mut ParallelEmbedding<B>),
    /// A layer norm.
    Norm(&'a mut ParallelNorm<B>),
    /// A module that contains other layers.
    Module(&'a mut dyn Parallelize<B>),
    /// Any other layer, with a description of its type. No style supports it, and a plan that
    /// matches it is refused.
    Other(&'static str),
}

impl<'a, B: Backend> From<&'a mut ParallelLinear<B>> for Layer<'a, B> {
    fn from(layer: &'a mut ParallelLinear<B>) -> Self {
        Self::Linear(layer)
    }
}

impl<'a, B: Backend> From<&'a mut ParallelEmbedding<B>> for Layer<'a, B> {
    fn from(layer: &'a mut ParallelEmbedding<B>) -> Self {
        Self::Embedding(layer)
    }
}

impl<'a, B: Backend> From<&'a mut ParallelNorm<B>> for Layer<'a, B> {
    fn from(layer: &'a mut ParallelNorm<B>) -> Self {
        Self::Norm(layer)
    }
}

impl<'a, B: Backend> From<&'a mut dyn Parallelize<B>> for Layer<'a, B> {
    fn from(module: &'a mut dyn Parallelize<B>) -> Self {
        Self::Module(module)
    }
}

impl<B: ParallelBackend> Layer<'_, B> {
    /// A description of the layer's type.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Linear(_) => "a linear layer",
            Self::Embedding(_) => "an embedding",
            Self::Norm(_) => "a norm",
            Self::Module(_) => "a module",
            Self::Other(kind) => kind,
        }
    }

    /// Distributes the parameter `weight` or `bias` over a mesh. Each rank keeps a part of its own
    /// values.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown parameter, and for placements that do not match the mesh
    /// or the shape; [`Error::AlreadyParallel`].
    pub fn shard(&mut self, parameter: &str, mesh: &Mesh, placements: &[Placement]) -> Result<()> {
        match self {
            Self::Linear(layer) => {
                let ParallelLinear { weight, bias, placed } = &mut **layer;
                shard(placed, (weight, bias.as_mut()), parameter, mesh, placements)
            }
            Self::Embedding(layer) => {
                let ParallelEmbedding { weight, placed } = &mut **layer;
                shard(placed, (weight, None), parameter, mesh, placements)
            }
            Self::Norm(layer) => {
                let ParallelNorm { weight, bias, placed, .. } = &mut **layer;
                shard(placed, (weight, bias.as_mut()), parameter, mesh, placements)
            }
            Self::Module(_) | Self::Other(_) => Err(Error::refused(format!(
                "parameter {parameter:?} of {} cannot be sharded; shard those of linear \
                     layers, embeddings and norms",
                self.kind()
            ))),
        }
    }

    /// The names of the layer's parameters, each with a flag that is true if it is distributed.
    pub(crate) fn parameters(&self) -> Vec<(&'static str, bool)> {
        let Some((placed, _, bias)) = self.parts() else { return Vec::new() };
        let names = ["weight"].into_iter().chain(bias.map(|_| "bias"));
        names.map(|name| (name, Placed::has(placed, name))).collect()
    }

    /// The layer's placements, and the ids of its weight and its bias.
    fn parts(&self) -> Option<(&Option<Placed>, ParamId, Option<ParamId>)> {
        match self {
            Self::Linear(layer) => {
                Some((&layer.placed, layer.weight.id, layer.bias.as_ref().map(|bias| bias.id)))
            }
            Self::Embedding(layer) => Some((&layer.placed, layer.weight.id, None)),
            Self::Norm(layer) => {
                Some((&layer.placed, layer.weight.id, layer.bias.as_ref().map(|bias| bias.id)))
            }
            Self::Module(_) | Self::Other(_) => None,
        }
    }

    /// The distributed parameters of the layer.
    pub(crate) fn placed(&self) -> Vec<(ParamId, (PlacedParameter, Mesh))> {
        let Some((placed, weight, bias)) = self.parts() else { return Vec::new() };
        let id = |name: &str| if name == "weight" { Some(weight) } else { bias };
        let parameters = placed
            .iter()
            .flat_map(|placed| placed.parameters.iter().map(|one| (one, &placed.mesh)));
        parameters
            .filter_map(|(one, mesh)| Some((id(one.name)?, (one.clone(), mesh.clone()))))
            .collect()
    }

    pub(crate) fn prepare(&mut self, input: PrepareInput, output: PrepareOutput) {
        let placed = match self {
            Self::Linear(layer) => &mut layer.placed,
            Self::Embedding(layer) => &mut layer.placed,
            Self::Norm(layer) => &mut layer.placed,
            Self::Module(_) | Self::Other(_) => return,
        };
        if let Some(placed) = placed {
            (placed.input, placed.output) = (input, output);
        }
    }
}

/// Calls `run` for a layer and all layers inside it, with their paths. The path of the root is
/// empty.
pub(crate) fn walk<B: ParallelBackend>(
    path: &str,
    mut layer: Layer<'_, B>,
    run: &mut dyn FnMut(&str, &mut Layer<'_, B>) -> Result<()>,
) -> Result<()> {
    run(path, &mut layer)?;
    if let Layer::Module(module) = layer {
        for (name, layer) in module.layers() {
            let path = if path.is_empty() { name } else { format!("{path}.{name}") };
            walk(&path, layer, run)?;
        }
    }
    Ok(())
}
