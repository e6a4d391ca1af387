//! Tests the functions with torch's names on plain tensors, on distributed tensors and on invalid
//! arguments.

use super::*;

fn local(rank: u32) -> Tensor<Graph, 2> {
    numbers(rank as usize, [2, 4])
}

/// The local tensors of both ranks, concatenated along a dimension.
fn joined(dim: usize) -> Vec<f32> {
    values(Tensor::cat(vec![local(0), local(1)], dim))
}

fn check_plain(
    make: impl Fn(Tensor<Graph, 2>, &Mesh) -> Result<DistTensor<Graph>> + Sync,
    placement: Placement,
    shape: [usize; 2],
    whole: Vec<f32>,
) {
    worlds(2, |world| {
        let mesh = line(&world, 2);
        let (made, calls) = world.trace(|| make(local(world.rank()), &mesh).unwrap());
        assert!(calls.is_empty(), "a plain tensor is this rank's part");
        assert_eq!((made.placements(), made.shape()), ([placement].as_slice(), shape.as_slice()));
        if placement != Replicate {
            assert_eq!(values(made.full::<2>().unwrap()), whole);
        }
    });
}

fn check_dist(
    make: impl Fn(DistTensor<Graph>, Option<&Mesh>) -> Result<DistTensor<Graph>> + Sync,
    placement: Placement,
) {
    worlds(2, |world| {
        let mesh = line(&world, 2);
        for from in [Shard(0), Shard(1), Replicate, PARTIAL] {
            for at in [Some(&mesh), None] {
                let tensor = shard_tensor(numbers(1, [3, 4]), &mesh, &[from]).unwrap();
                let made = make(tensor, at).unwrap();
                assert_eq!(
                    (made.placements(), made.shape()),
                    ([placement].as_slice(), [3, 4].as_slice())
                );
                assert_close(
                    &values(made.full::<2>().unwrap()),
                    &values(numbers(1, [3, 4])),
                    "the same tensor",
                );
            }
        }
    });
}

#[test]
fn make_input_shard_1d_regards_a_plain_tensor_as_a_part_and_redistributes_a_distributed_tensor() {
    check_plain(|x, mesh| make_input_shard_1d(x, Some(mesh), 0), Shard(0), [4, 4], joined(0));
    check_plain(|x, mesh| make_input_shard_1d(x, Some(mesh), 1), Shard(1), [2, 8], joined(1));
    check_dist(|x, mesh| make_input_shard_1d(x, mesh, 0), Shard(0));
    check_dist(|x, mesh| make_input_shard_1d(x, mesh, 1), Shard(1));
}

#[test]
fn make_input_shard_1d_last_dim_shards_the_last_dimension() {
    check_plain(|x, mesh| make_input_shard_1d_last_dim(x, Some(mesh)), Shard(1), [2, 8], joined(1));
    check_dist(make_input_shard_1d_last_dim, Shard(1));
}

#[test]
fn make_input_replicate_1d_regards_a_plain_tensor_as_the_whole() {
    check_plain(|x, mesh| make_input_replicate_1d(x, Some(mesh)), Replicate, [2, 4], Vec::new());
    check_dist(make_input_replicate_1d, Replicate);
}

#[test]
fn make_input_reshard_replicate_gathers_parts_along_dimension_0() {
    worlds(2, |world| {
        let mesh = line(&world, 2);
        let made = make_input_reshard_replicate(local(world.rank()), Some(&mesh)).unwrap();
        assert_eq!((made.placements(), made.shape()), ([Replicate].as_slice(), [4, 4].as_slice()));
        assert_eq!(values(made.to_local::<2>().unwrap()), joined(0));
    });
    check_dist(make_input_reshard_replicate, Replicate);
}

#[test]
fn the_gradient_of_make_input_reshard_replicate_is_that_of_this_ranks_rows() {
    worlds(2, |world| {
        let mesh = line(&world, 2);
        let x = local(world.rank()).require_grad();
        let whole =
            make_input_reshard_replicate(x.clone(), Some(&mesh)).unwrap().to_local::<2>().unwrap();
        let gradients = backward(&mesh, &(whole * numbers(7, [4, 4])).sum());
        let rank = world.rank() as usize;
        let expected = &values(numbers(7, [4, 4]))[8 * rank..8 * rank + 8];
        assert_close(&values(x.grad(&gradients).unwrap()), expected, "this rank's rows");
    });
}

