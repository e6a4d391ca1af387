//! The distribution of a layer: the shapes and placements of its parameters on a mesh, and the
//! redistribution of its input and output.

use burn::module::Param;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorMetadata};
use zeroshard_model::DimPlacement as Placement;

use super::backend::ParallelBackend;
use super::dist_tensor::{DistTensor, Value, primitive, resolve, shard_tensor};
use super::error::{Error, Result};
use super::prepare::{PrepareInput, PrepareOutput};
use super::world::Mesh;

/// The distribution of a layer.
#[derive(Debug, Clone)]
pub(crate) struct Placed {
    pub(crate) mesh: Mesh,
    pub(crate) parameters: Vec<PlacedParameter>,
    pub(crate) input: PrepareInput,
    pub(crate) output: PrepareOutput,
}

/// The distribution of a parameter.
#[derive(Debug, Clone)]
pub(crate) struct PlacedParameter {
    pub(crate) name: &'static str,
    /// The shape of the whole parameter.
    pub(crate) shape: Vec<usize>,
    pub(crate) placements: Vec<Placement>,
}

impl Placed {
    /// Returns whether the parameter `name` is distributed.
    pub(crate) fn has(placed: &Option<Self>, name: &str) -> bool {
        placed
            .as_ref()
            .is_some_and(|placed| placed.parameters.iter().any(|other| other.name == name))
    }

    /// Redistributes the input of the layer. By default a plain tensor is taken as replicated.
    /// `size` is the size of the last dimension of the whole input.
    pub(crate) fn prepare_input<B: ParallelBackend>(
        &self,
        input: Value<B>,
        size: usize,
    ) -> Result<DistTensor<B>> {
        match self.input.apply(input, &self.mesh, size)? {
            Value::Dist(input) => Ok(input),
            Value::Local(local) => {
                let replicated = vec![Placement::Replicate; self.mesh.process_mesh().ndim()];
                DistTensor::from_primitive(local, &self.mesh, &replicated)
            }
        }
    }

    /// The size of a whole parameter along a dimension. `local` is the size of this rank's part,
    /// which is the result for a parameter that is not distributed.
    pub(crate) fn size(&self, name: &str, dim: usize, local: usize) -> usize {
        let placed = self.parameters.iter().find(|other| other.name == name);
        placed.and_then(|placed| placed.shape.get(dim)).copied().unwrap_or(local)
    }

    /// The distributed tensor of which `parameter` is this rank's part. A parameter that is not
    /// distributed is taken as replicated.
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

/// Distributes one parameter of a layer: replaces its value by this rank's part, and records the
/// placements in `placed`.
pub(crate) fn shard<B: ParallelBackend, const D: usize>(
    placed: &mut Option<Placed>,
    (weight, bias): (&mut Param<Tensor<B, D>>, Option<&mut Param<Tensor<B, 1>>>),
    parameter: &str,
    mesh: &Mesh,
    placements: &[Placement],
) -> Result<()> {
    match (parameter, bias) {
        ("weight", _) => shard_one(placed, "weight", weight, mesh, placements),
        ("bias", Some(bias)) => shard_one(placed, "bias", bias, mesh, placements),
        (_, bias) => {
            let expected = if bias.is_some() { "weight or bias" } else { "weight" };
            Err(Error::invalid("parameter of a layer", format!("{parameter:?}"), expected))
        }
    }
}

fn shard_one<B: ParallelBackend, const D: usize>(
    placed: &mut Option<Placed>,
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
                format!("{:?}, the mesh of the layer's other parameters", placed.mesh),
            ));
        }
    }
    if placements.iter().any(|placement| matches!(placement, Placement::Partial(_))) {
        return Err(Error::invalid("placement of a parameter", "Partial", "Shard or Replicate"));
    }
    let whole = parameter.val();
    let shape = whole.dims().to_vec();
    let part = shard_tensor(whole.clone().detach(), mesh, placements)?.to_local::<D>()?.detach();
    *parameter = Param::initialized(parameter.id, part.set_require_grad(whole.is_require_grad()));
    let placements = resolve(placements, D);
    let placed = placed.get_or_insert_with(|| Placed {
        mesh: mesh.clone(),
        parameters: Vec::new(),
        input: PrepareInput::default(),
        output: PrepareOutput::default(),
    });
    placed.parameters.push(PlacedParameter { name, shape, placements });
    Ok(())
}

/// Runs a layer that is not distributed on a plain tensor.
pub(crate) fn undistributed<B: ParallelBackend>(
    input: Value<B>,
    run: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> Result<Value<B>> {
    match input {
        Value::Local(local) => Ok(Value::Local(run(local))),
        Value::Dist(_) => Err(Error::refused(
            "the layer is not distributed and takes a plain tensor; call `to_local` or `full`",
        )),
    }
}
