//! The sizes of the model, and the list of its parameters in manifest order.
//!
//! A decoder-only transformer on characters: learned positions, pre-norm blocks, GELU, and a head
//! tied to the token embedding (GPT-2: Radford et al. 2019; pre-norm: Xiong et al. 2020; tied head:
//! Press and Wolf 2017). The computation is in `segments`, the transfers are in `transfers`.

use std::ops::Range;

use zeroshard_model::{StridedBox, TensorBox};

use super::random::Stream;

/// The standard deviation of the initial weights. GPT-2 uses 0.02 at width 768; at width 128 a
/// larger value trains faster.
const INITIAL_DEVIATION: f32 = 0.04;

/// The number of parameters of one block.
pub const BLOCK_TENSORS: usize = 12;

/// The sizes of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Architecture {
    /// The number of different characters.
    pub vocabulary: usize,
    /// The number of characters in a window.
    pub context: usize,
    /// The width of the residual stream; a multiple of `heads`.
    pub width: usize,
    /// The number of transformer blocks.
    pub blocks: usize,
    /// The number of attention heads in a block.
    pub heads: usize,
    /// The hidden width of the MLP in a block.
    pub hidden: usize,
}

impl Architecture {
    /// The default model, about one million parameters.
    pub fn small(vocabulary: usize, context: usize) -> Self {
        Self { vocabulary, context, width: 128, blocks: 5, heads: 4, hidden: 512 }
    }
}

/// A part of the model that is computed as a unit, and whose parameters are pulled together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Segment {
    /// The token and position embedding.
    Embedding,
    /// A transformer block.
    Block(usize),
    /// The final norm, the head and the loss.
    Head,
}

/// The parameter group of a tensor, as an index into the job's optimizers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Group {
    /// Matrices, which have weight decay.
    Decay = 0,
    /// Biases and norms, which have no weight decay.
    NoDecay = 1,
}

/// The initial values of a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Start {
    Constant(f32),
    Uniform { deviation: f32 },
}

/// One tensor of the manifest.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameter {
    /// The name in the manifest.
    pub name: String,
    /// The shape, row-major.
    pub shape: Vec<usize>,
    /// The parameter group.
    pub group: Group,
    /// The index of the tensor to which this one is tied (only for the head).
    pub alias_of: Option<usize>,
    /// The dimension that is sharded over a tensor-parallel group; `None` if the tensor is
    /// replicated.
    pub shard_dim: Option<usize>,
    start: Start,
}

impl Parameter {
    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The shape in the types of the manifest.
    pub fn sizes(&self) -> Vec<u64> {
        self.shape.iter().map(|&size| size as u64).collect()
    }

    fn sharded(self, dim: usize) -> Self {
        Self { shard_dim: Some(dim), ..self }
    }
}

/// The sizes and the parameters of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    architecture: Architecture,
    parameters: Vec<Parameter>,
}

/// The index of the token embedding, which the head shares.
pub const EMBEDDING: usize = 0;
const POSITION: usize = 1;
const FIRST_BLOCK: usize = 2;

