//! Distributed tensors: each rank of a mesh holds a part.
//!
//! By default, the gradient of a `Shard` is sharded in the same way, and the gradients of a
//! `Replicate` and of a `Partial` are replicated. If the ranks use a replicated tensor in different
//! computations, such as the input of a column-wise layer, their gradients are partial sums. The
//! layers and [`DistTensor::to_local_with_gradient`] declare this, and the backward pass reduces
//! the gradients, as torch's DTensor does with `grad_placements`.

use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorMetadata, TensorPrimitive};
use zeroshard_model::{DimPlacement as Placement, Layout, Reduction, geometry::list};

use super::backend::{Exchange, ParallelBackend};
use super::error::{Error, Result};
use super::transfer::Transfer;
use super::world::Mesh;

/// The last dimension of a tensor. `Shard(LAST)` is torch's `Shard(-1)`.
pub const LAST: usize = usize::MAX;

/// A pending sum, torch's `Partial()`.
pub const PARTIAL: Placement = Placement::Partial(Reduction::Sum);

/// A tensor of which each rank of a mesh holds a part.
///
/// The number of dimensions is not part of the type. The methods that return a plain tensor have it
/// as a parameter.
#[derive(Debug, Clone)]
pub struct DistTensor<B: ParallelBackend> {
    local: FloatTensor<B>,
    mesh: Mesh,
    /// The shape of the whole tensor.
    shape: Vec<usize>,
    /// INVARIANT: one placement per mesh dimension, and each `Shard` names a dimension of `shape`.
    placements: Vec<Placement>,
    /// The placements of the gradient of `local`. INVARIANT: the defaults of the module
    /// documentation, except that the gradient of a `Replicate` may be `Partial`.
    gradient: Vec<Placement>,
}

/// Distributes a tensor over a mesh. Every rank must pass the same whole tensor.
///
/// # Errors
/// [`Error::Invalid`] for placements that do not match the mesh or the shape.
pub fn shard_tensor<B: ParallelBackend, const D: usize>(
    tensor: Tensor<B, D>,
    mesh: &Mesh,
    placements: &[Placement],
) -> Result<DistTensor<B>> {
    let replicated = vec![Placement::Replicate; mesh.process_mesh().ndim()];
    DistTensor::from_local(tensor, mesh, &replicated)?.reshard(placements)
}

impl<B: ParallelBackend> DistTensor<B> {
    /// Creates a distributed tensor whose local part on this rank is `local`. No data is
    /// transferred. The parts of all ranks must have the same shape.
    ///
    /// # Errors
    /// [`Error::Invalid`] for placements that do not match the mesh or the shape.
    pub fn from_local<const D: usize>(
        local: Tensor<B, D>,
        mesh: &Mesh,
        placements: &[Placement],
    ) -> Result<Self> {
        Self::from_primitive(primitive(local), mesh, placements)
    }

    /// Creates a distributed tensor like [`Self::from_local`]. `shape` is the shape of the whole
    /// tensor, so the parts may have different sizes.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `local` does not have the shape of this rank's part, and for
    /// placements that do not match the mesh or the shape.
    pub fn from_local_of<const D: usize>(
        local: Tensor<B, D>,
        mesh: &Mesh,
        placements: &[Placement],
        shape: [usize; D],
    ) -> Result<Self> {
        Self::of_shape(primitive(local), mesh, placements, shape.to_vec())
    }

    pub(crate) fn of_shape(
        local: FloatTensor<B>,
        mesh: &Mesh,
        placements: &[Placement],
        shape: Vec<usize>,
    ) -> Result<Self> {
        let placements = resolve(placements, shape.len());
        let tensor = Self::assembled(local, mesh.clone(), shape, placements)?;
        let size = tensor.transfer(&tensor.placements, &tensor.placements)?.size(mesh.rank());
        let found = tensor.local.shape().to_vec();
        if found != size {
            let expected = format!(
                "{size:?}, the part of a tensor of shape {:?} with placements {}",
                tensor.shape,
                list(&tensor.placements)
            );
            return Err(Error::invalid("shape of a local part", format!("{found:?}"), expected));
        }
        Ok(tensor)
    }

