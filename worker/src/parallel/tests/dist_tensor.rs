//! Where the parts of a tensor go, and its gradients.

use super::*;

const SUM: Placement = PARTIAL;
const MEAN: Placement = Partial(Reduction::Avg);

/// All placements along each dimension of a mesh.
fn all(dims: usize) -> Vec<Vec<Placement>> {
    let one = [Shard(0), Shard(1), Replicate, SUM, MEAN];
    (0..one.len().pow(dims as u32))
        .map(|n| (0..dims as u32).map(|d| one[n / one.len().pow(d) % one.len()]).collect())
        .collect()
}

/// Value and gradient of a tensor that goes from the one layout to the other, and of itself.
fn there_and_back(shape: [usize; 2], mesh: &Mesh, from: &[Placement], to: &[Placement]) {
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
fn every_layout_becomes_every_other_and_so_do_gradients() {
    worlds(3, |world| {
        let mesh = line(&world, 3);
        // Even, uneven with a short last part, with an empty part.
        for shape in [[3, 6], [5, 4], [2, 1]] {
            for from in all(1) {
                for to in all(1) {
                    there_and_back(shape, &mesh, &from, &to);
                }
            }
        }
    });
}

#[test]
fn every_layout_on_a_grid_becomes_every_other_and_so_do_gradients() {
    worlds(4, |world| {
        let mesh = world.mesh(ProcessMesh::dense([2, 2], ["dp", "tp"]).unwrap()).unwrap();
        for from in all(2) {
            for to in all(2) {
                there_and_back([5, 3], &mesh, &from, &to);
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
fn a_local_tensor_is_a_part_and_no_data_moves() {
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
fn local_tensors_of_several_sizes_are_parts_of_a_tensor_whose_shape_is_said() {
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
fn gradients_of_a_replicated_tensor_that_are_parts_are_summed() {
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
fn gradients_of_a_replicated_tensor_that_are_whole_stay_as_they_are() {
    worlds(2, |world| {
        let mesh = line(&world, 2);
        let x = numbers(1, [2, 2]).require_grad();
        let local = shard_tensor(x.clone(), &mesh, &[Replicate]).unwrap().to_local::<2>().unwrap();
        let gradient = x.grad(&backward(&mesh, &local.mul_scalar(3.0).sum())).unwrap();
        assert_eq!(values(gradient), [3.0; 4]);
    });
}

#[test]
fn a_gathered_input_of_cut_layers_has_its_gradients_reduced_and_scattered() {
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
fn an_elementwise_function_takes_pending_sums_first() {
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
fn a_maximum_over_ranks_has_no_gradient_and_says_so() {
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
fn what_does_not_fit_is_refused_with_what_would() {
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
        for error in refusals {
            assert!(
                matches!(error, Error::Invalid(zeroshard_proto::Error::Invalid { .. })),
                "{error}"
            );
        }
        assert_eq!(
            values(shard_tensor(x.clone(), &mesh, &[Shard(LAST)]).unwrap().full::<2>().unwrap()),
            values(x)
        );
    });
}

#[test]
fn two_ranks_with_another_mesh_are_told_what_each_has() {
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
fn an_error_in_backward_is_told() {
    let errors = worlds(2, |world| {
        let mesh = line(&world, 2);
        let x = numbers(1, [2, 2]).require_grad();
        let used = shard_tensor(x, &mesh, &[Replicate]).unwrap();
        let local = used.to_local_with_gradient::<2>(&[PARTIAL]).unwrap();
        if world.rank() == 0 {
            // Another operation where rank 1's backward reduces.
            return world.all_reduce(&[0, 1], Reduction::Sum, vec![0.0; 9]).unwrap_err();
        }
        world.backward(&local.sum()).map(drop).unwrap_err()
    });
    assert!(errors.iter().any(|error| error.to_string().contains("9 f32")), "{errors:?}");
}
