//! Forward and backward passes of the segments, on burn.
//!
//! Every level runs the model segment by segment with the same operations on the same shapes, so
//! the levels agree bit for bit. Each segment has its own autograd graph, in which its input is a
//! leaf. Its backward pass takes the gradient of the output and returns the gradients of the input
//! and of the parameters, independently of the other segments.
//!
//! If the model is sharded over a group of ranks, each rank computes a part of the embedding, the
//! attention, the MLP and the head, and the [`Group`] redistributes their inputs and outputs.
//!
//! All numbers are f32. A batch has `n` windows of `t` characters (with sequence parallelism, a
//! part of each window); hidden states have the shape `[n * t, width]`.

use burn::tensor::activation::{log_softmax, sigmoid, softmax};
use burn::tensor::module::linear;
use burn::tensor::{Int, Tensor, TensorData};
use zeroshard_worker::parallel::{HostValues, Result, lookup};

use super::batches::Batch;
use super::device::{Device, Plain};
use super::model::{Architecture, BLOCK_TENSORS, EMBEDDING, Segment};
use super::network::{Graph, Group, Network};

/// Hidden states or their gradient, outside of autograd: `[n * t, width]`.
pub type Hidden = Tensor<Plain, 2>;

/// A parameter of a segment, flattened.
pub type Leaf = Tensor<Graph, 1>;

/// The number that a norm adds to the variance (PyTorch's default).
const NORM_EPSILON: f32 = 1e-5;
/// The number that is added to the attention scores of later characters. Its exponential is 0 in
/// f32.
const MASKED: f32 = -1e9;

/// Whether a forward pass records the graph for a backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tracking {
    /// The graph is recorded.
    Graph,
    /// No graph is recorded; intermediate results are freed after their use.
    None,
}

/// Creates a leaf from the values of a parameter, without a copy on the CPU.
pub fn leaf(values: Vec<f32>, device: &Device) -> Leaf {
    let count = values.len();
    Tensor::from_data(TensorData::new(values, [count]), device)
}

/// The result of the backward pass of a segment.
#[derive(Debug)]
pub struct Gradients {
    /// The gradient of the input, `[n * t, width]`; `None` for the embedding, whose input is
    /// characters.
    pub input: Option<Hidden>,
    /// The gradients of the parameters, flattened, in the order of `Model::tensors_of`.
    pub parameters: Vec<HostValues>,
}

/// A segment after its forward pass, with its graph if one was recorded.
pub struct Pass<'a> {
    group: Option<&'a Group>,
    input: Option<Tensor<Graph, 2>>,
    parameters: Vec<Leaf>,
    output: Tensor<Graph, 2>,
}

impl<'a> Pass<'a> {
    /// Runs the forward pass of a segment.
    ///
    /// `parameters` are the parameters on this rank, flattened, in the order of
    /// `Model::tensors_of`. `hidden` is the output of the previous segment, `[n * t, width]`;
    /// `None` for the embedding.
    ///
    /// # Errors
    /// Those of the group's collectives.
    pub fn forward(
        network: &'a Network,
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
        let output = Run { network, batch }.segment(segment, &parameters, input.clone())?;
        let parameters = if track { parameters } else { Vec::new() };
        Ok(Self { group: network.group(), input, parameters, output })
    }

    /// The output, detached from the graph: hidden states, or for the head the loss as `[1, 1]`.
    pub fn output(&self) -> Hidden {
        self.output.clone().inner()
    }

    /// Runs the backward pass of the segment and frees its graph.
    ///
    /// `upstream` is the gradient of the output. The pass differentiates `sum(output * upstream)`,
    /// whose gradient with respect to the output is exactly `upstream`.
    ///
    /// # Errors
    /// Those of the group's collectives.
    pub fn backward(self, upstream: Hidden) -> Result<Gradients> {
        let Self { group, input, parameters, output } = self;
        let weighted = (output * Tensor::from_inner(upstream)).sum();
        let mut gradients = match group {
            Some(group) => group.backward(&weighted)?,
            None => weighted.backward(),
        };
        Ok(Gradients {
            input: input.and_then(|input| input.grad_remove(&mut gradients)),
            parameters: parameters
                .iter()
                .map(|parameter| match parameter.grad_remove(&mut gradients) {
                    Some(gradient) => HostValues::of(gradient),
                    None => vec![0.0; parameter.shape().num_elements()].into(),
                })
                .collect(),
        })
    }
}

