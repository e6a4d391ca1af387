//! Where lanes lie in slices.

use proptest::prelude::*;
use zeroshard_proto::{DimPlacement, Manifest, ProcessMesh, Reduction, TensorLayout, TensorSpec};

use super::*;

/// The lane of a slice whose tensor has no layout.
pub(crate) fn whole(numel: usize, world: u32) -> Vec<Lane> {
    vec![Lane { area: Area::whole(numel), ranks: (0..world).collect() }]
}

/// A job of one tensor, laid out like this on a mesh of these ranks.
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

/// Jobs of one tensor of `shape`, on meshes of one or two dimensions, whose ranks are in any order
/// and may be a part of the world.
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

/// The elements of `slice` that are in `area`, one by one: within the slice, ascending.
pub(crate) fn elements(shape: &[u64], area: &TensorBox, slice: &SliceSpec) -> Vec<usize> {
    let inside = |&element: &usize| {
        let mut rest = (slice.offset + element) as u64;
        (0..shape.len()).rev().all(|dim| {
            let index = rest % shape[dim];
            rest /= shape[dim];
            (area.offset[dim]..area.offset[dim] + area.size[dim]).contains(&index)
        })
    };
    (0..slice.numel).filter(inside).collect()
}

proptest! {
    #[test]
    fn a_slices_lanes_have_each_element_once_and_number_their_own(
        job in prop::collection::vec(1u64..7, 0..4).prop_flat_map(jobs),
        cut in any::<[prop::sample::Index; 2]>(),
        among in any::<[prop::sample::Index; 2]>(),
    ) {
        let tensor = &job.manifest.tensors()[0];
        let range = |cut: [prop::sample::Index; 2], numel: usize| {
            let [a, b] = cut.map(|cut| cut.index(numel + 1));
            a.min(b)..a.max(b)
        };
        let whole = range(cut, tensor.numel() as usize);
        let slice = SliceSpec { tensor: 0, offset: whole.start, numel: whole.len() };
        let lanes = Lanes::new(&job, 0).of(&slice);
        let mut seen = vec![0; slice.numel];
        for lane in lanes.iter() {
            let contributions = job.contributions(0).lanes;
            let area = &contributions.iter().find(|of| *of.ranks == *lane.ranks).unwrap().area;
            let expected = elements(&tensor.shape, area, &slice);
            let actual: Vec<usize> = lane.area.elements(0..lane.area.numel()).runs().flatten().collect();
            prop_assert_eq!(&actual, &expected);
            expected.iter().for_each(|&element| seen[element] += 1);
            for (index, &element) in expected.iter().enumerate() {
                prop_assert_eq!(lane.area.place(index), element);
            }
            let some = range(among, slice.numel);
            let inside = lane.area.among(&some);
            let both: Vec<usize> = expected.iter().copied().filter(|element| some.contains(element)).collect();
            prop_assert_eq!(&expected[inside], &both[..]);
        }
        prop_assert!(seen.iter().all(|&times| times == 1), "{:?}", seen);
    }
}

#[test]
fn a_box_that_is_in_one_run_is_dense() {
    let slice = SliceSpec { tensor: 0, offset: 8, numel: 8 };
    let view = |offset: [u64; 2], size: [u64; 2]| {
        Arc::new(BoxView::new(&[6, 4], &TensorBox { offset: offset.into(), size: size.into() }))
    };
    // Rows 2 and 3 are the slice.
    let area = |offset, size| Area::of(&view(offset, size), &slice);
    assert_eq!(area([0, 0], [6, 4]), Area::whole(8));
    assert_eq!(area([1, 0], [2, 4]), Area::Dense { start: 0, numel: 4 });
    assert_eq!(area([3, 1], [2, 2]), Area::Dense { start: 5, numel: 2 });
    assert!(matches!(area([0, 1], [6, 2]), Area::Strided { .. }));
    assert_eq!(area([4, 0], [2, 4]).numel(), 0);
}
