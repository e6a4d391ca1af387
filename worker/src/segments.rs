//! What the segments compute, forward and backward, on burn.
//!
//! Every level runs the model segment by segment with the same operations on the same shapes, so that
//! the levels agree bit for bit. A segment's input is a leaf of its own graph: its backward takes the
//! gradient of its output, and gives the gradient of its input and of its parameters, at once and
//! independently of the other segments.
//!
//! Everything is f32. Shapes: `n` windows of `t` characters; hidden states are `[n * t, width]`.

use burn::backend::{Autodiff, Flex};
use burn::tensor::activation::{log_softmax, sigmoid, softmax};
use burn::tensor::module::linear;
use burn::tensor::{Int, Tensor, TensorData};

use crate::batches::Batch;
use crate::model::{Architecture, BLOCK_TENSORS, Segment};

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
pub struct Pass {
    input: Option<Tensor<Graph, 2>>,
    parameters: Vec<Leaf>,
    output: Tensor<Graph, 2>,
}

impl Pass {
    /// Runs a segment forward.
    ///
    /// `parameters`: flattened, in the order of `Model::tensors_of`. `hidden`: the output of the segment
    /// before, `[n * t, width]`; `None` for the embedding.
    pub fn forward(
        architecture: &Architecture,
        segment: Segment,
        parameters: &[Leaf],
        hidden: Option<Hidden>,
        batch: &Batch,
        tracking: Tracking,
    ) -> Self {
        let track = tracking == Tracking::Graph;
        let parameters: Vec<Leaf> = parameters
            .iter()
            .map(|leaf| if track { leaf.clone().detach().require_grad() } else { leaf.clone() })
            .collect();
        let input = hidden.map(|hidden| {
            let hidden = Tensor::from_inner(hidden);
            if track { hidden.require_grad() } else { hidden }
        });
        let run = Run { architecture, batch };
        let output = run.segment(segment, &parameters, input.clone());
        Self { input, parameters: if track { parameters } else { Vec::new() }, output }
    }

    /// The output, outside the graph: hidden states, or the head's loss as `[1, 1]`.
    pub fn output(&self) -> Hidden {
        self.output.clone().inner()
    }

    /// Runs the segment backward and drops its graph.
    ///
    /// `upstream`: the gradient of the output, of the output's shape. It enters as the gradient of
    /// `sum(output * upstream)`, which is `1 * upstream`: exact.
    pub fn backward(self, upstream: Hidden) -> Gradients {
        let Self { input, parameters, output } = self;
        let mut gradients = (output * Tensor::from_inner(upstream)).sum().backward();
        Gradients {
            input: input.and_then(|input| input.grad_remove(&mut gradients)),
            parameters: parameters
                .iter()
                .map(|parameter| match parameter.grad_remove(&mut gradients) {
                    Some(gradient) => values(gradient),
                    None => vec![0.0; parameter.shape().num_elements()],
                })
                .collect(),
        }
    }
}

/// Probabilities of the next character after each window's last one: `[n, vocabulary]` logits, flattened.
/// `parameters` and `hidden` are the head's.
pub fn last_logits(
    architecture: &Architecture,
    parameters: &[Leaf],
    hidden: Hidden,
    batch: &Batch,
) -> Vec<f32> {
    let run = Run { architecture, batch };
    let [rows, width] = hidden.dims();
    let last = hidden
        .reshape([batch.windows(), rows / batch.windows(), width])
        .narrow(1, rows / batch.windows() - 1, 1)
        .reshape([batch.windows(), width]);
    values(run.logits(parameters, Tensor::from_inner(last)).inner().flatten(0, 1))
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
    architecture: &'a Architecture,
    batch: &'a Batch,
}

