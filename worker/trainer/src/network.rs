//! The part of a model on one rank, and the group of ranks over which the model is sharded.

use std::sync::Arc;

use burn::backend::Autodiff;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use zeroshard_model::{DimPlacement as Placement, Layout, ProcessMesh, Reduction, TensorBox};
use zeroshard_worker::{
    collectives::Collectives,
    parallel::{DistTensor, Mesh, PARTIAL, Result, World},
};

use super::device::{Device, Plain};
use super::model::{Model, Parameter};
use super::parallelism::Parallelism;

/// The backend with autograd. It also executes forward passes that need no gradients, because some
/// of its operations differ from the plain backend's (which has a fused softmax kernel), and the
/// bits must not depend on the level.
pub type Graph = Autodiff<Plain>;

/// The tensor-parallel ranks of a replica. Cheap to clone.
///
/// Hidden states have the shape `[n, t, width]`: `n` windows of `t` characters. Between the sharded
/// layers, each rank holds the whole residual stream, or with sequence parallelism a part of every
/// window.
#[derive(Debug, Clone)]
pub struct Group {
    /// INVARIANT: has one dimension.
    mesh: Mesh,
    parallelism: Parallelism,
}

impl Group {
    /// Creates the group of this rank on `mesh`, the mesh of `parallelism`. All workers must call
    /// this function, with the same description of the run in `settings`.
    ///
    /// # Errors
    /// Those of the collectives; [`zeroshard_worker::collectives::Error::Disagreement`] if another
    /// worker has a different mesh or description.
    pub fn new(
        collectives: Arc<dyn Collectives>,
        mesh: ProcessMesh,
        parallelism: Parallelism,
        settings: &str,
    ) -> Result<Self> {
        let world = World::new(collectives);
        let all = world.mesh(mesh)?;
        world.agree(all.process_mesh(), "the run", settings)?;
        Ok(Self { mesh: all.sub_mesh(&["tp"])?, parallelism })
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.parallelism.ranks as usize
    }

    /// The box of a parameter that this rank holds.
    pub fn bounds(&self, parameter: &Parameter) -> TensorBox {
        let placement = self.parallelism.placements(parameter)[1];
        let layout = Layout::new(self.mesh.process_mesh().clone(), vec![placement]);
        let layout = layout.expect("the mesh has one dimension");
        layout
            .local_box(&parameter.sizes(), self.mesh.rank())
            .expect("World::mesh checks that this rank is in it")
    }

    /// The position of the first character and the number of characters that this rank's part of
    /// the residual stream has of a window of `length` characters.
    pub fn window(&self, length: usize) -> (usize, usize) {
        if !self.parallelism.sequence {
            return (0, length);
        }
        let part = length / self.size();
        (self.mesh.coordinate()[0] * part, part)
    }

    /// Redistributes the residual stream for a sharded layer: replicates it, and declares that the
    /// gradients of the ranks are partial sums.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn enter(&self, x: Tensor<Graph, 3>) -> Result<Tensor<Graph, 3>> {
        let x = DistTensor::from_local(x, &self.mesh, &[self.stream()])?;
        x.convert(&[Placement::Replicate], &[PARTIAL])?.to_local_with_gradient(&[PARTIAL])
    }

    /// Redistributes the output of a sharded layer, a partial sum on each rank, to the residual
    /// stream.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn leave(&self, x: Tensor<Graph, 3>) -> Result<Tensor<Graph, 3>> {
        DistTensor::from_local(x, &self.mesh, &[PARTIAL])?.reshard(&[self.stream()])?.to_local()
    }

    /// The sum over the ranks, replicated. All ranks must continue with the same computation.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn sum(&self, x: Tensor<Graph, 2>) -> Result<Tensor<Graph, 2>> {
        DistTensor::from_local(x, &self.mesh, &[PARTIAL])?.full()
    }

    /// The elementwise maximum over the ranks, for tensors that are not part of an autograd graph.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn max(&self, x: Tensor<Graph, 2>) -> Result<Tensor<Graph, 2>> {
        DistTensor::from_local(x, &self.mesh, &[Placement::Partial(Reduction::Max)])?.full()
    }

    /// Runs a backward pass.
    ///
    /// # Errors
    /// Those of its collectives.
    pub fn backward(
        &self,
        loss: &Tensor<Graph, 1>,
    ) -> Result<<Graph as AutodiffBackend>::Gradients> {
        self.mesh.world().backward(loss)
    }

    fn stream(&self) -> Placement {
        if self.parallelism.sequence { Placement::Shard(1) } else { Placement::Replicate }
    }
}

/// The part of a model on one rank: the whole model, or a shard if there is a group.
#[derive(Debug, Clone)]
pub struct Network {
    model: Model,
    group: Option<Group>,
    /// The box of each tensor that this rank holds.
    boxes: Vec<TensorBox>,
    device: Device,
}

impl Network {
    /// The whole model on one rank.
    pub fn whole(model: Model, device: Device) -> Self {
        Self::new(model, None, device)
    }

    /// The part of a model on this rank of `group`; without a group, the whole model.
    pub fn new(model: Model, group: Option<Group>, device: Device) -> Self {
        let bounds = |parameter: &Parameter| match &group {
            Some(group) => group.bounds(parameter),
            None => TensorBox::whole(&parameter.sizes()),
        };
        let boxes = model.parameters().iter().map(bounds).collect();
        Self { model, group, boxes, device }
    }

    /// The whole model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The device that computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The group of ranks over which the model is sharded, if it is.
    pub fn group(&self) -> Option<&Group> {
        self.group.as_ref()
    }

    /// The box of a tensor that this rank holds.
    pub fn bounds(&self, tensor: usize) -> &TensorBox {
        &self.boxes[tensor]
    }

    /// The number of ranks over which the model is sharded; 1 without a group.
    pub fn ranks(&self) -> usize {
        self.group.as_ref().map_or(1, Group::size)
    }
}
