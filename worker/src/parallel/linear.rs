//! A linear layer whose weight may be distributed.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use zeroshard_model::DimPlacement as Placement;

use super::backend::ParallelBackend;
use super::dist_tensor::{DistTensor, PARTIAL, Value, gradient_of, primitive};
use super::error::{Error, Result};
use super::placed::{Placed, undistributed};

/// burn's [`Linear`], `x W + b`, with parameters that can be distributed. Create it with
/// `linear.into()`.
///
/// The weight has the shape `[d_input, d_output]`, so a column-wise parallel layer has the
/// placement `Shard(1)`. In torch the weight is transposed, and the placement is `Shard(0)`.
#[derive(Module, Debug)]
pub struct ParallelLinear<B: Backend> {
    /// The weight, `[d_input, d_output]`, or this rank's part if the layer is distributed.
    pub weight: Param<Tensor<B, 2>>,
    /// The bias, `[d_output]`, or this rank's part if the layer is distributed.
    pub bias: Option<Param<Tensor<B, 1>>>,
    #[module(skip)]
    pub(crate) placed: Option<Placed>,
}

impl<B: Backend> From<Linear<B>> for ParallelLinear<B> {
    fn from(Linear { weight, bias }: Linear<B>) -> Self {
        Self { weight, bias, placed: None }
    }
}

impl<B: ParallelBackend> ParallelLinear<B> {
    /// Applies the layer. The input has the shape `[..., d_input]` and at least two dimensions; the
    /// output has the shape `[..., d_output]`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an input of the wrong shape or on another mesh; those of the
    /// collectives.
    pub fn forward(&self, input: impl Into<Value<B>>) -> Result<Value<B>> {
        let Some(placed) = &self.placed else {
            return undistributed(input.into(), |input| {
                let bias = self.bias.as_ref().map(|bias| primitive(bias.val()));
                B::linear(input, primitive(self.weight.val()), bias)
            });
        };
        let size = placed.size("weight", 0, self.weight.dims()[0]);
        let input = placed.prepare_input(input.into(), size)?;
        let output = self.apply(placed, input)?;
        placed.output.apply(output, &placed.mesh)
    }

    /// Computes `x W + b` for any placements of input and weight. If the result is a sum over
    /// ranks, only the first rank adds the bias.
    fn apply(&self, placed: &Placed, input: DistTensor<B>) -> Result<DistTensor<B>> {
        let weight = placed.dist("weight", &self.weight)?;
        let (rank, shape) = (input.shape().len(), input.shape().to_vec());
        if rank < 2 || shape.last() != weight.shape().first() || *input.mesh() != placed.mesh {
            let expected = format!(
                "of shape [..., {}] with 2 dimensions or more, on {:?}",
                weight.shape()[0],
                placed.mesh
            );
            let found = format!("of shape {shape:?} on {:?}", input.mesh());
            return Err(Error::invalid("input of a linear layer", found, expected));
        }
        let last = rank - 1;
        let mut dims = Vec::with_capacity(weight.placements().len());
        for (weight, input) in weight.placements().iter().zip(input.placements()) {
            dims.push(DimStrategy::new(*weight, *input, last)?);
        }
        let each = |of: fn(&DimStrategy) -> Placement| dims.iter().map(of).collect::<Vec<_>>();
        let output = each(|dim| dim.output);
        let bias = match &self.bias {
            None => None,
            Some(bias) => {
                let to = output.iter().map(|output| match output {
                    Placement::Shard(dim) if *dim == last => Placement::Shard(0),
                    Placement::Partial(_) => PARTIAL,
                    _ => Placement::Replicate,
                });
                let to: Vec<Placement> = to.collect();
                let gradient = to.iter().zip(&output).map(|(bias, output)| match (bias, output) {
                    // Each rank computes some of the rows.
                    (Placement::Replicate, Placement::Shard(_)) => PARTIAL,
                    (bias, _) => gradient_of(bias),
                });
                let gradient: Vec<Placement> = gradient.collect();
                Some(placed.dist("bias", bias)?.convert(&to, &gradient)?.local_for(&gradient)?)
            }
        };
        let mut shape = shape;
        shape[last] = weight.shape()[1];
        let input = input.convert(&each(|dim| dim.input), &each(|dim| dim.input_gradient))?;
        let input = input.local_for(&each(|dim| dim.input_gradient))?;
        let weight = weight.local_for(&each(|dim| dim.weight_gradient))?;
        let local = B::linear(input, weight, bias);
        DistTensor::assembled(local, placed.mesh.clone(), shape, output)
    }
}

/// The placements of the layer's tensors along one dimension of the mesh.
struct DimStrategy {
    input: Placement,
    input_gradient: Placement,
    weight_gradient: Placement,
    output: Placement,
}

impl DimStrategy {
    fn new(weight: Placement, input: Placement, last: usize) -> Result<Self> {
        use Placement::{Partial, Replicate, Shard};
        Ok(match weight {
            // A replicated weight: the input stays sharded by rows, or is replicated.
            Replicate => {
                let rows = matches!(input, Shard(dim) if dim < last);
                let input = if rows { input } else { Replicate };
                let weight_gradient = if rows { PARTIAL } else { Replicate };
                Self { input, input_gradient: input, weight_gradient, output: input }
            }
            // Column-wise: each rank computes some columns of the output.
            Shard(1) => Self {
                input: Replicate,
                input_gradient: PARTIAL,
                weight_gradient: weight,
                output: Shard(last),
            },
            // Row-wise: each rank computes a partial sum of every output element.
            Shard(_) => Self {
                input: Shard(last),
                input_gradient: Shard(last),
                weight_gradient: weight,
                output: PARTIAL,
            },
            Partial(_) => {
                return Err(Error::invalid("placement of a weight", weight, "Shard or Replicate"));
            }
        })
    }
}
