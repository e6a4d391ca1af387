//! Redistribution of the inputs and outputs of a module that contains other layers.

use zeroshard_model::DimPlacement as Placement;

use super::backend::ParallelBackend;
use super::dist_tensor::{DistTensor, Value};
use super::error::{Error, Result};
use super::world::Mesh;

/// Redistributes the inputs and outputs of a module. The module stores a `Hooks` in a field
/// (`#[module(skip)]`), returns it from [`super::Parallelize::hooks`], and passes its inputs and
/// outputs through it in the forward pass. Until a style sets them, the hooks change nothing.
#[derive(Debug, Clone, Default)]
pub struct Hooks {
    pub(crate) inputs: Option<Prepared>,
    pub(crate) outputs: Option<Prepared>,
}

/// The redistribution of a list of tensors.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Prepared {
    pub(crate) mesh: Mesh,
    /// The layouts of plain tensors; `None` for a tensor that is not redistributed.
    pub(crate) layouts: Vec<Option<Placement>>,
    /// The layouts after the redistribution.
    pub(crate) desired: Vec<Option<Placement>>,
    /// `true` if the results are plain tensors.
    pub(crate) local: bool,
}

impl Hooks {
    /// Redistributes the inputs of the module.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the number of inputs is not the number of layouts in the plan; those
    /// of the collectives.
    pub fn inputs<B: ParallelBackend>(&self, inputs: Vec<Value<B>>) -> Result<Vec<Value<B>>> {
        apply(&self.inputs, inputs, "inputs of a module")
    }

    /// Redistributes the outputs of the module.
    ///
    /// # Errors
    /// Those of [`Self::inputs`].
    pub fn outputs<B: ParallelBackend>(&self, outputs: Vec<Value<B>>) -> Result<Vec<Value<B>>> {
        apply(&self.outputs, outputs, "outputs of a module")
    }
}

fn apply<B: ParallelBackend>(
    prepared: &Option<Prepared>,
    values: Vec<Value<B>>,
    what: &str,
) -> Result<Vec<Value<B>>> {
    let Some(Prepared { mesh, layouts, desired, local }) = prepared else { return Ok(values) };
    if values.len() != layouts.len() {
        let expected = format!("{}, the number of layouts in the plan", layouts.len());
        return Err(Error::invalid(format!("number of {what}"), values.len(), expected));
    }
    let pairs = values.into_iter().zip(layouts).zip(desired);
    pairs
        .map(|((value, layout), desired)| {
            let (Some(layout), Some(desired)) = (layout, desired) else { return Ok(value) };
            let tensor = match value {
                Value::Dist(tensor) => tensor,
                Value::Local(plain) => DistTensor::from_primitive(plain, mesh, &[*layout])?,
            };
            match (desired, local) {
                // Each rank uses the whole tensor in a different computation.
                (Placement::Replicate, false) => Ok(tensor.replicate_for_parts()?.into()),
                (desired, false) => Ok(tensor.reshard(&[*desired])?.into()),
                (desired, true) => super::prepare::local(tensor.reshard(&[*desired])?),
            }
        })
        .collect()
}
