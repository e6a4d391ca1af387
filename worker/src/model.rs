//! The model as data: its sizes, and the list of its parameters in manifest order.
//!
//! A decoder-only transformer on characters: learned positions, pre-norm blocks, GELU, and a head tied
//! to the token embedding (GPT-2: Radford et al. 2019; pre-norm: Xiong et al. 2020; tied head: Press and
//! Wolf 2017). What the parameters do is in `segments`; how they travel is in `levels`.

use std::ops::Range;
use std::sync::Arc;

use thiserror::Error;
use zeroshard_proto::{BoxView, DimPlacement, Layout, ProcessMesh, TensorBox};

use crate::random::Stream;

/// Standard deviation of the initial weights (GPT-2's 0.02 for a model of width 768 is wider than this
/// model needs to be told: at width 128 it trains faster from a little more).
const INITIAL_DEVIATION: f32 = 0.04;

/// Parameters of one block.
pub const BLOCK_TENSORS: usize = 12;

/// The sizes of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Architecture {
    /// Different characters.
    pub vocabulary: usize,
    /// Characters that the model sees at once.
    pub context: usize,
    /// Width of the residual stream; a multiple of `heads`.
    pub width: usize,
    /// Transformer blocks.
    pub blocks: usize,
    /// Attention heads of a block.
    pub heads: usize,
}

impl Architecture {
    /// The default model, about one million parameters.
    pub fn small(vocabulary: usize, context: usize) -> Self {
        Self { vocabulary, context, width: 128, blocks: 5, heads: 4 }
    }
}

/// Sizes that make no model.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Error {
    /// A width that the heads do not divide.
    #[error("--width {width} cannot be divided among {heads} heads; use a multiple of {heads}, such as {}", width.div_ceil(*heads).max(1) * heads)]
    Width {
        /// The width.
        width: usize,
        /// The heads.
        heads: usize,
    },
    /// Heads that the ranks do not divide.
    #[error("--heads {heads} cannot be divided among --tensor-parallel {ranks} ranks; use one of {}, or a multiple of {ranks} heads", divisors(*heads))]
    Heads {
        /// The heads.
        heads: usize,
        /// The ranks.
        ranks: usize,
    },
}

/// "1, 2 or 4".
fn divisors(number: usize) -> String {
    let mut all: Vec<String> = (1..=number)
        .filter(|divisor| number.is_multiple_of(*divisor))
        .map(|divisor| divisor.to_string())
        .collect();
    let last = all.pop().unwrap_or_default();
    if all.is_empty() { last } else { format!("{} or {last}", all.join(", ")) }
}

/// What a rank of a tensor-parallel group has of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Division {
    /// Number of ranks.
    pub ranks: usize,
    /// Which of them.
    pub place: usize,
    /// Whether the residual stream is cut too, by rows.
    pub sequence: bool,
}

impl Division {
    /// All of it.
    pub const WHOLE: Self = Self { ranks: 1, place: 0, sequence: false };
}

/// A piece of the model that runs (and whose parameters travel) as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Segment {
    /// Token and position embedding.
    Embedding,
    /// One transformer block.
    Block(usize),
    /// Final norm, head and loss.
    Head,
}

/// The parameter group of a tensor, as an index into the job's optimizers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Group {
    /// Matrices: weight decay.
    Decay = 0,
    /// Biases and norms: no weight decay.
    NoDecay = 1,
}

/// How a tensor begins.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Start {
    Constant(f32),
    Uniform { deviation: f32 },
}

/// One tensor of the manifest.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameter {
    /// Name in the manifest.
    pub name: String,
    /// Sizes, row-major.
    pub shape: Vec<usize>,
    /// Parameter group.
    pub group: Group,
    /// The tensor that this one is another name of (the tied head), as an index into the model's list.
    pub alias_of: Option<usize>,
    /// The dimension along which tensor-parallel ranks cut it; `None`: each has all of it.
    pub cut: Option<usize>,
    start: Start,
}

impl Parameter {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    fn cut(self, dim: usize) -> Self {
        Self { cut: Some(dim), ..self }
    }
}

/// The model: sizes and parameters.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    architecture: Architecture,
    parameters: Vec<Parameter>,
    division: Division,
    /// Of the tensor-parallel ranks, by their places.
    mesh: Arc<ProcessMesh>,
}

/// Index of the token embedding, which the head shares.
pub const EMBEDDING: usize = 0;
const POSITION: usize = 1;
const FIRST_BLOCK: usize = 2;

impl Model {
    /// Lays out the parameters of a model that one rank has all of.
    ///
    /// # Errors
    /// [`Error::Width`].
    pub fn new(architecture: Architecture) -> Result<Self, Error> {
        Self::divided(architecture, Division::WHOLE)
    }

