//! Jobs of one tensor, for tests.

use std::sync::Arc;

use proptest::prelude::*;
use zeroshard_model::{
    DimPlacement, JobSpec, Manifest, ProcessMesh, Reduction, SliceSpec, TensorBox, TensorLayout,
    TensorSpec,
    geometry::{Contributions, SliceContributors},
};

/// The contributors to a slice whose tensor has no layout: all ranks.
pub(crate) fn whole(numel: usize, world: u32) -> Arc<[SliceContributors]> {
    let slice = SliceSpec { tensor: 0, offset: 0, numel };
    Contributions::mean(&[numel as u64], world).of_slice(&slice)
}

/// A job with one tensor that has these placements on this mesh.
pub(crate) fn job(tensor: TensorSpec, mesh: ProcessMesh, placements: &[DimPlacement]) -> JobSpec {
    let layout = Some(TensorLayout { mesh: 0, placements: placements.to_vec() });
    let manifest = Manifest::new(vec![TensorSpec { layout, ..tensor }]).unwrap();
    let world = mesh.ranks().iter().max().unwrap() + 1;
    let groups = vec!["adamw".parse().unwrap()];
    let job =
        JobSpec { world, meshes: vec![Arc::new(mesh)], ..JobSpec::new("job", manifest, groups) };
    job.validate().unwrap();
    job
}

/// Generates jobs with one tensor of `shape`, on meshes of one or two dimensions, whose ranks are
/// in any order and may be a subset of the world.
pub(crate) fn jobs(shape: Vec<u64>) -> impl Strategy<Value = JobSpec> {
    let dims = shape.len();
    let placement = (0..4 + dims).prop_map(|kind| match kind {
        0 | 1 => DimPlacement::Replicate,
        2 => DimPlacement::Partial(Reduction::Sum),
        3 => DimPlacement::Partial(Reduction::Avg),
        sharded => DimPlacement::Shard(sharded - 4),
    });
    let mesh = prop::collection::vec((1usize..5, placement), 1..3).prop_flat_map(|dims| {
        let size: u32 = dims.iter().map(|dim| dim.0 as u32).product();
        let ranks = Just((0..size + 1).collect::<Vec<u32>>()).prop_shuffle();
        (Just(dims), ranks.prop_map(move |ranks| ranks[..size as usize].to_vec()))
    });
    mesh.prop_map(move |(dims, ranks)| {
        let (sizes, placements): (Vec<_>, Vec<_>) = dims.into_iter().unzip();
        let names = (0..sizes.len()).map(|dim| format!("d{dim}"));
        let mesh = ProcessMesh::new(sizes, ranks, names).unwrap();
        job(TensorSpec::new("w", shape.clone()), mesh, &placements)
    })
}

/// The elements of `slice` that are in `bounds`, computed one by one: relative to the slice,
/// ascending.
pub(crate) fn elements(shape: &[u64], bounds: &TensorBox, slice: &SliceSpec) -> Vec<usize> {
    let inside = |&element: &usize| {
        let mut rest = (slice.offset + element) as u64;
        (0..shape.len()).rev().all(|dim| {
            let index = rest % shape[dim];
            rest /= shape[dim];
            (bounds.offset[dim]..bounds.offset[dim] + bounds.size[dim]).contains(&index)
        })
    };
    (0..slice.numel).filter(inside).collect()
}
