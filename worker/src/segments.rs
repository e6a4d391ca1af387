//! What the segments compute, forward and backward, on burn.
//!
//! Every level runs the model segment by segment with the same operations on the same shapes, so that
//! the levels agree bit for bit. A segment's input is a leaf of its own graph: its backward takes the
//! gradient of its output, and gives the gradient of its input and of its parameters, at once and
//! independently of the other segments.
//!
//! Everything is f32. Shapes: `n` windows of `t` characters; hidden states are `[n * t, width]`, or this rank's rows of that where
//! tensor-parallel ranks cut the residual stream.

use burn::backend::{Autodiff, Flex};
use burn::tensor::activation::{log_softmax, sigmoid, softmax};
use burn::tensor::module::linear;
use burn::tensor::{Int, Tensor, TensorData};

use crate::batches::Batch;
use crate::error::Result;
use crate::model::{BLOCK_TENSORS, EMBEDDING, Model, Segment};
use crate::parallel::lookup;
use crate::tensor_parallel::Group;

/// The backend without graphs.
pub type Plain = Flex;
/// The backend with graphs. It also runs forward passes without graphs: its operations are not always the
/// plain backend's (there a softmax is one fused kernel), and the bits must not depend on the level.
pub type Graph = Autodiff<Flex>;

/// Hidden states or their gradient, outside any graph: `[n * t, width]`.
pub type Hidden = Tensor<Plain, 2>;

/// A parameter of a segment, flattened.
pub type Leaf = Tensor<Graph, 1>;

/// Added to the variance in a norm (PyTorch's default).
const NORM_EPSILON: f32 = 1e-5;
/// Added to the attention score of a later character. In f32 the exponential of it is 0.
const MASKED: f32 = -1e9;

/// What runs, and with whom.
#[derive(Debug, Clone, Copy)]
pub struct Network<'a> {
    /// The model.
    pub model: &'a Model,
    /// The ranks that have the other parts of it; `None`: this rank has all of it.
    pub group: Option<&'a Group>,
}

/// Whether a forward pass keeps what a backward pass needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tracking {
    /// It does.
    Graph,
    /// It does not: an intermediate result is freed when it was used.
    None,
}

/// Makes a leaf of a parameter's values. Takes the buffer over; nothing is copied.
pub fn leaf(values: Vec<f32>) -> Leaf {
    let count = values.len();
    Tensor::from_data(TensorData::new(values, [count]), &Default::default())
}

/// The gradients that a backward pass of a segment gives.
#[derive(Debug)]
pub struct Gradients {
    /// Of its input, `[n * t, width]`; `None` for the embedding, whose input is characters.
    pub input: Option<Hidden>,
    /// Of its parameters, flattened, in the order of `Model::tensors_of`.
    pub parameters: Vec<Vec<f32>>,
}

/// A segment after its forward pass, with its graph if that was tracked.
pub struct Pass<'a> {
    group: Option<&'a Group>,
    input: Option<Tensor<Graph, 2>>,
    parameters: Vec<Leaf>,
    output: Tensor<Graph, 2>,
}