impl Model {
    /// Lists the parameters of a model.
    pub fn new(architecture: Architecture) -> Self {
        let Architecture { vocabulary, context, width, blocks, hidden, .. } = architecture;
        let mut list = Vec::with_capacity(FIRST_BLOCK + blocks * BLOCK_TENSORS + 3);
        list.push(weight("embedding.weight", &[vocabulary, width], INITIAL_DEVIATION).sharded(0));
        list.push(weight("position.weight", &[context, width], INITIAL_DEVIATION));
        // Layers that add to the residual stream have smaller initial weights, so that its variance
        // does not grow with depth (GPT-2).
        let residual = INITIAL_DEVIATION / (2.0 * blocks as f32).sqrt();
        for block in 0..blocks {
            let name = |rest: &str| format!("blocks.{block}.{rest}");
            list.push(constant(&name("norm1.weight"), &[width], 1.0));
            list.push(constant(&name("norm1.bias"), &[width], 0.0));
            // Query, key and value are a separate dimension, so that the last dimension can be
            // sharded by heads.
            list.push(
                weight(&name("attention.in.weight"), &[width, 3, width], INITIAL_DEVIATION)
                    .sharded(2),
            );
            list.push(constant(&name("attention.in.bias"), &[3, width], 0.0).sharded(1));
            list.push(weight(&name("attention.out.weight"), &[width, width], residual).sharded(0));
            list.push(constant(&name("attention.out.bias"), &[width], 0.0));
            list.push(constant(&name("norm2.weight"), &[width], 1.0));
            list.push(constant(&name("norm2.bias"), &[width], 0.0));
            list.push(
                weight(&name("mlp.in.weight"), &[width, hidden], INITIAL_DEVIATION).sharded(1),
            );
            list.push(constant(&name("mlp.in.bias"), &[hidden], 0.0).sharded(0));
            list.push(weight(&name("mlp.out.weight"), &[hidden, width], residual).sharded(0));
            list.push(constant(&name("mlp.out.bias"), &[width], 0.0));
        }
        list.push(constant("norm.weight", &[width], 1.0));
        list.push(constant("norm.bias", &[width], 0.0));
        list.push(Parameter {
            alias_of: Some(EMBEDDING),
            ..weight("head.weight", &[vocabulary, width], INITIAL_DEVIATION)
        });
        Self { architecture, parameters: list }
    }

    /// The sizes.
    pub fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// All tensors in manifest order, including aliases.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The number of elements of all tensors that are not aliases.
    pub fn elements(&self) -> usize {
        self.parameters.iter().filter(|p| p.alias_of.is_none()).map(Parameter::elements).sum()
    }

    /// The segments in forward order.
    pub fn segments(&self) -> Vec<Segment> {
        std::iter::once(Segment::Embedding)
            .chain((0..self.architecture.blocks).map(Segment::Block))
            .chain([Segment::Head])
            .collect()
    }

    /// The tensors that a segment reads, in the order in which the module `segments` expects them.
    /// Aliases are resolved: the head reads the embedding.
    pub fn tensors_of(&self, segment: Segment) -> Vec<usize> {
        match segment {
            Segment::Embedding => vec![EMBEDDING, POSITION],
            Segment::Block(block) => block_range(block).collect(),
            Segment::Head => {
                let norm = block_range(self.architecture.blocks).start;
                vec![norm, norm + 1, EMBEDDING]
            }
        }
    }

    /// Returns whether a segment whose backward pass is later than that of `segment` also reads
    /// `tensor`. This is true for the embedding in the head.
    pub fn reads_again(&self, segment: Segment, tensor: usize) -> bool {
        segment == Segment::Head && tensor == EMBEDDING
    }

    /// The initial values of a tensor.
    #[cfg(test)]
    pub(crate) fn initial_values(&self, seed: u64, tensor: usize) -> Vec<f32> {
        self.initial_part(seed, tensor, &TensorBox::whole(&self.parameters[tensor].sizes()))
    }

    /// The initial values of a box of a tensor; the rest of the tensor is not computed. Only
    /// multiplications and additions are used, so a seed gives the same bits on every machine.
    pub fn initial_part(&self, seed: u64, tensor: usize, bounds: &TensorBox) -> Vec<f32> {
        let parameter = &self.parameters[tensor];
        match parameter.start {
            Start::Constant(value) => vec![value; bounds.numel() as usize],
            Start::Uniform { deviation } => {
                let stream = Stream::new(&[seed, INITIAL_STREAM, tensor as u64]);
                let half_width = deviation * 3f32.sqrt();
                let strided = StridedBox::new(&parameter.sizes(), bounds.clone());
                let runs = strided.runs(0..strided.numel()).flat_map(|(_, run)| {
                    let mut stream = stream.after(run.start as u64);
                    run.map(move |_| (2.0 * stream.unit() - 1.0) * half_width)
                });
                runs.collect()
            }
        }
    }
}