impl Run<'_> {
    fn segment(
        &self,
        segment: Segment,
        parameters: &[Leaf],
        input: Option<Tensor<Graph, 2>>,
    ) -> Tensor<Graph, 2> {
        match (segment, input) {
            (Segment::Embedding, _) => self.embed(parameters),
            (Segment::Block(_), Some(input)) => self.block(parameters, input),
            (Segment::Head, Some(input)) => self.loss(parameters, input),
            (_, None) => unreachable!("only the embedding has no hidden input"),
        }
    }

    /// Sum of a character's and a position's vector.
    fn embed(&self, parameters: &[Leaf]) -> Tensor<Graph, 2> {
        let [characters, positions] = parameters else {
            unreachable!("Model::tensors_of gives the embedding two tensors");
        };
        let width = self.architecture.width;
        let (n, t) = (self.batch.windows(), self.batch.length());
        let table = matrix(characters, self.architecture.vocabulary, width);
        let characters = table.select(0, indices(self.batch.inputs())).reshape([n, t, width]);
        let positions = matrix(positions, self.architecture.context, width);
        let positions = positions.narrow(0, 0, t).unsqueeze::<3>();
        (characters + positions).reshape([n * t, width])
    }

    /// Attention and MLP, each added to the residual stream.
    fn block(&self, parameters: &[Leaf], x: Tensor<Graph, 2>) -> Tensor<Graph, 2> {
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
        let width = self.architecture.width;
        let dense = |x: Tensor<Graph, 2>, weight: &Leaf, bias: &Leaf, from: usize, to: usize| {
            linear(x, matrix(weight, from, to), Some(bias.clone()))
        };
        let h = norm(x.clone(), norm1, norm1_bias);
        let h = self.attention(dense(h, qkv, qkv_bias, width, 3 * width));
        let x = x + dense(h, out, out_bias, width, width);
        let h = norm(x.clone(), norm2, norm2_bias);
        let h = gelu(dense(h, up, up_bias, width, 4 * width));
        x + dense(h, down, down_bias, 4 * width, width)
    }

    /// Causal attention of all heads. `qkv`: `[n * t, 3 * width]`.
    fn attention(&self, qkv: Tensor<Graph, 2>) -> Tensor<Graph, 2> {
        let Architecture { width, heads, .. } = *self.architecture;
        let (n, t, size) = (self.batch.windows(), self.batch.length(), width / heads);
        let head = |part: usize| {
            qkv.clone().narrow(1, part * width, width).reshape([n, t, heads, size]).swap_dims(1, 2)
        };
        let scale = (size as f32).sqrt().recip();
        let scores = head(0).mul_scalar(scale).matmul(head(1).swap_dims(2, 3));
        let weights = softmax(scores + causal_mask([n, heads, t, t]), 3);
        weights.matmul(head(2)).swap_dims(1, 2).reshape([n * t, width])
    }

    fn logits(&self, parameters: &[Leaf], x: Tensor<Graph, 2>) -> Tensor<Graph, 2> {
        let [scale, bias, table] = parameters else {
            unreachable!("Model::tensors_of gives the head three tensors");
        };
        let table = matrix(table, self.architecture.vocabulary, self.architecture.width);
        norm(x, scale, bias).matmul(table.transpose())
    }

    /// Mean negative log-likelihood of the next characters, nats: `[1, 1]`.
    fn loss(&self, parameters: &[Leaf], x: Tensor<Graph, 2>) -> Tensor<Graph, 2> {
        let likelihood = log_softmax(self.logits(parameters, x), 1);
        let rows = self.batch.targets().len();
        let targets = indices(self.batch.targets()).reshape([rows, 1]);
        likelihood.gather(1, targets).mean().neg().reshape([1, 1])
    }
}

/// Layer norm over the last dimension (Ba, Kiros, Hinton 2016).
fn norm(x: Tensor<Graph, 2>, scale: &Leaf, bias: &Leaf) -> Tensor<Graph, 2> {
    let centred = x.clone() - x.mean_dim(1);
    let variance = centred.clone().mul(centred.clone()).mean_dim(1);
    let normal = centred * variance.add_scalar(NORM_EPSILON).sqrt().recip();
    normal * scale.clone().unsqueeze() + bias.clone().unsqueeze()
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
    let architecture = model.architecture();
    let run = Run { architecture: &architecture, batch };
    let mut x = None;
    for segment in model.segments() {
        let parameters: Vec<Leaf> = model.tensors_of(segment).iter().map(|t| leaves[t].clone()).collect();
        x = Some(run.segment(segment, &parameters, x.take()));
    }
    x.expect("a model has segments")
}
