//! The data that a rank exchanges with the shard servers: tensors by their index in the manifest.

use zeroshard_client::{Target, TensorId};
use zeroshard_model::TensorBox;

use super::host::HostValues;

/// The values of a box of a tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Buffer {
    /// Index in the manifest.
    pub tensor: usize,
    /// The box.
    pub bounds: TensorBox,
    /// The elements of the box, row-major.
    pub values: Vec<f32>,
}

impl Buffer {
    /// A buffer of zeros for a box of a tensor.
    pub fn zeros(tensor: usize, bounds: TensorBox) -> Self {
        let values = vec![0.0; bounds.numel() as usize];
        Self { tensor, bounds, values }
    }
}

/// The index of a tensor in the manifest, and the gradient of the part that this rank holds.
pub type Gradient = (usize, HostValues);

pub(crate) fn tensor_ids(tensors: &[usize]) -> Vec<TensorId> {
    tensors.iter().copied().map(TensorId::new).collect()
}

pub(crate) fn targets(buffers: &mut [Buffer]) -> Vec<Target<'_>> {
    let mut targets = Vec::with_capacity(buffers.len());
    for Buffer { tensor, bounds, values } in buffers {
        targets.push(Target {
            bounds: Some(bounds.clone()),
            ..Target::new(TensorId::new(*tensor), values)
        });
    }
    targets
}