    pub(crate) fn from_primitive(
        local: FloatTensor<B>,
        mesh: &Mesh,
        placements: &[Placement],
    ) -> Result<Self> {
        let mut shape = local.shape().to_vec();
        let placements = resolve(placements, shape.len());
        for (placement, size) in placements.iter().zip(mesh.process_mesh().shape()) {
            if let &Placement::Shard(dim) = placement
                && let Some(global) = shape.get_mut(dim)
            {
                *global *= size;
            }
        }
        Self::assembled(local, mesh.clone(), shape, placements)
    }

    /// Checks the placements, but not the shape of the local part, which the caller guarantees.
    pub(crate) fn assembled(
        local: FloatTensor<B>,
        mesh: Mesh,
        shape: Vec<usize>,
        placements: Vec<Placement>,
    ) -> Result<Self> {
        let gradient = placements.iter().map(gradient_of).collect();
        let tensor = Self { local, mesh, shape, placements, gradient };
        tensor.layout(&tensor.placements)?.check(&tensor.sizes(), "to be distributed")?;
        Ok(tensor)
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The shape of the whole tensor.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The placements, one for each dimension of the mesh.
    pub fn placements(&self) -> &[Placement] {
        &self.placements
    }

    /// Redistributes the tensor to other placements on the same mesh.
    ///
    /// # Errors
    /// [`Error::Invalid`] for placements that do not match the mesh or the shape; those of the
    /// collectives.
    pub fn reshard(self, placements: &[Placement]) -> Result<Self> {
        let placements = resolve(placements, self.shape.len());
        let gradient: Vec<Placement> = placements.iter().map(gradient_of).collect();
        self.convert(&placements, &gradient)
    }

    /// Redistributes the tensor to another mesh of the same world. All ranks of both meshes must
    /// call this method. On a mesh that does not contain a rank, the part of that rank is empty.
    ///
    /// # Errors
    /// Those of [`Self::reshard`]; [`Error::Invalid`] for a mesh of a different world.
    pub fn reshard_to(self, mesh: &Mesh, placements: &[Placement]) -> Result<Self> {
        if *mesh == self.mesh {
            return self.reshard(placements);
        }
        let placements = resolve(placements, self.shape.len());
        let gradient: Vec<Placement> = placements.iter().map(gradient_of).collect();
        let to = |placements: &[Placement]| {
            Layout::new(mesh.process_mesh().clone(), placements.to_vec())
        };
        let forward = Transfer {
            shape: self.sizes(),
            from: self.layout(&self.placements)?,
            to: to(&placements)?,
        };
        let backward = Transfer {
            shape: self.sizes(),
            from: to(&gradient)?,
            to: self.layout(&self.gradient)?,
        };
        let no_gradient = self.averages().then_some("of a pending mean or maximum to another mesh");
        let world = self.mesh.world().clone();
        let exchange = Exchange { world, forward, backward, scale: 1.0, no_gradient };
        let local = B::exchange(self.local, exchange)?;
        Self::assembled(local, mesh.clone(), self.shape, placements)
    }

    /// Replicates the tensor for a sharded layer, in which each rank computes something different.
    /// The gradients of the ranks are therefore partial sums, which the backward pass reduces, and
    /// scatters along sharded dimensions.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn replicate_for_parts(self) -> Result<Self> {
        let part = |placement: &Placement| match placement {
            Placement::Shard(_) => PARTIAL,
            _ => Placement::Replicate,
        };
        let gradient: Vec<Placement> = self.placements.iter().map(part).collect();
        self.convert(&vec![Placement::Replicate; gradient.len()], &gradient)
    }

    /// The part of this rank. Its gradient has the placements of the tensor, with `Replicate` in
    /// place of `Partial`.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the tensor has `D` dimensions, and those of the collectives.
    pub fn to_local<const D: usize>(self) -> Result<Tensor<B, D>> {
        let gradient: Vec<Placement> = self.placements.iter().map(gradient_of).collect();
        self.to_local_with_gradient(&gradient)
    }

