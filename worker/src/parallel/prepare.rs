//! Redistribution of the input and output of a parallel layer. The functions have the names of the
//! first version of torch's tensor-parallel module. Meshes must have one dimension.
//!
//! A plain tensor is taken as this rank's part; a distributed tensor is redistributed. The default
//! mesh is that of the distributed tensor.

use burn::tensor::TensorMetadata;
use zeroshard_model::DimPlacement as Placement;

use super::backend::ParallelBackend;
use super::dist_tensor::{DistTensor, LAST, Value};
use super::error::{Error, Result};
use super::world::Mesh;

/// Shards a tensor along `dim`, which may be [`LAST`].
///
/// # Errors
/// Like all functions of this module: [`Error::Invalid`] unless the mesh has one dimension, for a
/// plain tensor without a mesh, and for an unknown dimension; those of the collectives.
pub fn make_input_shard_1d<B: ParallelBackend>(
    input: impl Into<Value<B>>,
    mesh: Option<&Mesh>,
    dim: usize,
) -> Result<DistTensor<B>> {
    place(input.into(), mesh, Placement::Shard(dim), Placement::Shard(dim))
}

/// Shards a tensor along its last dimension.
///
/// # Errors
/// See [`make_input_shard_1d`].
pub fn make_input_shard_1d_last_dim<B: ParallelBackend>(
    input: impl Into<Value<B>>,
    mesh: Option<&Mesh>,
) -> Result<DistTensor<B>> {
    make_input_shard_1d(input, mesh, LAST)
}

/// Replicates a tensor that is sharded along dimension 0, as the input of a layer with sharded
/// weights. The gradients of the ranks are partial sums, which the backward pass reduces and
/// scatters.
///
/// # Errors
/// See [`make_input_shard_1d`].
pub fn make_input_reshard_replicate<B: ParallelBackend>(
    input: impl Into<Value<B>>,
    mesh: Option<&Mesh>,
) -> Result<DistTensor<B>> {
    make_input_shard_1d(input, mesh, 0)?.replicate_for_parts()
}

/// Replicates a tensor.
///
/// # Errors
/// See [`make_input_shard_1d`].
pub fn make_input_replicate_1d<B: ParallelBackend>(
    input: impl Into<Value<B>>,
    mesh: Option<&Mesh>,
) -> Result<DistTensor<B>> {
    place(input.into(), mesh, Placement::Replicate, Placement::Replicate)
}

/// Shards a distributed output along `dim`, which may be [`LAST`].
///
/// # Errors
/// See [`make_input_shard_1d`]; [`Error::Invalid`] for a plain tensor.
pub fn make_output_shard_1d<B: ParallelBackend>(
    output: impl Into<Value<B>>,
    mesh: Option<&Mesh>,
    dim: usize,
) -> Result<DistTensor<B>> {
    make_input_shard_1d(output.into().dist()?, mesh, dim)
}

/// Replicates a distributed output.
///
/// # Errors
/// See [`make_output_shard_1d`].
pub fn make_output_replicate_1d<B: ParallelBackend>(
    output: impl Into<Value<B>>,
    mesh: Option<&Mesh>,
) -> Result<DistTensor<B>> {
    make_input_replicate_1d(output.into().dist()?, mesh)
}

/// Converts a distributed output into a plain tensor: the whole tensor.
///
/// # Errors
/// See [`make_output_shard_1d`].
pub fn make_output_tensor<B: ParallelBackend>(
    output: impl Into<Value<B>>,
    mesh: Option<&Mesh>,
) -> Result<Value<B>> {
    local(make_output_replicate_1d(output, mesh)?)
}

/// Converts a distributed output into a plain tensor: this rank's part in its current placement.
/// The mesh is ignored.
///
/// # Errors
/// See [`make_output_shard_1d`].
pub fn make_sharded_output_tensor<B: ParallelBackend>(
    output: impl Into<Value<B>>,
    _mesh: Option<&Mesh>,
) -> Result<Value<B>> {
    local(output.into().dist()?)
}

/// Converts a distributed output into a plain tensor: this rank's part along dimension 0.
///
/// # Errors
/// See [`make_output_shard_1d`].
pub fn make_output_reshard_tensor<B: ParallelBackend>(
    output: impl Into<Value<B>>,
    mesh: Option<&Mesh>,
) -> Result<Value<B>> {
    local(make_output_shard_1d(output, mesh, 0)?)
}

/// The redistribution of the input of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PrepareInput {
    /// No redistribution. A plain tensor is taken as replicated.
    #[default]
    AsIs,
    /// [`make_input_shard_1d`].
    Shard1d(usize),
    /// [`make_input_shard_1d_last_dim`].
    Shard1dLastDim,
    /// [`make_input_reshard_replicate`].
    ReshardReplicate,
    /// [`make_input_replicate_1d`].
    Replicate1d,
    /// The keywords of torch's current version: the layout of a plain tensor, and the layout that
    /// the layer needs.
    Layouts {
        /// `input_layouts`.
        input: Placement,
        /// `desired_input_layouts`.
        desired: Placement,
    },
}