#[test]
fn make_output_shard_1d_redistributes() {
    check_dist(|x, mesh| make_output_shard_1d(x, mesh, 0), Shard(0));
    check_dist(|x, mesh| make_output_shard_1d(x, mesh, 1), Shard(1));
}

#[test]
fn make_output_replicate_1d_redistributes() {
    check_dist(make_output_replicate_1d, Replicate);
}

/// The plain tensor that `make` returns on rank 0 for a 3 x 4 tensor with the given placement.
fn plain(
    make: impl Fn(DistTensor<Graph>, Option<&Mesh>) -> Result<Value<Graph>> + Sync,
    from: Placement,
) -> Vec<f32> {
    let found = worlds(2, |world| {
        let mesh = line(&world, 2);
        let tensor = shard_tensor(numbers(1, [3, 4]), &mesh, &[from]).unwrap();
        let made = make(tensor, None).unwrap();
        assert!(matches!(made, Value::Local(_)));
        values(made.local::<2>().unwrap())
    });
    found.into_iter().next().unwrap()
}

#[test]
fn make_output_tensor_returns_the_whole_tensor() {
    for from in [Shard(0), Shard(1), Replicate, PARTIAL] {
        assert_close(&plain(make_output_tensor, from), &values(numbers(1, [3, 4])), "all");
    }
}

#[test]
fn make_sharded_output_tensor_returns_the_part_in_its_current_placement() {
    assert_eq!(plain(make_sharded_output_tensor, Shard(0)), values(numbers(1, [3, 4]))[..8]);
    assert_eq!(plain(make_sharded_output_tensor, Replicate), values(numbers(1, [3, 4])));
}

#[test]
fn make_output_reshard_tensor_returns_the_part_along_dimension_0() {
    for from in [Shard(0), Shard(1), Replicate, PARTIAL] {
        assert_close(
            &plain(make_output_reshard_tensor, from),
            &values(numbers(1, [3, 4]))[..8],
            "two rows",
        );
    }
}

#[test]
fn every_function_refuses_a_mesh_of_two_dimensions() {
    worlds(2, |world| {
        let grid = world.mesh(ProcessMesh::dense([1, 2], ["dp", "tp"]).unwrap()).unwrap();
        let tensor = || shard_tensor(numbers(1, [3, 4]), &grid, &[Replicate, Replicate]).unwrap();
        let plain = || numbers(1, [3, 4]);
        for at in [Some(&grid), None] {
            let dist = [
                make_input_shard_1d(tensor(), at, 0),
                make_input_shard_1d_last_dim(tensor(), at),
                make_input_reshard_replicate(tensor(), at),
                make_input_replicate_1d(tensor(), at),
                make_output_shard_1d(tensor(), at, 0),
                make_output_replicate_1d(tensor(), at),
                make_input_shard_1d(plain(), at, 0),
                make_input_shard_1d_last_dim(plain(), at),
                make_input_reshard_replicate(plain(), at),
                make_input_replicate_1d(plain(), at),
            ];
            let local =
                [make_output_tensor(tensor(), at), make_output_reshard_tensor(tensor(), at)];
            let errors = dist
                .into_iter()
                .map(|made| made.map(drop))
                .chain(local.into_iter().map(|made| made.map(drop)));
            for error in errors {
                let Err(Error::Invalid(zeroshard_model::Error::Refused { sentence })) = &error
                else {
                    panic!("{error:?}")
                };
                assert!(sentence.contains("mesh"), "{error:?}");
            }
        }
    });
}

#[test]
fn output_functions_refuse_a_plain_tensor_and_input_functions_one_without_a_mesh() {
    worlds(1, |world| {
        let mesh = line(&world, 1);
        let plain = || numbers(1, [3, 4]);
        let refused = [
            make_output_shard_1d(plain(), Some(&mesh), 0).map(drop),
            make_output_replicate_1d(plain(), Some(&mesh)).map(drop),
            make_output_tensor(plain(), Some(&mesh)).map(drop),
            make_sharded_output_tensor(plain(), Some(&mesh)).map(drop),
            make_output_reshard_tensor(plain(), Some(&mesh)).map(drop),
            make_input_shard_1d(plain(), None, 0).map(drop),
            make_input_replicate_1d(plain(), None).map(drop),
            make_input_shard_1d(plain(), Some(&mesh), 2).map(drop),
        ];
        assert!(refused.iter().all(|made| matches!(made, Err(Error::Invalid(_)))), "{refused:?}");
    });
}