    /// The part of this rank, whose gradient has the placements `gradient`: torch's
    /// `to_local(grad_placements=...)`.
    ///
    /// # Errors
    /// Those of [`Self::to_local`].
    pub fn to_local_with_gradient<const D: usize>(
        self,
        gradient: &[Placement],
    ) -> Result<Tensor<B, D>> {
        plain(self.local_for(gradient)?)
    }

    /// The whole tensor, on every rank.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the tensor has `D` dimensions, and those of the collectives.
    pub fn full<const D: usize>(self) -> Result<Tensor<B, D>> {
        let whole = vec![Placement::Replicate; self.placements.len()];
        self.reshard(&whole)?.to_local()
    }

    /// Applies an elementwise function. Pending reductions are executed first.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the tensor has `D` dimensions and `function` keeps the shape, and
    /// those of the collectives.
    pub fn map<const D: usize>(
        self,
        function: impl FnOnce(Tensor<B, D>) -> Tensor<B, D>,
    ) -> Result<Self> {
        let reduced: Vec<Placement> = self
            .placements
            .iter()
            .map(|placement| match placement {
                Placement::Partial(_) => Placement::Replicate,
                other => *other,
            })
            .collect();
        let tensor = if reduced == self.placements { self } else { self.reshard(&reduced)? };
        let (mesh, shape, placements) =
            (tensor.mesh.clone(), tensor.shape.clone(), tensor.placements.clone());
        let local = tensor.to_local::<D>()?;
        let before = local.shape();
        let local = function(local);
        if local.shape() != before {
            let after = local.shape();
            return Err(Error::refused(format!(
                "an elementwise function must keep the shape {before:?}, but returned {after:?}"
            )));
        }
        Self::assembled(primitive(local), mesh, shape, placements)
    }

    /// The position of this rank's part in the whole tensor.
    pub(crate) fn offset(&self) -> Result<Vec<u64>> {
        let bounds = self.layout(&self.placements)?.local_box(&self.sizes(), self.mesh.rank());
        Ok(bounds.expect("World::mesh checks that this rank is in it").offset)
    }

    /// The part of this rank, whose gradient has the placements `gradient`.
    pub(crate) fn local_for(self, gradient: &[Placement]) -> Result<FloatTensor<B>> {
        let placements = self.placements.clone();
        let gradient = resolve(gradient, self.shape.len());
        Ok(self.convert(&placements, &gradient)?.local)
    }

    /// Redistributes the tensor to `placements`; the gradient of the result has the placements
    /// `gradient`.
    ///
    /// # Errors
    /// [`super::Error`] of the collectives.
    pub fn convert(self, placements: &[Placement], gradient: &[Placement]) -> Result<Self> {
        if self.placements == placements && self.gradient == gradient {
            return Ok(self);
        }
        let forward = self.transfer(&self.placements, placements)?;
        forward.to.check(&forward.shape, "to be distributed")?;
        let backward = self.transfer(gradient, &self.gradient)?;
        let (mut scale, mut no_gradient) = (1.0, None);
        let pairs = self.placements.iter().zip(placements).zip(self.mesh.process_mesh().shape());
        for ((from, to), &size) in pairs.filter(|((from, to), _)| from != to) {
            // In a mean over n ranks, the part of each rank has the weight 1/n.
            match (from, to) {
                (Placement::Partial(Reduction::Max), _)
                | (_, Placement::Partial(Reduction::Max)) => {
                    no_gradient = Some("of a maximum over ranks");
                }
                (Placement::Partial(Reduction::Avg), _) => scale /= size as f32,
                (_, Placement::Partial(Reduction::Avg)) => scale *= size as f32,
                _ => {}
            }
        }
        let world = self.mesh.world().clone();
        let local =
            B::exchange(self.local, Exchange { world, forward, backward, scale, no_gradient })?;
        Ok(Self { local, placements: placements.to_vec(), gradient: gradient.to_vec(), ..self })
    }

