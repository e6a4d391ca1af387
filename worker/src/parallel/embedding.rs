//! An embedding whose table may be distributed.

use burn::module::{Module, Param};
use burn::nn::Embedding;
use burn::tensor::backend::Backend;
use burn::tensor::module::embedding;
use burn::tensor::{Int, Tensor};
use zeroshard_proto::DimPlacement as Placement;

use super::backend::ParallelBackend;
use super::dist_tensor::{DistTensor, PARTIAL, Value, primitive};
use super::error::Result;
use super::placed::Placed;

/// burn's [`Embedding`], which can be distributed. Made from one: `embedding.into()`.
#[derive(Module, Debug)]
pub struct ParallelEmbedding<B: Backend> {
    /// `[n_embedding, d_model]`; of a distributed layer this rank's part of it.
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
    /// The vectors of `tokens`, which are the same on every rank of the mesh: `[n, t]` -> `[n, t,
    /// d_model]`.
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

/// The vectors of those tokens whose rows are here, from number `first` on; zeros for the others.
pub(crate) fn lookup<B: Backend>(
    table: Tensor<B, 2>,
    tokens: Tensor<B, 2, Int>,
    first: i64,
) -> Tensor<B, 3> {
    let [rows, width] = table.dims();
    let [n, t] = tokens.dims();
    if rows == 0 {
        // Of the graph nevertheless: backward has its collectives on every rank.
        let nothing = table.sum().reshape([1, 1, 1]);
        return Tensor::zeros([n, t, width], &tokens.device()) + nothing;
    }
    let here = tokens.sub_scalar(first);
    let elsewhere =
        here.clone().lower_elem(0).bool_or(here.clone().greater_equal_elem(rows as i64));
    let vectors = embedding(table, here.clamp(0, rows as i64 - 1));
    vectors.mask_fill(elsewhere.unsqueeze_dim::<3>(2).expand([n, t, width]), 0.0)
}