    /// Lays out the parameters of a model that several ranks have parts of: heads and the inner layer of the MLP are cut, and the
    /// vocabulary (Shoeybi et al. 2019).
    ///
    /// # Errors
    /// [`Error::Width`]; [`Error::Heads`] if the ranks would not have the same number of heads.
    pub fn divided(architecture: Architecture, division: Division) -> Result<Self, Error> {
        let Architecture { width, heads, .. } = architecture;
        if !width.is_multiple_of(heads) {
            return Err(Error::Width { width, heads });
        }
        if !heads.is_multiple_of(division.ranks) {
            return Err(Error::Heads { heads, ranks: division.ranks });
        }
        let mesh =
            ProcessMesh::dense([division.ranks], ["tp"]).expect("no more ranks than heads, and one at least");
        Ok(Self { architecture, parameters: Self::lay_out(architecture), division, mesh: Arc::new(mesh) })
    }

    fn lay_out(architecture: Architecture) -> Vec<Parameter> {
        let Architecture { vocabulary, context, width, blocks, .. } = architecture;
        let mut list = Vec::with_capacity(FIRST_BLOCK + blocks * BLOCK_TENSORS + 3);
        list.push(weight("embedding.weight", &[vocabulary, width], INITIAL_DEVIATION).cut(0));
        list.push(weight("position.weight", &[context, width], INITIAL_DEVIATION));
        // What ends in the residual stream starts smaller, so that its variance does not grow with
        // depth (GPT-2).
        let residual = INITIAL_DEVIATION / (2.0 * blocks as f32).sqrt();
        for block in 0..blocks {
            let name = |rest: &str| format!("blocks.{block}.{rest}");
            list.push(constant(&name("norm1.weight"), width, 1.0));
            list.push(constant(&name("norm1.bias"), width, 0.0));
            list.push(weight(&name("attention.in.weight"), &[width, 3 * width], INITIAL_DEVIATION).cut(1));
            list.push(constant(&name("attention.in.bias"), 3 * width, 0.0).cut(0));
            list.push(weight(&name("attention.out.weight"), &[width, width], residual).cut(0));
            list.push(constant(&name("attention.out.bias"), width, 0.0));
            list.push(constant(&name("norm2.weight"), width, 1.0));
            list.push(constant(&name("norm2.bias"), width, 0.0));
            list.push(weight(&name("mlp.in.weight"), &[width, 4 * width], INITIAL_DEVIATION).cut(1));
            list.push(constant(&name("mlp.in.bias"), 4 * width, 0.0).cut(0));
            list.push(weight(&name("mlp.out.weight"), &[4 * width, width], residual).cut(0));
            list.push(constant(&name("mlp.out.bias"), width, 0.0));
        }
        list.push(constant("norm.weight", width, 1.0));
        list.push(constant("norm.bias", width, 0.0));
        list.push(Parameter {
            alias_of: Some(EMBEDDING),
            ..weight("head.weight", &[vocabulary, width], INITIAL_DEVIATION).cut(0)
        });
        list
    }

    /// What this rank has of the model.
    pub fn division(&self) -> Division {
        self.division
    }

    /// How a tensor's gradient lies among the tensor-parallel ranks. Where they cut the residual stream, each sees some rows of
    /// what it has all of.
    pub fn placement(&self, tensor: usize) -> DimPlacement {
        match self.parameters[tensor].cut {
            Some(dim) => DimPlacement::Shard(dim),
            None if self.division.sequence => DimPlacement::Partial(zeroshard_proto::Reduction::Sum),
            None => DimPlacement::Replicate,
        }
    }

    /// What this rank has of a tensor.
    pub fn area(&self, tensor: usize) -> TensorBox {
        let shape: Vec<u64> = self.parameters[tensor].shape.iter().map(|&size| size as u64).collect();
        let layout =
            Layout::new(self.mesh.clone(), vec![self.placement(tensor)]).expect("one for its one dimension");
        layout.local_box(&shape, self.division.place as u32).expect("the place is one of the ranks'")
    }

    /// How many elements of a tensor this rank has.
    pub fn elements_of(&self, tensor: usize) -> usize {
        self.area(tensor).numel() as usize
    }

    /// The sizes.
    pub fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// All tensors in manifest order, aliases too.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Elements of all tensors that are not aliases.
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

    /// The tensors that a segment reads, in the order in which `segments` takes them. Aliases are
    /// resolved: the head reads the embedding.
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

    /// Whether a segment that runs backward later than `segment` reads `tensor` too: true for the embedding
    /// in the head.
    pub fn reads_again(&self, segment: Segment, tensor: usize) -> bool {
        segment == Segment::Head && tensor == EMBEDDING
    }

