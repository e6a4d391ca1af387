//! An embedding whose table may be distributed.

use burn::module::{Module, Param};
use burn::nn::Embedding;
use burn::tensor::backend::Backend;
use burn::tensor::module::embedding;
use burn::tensor::{Int, Tensor};
use zeroshard_model::DimPlacement as Placement;

use super::backend::ParallelBackend;
use super::dist_tensor::{DistTensor, PARTIAL, Value, primitive};
use super::error::Result;
use super::placed::Placed;

/// burn's [`Embedding`], with a table that can be distributed. Create it with `embedding.into()`.
#[derive(Module, Debug)]
pub struct ParallelEmbedding<B: Backend> {
    /// The table, `[n_embedding, d_model]`, or this rank's part if the layer is distributed.
    pub weight: Param<Tensor<B, 2>>,
    #[module(skip)]
    pub(crate) placed: Option<Placed>,
}

impl<B: Backend> From<Embedding<B>> for ParallelEmbedding<B> {
    fn from(Embedding { weight }: Embedding<B>) -> Self {
        Self { weight, placed: None }
    }
}

impl<B: ParallelBackend> ParallelEmbedding<B> {
    /// Looks up the vectors of `tokens`, which must be the same on every rank of the mesh. The
    /// input has the shape `[n, t]`, the output `[n, t, d_model]`.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn forward(&self, tokens: Tensor<B, 2, Int>) -> Result<Value<B>> {
        let Some(placed) = &self.placed else {
            return Ok(embedding(self.weight.val(), tokens).into());
        };
        let weight = placed.dist("weight", &self.weight)?;
        let [n, t] = tokens.dims();
        let shape = vec![n, t, weight.shape()[1]];
        let output = weight.placements().iter().map(|placement| match placement {
            Placement::Shard(0) => PARTIAL,
            Placement::Shard(_) => Placement::Shard(2),
            _ => Placement::Replicate,
        });
        let output: Vec<Placement> = output.collect();
        let first = weight.offset()?[0];
        let local = if output.contains(&PARTIAL) {
            lookup(self.weight.val(), tokens, first as i64)
        } else {
            embedding(self.weight.val(), tokens)
        };
        let output = DistTensor::assembled(primitive(local), placed.mesh.clone(), shape, output)?;
        placed.output.apply(output, &placed.mesh)
    }
}

/// Looks up tokens in a range of the table's rows, `table`, which begins at row `first`. The result
/// is zero for tokens outside the range.
pub fn lookup<B: Backend>(
    table: Tensor<B, 2>,
    tokens: Tensor<B, 2, Int>,
    first: i64,
) -> Tensor<B, 3> {
    let [rows, width] = table.dims();
    let [n, t] = tokens.dims();
    if rows == 0 {
        // The result must depend on the table, because every rank has to execute the collectives of
        // the backward pass.
        let zero = table.sum().reshape([1, 1, 1]);
        return Tensor::zeros([n, t, width], &tokens.device()) + zero;
    }
    let row = tokens.sub_scalar(first);
    let outside = row.clone().lower_elem(0).bool_or(row.clone().greater_equal_elem(rows as i64));
    let vectors = embedding(table, row.clamp(0, rows as i64 - 1));
    vectors.mask_fill(outside.unsqueeze_dim::<3>(2).expand([n, t, width]), 0.0)
}
