//! Layers whose parameters can be distributed, and how a module shows them to a plan.

use burn::module::{Param, ParamId};
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorMetadata};
use zeroshard_proto::DimPlacement as Placement;

use super::backend::ParallelBackend;
use super::dist_tensor::{DistTensor, Value, primitive, resolve, shard_tensor};
use super::embedding::ParallelEmbedding;
use super::error::{Error, Result};
use super::hooks::Hooks;
use super::linear::ParallelLinear;
use super::norm::ParallelNorm;
use super::prepare::{PrepareInput, PrepareOutput};
use super::world::Mesh;

/// A module that shows its layers, so that [`super::parallelize_module`] and [`super::shard_layer`]
/// can distribute them.
pub trait Parallelize<B: Backend> {
    /// The direct layers, by name. A name may have several tokens: `blocks.0`.
    fn layers(&mut self) -> Vec<(String, Layer<'_, B>)>;

    /// What prepares this module's own input and output, if it has a place for it.
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
    /// A module with layers of its own.
    Module(&'a mut dyn Parallelize<B>),
    /// Anything else, by its type: no style knows it, and a plan that matches it is told so.
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
    /// The layer's type.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Linear(_) => "a linear layer",
            Self::Embedding(_) => "an embedding",
            Self::Norm(_) => "a norm",
            Self::Module(_) => "a module",
            Self::Other(kind) => kind,
        }
    }

    /// Distributes a parameter (`weight`, `bias`) over a mesh: each rank keeps its part of what it
    /// has.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a parameter that the layer has not, and placements that do not fit;
    /// [`Error::AlreadyParallel`].
    pub fn shard(&mut self, parameter: &str, mesh: &Mesh, placements: &[Placement]) -> Result<()> {
        match self {
            Self::Linear(layer) => layer.shard(parameter, mesh, placements),
            Self::Embedding(layer) => layer.shard(parameter, mesh, placements),
            Self::Norm(layer) => layer.shard(parameter, mesh, placements),
            Self::Module(_) | Self::Other(_) => {
                let expected = "one of a linear layer, an embedding or a norm";
                Err(Error::invalid(
                    "parameter",
                    format!("{parameter:?} of {}", self.kind()),
                    expected,
                ))
            }
        }
    }

    /// The layer's parameters, and whether each is distributed.
    pub(crate) fn parameters(&self) -> Vec<(&'static str, bool)> {
        match self {
            Self::Linear(layer) => layer.parameters(),
            Self::Embedding(layer) => layer.parameters(),
            Self::Norm(layer) => layer.parameters(),
            Self::Module(_) | Self::Other(_) => Vec::new(),
        }
    }

    /// The distributed ones of the layer's parameters.
    pub(crate) fn placed(&self) -> Vec<(ParamId, (PlacedParameter, Mesh))> {
        let (placed, weight, bias) = match self {
            Self::Linear(layer) => {
                (&layer.placed, layer.weight.id, layer.bias.as_ref().map(|bias| bias.id))
            }
            Self::Embedding(layer) => (&layer.placed, layer.weight.id, None),
            Self::Norm(layer) => {
                (&layer.placed, layer.weight.id, layer.bias.as_ref().map(|bias| bias.id))
            }
            Self::Module(_) | Self::Other(_) => return Vec::new(),
        };
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

/// Calls `run` for a layer and all in it, with their paths; the root's is empty.
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

/// How a layer is distributed.
#[derive(Debug, Clone)]
pub(crate) struct Placed {
    pub(crate) mesh: Mesh,
    pub(crate) parameters: Vec<PlacedParameter>,
    pub(crate) input: PrepareInput,
    pub(crate) output: PrepareOutput,
}

/// How a parameter is distributed.
#[derive(Debug, Clone)]
pub(crate) struct PlacedParameter {
    name: &'static str,
    /// Of the whole parameter.
    pub(crate) shape: Vec<usize>,
    pub(crate) placements: Vec<Placement>,
}

impl Placed {
    /// Distributes one parameter of a layer: leaves this rank's part in it, and notes that down in
    /// `placed`.
    pub(crate) fn shard<B: ParallelBackend, const D: usize>(
        placed: &mut Option<Self>,
        name: &'static str,
        parameter: &mut Param<Tensor<B, D>>,
        mesh: &Mesh,
        placements: &[Placement],
    ) -> Result<()> {
        if let Some(placed) = placed {
            if placed.parameters.iter().any(|other| other.name == name) {
                return Err(Error::AlreadyParallel { layer: name.to_owned() });
            }
            if placed.mesh != *mesh {
                return Err(Error::invalid(
                    "mesh of a parameter",
                    format!("{mesh:?}"),
                    format!("{:?}, as of the layer's others", placed.mesh),
                ));
            }
        }
        if placements.iter().any(|placement| matches!(placement, Placement::Partial(_))) {
            return Err(Error::invalid(
                "placement of a parameter",
                "Partial",
                "Shard or Replicate",
            ));
        }
        let whole = parameter.val();
        let shape = whole.dims().to_vec();
        let part =
            shard_tensor(whole.clone().detach(), mesh, placements)?.to_local::<D>()?.detach();
        *parameter =
            Param::initialized(parameter.id, part.set_require_grad(whole.is_require_grad()));
        let placements = resolve(placements, D);
        let placed = placed.get_or_insert_with(|| Self {
            mesh: mesh.clone(),
            parameters: Vec::new(),
            input: PrepareInput::default(),
            output: PrepareOutput::default(),
        });
        placed.parameters.push(PlacedParameter { name, shape, placements });
        Ok(())
    }

    /// Whether that parameter is distributed.
    pub(crate) fn has(placed: &Option<Self>, name: &str) -> bool {
        placed
            .as_ref()
            .is_some_and(|placed| placed.parameters.iter().any(|other| other.name == name))
    }

    /// Size of a whole parameter along a dimension; `here`: that of this rank's part.
    pub(crate) fn size(&self, name: &str, dim: usize, here: usize) -> usize {
        let placed = self.parameters.iter().find(|other| other.name == name);
        placed.and_then(|placed| placed.shape.get(dim)).copied().unwrap_or(here)
    }

    /// A parameter as the distributed tensor that it is a part of. One that is not distributed is
    /// replicated.
    pub(crate) fn dist<B: ParallelBackend, const D: usize>(
        &self,
        name: &str,
        parameter: &Param<Tensor<B, D>>,
    ) -> Result<DistTensor<B>> {
        let local = primitive(parameter.val());
        let (shape, placements) = match self.parameters.iter().find(|other| other.name == name) {
            Some(placed) => (placed.shape.clone(), placed.placements.clone()),
            None => (
                local.shape().to_vec(),
                vec![Placement::Replicate; self.mesh.process_mesh().ndim()],
            ),
        };
        DistTensor::assembled(local, self.mesh.clone(), shape, placements)
    }
}

/// A parameter that a layer has not.
pub(crate) fn no_parameter(name: &str, expected: &str) -> Error {
    Error::invalid("parameter of a layer", format!("{name:?}"), expected)
}

/// Runs a layer that is not distributed on a plain tensor.
pub(crate) fn undistributed<B: ParallelBackend>(
    input: Value<B>,
    run: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> Result<Value<B>> {
    match input {
        Value::Local(local) => Ok(Value::Local(run(local))),
        Value::Dist(_) => {
            let expected =
                "a plain tensor, since the layer is not parallel: call `to_local` or `full` before";
            Err(Error::invalid("input of a layer", "a DistTensor", expected))
        }
    }
}