impl<'a> Pass<'a> {
    /// Runs a segment forward.
    ///
    /// `parameters`: flattened, in the order of `Model::tensors_of`. `hidden`: the output of the segment
    /// before, `[n * t, width]`; `None` for the embedding.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn forward(
        network: Network<'a>,
        segment: Segment,
        parameters: &[Leaf],
        hidden: Option<Hidden>,
        batch: &Batch,
        tracking: Tracking,
    ) -> Result<Self> {
        let track = tracking == Tracking::Graph;
        let parameters: Vec<Leaf> = parameters
            .iter()
            .map(|leaf| if track { leaf.clone().detach().require_grad() } else { leaf.clone() })
            .collect();
        let input = hidden.map(|hidden| {
            let hidden = Tensor::from_inner(hidden);
            if track { hidden.require_grad() } else { hidden }
        });
        let run = Run { network, batch };
        let output = run.segment(segment, &parameters, input.clone())?;
        let parameters = if track { parameters } else { Vec::new() };
        Ok(Self { group: network.group, input, parameters, output })
    }

    /// The output, outside the graph: hidden states, or the head's loss as `[1, 1]`.
    pub fn output(&self) -> Hidden {
        self.output.clone().inner()
    }

    /// Runs the segment backward and drops its graph.
    ///
    /// `upstream`: the gradient of the output, of the output's shape. It enters as the gradient of
    /// `sum(output * upstream)`, which is `1 * upstream`: exact.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn backward(self, upstream: Hidden) -> Result<Gradients> {
        let Self { group, input, parameters, output } = self;
        let sum = (output * Tensor::from_inner(upstream)).sum();
        let mut gradients = match group {
            Some(group) => group.mesh().world().backward(&sum)?,
            None => sum.backward(),
        };
        Ok(Gradients {
            input: input.and_then(|input| input.grad_remove(&mut gradients)),
            parameters: parameters
                .iter()
                .map(|parameter| match parameter.grad_remove(&mut gradients) {
                    Some(gradient) => values(gradient),
                    None => vec![0.0; parameter.shape().num_elements()],
                })
                .collect(),
        })
    }
}

/// Logits of the next character after each window's last one: `[n, vocabulary]`, flattened. `parameters` and `hidden` are the head's.
///
/// # Errors
/// Those of the collectives.
pub fn last_logits(
    network: Network<'_>,
    parameters: &[Leaf],
    hidden: Hidden,
    batch: &Batch,
) -> Result<Vec<f32>> {
    let run = Run { network, batch };
    let (windows, length) = (batch.windows(), batch.length());
    let (x, table) = run.normalized(parameters, Tensor::from_inner(hidden))?;
    let width = x.dims()[1];
    let last = x.reshape([windows, length, width]).narrow(1, length - 1, 1).reshape([windows, width]);
    let logits = last.matmul(table.transpose());
    let logits = match network.group {
        Some(group) => group.columns(logits, network.model.architecture().vocabulary)?,
        None => logits,
    };
    Ok(values(logits.inner().flatten(0, 1)))
}

/// The gradient that starts a backward pass at the head: `scale`, as `[1, 1]`.
pub fn seed(scale: f32) -> Hidden {
    Tensor::from_data([[scale]], &Default::default())
}

/// The value of the head's `[1, 1]` output.
pub fn scalar(loss: Hidden) -> f32 {
    loss.into_scalar()
}

fn values(tensor: Tensor<Plain, 1>) -> Vec<f32> {
    tensor.into_data().into_vec().expect("all tensors of the model are f32")
}

/// One forward pass.
struct Run<'a> {
    network: Network<'a>,
    batch: &'a Batch,
}

