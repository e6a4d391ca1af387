//! A job without a model: parameters and gradients that are the same on every machine.

use zeroshard_client::TensorData;
use zeroshard_model::{
    JobSpec, Manifest, Optimizer, Policy, Result, TensorId, TensorSpec,
    geometry::blocks::SLICE,
    splitmix::{GOLDEN, mixed},
};

/// `numel` numbers in [-1, 1) that depend only on `seed`: splitmix64 of a counter.
pub fn values(seed: u64, numel: usize) -> Vec<f32> {
    let number = |index: u64| {
        let number = mixed(seed.wrapping_mul(GOLDEN) ^ index.wrapping_mul(GOLDEN));
        // 24 bits: exact in f32.
        (number >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..numel as u64).map(number).collect()
}

fn tensors(
    manifest: &Manifest,
    wanted: impl Fn(&TensorSpec) -> bool,
    seed: u64,
) -> impl Iterator<Item = (TensorId, Vec<f32>)> {
    let numbered = manifest.tensors().iter().enumerate().filter(move |(_, spec)| wanted(spec));
    numbered.map(move |(tensor, spec)| {
        (TensorId::new(tensor), values(seed + tensor as u64, spec.numel() as usize))
    })
}

/// The tensors at these positions.
pub fn tensor_ids(indices: impl IntoIterator<Item = usize>) -> Vec<TensorId> {
    indices.into_iter().map(TensorId::new).collect()
}

/// The initial parameters of all tensors that own their storage.
pub fn parameters(manifest: &Manifest) -> Vec<TensorData> {
    let all = tensors(manifest, |spec| spec.alias_of.is_none(), 1 << 40);
    all.map(|(tensor, values)| TensorData::new(tensor, values)).collect()
}

/// The gradients of `rank` for `step`, of all trained tensors.
pub fn gradients(manifest: &Manifest, rank: u32, step: u64) -> Vec<TensorData> {
    let all = scaled_gradients(manifest, rank, step, 1.0).into_iter();
    all.map(|(tensor, values)| TensorData::new(tensor, values)).collect()
}

/// The same gradients as values by tensor, multiplied by `factor`.
pub fn scaled_gradients(
    manifest: &Manifest,
    rank: u32,
    step: u64,
    factor: f32,
) -> Vec<(TensorId, Vec<f32>)> {
    let seed = (u64::from(rank) << 48) | ((step + 1) << 20);
    let scaled = |values: Vec<f32>| values.into_iter().map(|value| value * factor).collect();
    let all = tensors(manifest, TensorSpec::trains, seed);
    all.map(|(tensor, values)| (tensor, scaled(values))).collect()
}

/// A job with one parameter group and `world` ranks.
///
/// # Errors
/// [`zeroshard_model::Error::Invalid`] for an invalid manifest.
pub fn job(
    name: &str,
    world: u32,
    optimizer: Optimizer,
    tensors: Vec<TensorSpec>,
) -> Result<JobSpec> {
    Ok(JobSpec { world, ..JobSpec::new(name, Manifest::new(tensors)?, vec![optimizer]) })
}

/// Two small tensors: `w` of 1,000 elements and `b` of 3.
pub fn small() -> Vec<TensorSpec> {
    vec![TensorSpec::new("w", [10, 100]), TensorSpec::new("b", [3])]
}

/// Tensors of every kind: uneven, empty, of one element, frozen, tied, and `last`, which is large.
/// They are whole if the optimizer needs whole tensors. Adafactor does not train empty tensors, so
/// it is frozen there.
fn every_kind(optimizer: &Optimizer, last: TensorSpec) -> Vec<TensorSpec> {
    let mut tensors = vec![
        TensorSpec::new("embedding", [1000, 33]),
        TensorSpec {
            frozen: matches!(optimizer, Optimizer::Adafactor(_)),
            ..TensorSpec::new("empty", [0, 7])
        },
        TensorSpec::new("scalar", []),
        TensorSpec { frozen: true, ..TensorSpec::new("frozen", [129]) },
        TensorSpec { buffer: true, ..TensorSpec::new("running_mean", [3]) },
        TensorSpec::new("bias", [65_537]),
        TensorSpec {
            alias_of: Some("embedding".to_owned()),
            ..TensorSpec::new("head", [1000, 33])
        },
        TensorSpec::new("one", [1]),
        last,
    ];
    if optimizer.needs_whole_tensors() {
        tensors.iter_mut().for_each(|tensor| tensor.policy = Policy::Whole);
    }
    tensors
}

/// Tensors of every kind, with 100,000 elements in total.
pub fn kinds(optimizer: &Optimizer) -> Vec<TensorSpec> {
    every_kind(optimizer, TensorSpec::new("matrix", [131, 65]))
}

/// Tensors of every kind, with a tensor of more than one slice.
pub fn kinds_and_large(optimizer: &Optimizer) -> Vec<TensorSpec> {
    every_kind(optimizer, TensorSpec::new("large", [SLICE as u64 + 70_001]))
}