impl PrepareInput {
    /// The placement that a plain tensor is taken to have.
    fn plain(self) -> Option<Placement> {
        match self {
            Self::AsIs => None,
            Self::Shard1d(dim) => Some(Placement::Shard(dim)),
            Self::Shard1dLastDim => Some(Placement::Shard(LAST)),
            Self::ReshardReplicate => Some(Placement::Shard(0)),
            Self::Replicate1d => Some(Placement::Replicate),
            Self::Layouts { input, .. } => Some(input),
        }
    }

    /// Redistributes an input. `last` is the size of the last dimension of the whole input, along
    /// which the parts may have different sizes.
    pub(crate) fn apply<B: ParallelBackend>(
        self,
        input: Value<B>,
        mesh: &Mesh,
        last: usize,
    ) -> Result<Value<B>> {
        let at = Some(mesh);
        let input = match (input, self.plain()) {
            (Value::Local(local), Some(plain @ Placement::Shard(dim))) => {
                mesh.check_1d("a tensor-parallel layer")?;
                let rank = local.shape().num_dims();
                if rank > 0 && (dim == LAST || dim + 1 == rank) {
                    let mut shape = local.shape().to_vec();
                    shape[rank - 1] = last;
                    Value::Dist(DistTensor::of_shape(local, mesh, &[plain], shape)?)
                } else {
                    Value::Local(local)
                }
            }
            (input, _) => input,
        };
        Ok(Value::Dist(match self {
            Self::AsIs => return Ok(input),
            Self::Shard1d(dim) => make_input_shard_1d(input, at, dim)?,
            Self::Shard1dLastDim => make_input_shard_1d_last_dim(input, at)?,
            Self::ReshardReplicate => make_input_reshard_replicate(input, at)?,
            Self::Replicate1d => make_input_replicate_1d(input, at)?,
            Self::Layouts { input: plain, desired } => {
                let current = match &input {
                    Value::Dist(tensor) => tensor.placements().first().copied().unwrap_or(plain),
                    Value::Local(_) => plain,
                };
                let tensor = place(input, at, plain, current)?;
                if desired == Placement::Replicate {
                    tensor.replicate_for_parts()?
                } else {
                    tensor.reshard(&[desired])?
                }
            }
        }))
    }
}

/// The redistribution of the output of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PrepareOutput {
    /// No redistribution; the result is a distributed tensor.
    #[default]
    AsIs,
    /// [`make_output_shard_1d`].
    Shard1d(usize),
    /// [`make_output_replicate_1d`].
    Replicate1d,
    /// [`make_output_tensor`].
    Tensor,
    /// [`make_sharded_output_tensor`].
    ShardedTensor,
    /// [`make_output_reshard_tensor`].
    ReshardTensor,
    /// The keywords of torch's current version.
    Layouts {
        /// `output_layouts`.
        output: Placement,
        /// `use_local_output`: whether the result is a plain tensor.
        local: bool,
    },
}

impl PrepareOutput {
    pub(crate) fn apply<B: ParallelBackend>(
        self,
        output: DistTensor<B>,
        mesh: &Mesh,
    ) -> Result<Value<B>> {
        let at = Some(mesh);
        Ok(match self {
            Self::AsIs => output.into(),
            Self::Shard1d(dim) => make_output_shard_1d(output, at, dim)?.into(),
            Self::Replicate1d => make_output_replicate_1d(output, at)?.into(),
            Self::Tensor => make_output_tensor(output, at)?,
            Self::ShardedTensor => make_sharded_output_tensor(output, at)?,
            Self::ReshardTensor => make_output_reshard_tensor(output, at)?,
            Self::Layouts { output: wanted, local: plain } => {
                let output = place(output.into(), at, wanted, wanted)?;
                if plain { local(output)? } else { output.into() }
            }
        })
    }
}

/// Places a tensor on a mesh of one dimension. A plain tensor is taken to have the placement
/// `plain`; a distributed tensor is redistributed to `wanted`.
fn place<B: ParallelBackend>(
    input: Value<B>,
    mesh: Option<&Mesh>,
    plain: Placement,
    wanted: Placement,
) -> Result<DistTensor<B>> {
    let check = |mesh: &Mesh| mesh.check_1d("a tensor-parallel layer");
    match (input, mesh) {
        (Value::Local(local), Some(mesh)) => {
            check(mesh)?;
            DistTensor::from_primitive(local, mesh, &[plain])
        }
        (Value::Local(_), None) => {
            Err(Error::refused("the tensor is not distributed; pass a mesh"))
        }
        (Value::Dist(tensor), mesh) => {
            let mesh = mesh.unwrap_or(tensor.mesh()).clone();
            check(&mesh)?;
            tensor.reshard_to(&mesh, &[wanted])
        }
    }
}

/// The part of this rank.
pub(crate) fn local<B: ParallelBackend>(tensor: DistTensor<B>) -> Result<Value<B>> {
    let gradient: Vec<Placement> =
        tensor.placements().iter().map(super::dist_tensor::gradient_of).collect();
    Ok(Value::Local(tensor.local_for(&gradient)?))
}
