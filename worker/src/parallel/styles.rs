//! Parallel styles with torch's names. Each style supports the arguments of both the first and the
//! current version of torch's tensor-parallel module. Instead of the functions of the first
//! version, they accept [`PrepareInput`] and [`PrepareOutput`], which name these functions.

use std::fmt;

use zeroshard_model::{DimPlacement as Placement, geometry::list};

use super::backend::ParallelBackend;
use super::dist_tensor::LAST;
use super::error::{Error, Result};
use super::hooks::{Hooks, Prepared};
use super::layer::Layer;
use super::prepare::{PrepareInput, PrepareOutput};
use super::world::Mesh;

/// A way to distribute a layer. Users can implement their own styles.
///
/// `Debug` must print all settings, because the ranks compare this text.
pub trait ParallelStyle<B: ParallelBackend>: fmt::Debug {
    /// Distributes a layer over a mesh of one dimension. `path` is the path of the layer, for
    /// errors.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a layer of a type that the style does not support,
    /// [`Error::AlreadyParallel`], and those of [`Layer::shard`].
    fn apply(&self, path: &str, layer: &mut Layer<'_, B>, mesh: &Mesh) -> Result<()>;
}

/// Shards the output dimension of a linear layer or an embedding: each rank computes some columns
/// of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColwiseParallel {
    /// The redistribution of the input. By default a plain tensor is taken as the whole input.
    pub prepare_input: PrepareInput,
    /// The redistribution of the output. By default the output is a plain tensor with the columns
    /// of this rank.
    pub prepare_output: PrepareOutput,
}

impl Default for ColwiseParallel {
    fn default() -> Self {
        Self {
            prepare_input: PrepareInput::Replicate1d,
            prepare_output: PrepareOutput::ShardedTensor,
        }
    }
}

/// Shards the input dimension of a linear layer: each rank computes a partial sum of every output
/// element. In an embedding each rank holds some rows of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowwiseParallel {
    /// The redistribution of the input. By default a plain tensor is taken as the columns of this
    /// rank.
    pub prepare_input: PrepareInput,
    /// The redistribution of the output. By default the output is a plain tensor with all columns.
    pub prepare_output: PrepareOutput,
}

impl Default for RowwiseParallel {
    fn default() -> Self {
        Self { prepare_input: PrepareInput::Shard1dLastDim, prepare_output: PrepareOutput::Tensor }
    }
}

macro_rules! keywords {
    ($style:ident, $input:expr, $output:expr) => {
        impl $style {
            /// Creates the style with the keywords of torch's current version: `input_layouts`,
            /// `output_layouts` and `use_local_output`. `None` is the default layout.
            pub fn new(
                input: Option<Placement>,
                output: Option<Placement>,
                use_local_output: bool,
            ) -> Self {
                Self {
                    prepare_input: PrepareInput::Layouts {
                        input: input.unwrap_or($input),
                        desired: $input,
                    },
                    prepare_output: PrepareOutput::Layouts {
                        output: output.unwrap_or($output),
                        local: use_local_output,
                    },
                }
            }
        }
    };
}

keywords!(ColwiseParallel, Placement::Replicate, Placement::Shard(LAST));
keywords!(RowwiseParallel, Placement::Shard(LAST), Placement::Replicate);

/// Shards the linear layers of a module in pairs: the first, third, ... column-wise, and the
/// second, fourth, ... row-wise (Shoeybi et al. 2019). The first layer prepares the input, and the
/// last layer of the last pair prepares the output. If the number of layers is odd, the last one is
/// not distributed. In a module with fewer than two direct linear layers, the style is applied to
/// the modules inside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PairwiseParallel {
    /// The redistribution of the input. By default a plain tensor is taken as the whole input.
    pub prepare_input: PrepareInput,
    /// The redistribution of the output. By default the output is a plain tensor with all columns.
    pub prepare_output: PrepareOutput,
}

impl Default for PairwiseParallel {
    fn default() -> Self {
        Self { prepare_input: PrepareInput::Replicate1d, prepare_output: PrepareOutput::Tensor }
    }
}

/// Shards activations along the sequence between parallel layers (Korthikanti et al. 2022). Applied
/// to a module with linear layers, it means [`PairwiseParallel`] with an input and output that are
/// sharded along dimension 0, as in torch's first version. Applied to a norm, the norm runs on
/// inputs that are sharded along `sequence_dim`, as in torch's current version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceParallel {
    /// The sequence dimension of a norm's input.
    pub sequence_dim: usize,
    /// `true` if the output of a norm is a plain tensor.
    pub use_local_output: bool,
}

impl Default for SequenceParallel {
    fn default() -> Self {
        Self { sequence_dim: 1, use_local_output: false }
    }
}