/// The part of the key that distinguishes initial values from other uses of the seed.
const INITIAL_STREAM: u64 = 1;

fn block_range(block: usize) -> Range<usize> {
    let start = FIRST_BLOCK + block * BLOCK_TENSORS;
    start..start + BLOCK_TENSORS
}

fn weight(name: &str, shape: &[usize], deviation: f32) -> Parameter {
    Parameter {
        name: name.to_owned(),
        shape: shape.to_vec(),
        group: Group::Decay,
        alias_of: None,
        shard_dim: None,
        start: Start::Uniform { deviation },
    }
}

fn constant(name: &str, shape: &[usize], value: f32) -> Parameter {
    Parameter {
        name: name.to_owned(),
        shape: shape.to_vec(),
        group: Group::NoDecay,
        alias_of: None,
        shard_dim: None,
        start: Start::Constant(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_model_has_about_a_million_parameters() {
        let model = Model::new(Architecture::small(96, 64));
        assert!((900_000..1_100_000).contains(&model.elements()), "{}", model.elements());
    }

    #[test]
    fn segments_cover_every_tensor_and_share_only_the_embedding() {
        let model = Model::new(Architecture::small(50, 16));
        let mut readers = vec![0; model.parameters().len()];
        for segment in model.segments() {
            for tensor in model.tensors_of(segment) {
                readers[tensor] += 1;
            }
        }
        for (tensor, parameter) in model.parameters().iter().enumerate() {
            let expected = match (tensor, parameter.alias_of) {
                (EMBEDDING, _) => 2,
                (_, Some(_)) => 0,
                (_, None) => 1,
            };
            assert_eq!(readers[tensor], expected, "{}", parameter.name);
        }
    }

    #[test]
    fn biases_and_norms_are_not_decayed() {
        let model = Model::new(Architecture::small(50, 16));
        for parameter in model.parameters() {
            let plain = parameter.name.ends_with("bias") || parameter.name.contains("norm");
            let expected = if plain { Group::NoDecay } else { Group::Decay };
            assert_eq!(parameter.group, expected, "{}", parameter.name);
        }
    }

    #[test]
    fn the_head_is_tied_to_the_embedding() {
        let model = Model::new(Architecture::small(50, 16));
        let head = model.parameters().last().expect("a model has parameters");
        assert_eq!(head.name, "head.weight");
        assert_eq!(head.alias_of, Some(EMBEDDING));
        assert_eq!(head.shape, model.parameters()[EMBEDDING].shape);
    }

    #[test]
    fn initial_values_depend_only_on_the_seed() {
        let model = Model::new(Architecture::small(50, 16));
        let embedding = model.initial_values(1, EMBEDDING);
        assert_eq!(embedding, model.initial_values(1, EMBEDDING));
        assert_ne!(embedding, model.initial_values(2, EMBEDDING));
        let variance: f32 = embedding.iter().map(|x| x * x).sum::<f32>() / embedding.len() as f32;
        assert!((variance.sqrt() - INITIAL_DEVIATION).abs() < 0.1 * INITIAL_DEVIATION);
    }

    #[test]
    fn the_initial_values_of_a_box_equal_those_of_the_tensor() {
        let model = Model::new(Architecture::small(50, 16));
        for (tensor, parameter) in
            model.parameters().iter().enumerate().filter(|(_, p)| p.shard_dim.is_some())
        {
            let mut bounds = TensorBox::whole(&parameter.sizes());
            let dim = parameter.shard_dim.unwrap();
            (bounds.offset[dim], bounds.size[dim]) = (5, 7);
            let strided = StridedBox::new(&parameter.sizes(), bounds.clone());
            let whole = model.initial_values(1, tensor);
            let runs = strided.runs(0..strided.numel());
            let expected: Vec<f32> = runs.flat_map(|(_, run)| whole[run].to_vec()).collect();
            assert_eq!(model.initial_part(1, tensor, &bounds), expected, "{}", parameter.name);
        }
    }
}
