//! Tests the redistribution of tensors and of their gradients.

use super::*;

const SUM: Placement = PARTIAL;
const MEAN: Placement = Partial(Reduction::Avg);

/// All combinations of placements on a mesh of `dims` dimensions.
fn all(dims: usize) -> Vec<Vec<Placement>> {
    let one = [Shard(0), Shard(1), Replicate, SUM, MEAN];
    (0..one.len().pow(dims as u32))
        .map(|n| (0..dims as u32).map(|d| one[n / one.len().pow(d) % one.len()]).collect())
        .collect()
}

/// Checks the values and the gradient of a tensor after a redistribution.
fn check_reshard(shape: [usize; 2], mesh: &Mesh, from: &[Placement], to: &[Placement]) {
    let what = format!("{shape:?} on {:?}: {from:?} to {to:?}", mesh.process_mesh().shape());
    let x = numbers(3, shape).require_grad();
    let tensor = shard_tensor(x.clone(), mesh, from).unwrap().reshard(to).unwrap();
    assert_eq!(tensor.placements(), to, "{what}");
    assert_eq!(tensor.shape(), shape, "{what}");
    let whole = tensor.full::<2>().unwrap();
    assert_close(&values(whole.clone().inner()), &values(x.clone().inner()), &what);
    let weights = numbers(4, shape);
    let gradients = backward(mesh, &(whole * weights.clone()).sum());
    assert_close(&values(x.grad(&gradients).unwrap()), &values(weights.inner()), &what);
}

#[test]
fn tensors_and_gradients_are_redistributed_from_every_layout_to_every_other() {
    worlds(3, |world| {
        let mesh = line(&world, 3);
        // Parts of equal sizes, a shorter last part, and an empty part.
        for shape in [[3, 6], [5, 4], [2, 1]] {
            for from in all(1) {
                for to in all(1) {
                    check_reshard(shape, &mesh, &from, &to);
                }
            }
        }
    });
}

#[test]
fn tensors_and_gradients_are_redistributed_on_a_mesh_of_two_dimensions() {
    worlds(4, |world| {
        let mesh = world.mesh(ProcessMesh::dense([2, 2], ["dp", "tp"]).unwrap()).unwrap();
        for from in all(2) {
            for to in all(2) {
                check_reshard([5, 3], &mesh, &from, &to);
            }
        }
    });
}

#[test]
fn parts_are_those_of_torch_chunk() {
    let parts = worlds(3, |world| {
        let mesh = line(&world, 3);
        let rows = |rows| {
            values(
                shard_tensor(numbers(0, [rows, 1]), &mesh, &[Shard(0)])
                    .unwrap()
                    .to_local::<2>()
                    .unwrap(),
            )
            .len()
        };
        (rows(7), rows(4), rows(1))
    });
    assert_eq!(parts, [(3, 2, 1), (3, 2, 0), (1, 0, 0)]);
}

#[test]
fn from_local_transfers_no_data() {
    worlds(2, |world| {
        let mesh = line(&world, 2);
        let local = numbers(world.rank() as usize, [2, 3]);
        let (tensor, calls) =
            world.trace(|| DistTensor::from_local(local.clone(), &mesh, &[Shard(0)]).unwrap());
        assert_eq!(tensor.shape(), [4, 3]);
        assert!(calls.is_empty());
        let whole = values(tensor.full::<2>().unwrap());
        let rank = world.rank() as usize;
        assert_eq!(whole[6 * rank..6 * rank + 6], values(local));
    });
}

#[test]
fn from_local_of_accepts_parts_of_different_sizes() {
    worlds(2, |world| {
        let mesh = line(&world, 2);
        let rows = 3 - world.rank() as usize;
        let local = numbers(world.rank() as usize, [rows, 2]);
        let tensor = DistTensor::from_local_of(local.clone(), &mesh, &[Shard(0)], [5, 2]).unwrap();
        assert_eq!(tensor.full::<2>().unwrap().dims(), [5, 2]);
        let error = DistTensor::from_local_of(local, &mesh, &[Shard(0)], [7, 2]).unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
    });
}

#[test]
fn partial_gradients_of_a_replicated_tensor_are_summed() {
    worlds(3, |world| {
        let mesh = line(&world, 3);
        let x = numbers(1, [2, 2]).require_grad();
        let used = shard_tensor(x.clone(), &mesh, &[Replicate]).unwrap();
        let local = used.to_local_with_gradient::<2>(&[PARTIAL]).unwrap();
        let loss = local.mul_scalar(1.0 + world.rank() as f32).sum();
        let gradient = x.grad(&backward(&mesh, &loss)).unwrap();
        assert_eq!(values(gradient), [6.0; 4]);
    });
}

#[test]
fn replicated_gradients_of_a_replicated_tensor_are_not_changed() {
    worlds(2, |world| {
        let mesh = line(&world, 2);
        let x = numbers(1, [2, 2]).require_grad();
        let local = shard_tensor(x.clone(), &mesh, &[Replicate]).unwrap().to_local::<2>().unwrap();
        let gradient = x.grad(&backward(&mesh, &local.mul_scalar(3.0).sum())).unwrap();
        assert_eq!(values(gradient), [3.0; 4]);
    });
}