impl Run<'_> {
    fn segment(
        &self,
        segment: Segment,
        parameters: &[Leaf],
        input: Option<Tensor<Graph, 2>>,
    ) -> Result<Tensor<Graph, 2>> {
        match (segment, input) {
            (Segment::Embedding, _) => self.embed(parameters),
            (Segment::Block(_), Some(input)) => self.block(parameters, input),
            (Segment::Head, Some(input)) => self.loss(parameters, input),
            (_, None) => unreachable!("only the embedding has no hidden input"),
        }
    }

    /// Rows of all windows together.
    fn rows(&self) -> usize {
        self.batch.windows() * self.batch.length()
    }

    fn width(&self) -> usize {
        self.network.model.architecture().width
    }

    /// From the residual stream to layers that may be cut.
    fn enter(&self, x: Tensor<Graph, 2>) -> Result<Tensor<Graph, 2>> {
        match self.network.group {
            Some(group) => Ok(group.enter(x, self.rows())?),
            None => Ok(x),
        }
    }

    /// A layer that ends in the residual stream.
    fn leave(&self, x: Tensor<Graph, 2>, weight: &Leaf, bias: &Leaf) -> Result<Tensor<Graph, 2>> {
        let weight = matrix(weight, x.dims()[1], self.width());
        match self.network.group {
            // Once, after the sum.
            Some(group) => Ok(group.leave(linear(x, weight, None))? + bias.clone().unsqueeze()),
            None => Ok(linear(x, weight, Some(bias.clone()))),
        }
    }

    /// Sum of a character's and a position's vector.
    fn embed(&self, parameters: &[Leaf]) -> Result<Tensor<Graph, 2>> {
        let [characters, positions] = parameters else {
            unreachable!("Model::tensors_of gives the embedding two tensors");
        };
        let (n, t, width) = (self.batch.windows(), self.batch.length(), self.width());
        let positions = matrix(positions, self.network.model.architecture().context, width);
        let vectors = match self.network.group {
            None => table(characters, width).select(0, indices(self.batch.inputs())),
            Some(group) => {
                let first = self.network.model.area(EMBEDDING).offset[0] as i64;
                let tokens = indices(self.batch.inputs()).reshape([n, t]);
                let vectors = lookup(table(characters, width), tokens, first).reshape([n * t, width]);
                let vectors = group.leave(vectors)?;
                if group.sequence() {
                    let rows: Vec<i32> = group.rows(n * t).map(|row| (row % t) as i32).collect();
                    let count = rows.len();
                    let rows = Tensor::from_data(TensorData::new(rows, [count]), &Default::default());
                    return Ok(vectors + positions.select(0, rows));
                }
                vectors
            }
        };
        let positions = positions.narrow(0, 0, t).unsqueeze::<3>();
        Ok((vectors.reshape([n, t, width]) + positions).reshape([n * t, width]))
    }

    /// Attention and MLP, each added to the residual stream.
    fn block(&self, parameters: &[Leaf], x: Tensor<Graph, 2>) -> Result<Tensor<Graph, 2>> {
        let Ok(
            [
                norm1,
                norm1_bias,
                qkv,
                qkv_bias,
                out,
                out_bias,
                norm2,
                norm2_bias,
                up,
                up_bias,
                down,
                down_bias,
            ],
        ) = <&[Leaf; BLOCK_TENSORS]>::try_from(parameters)
        else {
            unreachable!("Model::tensors_of gives a block its tensors");
        };
        let width = self.width();
        let dense = |x: Tensor<Graph, 2>, weight: &Leaf, bias: &Leaf| {
            linear(x, matrix(weight, width, bias.dims()[0]), Some(bias.clone()))
        };
        let h = self.enter(norm(x.clone(), norm1, norm1_bias))?;
        let h = self.attention(dense(h, qkv, qkv_bias));
        let x = x + self.leave(h, out, out_bias)?;
        let h = self.enter(norm(x.clone(), norm2, norm2_bias))?;
        let h = gelu(dense(h, up, up_bias));
        Ok(x + self.leave(h, down, down_bias)?)
    }

    /// Causal attention of this rank's heads. `qkv`: `[n * t, heads * 3 * size]`, head by head, so that ranks have whole heads.
    fn attention(&self, qkv: Tensor<Graph, 2>) -> Tensor<Graph, 2> {
        let architecture = self.network.model.architecture();
        let heads = architecture.heads / self.network.model.division().ranks;
        let (n, t, size) =
            (self.batch.windows(), self.batch.length(), architecture.width / architecture.heads);
        let qkv = qkv.reshape([n, t, heads, 3, size]);
        let head = |part: usize| qkv.clone().narrow(3, part, 1).reshape([n, t, heads, size]).swap_dims(1, 2);
        let scale = (size as f32).sqrt().recip();
        let scores = head(0).mul_scalar(scale).matmul(head(1).swap_dims(2, 3));
        let weights = softmax(scores + causal_mask([n, heads, t, t]), 3);
        weights.matmul(head(2)).swap_dims(1, 2).reshape([n * t, heads * size])
    }

    /// The head's input, and its table.
    fn normalized(
        &self,
        parameters: &[Leaf],
        x: Tensor<Graph, 2>,
    ) -> Result<(Tensor<Graph, 2>, Tensor<Graph, 2>)> {
        let [scale, bias, characters] = parameters else {
            unreachable!("Model::tensors_of gives the head three tensors");
        };
        Ok((self.enter(norm(x, scale, bias))?, table(characters, self.width())))
    }

    /// Mean negative log-likelihood of the next characters, nats: `[1, 1]`.
    fn loss(&self, parameters: &[Leaf], x: Tensor<Graph, 2>) -> Result<Tensor<Graph, 2>> {
        let (x, table) = self.normalized(parameters, x)?;
        let logits = x.matmul(table.transpose());
        let rows = self.rows();
        let targets = indices(self.batch.targets()).reshape([rows, 1]);
        let Some(group) = self.network.group else {
            return Ok(log_softmax(logits, 1).gather(1, targets).mean().neg().reshape([1, 1]));
        };
        // Each rank has the logits of some characters.
        let count = logits.dims()[1];
        let largest = match count {
            0 => Tensor::full([rows, 1], f32::MIN, &logits.device()),
            _ => logits.clone().max_dim(1),
        };
        let shifted = logits - group.largest(largest)?;
        let sum = shifted.clone().exp().sum_dim(1);
        let target = if count == 0 {
            sum.clone()
        } else {
            let here = targets.sub_scalar(self.network.model.area(EMBEDDING).offset[0] as i64);
            let elsewhere = here.clone().lower_elem(0).bool_or(here.clone().greater_equal_elem(count as i64));
            shifted.gather(1, here.clamp(0, count as i64 - 1)).mask_fill(elsewhere, 0.0)
        };
        let both = group.sum(Tensor::cat(vec![sum, target], 1))?;
        let loss = both.clone().narrow(1, 0, 1).log() - both.narrow(1, 1, 1);
        Ok(loss.mean().reshape([1, 1]))
    }
}