    /// What this rank has of a tensor's first values.
    pub fn initial_part(&self, seed: u64, tensor: usize) -> Vec<f32> {
        let (whole, area) = (self.initial_values(seed, tensor), self.area(tensor));
        let shape: Vec<u64> = self.parameters[tensor].shape.iter().map(|&size| size as u64).collect();
        let view = BoxView::new(&shape, &area);
        view.runs(0..view.numel()).flat_map(|run| &whole[run.at..run.at + run.numel]).copied().collect()
    }

    /// A tensor's first values. Uniform, with nothing but multiplications and additions, so that a seed means the
    /// same bits on every machine.
    pub fn initial_values(&self, seed: u64, tensor: usize) -> Vec<f32> {
        let parameter = &self.parameters[tensor];
        let count = parameter.elements();
        match parameter.start {
            Start::Constant(value) => vec![value; count],
            Start::Uniform { deviation } => {
                let mut stream = Stream::new(&[seed, INITIAL_STREAM, tensor as u64]);
                let half_width = deviation * 3f32.sqrt();
                (0..count).map(|_| (2.0 * stream.unit() - 1.0) * half_width).collect()
            }
        }
    }
}

/// Keeps the initial values apart from every other use of the seed.
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
        cut: None,
        start: Start::Uniform { deviation },
    }
}

fn constant(name: &str, size: usize, value: f32) -> Parameter {
    Parameter {
        name: name.to_owned(),
        shape: vec![size],
        group: Group::NoDecay,
        alias_of: None,
        cut: None,
        start: Start::Constant(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_model_has_about_a_million_parameters() {
        let model = Model::new(Architecture::small(96, 64)).unwrap();
        assert!((900_000..1_100_000).contains(&model.elements()), "{}", model.elements());
    }

    #[test]
    fn segments_cover_every_tensor_and_share_only_the_embedding() {
        let model = Model::new(Architecture::small(50, 16)).unwrap();
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
        let model = Model::new(Architecture::small(50, 16)).unwrap();
        for parameter in model.parameters() {
            let expected = if parameter.shape.len() == 1 { Group::NoDecay } else { Group::Decay };
            assert_eq!(parameter.group, expected, "{}", parameter.name);
        }
    }

    #[test]
    fn head_is_the_embedding() {
        let model = Model::new(Architecture::small(50, 16)).unwrap();
        let head = model.parameters().last().expect("a model has parameters");
        assert_eq!(head.name, "head.weight");
        assert_eq!(head.alias_of, Some(EMBEDDING));
        assert_eq!(head.shape, model.parameters()[EMBEDDING].shape);
    }

    #[test]
    fn initial_values_follow_the_seed() {
        let model = Model::new(Architecture::small(50, 16)).unwrap();
        let embedding = model.initial_values(1, EMBEDDING);
        assert_eq!(embedding, model.initial_values(1, EMBEDDING));
        assert_ne!(embedding, model.initial_values(2, EMBEDDING));
        let variance: f32 = embedding.iter().map(|x| x * x).sum::<f32>() / embedding.len() as f32;
        assert!((variance.sqrt() - INITIAL_DEVIATION).abs() < 0.1 * INITIAL_DEVIATION);
    }

    #[test]
    fn parts_of_all_ranks_are_the_whole() {
        let architecture = Architecture { vocabulary: 11, context: 4, width: 6, blocks: 1, heads: 3 };
        let whole = Model::new(architecture).unwrap();
        for ranks in [1, 3] {
            for tensor in 0..whole.parameters().len() {
                let parts: Vec<Vec<f32>> = (0..ranks)
                    .map(|place| {
                        let division = Division { ranks, place, sequence: false };
                        Model::divided(architecture, division).unwrap().initial_part(3, tensor)
                    })
                    .collect();
                let all = whole.initial_values(3, tensor);
                match whole.parameters()[tensor].cut {
                    None => assert!(parts.iter().all(|part| *part == all)),
                    Some(0) => assert_eq!(parts.concat(), all),
                    Some(_) => assert_eq!(parts.iter().map(Vec::len).sum::<usize>(), all.len()),
                }
            }
        }
    }

    #[test]
    fn heads_that_do_not_divide_are_refused_with_what_would() {
        let architecture = Architecture::small(50, 16);
        let refused =
            Model::divided(architecture, Division { ranks: 3, place: 0, sequence: false }).unwrap_err();
        assert_eq!(refused, Error::Heads { heads: 4, ranks: 3 });
        assert!(refused.to_string().contains("one of 1, 2 or 4, or a multiple of 3 heads"), "{refused}");
        let refused = Model::new(Architecture { width: 100, heads: 3, ..architecture }).unwrap_err();
        assert!(refused.to_string().contains("such as 102"), "{refused}");
    }
}
