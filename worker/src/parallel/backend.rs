//! Collectives inside autograd: one operation, whose forward takes a tensor from one layout to
//! another, and whose backward does so with the gradient.

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, FloatTensorOps};
use burn::tensor::{Tensor, TensorData, TensorPrimitive};

use super::error::{Error, Result};
use super::transfer::Transfer;
use super::world::World;

/// The redistribution of a tensor, and that of its gradient.
#[derive(Debug, Clone)]
pub struct Exchange {
    pub(crate) world: World,
    pub(crate) forward: Transfer,
    pub(crate) backward: Transfer,
    /// Factor of the gradient, for means.
    pub(crate) scale: f32,
    /// The reason why the operation has no gradient, if it has none.
    pub(crate) no_gradient: Option<&'static str>,
}

/// A backend whose tensors can be distributed.
pub trait ParallelBackend: Backend {
    /// Takes this rank's part of a tensor to another layout, together with the other ranks.
    ///
    /// # Errors
    /// Those of the collectives. An error in a backward pass is returned by [`World::backward`],
    /// and its gradients are NaN.
    fn exchange(local: FloatTensor<Self>, exchange: Exchange) -> Result<FloatTensor<Self>>;
}

impl ParallelBackend for Flex {
    fn exchange(local: FloatTensor<Self>, exchange: Exchange) -> Result<FloatTensor<Self>> {
        let Exchange { world, forward, .. } = exchange;
        if forward.is_identity() {
            return Ok(local);
        }
        let local = Tensor::<Self, 1>::from_primitive(TensorPrimitive::Float(local));
        let device = local.device();
        // The rank of the type is not that of the primitive; nothing here depends on it.
        let data = local.into_data().into_vec::<f32>().map_err(|_| {
            Error::invalid("element type of a distributed tensor", "another one", "f32")
        })?;
        let result = forward.run(&world, data)?;
        let data = TensorData::new(result, forward.size(world.rank()));
        Ok(Self::float_from_data(data, &device))
    }
}

impl<B: ParallelBackend, C: CheckpointStrategy> ParallelBackend for Autodiff<B, C> {
    fn exchange(local: FloatTensor<Self>, exchange: Exchange) -> Result<FloatTensor<Self>> {
        let prepared = Redistribute.prepare::<C>([local.node.clone()]).compute_bound().stateful();
        match prepared {
            OpsKind::Tracked(prepared) => {
                if let Some(reason) = exchange.no_gradient {
                    return Err(Error::invalid(
                        "tensor whose gradient is wanted",
                        reason,
                        "one outside of autograd",
                    ));
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

/// The node of the graph.
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
            let no_gradient = Some("that of a gradient");
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
