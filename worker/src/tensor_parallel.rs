//! What the ranks of a tensor-parallel group do together between layers that are cut: Megatron's f and g (Shoeybi et al. 2019), and
//! with the residual stream cut by rows their sequence-parallel forms (Korthikanti et al. 2022).

use burn::tensor::Tensor;

use crate::parallel::{DistTensor, Mesh, PARTIAL, Partial, Reduction, Replicate, Result, Shard};
use crate::segments::Graph;

/// A tensor-parallel group, as one of its ranks sees it.
#[derive(Debug, Clone)]
pub struct Group {
    mesh: Mesh,
    sequence: bool,
}

impl Group {
    /// The ranks of a mesh of one dimension. `sequence`: whether the residual stream is cut.
    pub fn new(mesh: Mesh, sequence: bool) -> Self {
        Self { mesh, sequence }
    }

    /// The ranks.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Whether the residual stream is cut by rows.
    pub fn sequence(&self) -> bool {
        self.sequence
    }

    /// This rank's rows of a residual stream of so many.
    pub fn rows(&self, rows: usize) -> std::ops::Range<usize> {
        if !self.sequence {
            return 0..rows;
        }
        // torch.chunk's rule.
        let step = rows.div_ceil(self.mesh.process_mesh().size());
        let place = self.mesh.coordinate()[0];
        (step * place).min(rows)..(step * (place + 1)).min(rows)
    }

    /// From the residual stream of so many rows to layers that are cut: all rows. Backward sums the ranks' gradients.
    ///
    /// # Errors
    /// Those of the collectives, here and below.
    pub fn enter(&self, x: Tensor<Graph, 2>, rows: usize) -> Result<Tensor<Graph, 2>> {
        if self.sequence {
            let shape = [rows, x.dims()[1]];
            return DistTensor::from_local_of(x, &self.mesh, &[Shard(0)], shape)?
                .replicate_for_parts()?
                .to_local_with_gradient(&[PARTIAL]);
        }
        DistTensor::from_local(x, &self.mesh, &[Replicate])?.to_local_with_gradient(&[PARTIAL])
    }

    /// From layers that are cut, of whose outputs the sum is wanted, to the residual stream.
    ///
    /// # Errors
    /// See [`Self::enter`].
    pub fn leave(&self, y: Tensor<Graph, 2>) -> Result<Tensor<Graph, 2>> {
        let to = if self.sequence { Shard(0) } else { Replicate };
        DistTensor::from_local(y, &self.mesh, &[PARTIAL])?.reshard(&[to])?.to_local()
    }

    /// The sum of what the ranks have.
    ///
    /// # Errors
    /// See [`Self::enter`].
    pub fn sum(&self, y: Tensor<Graph, 2>) -> Result<Tensor<Graph, 2>> {
        DistTensor::from_local(y, &self.mesh, &[PARTIAL])?.full()
    }

    /// The largest of what the ranks have, outside of any graph.
    ///
    /// # Errors
    /// See [`Self::enter`].
    pub fn largest(&self, y: Tensor<Graph, 2>) -> Result<Tensor<Graph, 2>> {
        let largest =
            DistTensor::from_local(y.inner(), &self.mesh, &[Partial(Reduction::Max)])?.full::<2>()?;
        Ok(Tensor::from_inner(largest))
    }

    /// All columns, of which each rank has some.
    ///
    /// # Errors
    /// See [`Self::enter`].
    pub fn columns(&self, y: Tensor<Graph, 2>, columns: usize) -> Result<Tensor<Graph, 2>> {
        let shape = [y.dims()[0], columns];
        DistTensor::from_local_of(y, &self.mesh, &[Shard(1)], shape)?.full()
    }
}
