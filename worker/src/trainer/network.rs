//! A model as one rank runs it: its part of every tensor, and the group of ranks that has the
//! others.

use std::sync::Arc;

use burn::backend::{Autodiff, Flex};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use zeroshard_proto::{DimPlacement as Placement, Layout, ProcessMesh, Reduction, TensorBox};

use super::model::{Model, Parameter};
use super::parallelism::Parallelism;
use crate::collectives::Collectives;
use crate::parallel::{DistTensor, Mesh, PARTIAL, Result, World};

/// The backend without graphs.
pub type Plain = Flex;
/// The backend with graphs. It also runs forward passes without graphs: its operations are not
/// always the plain backend's (there a softmax is one fused kernel), and the bits must not depend
/// on the level.
pub type Graph = Autodiff<Flex>;

/// The tensor-parallel ranks of a replica, as one of them sees them. Cheap to clone.
///
/// Hidden states are `[n, t, width]`: `n` windows of `t` characters. Between the cut layers, each
/// rank has the whole residual stream, or with sequence parallelism its part of every window.
#[derive(Debug, Clone)]
pub struct Group {
    /// INVARIANT: of one dimension.
    mesh: Mesh,
    parallelism: Parallelism,
}

impl Group {
    /// The group of this rank on `mesh`, the mesh of `parallelism`. All workers call this at the
    /// same time, with the same description of the run (`said`).
    ///
    /// # Errors
    /// Those of the collectives; [`crate::collectives::Error::Disagreement`] if another worker has
    /// another mesh or another description.
    pub fn new(
        collectives: Arc<dyn Collectives>,
        mesh: ProcessMesh,
        parallelism: Parallelism,
        said: &str,
    ) -> Result<Self> {
        let world = World::new(collectives);
        let all = world.mesh(mesh)?;
        world.agree(all.process_mesh(), "the run", said)?;
        Ok(Self { mesh: all.sub_mesh(&["tp"])?, parallelism })
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.parallelism.ranks as usize
    }

    /// This rank's part of a parameter.
    pub fn bounds(&self, parameter: &Parameter) -> TensorBox {
        let placement = self.parallelism.placements(parameter)[1];
        let layout = Layout::new(self.mesh.process_mesh().clone(), vec![placement]);
        let layout = layout.expect("the mesh has one dimension");
        layout
            .local_box(&parameter.sizes(), self.mesh.rank())
            .expect("a mesh is made with this rank in it")
    }

    /// The first character of a window of `length` in this rank's part of the residual stream, and
    /// the number of characters in it.
    pub fn window(&self, length: usize) -> (usize, usize) {
        if !self.parallelism.sequence {
            return (0, length);
        }
        let part = length / self.size();
        (self.mesh.coordinate()[0] * part, part)
    }

    /// From the residual stream into a cut layer: every rank gets the whole input, and its gradient
    /// is a term of a sum over the ranks.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn enter(&self, x: Tensor<Graph, 3>) -> Result<Tensor<Graph, 3>> {
        let x = DistTensor::from_local(x, &self.mesh, &[self.stream()])?;
        x.convert(&[Placement::Replicate], &[PARTIAL])?.to_local_with_gradient(&[PARTIAL])
    }

    /// From a cut layer, whose outputs are the terms of a sum over the ranks, to the residual
    /// stream.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn leave(&self, x: Tensor<Graph, 3>) -> Result<Tensor<Graph, 3>> {
        DistTensor::from_local(x, &self.mesh, &[PARTIAL])?.reshard(&[self.stream()])?.to_local()
    }

    /// The sum over the ranks. All ranks go on with the same computation.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn sum(&self, x: Tensor<Graph, 2>) -> Result<Tensor<Graph, 2>> {
        DistTensor::from_local(x, &self.mesh, &[PARTIAL])?.full()
    }

    /// The elementwise maximum over the ranks, of tensors outside any graph.
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

/// A model as one rank runs it: all of it, or its part of what a group has together.
#[derive(Debug, Clone)]
pub struct Network {
    model: Model,
    group: Option<Group>,
    /// The box of each tensor that this rank has.
    boxes: Vec<TensorBox>,
}

impl Network {
    /// All of a model.
    pub fn whole(model: Model) -> Self {
        Self::new(model, None)
    }

    /// A rank's part of a model; without a group, all of it.
    pub fn new(model: Model, group: Option<Group>) -> Self {
        let bounds = |parameter: &Parameter| match &group {
            Some(group) => group.bounds(parameter),
            None => TensorBox::whole(&parameter.sizes()),
        };
        let boxes = model.parameters().iter().map(bounds).collect();
        Self { model, group, boxes }
    }

    /// The whole model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The ranks that have the model together.
    pub fn group(&self) -> Option<&Group> {
        self.group.as_ref()
    }

    /// The box of a tensor that this rank has.
    pub fn bounds(&self, tensor: usize) -> &TensorBox {
        &self.boxes[tensor]
    }

    /// Number of ranks that have the model together.
    pub fn ranks(&self) -> usize {
        self.group.as_ref().map_or(1, Group::size)
    }
}
