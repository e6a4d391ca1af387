use super::*;
use crate::local::LocalTensor;

fn spec() -> JobSpec {
    let manifest = Manifest::new(vec![TensorSpec::new("w", [2, 3])]).unwrap();
    JobSpec::new("job", manifest, vec!["adamw".parse().unwrap()])
}

fn what(result: Result<impl std::fmt::Debug>) -> String {
    match result {
        Err(Error::Invalid { what, .. }) => what,
        other => panic!("{other:?}"),
    }
}

// promise: invalid-input
#[test]
fn a_spec_that_contradicts_itself_is_refused() {
    assert_eq!(what(JobSpec { world: 0, ..spec() }.validate()), "world");
    assert_eq!(what(JobSpec { groups: vec![], ..spec() }.validate()), "number of parameter groups");
    assert_eq!(what(JobSpec { replicas: 2, ..spec() }.validate()), "replicas");
    for timeout in [Duration::ZERO, Duration::from_millis(999), Duration::MAX] {
        let idle = JobSpec { idle_timeout: Some(timeout), ..spec() };
        assert_eq!(what(idle.validate()), "idle_timeout");
    }
    let lamb = JobSpec { groups: vec!["lamb".parse().unwrap()], ..spec() };
    assert_eq!(what(lamb.validate()), "policy of tensor \"w\"");
    let groups = |names: [&str; 2]| JobSpec {
        groups: names.map(|name| name.parse().unwrap()).into(),
        ..spec()
    };
    let refused = groups(["adamw", "average"]).validate();
    assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
}

// promise: invalid-input
#[test]
fn each_group_has_its_own_optimizer_in_every_step() {
    let groups = |names: [&str; 2]| names.map(|name| name.parse().unwrap()).to_vec();
    let tensors = ["w", "v", "frozen"].map(|name| TensorSpec::new(name, [2, 3]));
    let [w, v, frozen] = tensors;
    let v = TensorSpec { group: 1, ..v };
    let tied = TensorSpec { alias_of: Some("v".into()), ..TensorSpec::new("tied", [2, 3]) };
    let tensors = vec![w, v, TensorSpec { frozen: true, ..frozen }, tied];
    let manifest = Manifest::new(tensors).unwrap();
    let spec = JobSpec::new("job", manifest, groups(["adamw", "sgd"]));
    spec.validate().unwrap();
    let kinds = [0, 1, 2, 3].map(|tensor| spec.optimizer_of(tensor).map(Optimizer::name));
    assert_eq!(kinds, [Some("adamw"), Some("sgd"), None, Some("sgd")]);
    assert_eq!(spec.arrays(0).state.len(), 2);
    assert!(spec.arrays(1).state.is_empty());
    spec.validate_step(&groups(["adamw", "sgd"])).unwrap();
    let swapped = spec.validate_step(&groups(["sgd", "adamw"]));
    assert_eq!(what(swapped), "optimizer of parameter group 0");
}

fn sharded(placements: &[DimPlacement]) -> JobSpec {
    let layout = Some(TensorLayout { mesh: 0, placements: placements.into() });
    let tensor = TensorSpec { layout, ..TensorSpec::new("w", [2, 3]) };
    let meshes = vec![Arc::new(ProcessMesh::dense([1, 2], ["dp", "tp"]).unwrap())];
    JobSpec { manifest: Manifest::new(vec![tensor]).unwrap(), world: 2, meshes, ..spec() }
}

// promise: invalid-input
#[test]
fn a_tensor_is_replaced_by_one_rank_of_those_that_hold_it() {
    let named = |spec: JobSpec, rank| {
        let tensors = spec.manifest.tensors().iter().cloned();
        let tensors = tensors.map(|tensor| TensorSpec { replaced_by: Some(rank), ..tensor });
        JobSpec { manifest: Manifest::new(tensors.collect()).unwrap(), world: 2, ..spec }
    };
    named(spec(), 1).validate().unwrap();
    let of_rank = |rank| LocalTensor::new(&named(spec(), 1), 0, rank);
    assert_eq!([0, 1].map(|rank| of_rank(rank).uploads()), [true, false]);
    assert_eq!([0, 1].map(|rank| of_rank(rank).replaces()), [false, true]);
    assert_eq!(what(named(spec(), 2).validate()), "replaced_by of tensor \"w\"");
    let sharded = sharded(&[DimPlacement::Replicate; 2]);
    assert_eq!(what(named(sharded, 1).validate()), "replaced_by of tensor \"w\"");
}

#[test]
fn layouts_determine_local_boxes() {
    use DimPlacement::{Replicate, Shard};
    let spec = sharded(&[Replicate, Shard(1)]);
    assert_eq!(spec.local_box(0, 1), TensorBox { offset: vec![0, 2], size: vec![2, 1] });
    assert!(spec.local_box(0, 2).is_empty());
    assert_eq!(spec.describe_rank(1), "rank 1 (dp 0, tp 1)");
}

// promise: invalid-input
#[test]
fn layouts_that_do_not_fit_are_refused() {
    use DimPlacement::{Partial, Replicate, Shard};
    assert_eq!(what(sharded(&[Replicate, Shard(2)]).validate()), "placement of tensor \"w\"");
    assert_eq!(
        what(sharded(&[Replicate, Partial(Reduction::Max)]).validate()),
        "placement of tensor \"w\""
    );
    assert_eq!(what(sharded(&[Replicate]).validate()), "number of placements");
    assert_eq!(
        what(JobSpec { meshes: vec![], ..sharded(&[Replicate; 2]) }.validate()),
        "mesh of tensor \"w\""
    );
    assert_eq!(what(JobSpec { world: 1, ..sharded(&[Replicate; 2]) }.validate()), "rank in mesh 0");
}

#[test]
fn sharded_tensors_have_fewer_contributions_than_tensors_summed_over_all_ranks() {
    use DimPlacement::{Partial, Shard};
    let on = |placement| {
        let layout = Some(TensorLayout { mesh: 0, placements: vec![placement] });
        let tensor = |i| TensorSpec {
            layout: layout.clone(),
            ..TensorSpec::new(format!("w{i}"), [1 << 20, 64])
        };
        let meshes = vec![Arc::new(ProcessMesh::dense([MAX_WORLD as usize], ["dp"]).unwrap())];
        let manifest = Manifest::new((0..2000).map(tensor).collect()).unwrap();
        JobSpec { manifest, world: MAX_WORLD, meshes, ..spec() }.validate()
    };
    assert_eq!(what(on(Partial(Reduction::Avg))), what(on(Shard(1))));
    assert_eq!(on(Shard(0)), Ok(()));
}

#[test]
fn the_difference_between_two_specs_is_named() {
    assert_eq!(spec().difference(&spec()), None);
    let other = JobSpec { world: 2, ..spec() };
    assert_eq!(spec().difference(&other).as_deref(), Some("world"));
}