    fn averages(&self) -> bool {
        let kinds = [Reduction::Avg, Reduction::Max].map(Placement::Partial);
        self.placements.iter().any(|placement| kinds.contains(placement))
    }

    fn sizes(&self) -> Vec<u64> {
        self.shape.iter().map(|&size| size as u64).collect()
    }

    fn layout(&self, placements: &[Placement]) -> Result<Layout> {
        Ok(Layout::new(self.mesh.process_mesh().clone(), placements.to_vec())?)
    }

    fn transfer(&self, from: &[Placement], to: &[Placement]) -> Result<Transfer> {
        Ok(Transfer { shape: self.sizes(), from: self.layout(from)?, to: self.layout(to)? })
    }
}

/// The default placement of a gradient; see the module documentation.
pub(crate) fn gradient_of(placement: &Placement) -> Placement {
    match placement {
        Placement::Shard(dim) => Placement::Shard(*dim),
        Placement::Replicate | Placement::Partial(_) => Placement::Replicate,
    }
}

/// Replaces [`LAST`] in the placements of a tensor of `rank` dimensions.
pub(crate) fn resolve(placements: &[Placement], rank: usize) -> Vec<Placement> {
    let resolve = |placement: &Placement| match placement {
        Placement::Shard(LAST) if rank > 0 => Placement::Shard(rank - 1),
        other => *other,
    };
    placements.iter().map(resolve).collect()
}

pub(crate) fn primitive<B: ParallelBackend, const D: usize>(
    tensor: Tensor<B, D>,
) -> FloatTensor<B> {
    tensor.into_primitive().tensor()
}

/// A plain tensor of `D` dimensions.
pub(crate) fn plain<B: ParallelBackend, const D: usize>(
    local: FloatTensor<B>,
) -> Result<Tensor<B, D>> {
    let found = local.shape().num_dims();
    if found != D {
        return Err(Error::invalid(
            "number of dimensions",
            found,
            format!("{D}, as in the type of the result"),
        ));
    }
    Ok(Tensor::from_primitive(TensorPrimitive::Float(local)))
}

/// A plain or distributed tensor. Parallel layers have inputs and outputs of this type.
#[derive(Debug, Clone)]
pub enum Value<B: ParallelBackend> {
    /// A plain tensor of this rank.
    Local(FloatTensor<B>),
    /// A distributed tensor.
    Dist(DistTensor<B>),
}

impl<B: ParallelBackend> Value<B> {
    /// The plain tensor, or this rank's part of the distributed tensor.
    ///
    /// # Errors
    /// Those of [`DistTensor::to_local`].
    pub fn local<const D: usize>(self) -> Result<Tensor<B, D>> {
        match self {
            Self::Local(local) => plain(local),
            Self::Dist(tensor) => tensor.to_local(),
        }
    }

    /// The distributed tensor.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a plain tensor.
    pub fn dist(self) -> Result<DistTensor<B>> {
        match self {
            Self::Dist(tensor) => Ok(tensor),
            Self::Local(_) => Err(Error::refused(
                "the tensor is not distributed; use `DistTensor::from_local` or `shard_tensor`",
            )),
        }
    }

    /// Applies an elementwise function, such as an activation.
    ///
    /// # Errors
    /// Those of [`DistTensor::map`].
    pub fn map<const D: usize>(
        self,
        function: impl FnOnce(Tensor<B, D>) -> Tensor<B, D>,
    ) -> Result<Self> {
        match self {
            Self::Local(local) => Ok(function(plain(local)?).into()),
            Self::Dist(tensor) => Ok(tensor.map(function)?.into()),
        }
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        match self {
            Self::Local(local) => local.shape().num_dims(),
            Self::Dist(tensor) => tensor.shape.len(),
        }
    }
}

impl<B: ParallelBackend, const D: usize> From<Tensor<B, D>> for Value<B> {
    fn from(tensor: Tensor<B, D>) -> Self {
        Self::Local(primitive(tensor))
    }
}

impl<B: ParallelBackend> From<DistTensor<B>> for Value<B> {
    fn from(tensor: DistTensor<B>) -> Self {
        Self::Dist(tensor)
    }
}
