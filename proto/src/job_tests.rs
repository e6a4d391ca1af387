use super::*;

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

#[test]
fn every_optimizer_survives_the_wire() {
    for optimizer in Optimizer::defaults() {
        assert_eq!(Optimizer::try_from(pb::Optimizer::from(&optimizer)), Ok(optimizer));
    }
}

#[test]
fn a_spec_survives_the_wire() {
    let kept = JobSpec { idle_timeout: Some(Duration::from_millis(1500)), ..spec() };
    for spec in [spec(), kept] {
        assert_eq!(JobSpec::try_from(pb::JobSpec::from(&spec)), Ok(spec));
    }
}

#[test]
fn unknown_hyperparameters_and_broken_flags_are_refused() {
    let adam = |name: &str, value| pb::Optimizer {
        name: "adam".into(),
        hyperparameters: [(name.to_owned(), value)].into(),
    };
    assert_eq!(what(Optimizer::try_from(adam("momentum", 0.9))), "hyperparameter");
    assert_eq!(what(Optimizer::try_from(adam("amsgrad", 0.5))), "amsgrad of adam");
    assert_eq!(what(Optimizer::try_from(adam("lr", f64::NAN))), "lr of adam");
    assert!(Optimizer::try_from(adam("amsgrad", 1.0)).is_ok());
}

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
    let mixed =
        JobSpec { groups: vec!["adamw".parse().unwrap(), "sgd".parse().unwrap()], ..spec() };
    assert_eq!(what(mixed.validate()), "optimizer of parameter group 1");
}

fn sharded(placements: &[DimPlacement]) -> JobSpec {
    let layout = Some(TensorLayout { mesh: 0, placements: placements.into() });
    let tensor = TensorSpec { layout, ..TensorSpec::new("w", [2, 3]) };
    let meshes = vec![Arc::new(ProcessMesh::dense([1, 2], ["dp", "tp"]).unwrap())];
    JobSpec { manifest: Manifest::new(vec![tensor]).unwrap(), world: 2, meshes, ..spec() }
}

#[test]
fn layouts_survive_the_wire_and_determine_local_boxes() {
    use DimPlacement::{Partial, Replicate, Shard};
    for placements in [[Partial(Reduction::Avg), Shard(1)], [Partial(Reduction::Sum), Replicate]] {
        let spec = sharded(&placements);
        assert_eq!(JobSpec::try_from(pb::JobSpec::from(&spec)), Ok(spec));
    }
    let spec = sharded(&[Replicate, Shard(1)]);
    assert_eq!(spec.local_box(0, 1), TensorBox { offset: vec![0, 2], size: vec![2, 1] });
    assert!(spec.local_box(0, 2).is_empty());
    assert_eq!(spec.describe_rank(1), "rank 1 (dp 0, tp 1)");
}

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
fn exceeding_a_limit_is_refused_and_the_error_states_the_limit() {
    let limit = |message: pb::JobSpec| match JobSpec::try_from(message) {
        Err(Error::Invalid { what, expected, .. }) => (what, expected),
        other => panic!("{other:?}"),
    };
    let message = || pb::JobSpec::from(&spec());
    let (what, expected) =
        limit(pb::JobSpec { meshes: vec![pb::Mesh::default(); 2000], ..message() });
    assert_eq!((what.as_str(), expected), ("number of meshes", format!("at most {MAX_MESHES}")));
    let groups = vec![pb::Optimizer::default(); 2000];
    let (what, expected) = limit(pb::JobSpec { groups, ..message() });
    assert_eq!(
        (what.as_str(), expected),
        ("number of parameter groups", format!("at most {MAX_GROUPS}"))
    );
    let (what, expected) = limit(pb::JobSpec { replicas: 65, ..message() });
    assert_eq!((what.as_str(), expected), ("replicas", format!("at most {MAX_REPLICAS}")));
    // The dimension names take 351 KiB.
    let dims = (0..40_000).map(|dim| pb::MeshDim { name: format!("dim {dim:04}"), size: 1 });
    let mesh = pb::Mesh { dims: dims.collect(), ranks: vec![0] };
    assert_eq!(
        limit(pb::JobSpec { meshes: vec![mesh], ..message() }).0,
        "number of dimensions of a mesh"
    );
}

#[test]
fn a_refused_spec_creates_no_slices_and_no_list_of_contributions() {
    // A message of a few bytes describes four million slices, each with 65,536 contributions.
    let message = pb::JobSpec {
        tensors: vec![pb::Tensor { shape: vec![1 << 44], ..(&TensorSpec::new("w", [])).into() }],
        world: MAX_WORLD,
        ..pb::JobSpec::from(&spec())
    };
    assert_eq!(what(JobSpec::try_from(message)), "number of contributions (ranks times slices)");
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