/// Layer norm over the last dimension (Ba, Kiros, Hinton 2016).
fn norm(x: Tensor<Graph, 2>, scale: &Leaf, bias: &Leaf) -> Tensor<Graph, 2> {
    let centred = x.clone() - x.mean_dim(1);
    let variance = centred.clone().mul(centred.clone()).mean_dim(1);
    let normal = centred * variance.add_scalar(NORM_EPSILON).sqrt().recip();
    normal * scale.clone().unsqueeze() + bias.clone().unsqueeze()
}

/// Rows of `width`.
fn table(flat: &Leaf, width: usize) -> Tensor<Graph, 2> {
    matrix(flat, flat.dims()[0] / width, width)
}

fn matrix(flat: &Leaf, rows: usize, columns: usize) -> Tensor<Graph, 2> {
    flat.clone().reshape([rows, columns])
}

fn indices(characters: &[u8]) -> Tensor<Graph, 1, Int> {
    let values: Vec<i32> = characters.iter().map(|&c| i32::from(c)).collect();
    let count = values.len();
    Tensor::from_data(TensorData::new(values, [count]), &Default::default())
}

/// 0 where a character may look, `MASKED` where it would look ahead. Full size: burn adds equal shapes thirty
/// times as fast as it broadcasts.
fn causal_mask(shape: [usize; 4]) -> Tensor<Graph, 4> {
    let [n, heads, t, _] = shape;
    let one: Vec<f32> = (0..t * t).map(|i| if i % t > i / t { MASKED } else { 0.0 }).collect();
    Tensor::from_data(TensorData::new(one.repeat(n * heads), shape), &Default::default())
}

/// GELU in its sigmoid form, `x * sigmoid(1.702 x)` (Hendrycks and Gimpel 2016, section 2): the form with
/// `erf` took a third of a step.
fn gelu(x: Tensor<Graph, 2>) -> Tensor<Graph, 2> {
    sigmoid(x.clone().mul_scalar(1.702)) * x
}

/// The loss of the whole model as one graph, `[1, 1]`: what the segments are measured against.
#[cfg(test)]
pub(crate) fn whole(
    model: &crate::model::Model,
    leaves: &std::collections::BTreeMap<usize, Leaf>,
    batch: &Batch,
) -> Tensor<Graph, 2> {
    let run = Run { network: Network { model, group: None }, batch };
    let mut x = None;
    for segment in model.segments() {
        let parameters: Vec<Leaf> = model.tensors_of(segment).iter().map(|t| leaves[t].clone()).collect();
        x = Some(run.segment(segment, &parameters, x.take()).unwrap());
    }
    x.expect("a model has segments")
}