#[test]
fn the_gradients_of_a_gathered_input_are_reduced_and_scattered() {
    worlds(2, |world| {
        let mesh = line(&world, 2);
        let x = numbers(world.rank() as usize, [2, 2]).require_grad();
        let gathered = make_input_reshard_replicate(x.clone(), Some(&mesh)).unwrap();
        let local = gathered.to_local_with_gradient::<2>(&[PARTIAL]).unwrap();
        let loss = local.mul_scalar(1.0 + world.rank() as f32).sum();
        let (_, calls) = world.trace(|| world.backward(&loss));
        assert_eq!(calls.iter().map(|call| call.name).collect::<Vec<_>>(), ["reduce_scatter"]);
    });
}

#[test]
fn pending_sums_are_reduced_before_an_elementwise_function() {
    worlds(2, |world| {
        let mesh = line(&world, 2);
        let terms = numbers(world.rank() as usize, [2, 2]);
        let tensor = DistTensor::from_local(terms, &mesh, &[PARTIAL]).unwrap();
        let found = values(tensor.map::<2>(|x| x.powi_scalar(2)).unwrap().full::<2>().unwrap());
        let sum = numbers(0, [2, 2]) + numbers(1, [2, 2]);
        assert_close(&found, &values(sum.powi_scalar(2)), "square of the sum");
    });
}

#[test]
fn a_tensor_moves_to_another_mesh() {
    worlds(4, |world| {
        let grid = world.mesh(ProcessMesh::dense([2, 2], ["dp", "tp"]).unwrap()).unwrap();
        let all = line(&world, 4);
        let x = numbers(2, [5, 3]).require_grad();
        let tensor = shard_tensor(x.clone(), &grid, &[Shard(0), Shard(1)]).unwrap();
        let whole = tensor.reshard_to(&all, &[Shard(1)]).unwrap().full::<2>().unwrap();
        assert_eq!(values(whole.clone()), values(x.clone()));
        let gradient = x.grad(&backward(&all, &whole.sum())).unwrap();
        assert_eq!(values(gradient), [1.0; 15]);
    });
}

#[test]
fn a_maximum_over_ranks_refuses_tensors_that_require_grad() {
    worlds(2, |world| {
        let mesh = line(&world, 2);
        let largest = |x: Tensor<Graph, 1>| {
            DistTensor::from_local(x, &mesh, &[Partial(Reduction::Max)]).unwrap().full::<1>()
        };
        let x = numbers(world.rank() as usize, [3]);
        let both = [values(numbers(0, [3])), values(numbers(1, [3]))];
        let expected: Vec<f32> = both[0].iter().zip(&both[1]).map(|(a, b)| a.max(*b)).collect();
        assert_eq!(values(largest(x.clone()).unwrap()), expected);
        assert!(matches!(largest(x.require_grad()), Err(Error::Invalid(_))));
    });
}

#[test]
fn invalid_placements_and_meshes_are_refused() {
    worlds(2, |world| {
        let mesh = line(&world, 2);
        let x = numbers(0, [2, 2]);
        let refusals = [
            shard_tensor(x.clone(), &mesh, &[Shard(2)]).unwrap_err(),
            shard_tensor(x.clone(), &mesh, &[Replicate, Replicate]).unwrap_err(),
            shard_tensor(x.clone(), &mesh, &[]).unwrap_err(),
            shard_tensor(x.clone(), &mesh, &[Shard(0)]).unwrap().to_local::<3>().unwrap_err(),
            world.mesh(ProcessMesh::new([1], [1 - world.rank()], ["x"]).unwrap()).unwrap_err(),
            mesh.sub_mesh(&["dp"]).unwrap_err(),
        ];
        for (case, error) in refusals.iter().enumerate() {
            use zeroshard_model::Error::{Invalid, Refused};
            let is_right = match case {
                4 | 5 => matches!(error, Error::Invalid(Refused { .. })),
                _ => matches!(error, Error::Invalid(Invalid { .. })),
            };
            assert!(is_right, "{error}");
        }
        assert_eq!(
            values(shard_tensor(x.clone(), &mesh, &[Shard(LAST)]).unwrap().full::<2>().unwrap()),
            values(x)
        );
    });
}

#[test]
fn a_disagreement_about_the_mesh_names_both_meshes() {
    let results = worlds(2, |world| {
        let ranks = if world.rank() == 0 { [0, 1] } else { [1, 0] };
        world.mesh(ProcessMesh::new([2], ranks, ["tp"]).unwrap()).unwrap_err()
    });
    assert!(results.iter().all(|error| matches!(
        error,
        Error::Collective(
            crate::collectives::Error::Disagreement { .. } | crate::collectives::Error::Lost { .. }
        )
    )));
    assert!(
        results
            .iter()
            .any(|error| error.to_string().contains("[0, 1]")
                && error.to_string().contains("[1, 0]"))
    );
}

#[test]
fn an_error_in_a_backward_pass_is_returned() {
    let errors = worlds(2, |world| {
        let mesh = line(&world, 2);
        let x = numbers(1, [2, 2]).require_grad();
        let used = shard_tensor(x, &mesh, &[Replicate]).unwrap();
        let local = used.to_local_with_gradient::<2>(&[PARTIAL]).unwrap();
        if world.rank() == 0 {
            // Rank 1 calls a different all_reduce in its backward pass.
            return world.all_reduce(&[0, 1], Reduction::Sum, vec![0.0; 9]).unwrap_err();
        }
        world.backward(&local.sum()).map(drop).unwrap_err()
    });
    assert!(errors.iter().any(|error| error.to_string().contains("9 f32")), "{errors:?}");
}