/// Redistributes the inputs of a module. An input with the layout `None` is not changed. The module
/// must have [`super::Hooks`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareModuleInput {
    /// The layouts that plain tensors are taken to have.
    pub input_layouts: Vec<Option<Placement>>,
    /// The layouts after the redistribution.
    pub desired_input_layouts: Vec<Option<Placement>>,
    /// `true` if the module receives plain tensors. torch's default is false.
    pub use_local_output: bool,
}

/// Redistributes the outputs of a module. An output with the layout `None` is not changed. The
/// module must have [`super::Hooks`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareModuleOutput {
    /// The layouts that plain tensors are taken to have.
    pub output_layouts: Vec<Option<Placement>>,
    /// The layouts after the redistribution.
    pub desired_output_layouts: Vec<Option<Placement>>,
    /// `true` if the caller receives plain tensors. torch's default is true.
    pub use_local_output: bool,
}

/// Redistributes the inputs and the outputs of a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareModuleInputOutput {
    /// The redistribution of the inputs.
    pub input: PrepareModuleInput,
    /// The redistribution of the outputs.
    pub output: PrepareModuleOutput,
}

impl<B: ParallelBackend> ParallelStyle<B> for ColwiseParallel {
    fn apply(&self, path: &str, layer: &mut Layer<'_, B>, mesh: &Mesh) -> Result<()> {
        check(self, path, layer, mesh)?;
        match layer {
            Layer::Linear(_) => shard(
                layer,
                mesh,
                &[("weight", Placement::Shard(1)), ("bias", Placement::Shard(0))],
            )?,
            Layer::Embedding(_) => shard(layer, mesh, &[("weight", Placement::Shard(1))])?,
            _ => return Err(unsupported(self, path, layer, "linear layers and embeddings")),
        }
        layer.prepare(self.prepare_input, self.prepare_output);
        Ok(())
    }
}

impl<B: ParallelBackend> ParallelStyle<B> for RowwiseParallel {
    fn apply(&self, path: &str, layer: &mut Layer<'_, B>, mesh: &Mesh) -> Result<()> {
        check(self, path, layer, mesh)?;
        match layer {
            Layer::Linear(_) => shard(
                layer,
                mesh,
                &[("weight", Placement::Shard(0)), ("bias", Placement::Replicate)],
            )?,
            Layer::Embedding(_) => shard(layer, mesh, &[("weight", Placement::Shard(0))])?,
            _ => return Err(unsupported(self, path, layer, "linear layers and embeddings")),
        }
        layer.prepare(self.prepare_input, self.prepare_output);
        Ok(())
    }
}

impl<B: ParallelBackend> ParallelStyle<B> for PairwiseParallel {
    fn apply(&self, path: &str, layer: &mut Layer<'_, B>, mesh: &Mesh) -> Result<()> {
        check(self, path, layer, mesh)?;
        let Layer::Module(module) = layer else {
            return Err(unsupported(self, path, layer, "modules with linear layers"));
        };
        let join =
            |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        let (mut linears, mut modules) = (Vec::new(), Vec::new());
        for (name, layer) in module.layers() {
            match layer {
                Layer::Linear(_) => linears.push((join(&name), layer)),
                Layer::Module(_) => modules.push((join(&name), layer)),
                _ => {}
            }
        }
        if linears.len() < 2 {
            if modules.is_empty() {
                return Err(unsupported(
                    self,
                    path,
                    &Layer::<B>::Other("a module with fewer than two linear layers"),
                    "modules with linear layers",
                ));
            }
            return modules
                .iter_mut()
                .try_for_each(|(path, module)| self.apply(path, module, mesh));
        }
        let pairs = linears.len() / 2;
        for (pair, layers) in linears.chunks_exact_mut(2).enumerate() {
            let [(first_path, first), (second_path, second)] = layers else { continue };
            let prepare_input = if pair == 0 { self.prepare_input } else { PrepareInput::AsIs };
            let prepare_output =
                if pair + 1 == pairs { self.prepare_output } else { PrepareOutput::AsIs };
            ColwiseParallel { prepare_input, prepare_output: PrepareOutput::AsIs }
                .apply(first_path, first, mesh)?;
            RowwiseParallel { prepare_input: PrepareInput::AsIs, prepare_output }.apply(
                second_path,
                second,
                mesh,
            )?;
        }
        Ok(())
    }
}

impl<B: ParallelBackend> ParallelStyle<B> for SequenceParallel {
    fn apply(&self, path: &str, layer: &mut Layer<'_, B>, mesh: &Mesh) -> Result<()> {
        check(self, path, layer, mesh)?;
        match layer {
            Layer::Module(_) => {
                let (prepare_input, prepare_output) =
                    (PrepareInput::ReshardReplicate, PrepareOutput::ReshardTensor);
                PairwiseParallel { prepare_input, prepare_output }.apply(path, layer, mesh)
            }
            Layer::Norm(_) => {
                shard(
                    layer,
                    mesh,
                    &[("weight", Placement::Replicate), ("bias", Placement::Replicate)],
                )?;
                let rows = Placement::Shard(self.sequence_dim);
                let output = if self.use_local_output {
                    PrepareOutput::ShardedTensor
                } else {
                    PrepareOutput::AsIs
                };
                layer.prepare(PrepareInput::Layouts { input: rows, desired: rows }, output);
                Ok(())
            }
            _ => Err(unsupported(self, path, layer, "norms, and modules with linear layers")),
        }
    }
}