/// The logits of the character after each window, `[n, vocabulary]`, flattened. `network` must have
/// the whole model; `parameters` and `hidden` are the parameters and the input of the head.
///
/// # Errors
/// None without a group.
pub fn last_logits(
    network: &Network,
    parameters: &[Leaf],
    hidden: Hidden,
    batch: &Batch,
) -> Result<Vec<f32>> {
    let run = Run { network, batch };
    let [rows, width] = hidden.dims();
    let last = hidden
        .reshape([batch.windows(), rows / batch.windows(), width])
        .narrow(1, rows / batch.windows() - 1, 1)
        .reshape([batch.windows(), width]);
    let logits = run.logits(parameters, Tensor::from_inner(last))?.inner();
    Ok(logits.into_data().into_vec().expect("the model is f32"))
}

/// The gradient of the head's output, with which a backward pass begins: `scale`, as `[1, 1]`.
pub fn seed(scale: f32, device: &Device) -> Hidden {
    Tensor::from_data([[scale]], device)
}

/// The value of the head's `[1, 1]` output.
pub fn scalar(loss: Hidden) -> f32 {
    loss.into_scalar()
}

/// One forward pass.
struct Run<'a> {
    network: &'a Network,
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

    /// The sum of the character embedding and the position embedding.
    fn embed(&self, parameters: &[Leaf]) -> Result<Tensor<Graph, 2>> {
        let [characters, positions] = parameters else {
            unreachable!("Model::tensors_of returns two tensors for the embedding");
        };
        let width = self.network.model().architecture().width;
        let (n, t) = (self.batch.windows(), self.batch.length());
        let table = matrix(characters, [-1, self.width()]);
        let characters = indices(self.batch.inputs(), self.network.device());
        let (characters, (first, t)) = match self.network.group() {
            None => (table.select(0, characters).reshape([n, t, width]), (0, t)),
            Some(group) => {
                let partial = lookup(table, characters.reshape([n, t]), self.first_character());
                (group.leave(partial)?, group.window(t))
            }
        };
        let positions = matrix(positions, [-1, self.width()]).narrow(0, first, t).unsqueeze::<3>();
        Ok((characters + positions).reshape([n * t, width]))
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
            unreachable!("Model::tensors_of returns BLOCK_TENSORS tensors for a block");
        };
        let columns = |flat: &Leaf| matrix(flat, [self.width(), -1]);
        let rows = |flat: &Leaf| matrix(flat, [-1, self.width()]);
        let h = self.enter(norm(x.clone(), norm1, norm1_bias))?;
        let h = self.attention(linear(h, columns(qkv), Some(qkv_bias.clone())));
        // The bias is added once, after the sum over the ranks.
        let h = self.leave(linear(h, rows(out), None))? + out_bias.clone().unsqueeze();
        let x = x + h;
        let h = self.enter(norm(x.clone(), norm2, norm2_bias))?;
        let h = gelu(linear(h, columns(up), Some(up_bias.clone())));
        let h = self.leave(linear(h, rows(down), None))? + down_bias.clone().unsqueeze();
        Ok(x + h)
    }

    /// Causal attention of the heads on this rank. `qkv` has the shape `[n * t, 3 * w]`, where `w`
    /// is the total width of these heads.
    fn attention(&self, qkv: Tensor<Graph, 2>) -> Tensor<Graph, 2> {
        let Architecture { width, heads, .. } = self.network.model().architecture();
        let (n, t, size) = (self.batch.windows(), self.batch.length(), width / heads);
        let heads = heads / self.network.ranks();
        let width = heads * size;
        let head = |part: usize| {
            qkv.clone().narrow(1, part * width, width).reshape([n, t, heads, size]).swap_dims(1, 2)
        };
        let scale = (size as f32).sqrt().recip();
        let scores = head(0).mul_scalar(scale).matmul(head(1).swap_dims(2, 3));
        let weights = softmax(scores + causal_mask([n, heads, t, t], self.network.device()), 3);
        weights.matmul(head(2)).swap_dims(1, 2).reshape([n * t, width])
    }

    /// The logits for the part of the vocabulary on this rank.
    fn logits(&self, parameters: &[Leaf], x: Tensor<Graph, 2>) -> Result<Tensor<Graph, 2>> {
        let [scale, bias, table] = parameters else {
            unreachable!("Model::tensors_of returns three tensors for the head");
        };
        let table = matrix(table, [-1, self.width()]);
        Ok(self.enter(norm(x, scale, bias))?.matmul(table.transpose()))
    }

    /// The mean negative log-likelihood of the next characters in nats, `[1, 1]`. With a group, the
    /// softmax is computed over the sharded vocabulary.
    fn loss(&self, parameters: &[Leaf], x: Tensor<Graph, 2>) -> Result<Tensor<Graph, 2>> {
        let logits = self.logits(parameters, x)?;
        let rows = self.batch.targets().len();
        let targets = indices(self.batch.targets(), self.network.device()).reshape([rows, 1]);
        let Some(group) = self.network.group() else {
            let likelihood = log_softmax(logits, 1);
            return Ok(likelihood.gather(1, targets).mean().neg().reshape([1, 1]));
        };
        let [_, columns] = logits.dims();
        let highest = group.max(logits.clone().detach().max_dim(1))?;
        let shifted = logits - highest;
        let targets = targets.sub_scalar(self.first_character());
        let outside = targets
            .clone()
            .lower_elem(0)
            .bool_or(targets.clone().greater_equal_elem(columns as i64));
        let target =
            shifted.clone().gather(1, targets.clamp(0, columns as i64 - 1)).mask_fill(outside, 0.0);
        let sums = group.sum(Tensor::cat(vec![shifted.exp().sum_dim(1), target], 1))?;
        let loss = sums.clone().narrow(1, 0, 1).log() - sums.narrow(1, 1, 1);
        Ok(loss.mean().reshape([1, 1]))
    }

    /// Redistributes the residual stream for a layer that may be sharded.
    fn enter(&self, x: Tensor<Graph, 2>) -> Result<Tensor<Graph, 2>> {
        match self.network.group() {
            None => Ok(x),
            Some(group) => Ok(group.enter(self.windows(x))?.flatten(0, 1)),
        }
    }

    /// Redistributes the output of a layer that may be sharded to the residual stream.
    fn leave(&self, x: Tensor<Graph, 2>) -> Result<Tensor<Graph, 2>> {
        match self.network.group() {
            None => Ok(x),
            Some(group) => Ok(group.leave(self.windows(x))?.flatten(0, 1)),
        }
    }

    fn windows(&self, x: Tensor<Graph, 2>) -> Tensor<Graph, 3> {
        x.reshape([self.batch.windows() as i32, -1, self.width()])
    }

    fn width(&self) -> i32 {
        self.network.model().architecture().width as i32
    }

    /// The first character of this rank's part of the vocabulary.
    fn first_character(&self) -> i64 {
        self.network.bounds(EMBEDDING).offset[0] as i64
    }
}

