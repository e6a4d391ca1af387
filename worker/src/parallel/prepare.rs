//! Redistribution of the input and output of a parallel layer: the functions of torch's first
//! tensor-parallel module, by their names there. Meshes have one dimension.
//!
//! A plain tensor that comes in *is* this rank's part; a distributed one is redistributed. Where no
//! mesh is given, it is the distributed tensor's own.

use burn::tensor::TensorMetadata;
use zeroshard_proto::DimPlacement as Placement;

use super::backend::ParallelBackend;
use super::dist_tensor::{DistTensor, LAST, Value};
use super::error::{Error, Result};
use super::world::Mesh;

/// A tensor sharded along `dim` ([`LAST`] is possible).
///
/// # Errors
/// All of these functions: [`Error::Invalid`] unless the mesh has one dimension, for a plain
/// tensor without a mesh and for an unknown dimension; those of the collectives.
pub fn make_input_shard_1d<B: ParallelBackend>(
    input: impl Into<Value<B>>,
    mesh: Option<&Mesh>,
    dim: usize,
) -> Result<DistTensor<B>> {
    place(input.into(), mesh, Placement::Shard(dim), Placement::Shard(dim))
}

/// A tensor sharded along its last dimension.
///
/// # Errors
/// See [`make_input_shard_1d`].
pub fn make_input_shard_1d_last_dim<B: ParallelBackend>(
    input: impl Into<Value<B>>,
    mesh: Option<&Mesh>,
) -> Result<DistTensor<B>> {
    make_input_shard_1d(input, mesh, LAST)
}

/// A replicated tensor, of parts along dimension 0. It is for a layer whose weights are cut: its
/// gradients are parts of a sum, which backward reduces and scatters.
///
/// # Errors
/// See [`make_input_shard_1d`].
pub fn make_input_reshard_replicate<B: ParallelBackend>(
    input: impl Into<Value<B>>,
    mesh: Option<&Mesh>,
) -> Result<DistTensor<B>> {
    make_input_shard_1d(input, mesh, 0)?.replicate_for_parts()
}

/// A replicated tensor.
///
/// # Errors
/// See [`make_input_shard_1d`].
pub fn make_input_replicate_1d<B: ParallelBackend>(
    input: impl Into<Value<B>>,
    mesh: Option<&Mesh>,
) -> Result<DistTensor<B>> {
    place(input.into(), mesh, Placement::Replicate, Placement::Replicate)
}

/// A distributed output, sharded along `dim` ([`LAST`] is possible).
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

/// A distributed output, replicated.
///
/// # Errors
/// See [`make_output_shard_1d`].
pub fn make_output_replicate_1d<B: ParallelBackend>(
    output: impl Into<Value<B>>,
    mesh: Option<&Mesh>,
) -> Result<DistTensor<B>> {
    make_input_replicate_1d(output.into().dist()?, mesh)
}

/// A distributed output as a plain tensor: all of it.
///
/// # Errors
/// See [`make_output_shard_1d`].
pub fn make_output_tensor<B: ParallelBackend>(
    output: impl Into<Value<B>>,
    mesh: Option<&Mesh>,
) -> Result<Value<B>> {
    local(make_output_replicate_1d(output, mesh)?)
}

/// A distributed output as a plain tensor: this rank's part as it is. The mesh is not used.
///
/// # Errors
/// See [`make_output_shard_1d`].
pub fn make_sharded_output_tensor<B: ParallelBackend>(
    output: impl Into<Value<B>>,
    _mesh: Option<&Mesh>,
) -> Result<Value<B>> {
    local(output.into().dist()?)
}

/// A distributed output as a plain tensor: this rank's part along dimension 0.
///
/// # Errors
/// See [`make_output_shard_1d`].
pub fn make_output_reshard_tensor<B: ParallelBackend>(
    output: impl Into<Value<B>>,
    mesh: Option<&Mesh>,
) -> Result<Value<B>> {
    local(make_output_shard_1d(output, mesh, 0)?)
}

/// How a style prepares the input of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PrepareInput {
    /// Not at all. A plain tensor is then taken for a replicated one.
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
    /// torch's current keywords: the layout of a plain tensor, and the one that the layer needs.
    Layouts {
        /// `input_layouts`.
        input: Placement,
        /// `desired_input_layouts`.
        desired: Placement,
    },
}

impl PrepareInput {
    /// The layout of a plain tensor.
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

    /// `last`: size of the input's last dimension, which the layer knows. Parts along it may have
    /// different sizes.
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
            Self::Layouts { input: is, desired } => {
                let own = match &input {
                    Value::Dist(tensor) => tensor.placements().first().copied().unwrap_or(is),
                    Value::Local(_) => is,
                };
                let tensor = place(input, at, is, own)?;
                if desired == Placement::Replicate {
                    tensor.replicate_for_parts()?
                } else {
                    tensor.reshard(&[desired])?
                }
            }
        }))
    }
}

/// How a style prepares the output of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PrepareOutput {
    /// Not at all: a distributed tensor.
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
    /// Today's keywords.
    Layouts {
        /// `output_layouts`.
        output: Placement,
        /// `use_local_output`: whether a plain tensor comes out.
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

/// A tensor on a mesh of one dimension: a plain one is `plain`, a distributed one becomes `wanted`.
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
            Err(Error::invalid("mesh", "not given", "given, for a plain tensor"))
        }
        (Value::Dist(tensor), mesh) => {
            let mesh = mesh.unwrap_or(tensor.mesh()).clone();
            check(&mesh)?;
            tensor.reshard_to(&mesh, &[wanted])
        }
    }
}

/// This rank's part.
pub(crate) fn local<B: ParallelBackend>(tensor: DistTensor<B>) -> Result<Value<B>> {
    let gradient: Vec<Placement> =
        tensor.placements().iter().map(super::dist_tensor::gradient_of).collect();
    Ok(Value::Local(tensor.local_for(&gradient)?))
}