impl<B: ParallelBackend> ParallelStyle<B> for PrepareModuleInput {
    fn apply(&self, path: &str, layer: &mut Layer<'_, B>, mesh: &Mesh) -> Result<()> {
        let Self { input_layouts, desired_input_layouts, use_local_output } = self;
        let prepared = prepared(mesh, input_layouts, desired_input_layouts, *use_local_output)?;
        install(self, path, layer, |hooks| &mut hooks.inputs, prepared)
    }
}

impl<B: ParallelBackend> ParallelStyle<B> for PrepareModuleOutput {
    fn apply(&self, path: &str, layer: &mut Layer<'_, B>, mesh: &Mesh) -> Result<()> {
        let Self { output_layouts, desired_output_layouts, use_local_output } = self;
        let prepared = prepared(mesh, output_layouts, desired_output_layouts, *use_local_output)?;
        install(self, path, layer, |hooks| &mut hooks.outputs, prepared)
    }
}

impl<B: ParallelBackend> ParallelStyle<B> for PrepareModuleInputOutput {
    fn apply(&self, path: &str, layer: &mut Layer<'_, B>, mesh: &Mesh) -> Result<()> {
        self.input.apply(path, layer, mesh)?;
        self.output.apply(path, layer, mesh)
    }
}

fn prepared(
    mesh: &Mesh,
    layouts: &[Option<Placement>],
    desired: &[Option<Placement>],
    local: bool,
) -> Result<Prepared> {
    mesh.check_1d("a parallel style")?;
    if layouts.len() != desired.len() {
        let expected = format!("{}, the number of layouts", layouts.len());
        return Err(Error::invalid("number of desired layouts", desired.len(), expected));
    }
    if let Some((layout, desired)) =
        layouts.iter().zip(desired).find(|(layout, desired)| layout.is_some() != desired.is_some())
    {
        let show =
            |placement: &Option<Placement>| placement.map_or("none".to_owned(), |p| list(&[p]));
        return Err(Error::refused(format!(
            "the layout {} cannot become the desired layout {}; pass both or none",
            show(layout),
            show(desired)
        )));
    }
    Ok(Prepared { mesh: mesh.clone(), layouts: layouts.to_vec(), desired: desired.to_vec(), local })
}

/// Sets the inputs or outputs of a module's hooks.
fn install<B: ParallelBackend>(
    style: &dyn fmt::Debug,
    path: &str,
    layer: &mut Layer<'_, B>,
    slot: fn(&mut Hooks) -> &mut Option<Prepared>,
    prepared: Prepared,
) -> Result<()> {
    let hooks = match layer {
        Layer::Module(module) => module.hooks(),
        _ => None,
    };
    match hooks.map(slot) {
        Some(Some(_)) => Err(Error::AlreadyParallel { layer: path.to_owned() }),
        Some(empty) => {
            *empty = Some(prepared);
            Ok(())
        }
        None => Err(unsupported(style, path, layer, "modules with hooks")),
    }
}

fn check<B: ParallelBackend>(
    style: &dyn fmt::Debug,
    path: &str,
    layer: &Layer<'_, B>,
    mesh: &Mesh,
) -> Result<()> {
    mesh.check_1d(&name(style))?;
    if layer.parameters().iter().any(|(_, distributed)| *distributed) {
        return Err(Error::AlreadyParallel { layer: path.to_owned() });
    }
    Ok(())
}

/// Distributes the parameters in `wanted` that the layer has.
fn shard<B: ParallelBackend>(
    layer: &mut Layer<'_, B>,
    mesh: &Mesh,
    wanted: &[(&str, Placement)],
) -> Result<()> {
    let has: Vec<&str> = layer.parameters().iter().map(|(name, _)| *name).collect();
    wanted
        .iter()
        .filter(|(name, _)| has.contains(name))
        .try_for_each(|(name, placement)| layer.shard(name, mesh, &[*placement]))
}

fn unsupported<B: ParallelBackend>(
    style: &dyn fmt::Debug,
    path: &str,
    layer: &Layer<'_, B>,
    expected: &'static str,
) -> Error {
    Error::Unsupported {
        style: name(style),
        layer: path.to_owned(),
        kind: layer.kind().to_owned(),
        expected,
    }
}

/// The style's name, without its settings.
fn name(style: &dyn fmt::Debug) -> String {
    let text = format!("{style:?}");
    text.split([' ', '(', '{']).next().unwrap_or_default().to_owned()
}