/// Layer norm over the last dimension (Ba, Kiros, Hinton 2016).
fn norm(x: Tensor<Graph, 2>, scale: &Leaf, bias: &Leaf) -> Tensor<Graph, 2> {
    let centred = x.clone() - x.mean_dim(1);
    let variance = centred.clone().mul(centred.clone()).mean_dim(1);
    let normal = centred * variance.add_scalar(NORM_EPSILON).sqrt().recip();
    normal * scale.clone().unsqueeze() + bias.clone().unsqueeze()
}

/// Reshapes a flattened matrix. One of the two sizes may be -1.
fn matrix(flat: &Leaf, shape: [i32; 2]) -> Tensor<Graph, 2> {
    flat.clone().reshape(shape)
}

fn indices(characters: &[u8], device: &Device) -> Tensor<Graph, 1, Int> {
    let values: Vec<i32> = characters.iter().map(|&c| i32::from(c)).collect();
    let count = values.len();
    Tensor::from_data(TensorData::new(values, [count]), device)
}

/// A mask that is 0 for earlier characters and `MASKED` for later ones. It has the full shape of
/// the scores, because burn adds tensors of equal shapes thirty times as fast as it broadcasts.
fn causal_mask(shape: [usize; 4], device: &Device) -> Tensor<Graph, 4> {
    let [n, heads, t, _] = shape;
    let one: Vec<f32> = (0..t * t).map(|i| if i % t > i / t { MASKED } else { 0.0 }).collect();
    Tensor::from_data(TensorData::new(one.repeat(n * heads), shape), device)
}

/// The sigmoid approximation of GELU, `x * sigmoid(1.702 x)` (Hendrycks and Gimpel 2016,
/// section 2). The exact form with `erf` took a third of the time of a step.
fn gelu(x: Tensor<Graph, 2>) -> Tensor<Graph, 2> {
    sigmoid(x.clone().mul_scalar(1.702)) * x
}

/// The loss of the whole model in one graph, `[1, 1]`; a reference for the tests.
#[cfg(test)]
pub(crate) fn whole(
    network: &Network,
    leaves: &std::collections::BTreeMap<usize, Leaf>,
    batch: &Batch,
) -> Tensor<Graph, 2> {
    let run = Run { network, batch };
    let mut x = None;
    for segment in network.model().segments() {
        let tensors = network.model().tensors_of(segment);
        let parameters: Vec<Leaf> = tensors.iter().map(|t| leaves[t].clone()).collect();
        x = Some(run.segment(segment, &parameters, x.take()).expect("there is no group"));
    }
    x.expect("a model has segments")
}
