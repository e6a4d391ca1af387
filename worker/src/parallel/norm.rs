//! A layer norm whose input may be sharded by rows.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use zeroshard_model::DimPlacement as Placement;

use super::backend::ParallelBackend;
use super::dist_tensor::{DistTensor, PARTIAL, Value, primitive};
use super::error::{Error, Result};
use super::placed::{Placed, undistributed};

/// Layer normalization (Ba, Kiros, Hinton 2016), like burn's `LayerNorm`. The rows of the input may
/// be distributed.
#[derive(Module, Debug)]
pub struct ParallelNorm<B: Backend> {
    /// The scale, `[d_model]`.
    pub weight: Param<Tensor<B, 1>>,
    /// The bias, `[d_model]`.
    pub bias: Option<Param<Tensor<B, 1>>>,
    /// The number that is added to the variance.
    pub epsilon: f64,
    #[module(skip)]
    pub(crate) placed: Option<Placed>,
}

impl<B: Backend> ParallelNorm<B> {
    /// Creates a norm over a last dimension of `size` elements, with torch's default epsilon.
    pub fn new(size: usize, device: &B::Device) -> Self {
        Self {
            weight: Param::from_tensor(Tensor::ones([size], device)),
            bias: Some(Param::from_tensor(Tensor::zeros([size], device))),
            epsilon: 1e-5,
            placed: None,
        }
    }
}

impl<B: ParallelBackend> ParallelNorm<B> {
    /// Normalizes over the last dimension, `[..., d_model]`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an input of the wrong shape or on another mesh; those of the
    /// collectives.
    pub fn forward(&self, input: impl Into<Value<B>>) -> Result<Value<B>> {
        let Some(placed) = &self.placed else {
            return undistributed(input.into(), |input| {
                let bias = self.bias.as_ref().map(|bias| primitive(bias.val()));
                B::layer_norm(input, primitive(self.weight.val()), bias, self.epsilon)
            });
        };
        let size = placed.size("weight", 0, self.weight.dims()[0]);
        let input = placed.prepare_input(input.into(), size)?;
        let weight = placed.dist("weight", &self.weight)?;
        if input.shape().last() != weight.shape().first() || *input.mesh() != placed.mesh {
            let expected = format!("of shape [..., {}] on {:?}", weight.shape()[0], placed.mesh);
            let found = format!("of shape {:?} on {:?}", input.shape(), input.mesh());
            return Err(Error::invalid("input of a norm", found, expected));
        }
        let last = input.shape().len() - 1;
        let rows =
            |placement: &Placement| matches!(placement, Placement::Shard(dim) if *dim < last);
        let along: Vec<Placement> = input
            .placements()
            .iter()
            .map(|p| if rows(p) { *p } else { Placement::Replicate })
            .collect();
        let gradient: Vec<Placement> =
            along.iter().map(|p| if rows(p) { PARTIAL } else { Placement::Replicate }).collect();
        let input = input.reshard(&along)?;
        let whole = vec![Placement::Replicate; along.len()];
        let parameter = |tensor: DistTensor<B>| tensor.reshard(&whole)?.local_for(&gradient);
        let weight = parameter(weight)?;
        let bias = match &self.bias {
            Some(bias) => Some(parameter(placed.dist("bias", bias)?)?),
            None => None,
        };
        let shape = input.shape().to_vec();
        let local = B::layer_norm(input.local_for(&along)?, weight, bias, self.epsilon);
        placed
            .output
            .apply(DistTensor::assembled(local, placed.mesh.clone(), shape, along)?, &placed.mesh)
    }
}
