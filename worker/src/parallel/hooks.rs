//! Redistribution of the inputs and outputs of a module that has layers of its own.

use zeroshard_proto::DimPlacement as Placement;

use super::backend::ParallelBackend;
use super::dist_tensor::{DistTensor, Value};
use super::error::{Error, Result};
use super::world::Mesh;

/// Redistributes a module's inputs and outputs. A module has one as a field (`#[module(skip)]`),
/// returns it from [`super::Parallelize::hooks`], and passes its inputs and outputs through it in
/// the forward pass. Without a plan they are not changed.
#[derive(Debug, Clone, Default)]
pub struct Hooks {
    pub(crate) inputs: Option<Prepared>,
    pub(crate) outputs: Option<Prepared>,
}

/// Layouts of tensors before and after.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Prepared {
    pub(crate) mesh: Mesh,
    /// `None`: not a tensor to be distributed.
    pub(crate) layouts: Vec<Option<Placement>>,
    pub(crate) desired: Vec<Option<Placement>>,
    /// Whether plain tensors come out.
    pub(crate) local: bool,
}

impl Hooks {
    /// The module's inputs, as it wants them.
    ///
    /// # Errors
    /// [`Error::Invalid`] for another number of them than the plan has, and those of the
    /// collectives.
    pub fn inputs<B: ParallelBackend>(&self, inputs: Vec<Value<B>>) -> Result<Vec<Value<B>>> {
        apply(&self.inputs, inputs, "inputs of a module")
    }

    /// The module's outputs, as its caller wants them.
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
        let expected = format!("{}, as in the plan", layouts.len());
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
                // Its layers use all of it for different things.
                (Placement::Replicate, false) => Ok(tensor.replicate_for_parts()?.into()),
                (desired, false) => Ok(tensor.reshard(&[*desired])?.into()),
                (desired, true) => super::prepare::local(tensor.reshard(&[*desired])?),
            }
        })
        .collect()
}
