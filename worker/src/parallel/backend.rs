//! Collectives in autograd: one operation whose forward pass redistributes a tensor, and whose
//! backward pass redistributes its gradient.

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorData, TensorPrimitive};

use super::error::{Error, Result};
use super::transfer::Transfer;
use super::world::World;

/// The redistributions of a tensor and of its gradient.
#[derive(Debug, Clone)]
pub struct Exchange {
    pub(crate) world: World,
    pub(crate) forward: Transfer,
    pub(crate) backward: Transfer,
    /// The factor of the gradient, different from 1 for means.
    pub(crate) scale: f32,
    /// A description of the operation, if it has no gradient.
    pub(crate) no_gradient: Option<&'static str>,
}

/// A backend whose tensors can be distributed.
pub trait ParallelBackend: Backend {
    /// Redistributes a tensor, together with the other ranks. `local` is the part of this rank.
    ///
    /// # Errors
    /// Those of the collectives. If the redistribution fails in a backward pass, the gradients are
    /// NaN and [`World::backward`] returns the error.
    fn exchange(local: FloatTensor<Self>, exchange: Exchange) -> Result<FloatTensor<Self>>;
}

impl ParallelBackend for Flex {
    fn exchange(local: FloatTensor<Self>, exchange: Exchange) -> Result<FloatTensor<Self>> {
        redistribute::<Self>(local, exchange)
    }
}

#[cfg(feature = "cuda")]
impl ParallelBackend for burn::backend::Cuda {
    fn exchange(local: FloatTensor<Self>, exchange: Exchange) -> Result<FloatTensor<Self>> {
        redistribute::<Self>(local, exchange)
    }
}

/// Redistributes a tensor through host memory.
fn redistribute<B: Backend>(local: FloatTensor<B>, exchange: Exchange) -> Result<FloatTensor<B>> {
    let Exchange { world, forward, .. } = exchange;
    if forward.is_identity() {
        return Ok(local);
    }
    let local = Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(local));
    let device = local.device();
    // The primitive has another number of dimensions than the type, which has no effect here.
    let data = local
        .into_data()
        .into_vec::<f32>()
        .map_err(|_| Error::refused("a distributed tensor must have f32 elements"))?;
    let result = forward.run(&world, data)?;
    let data = TensorData::new(result, forward.size(world.rank()));
    Ok(B::float_from_data(data, &device))
}

impl<B: ParallelBackend, C: CheckpointStrategy> ParallelBackend for Autodiff<B, C> {
    fn exchange(local: FloatTensor<Self>, exchange: Exchange) -> Result<FloatTensor<Self>> {
        let prepared = Redistribute.prepare::<C>([local.node.clone()]).compute_bound().stateful();
        match prepared {
            OpsKind::Tracked(prepared) => {
                if let Some(operation) = exchange.no_gradient {
                    return Err(Error::refused(format!(
                        "redistribution {operation} has no gradient; apply it to a detached tensor"
                    )));
                }
                let moved = B::exchange(local.primitive, exchange.clone())?;
                Ok(prepared.finish(exchange, moved))
            }
            OpsKind::UnTracked(prepared) => {
                Ok(prepared.finish(B::exchange(local.primitive, exchange)?))
            }
        }
    }
}

/// The operation in the autograd graph.
#[derive(Debug)]
struct Redistribute;

impl<B: ParallelBackend> Backward<B, 1> for Redistribute {
    /// The redistribution of the gradient.
    type State = Exchange;

    fn backward(self, ops: Ops<Exchange, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let Exchange { world, forward, backward, scale, .. } = ops.state;
        unary::<B, _>(ops.parents, ops.node, gradients, |gradient| {
            let device = B::float_device(&gradient);
            let gradient =
                if scale == 1.0 { gradient } else { B::float_mul_scalar(gradient, scale.into()) };
            let size = backward.size(world.rank());
            let no_gradient = Some("of a gradient");
            let reverse = Exchange {
                world: world.clone(),
                forward: backward,
                backward: forward,
                scale: 1.0,
                no_gradient,
            };
            B::exchange(gradient, reverse).unwrap_or_else(|error| {
                world.fail(error);
                let nothing = vec![f32::NAN; size.iter().product()];
                B::float_from_data(TensorData::new(nothing, size), &device)
            })
        });
    }
}
