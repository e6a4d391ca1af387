//! Compares parallel layers with dense layers.

use burn::nn::Embedding;
use burn::tensor::Int;

use super::*;

/// The output of a dense MLP, and the gradients of the sum of squares of the output: those of the
/// input and the two weights, and those of the two biases.
fn dense(
    sizes: [usize; 3],
    x: &Tensor<Graph, 2>,
) -> (Vec<f32>, Vec<Tensor<Flex, 2>>, Vec<Tensor<Flex, 1>>) {
    let mlp = Mlp::new(sizes);
    let y = mlp.forward(x.clone()).unwrap().local::<2>().unwrap();
    let gradients = y.clone().powi_scalar(2).sum().backward();
    let [up, down] = [&mlp.up, &mlp.down];
    let matrices = [x.clone(), up.weight.val(), down.weight.val()];
    let vectors = [up, down].map(|layer| layer.bias.as_ref().unwrap().val());
    (
        values(y),
        matrices.iter().map(|tensor| tensor.grad(&gradients).unwrap()).collect(),
        vectors.iter().map(|tensor| tensor.grad(&gradients).unwrap()).collect(),
    )
}

fn compare(
    ranks: usize,
    sizes: [usize; 3],
    plan: &(dyn Fn() -> Vec<(&'static str, Box<dyn ParallelStyle<Graph>>)> + Sync),
) {
    let (expected, matrices, vectors) = dense(sizes, &numbers(9, [4, sizes[0]]).require_grad());
    worlds(ranks, |world| {
        let mesh = line(&world, ranks);
        let x = numbers(9, [4, sizes[0]]).require_grad();
        let styles = plan();
        let plan: Vec<_> = styles.iter().map(|(key, style)| (*key, style.as_ref())).collect();
        let mlp = parallelize_module(Mlp::new(sizes), &mesh, &plan).unwrap();
        let y = mlp.forward(x.clone()).unwrap().local::<2>().unwrap();
        let what = format!("{ranks} ranks, {sizes:?}");
        assert_close(&values(y.clone()), &expected, &what);
        let gradients = backward(&mesh, &y.powi_scalar(2).sum());
        let grad = |tensor: Tensor<Graph, 2>| values(tensor.grad(&gradients).unwrap());
        let bias = |layer: &ParallelLinear<Graph>| {
            values(layer.bias.as_ref().unwrap().grad(&gradients).unwrap())
        };
        assert_close(&grad(x), &values(matrices[0].clone()), &what);
        assert_close(
            &grad(mlp.up.weight.val()),
            &part(matrices[1].clone(), &mesh, &[Shard(1)]),
            &what,
        );
        assert_close(
            &grad(mlp.down.weight.val()),
            &part(matrices[2].clone(), &mesh, &[Shard(0)]),
            &what,
        );
        assert_close(&bias(&mlp.up), &part(vectors[0].clone(), &mesh, &[Shard(0)]), &what);
        assert_close(&bias(&mlp.down), &values(vectors[1].clone()), &what);
    });
}

#[test]
fn column_then_row_equals_dense_forward_and_backward() {
    // Parts of equal sizes, of different sizes, and an empty part.
    for (ranks, hidden) in [(1, 4), (2, 6), (2, 5), (3, 5), (3, 2), (4, 9)] {
        compare(ranks, [3, hidden, 2], &|| {
            vec![
                ("up", Box::new(ColwiseParallel::default())),
                ("down", Box::new(RowwiseParallel::default())),
            ]
        });
    }
}

#[test]
fn the_keywords_of_the_current_version_equal_dense_by_default() {
    compare(3, [3, 5, 2], &|| {
        vec![
            ("up", Box::new(ColwiseParallel::new(None, None, true))),
            ("down", Box::new(RowwiseParallel::new(None, None, true))),
        ]
    });
}

#[test]
fn pairwise_equals_dense() {
    compare(2, [3, 5, 2], &|| vec![("", Box::new(PairwiseParallel::default()))]);
}

#[test]
fn distributed_tensors_between_the_layers_equal_dense() {
    compare(3, [3, 5, 2], &|| {
        vec![
            ("up", Box::new(ColwiseParallel::new(None, None, false))),
            ("down", Box::new(RowwiseParallel::new(None, None, false))),
        ]
    });
}

#[test]
fn the_bias_of_a_row_wise_layer_is_added_once() {
    for ranks in [2, 3] {
        worlds(ranks, |world| {
            let mesh = line(&world, ranks);
            let layer = linear(3, 4, 2);
            let bias = values(layer.bias.as_ref().unwrap().val());
            struct One(ParallelLinear<Graph>);
            impl Parallelize<Graph> for One {
                fn layers(&mut self) -> Vec<(String, Layer<'_, Graph>)> {
                    vec![("it".into(), (&mut self.0).into())]
                }
            }
            let style = RowwiseParallel::new(Some(Replicate), None, true);
            let layer = parallelize_module(One(layer), &mesh, &[("it", &style)]).unwrap().0;
            let zeros = Tensor::<Graph, 2>::zeros([3, 4], &Default::default());
            let y = layer.forward(zeros).unwrap().local::<2>().unwrap();
            assert_eq!(values(y), bias.repeat(3));
        });
    }
}

#[test]
fn sequence_parallel_of_an_mlp_shards_input_and_output_by_rows() {
    for ranks in [2, 3] {
        let sizes = [3, 5, 2];
        let (expected, matrices, vectors) =
            dense(sizes, &numbers(9, [2 * ranks, 3]).require_grad());
        worlds(ranks, |world| {
            let mesh = line(&world, ranks);
            let rows = part(numbers(9, [2 * ranks, 3]).inner(), &mesh, &[Shard(0)]);
            let x =
                Tensor::<Graph, 2>::from_data(TensorData::new(rows, [2, 3]), &Default::default())
                    .require_grad();
            let mlp =
                parallelize_module(Mlp::new(sizes), &mesh, &[("", &SequenceParallel::default())])
                    .unwrap();
            let y = mlp.forward(x.clone()).unwrap().local::<2>().unwrap();
            let rank = world.rank() as usize;
            assert_close(&values(y.clone()), &expected[4 * rank..4 * rank + 4], "rows");
            let gradients = backward(&mesh, &y.powi_scalar(2).sum());
            assert_close(
                &values(x.grad(&gradients).unwrap()),
                &part(matrices[0].clone(), &mesh, &[Shard(0)]),
                "input",
            );
            let up = values(mlp.up.weight.grad(&gradients).unwrap());
            assert_close(&up, &part(matrices[1].clone(), &mesh, &[Shard(1)]), "up");
            let bias = values(mlp.down.bias.as_ref().unwrap().grad(&gradients).unwrap());
            assert_close(&bias, &values(vectors[1].clone()), "the row bias sees all rows");
        });
    }
}

#[test]
fn sequence_parallel_of_an_mlp_gathers_and_scatters_once_in_each_direction() {
    worlds(2, |world| {
        let mesh = line(&world, 2);
        let mlp =
            parallelize_module(Mlp::new([3, 4, 2]), &mesh, &[("", &SequenceParallel::default())])
                .unwrap();
        let x = numbers(9, [2, 3]).require_grad();
        let names = |calls: Vec<Call>| calls.iter().map(|call| call.name).collect::<Vec<_>>();
        let (y, forward) = world.trace(|| mlp.forward(x).unwrap().local::<2>().unwrap());
        assert_eq!(names(forward), ["all_gather", "reduce_scatter"]);
        let (_, backward) = world.trace(|| world.backward(&y.sum()));
        // The gradient of the row-wise layer's bias uses the same gathered gradient.
        assert_eq!(names(backward), ["all_gather", "reduce_scatter"]);
    });
}

#[test]
fn a_norm_on_a_sharded_sequence_equals_dense_and_its_gradients_are_summed() {
    struct One(ParallelNorm<Graph>);
    impl Parallelize<Graph> for One {
        fn layers(&mut self) -> Vec<(String, Layer<'_, Graph>)> {
            vec![("norm".into(), (&mut self.0).into())]
        }
    }
    let new = || {
        let mut norm = ParallelNorm::<Graph>::new(3, &Default::default());
        norm.weight = Param::from_tensor(numbers(1, [3]).require_grad());
        norm
    };
    let dense = new();
    let y = dense.forward(numbers(9, [2, 4, 3])).unwrap().local::<3>().unwrap();
    let weight = values(dense.weight.grad(&y.clone().powi_scalar(2).sum().backward()).unwrap());
    let y = y.inner();
    worlds(2, |world| {
        let mesh = line(&world, 2);
        let norm = parallelize_module(One(new()), &mesh, &[("norm", &SequenceParallel::default())])
            .unwrap()
            .0;
        let cut = shard_tensor(numbers(9, [2, 4, 3]), &mesh, &[Shard(1)]).unwrap();
        let output = norm.forward(cut).unwrap().dist().unwrap();
        assert_eq!(output.placements(), [Shard(1)]);
        let local = output.to_local::<3>().unwrap();
        assert_close(&values(local.clone()), &part(y.clone(), &mesh, &[Shard(1)]), "rows");
        let gradients = backward(&mesh, &local.powi_scalar(2).sum());
        assert_close(&values(norm.weight.grad(&gradients).unwrap()), &weight, "weight");
    });
}

#[test]
fn an_embedding_sharded_by_columns_or_rows_equals_dense() {
    struct One(ParallelEmbedding<Graph>);
    impl Parallelize<Graph> for One {
        fn layers(&mut self) -> Vec<(String, Layer<'_, Graph>)> {
            vec![("table".into(), (&mut self.0).into())]
        }
    }
    let table = || {
        let weight = Param::from_tensor(numbers(2, [5, 3]).require_grad());
        ParallelEmbedding::<Graph>::from(Embedding { weight })
    };
    let tokens = || Tensor::<Graph, 2, Int>::from_data([[0, 4, 2], [3, 3, 1]], &Default::default());
    let dense = table();
    let y = dense.forward(tokens()).unwrap().local::<3>().unwrap();
    let gradients = (y.clone() * numbers(6, [2, 3, 3])).sum().backward();
    let (y, expected) = (values(y), dense.weight.grad(&gradients).unwrap());
    // 5 rows on 3 ranks: 2, 2, 1; on 4: 2, 2, 1, 0.
    for ranks in [2, 3, 4] {
        worlds(ranks, |world| {
            let mesh = line(&world, ranks);
            let columns = ColwiseParallel::new(None, Some(Replicate), true);
            let rows = RowwiseParallel::default();
            let styles: [(&dyn ParallelStyle<Graph>, Placement); 2] =
                [(&columns, Shard(1)), (&rows, Shard(0))];
            for (style, placement) in styles {
                let cut = parallelize_module(One(table()), &mesh, &[("table", style)]).unwrap().0;
                let found = cut.forward(tokens()).unwrap().local::<3>().unwrap();
                let what = format!("{style:?} on {ranks} ranks");
                assert_close(&values(found.clone()), &y, &what);
                let gradients = backward(&mesh, &(found * numbers(6, [2, 3, 3])).sum());
                let gradient = values(cut.weight.grad(&gradients).unwrap());
                assert_close(&gradient, &part(expected.clone(), &mesh, &[placement]), &what);
            }
        });
    }
}

#[test]
fn layers_on_a_mesh_of_two_dimensions_equal_dense() {
    let sizes = [3, 5, 2];
    let (expected, matrices, _) = dense(sizes, &numbers(9, [4, 3]).require_grad());
    worlds(4, |world| {
        let mesh = world.mesh(ProcessMesh::dense([2, 2], ["dp", "tp"]).unwrap()).unwrap();
        let shard = |name: &str, layer: &mut Layer<'_, Graph>, mesh: &Mesh| match name {
            "up" => {
                layer.shard("weight", mesh, &[Replicate, Shard(1)])?;
                layer.shard("bias", mesh, &[Replicate, Shard(0)])
            }
            "down" => layer.shard("weight", mesh, &[Replicate, Shard(0)]),
            _ => Ok(()),
        };
        let sharded = shard_layer(Mlp::new(sizes), &mesh, shard, None, None).unwrap();
        let cut = shard_tensor(numbers(9, [4, 3]), &mesh, &[Shard(0), Replicate]).unwrap();
        let y = sharded.layer.forward(cut).unwrap().dist().unwrap();
        let y = y.reshard(&[Shard(0), Replicate]).unwrap().to_local::<2>().unwrap();
        let row = 2 * mesh.coordinate()[0];
        assert_close(&values(y.clone()), &expected[2 * row..2 * row + 4], "rows");
        let gradients = backward(&mesh, &y.powi_scalar(2).sum());
        let up = values(sharded.layer.up.weight.grad(&gradients).unwrap());
        assert_close(
            &up,
            &part(matrices[1].clone(), &mesh, &[Replicate, Shard(1)]),
            "up, summed over dp",
        );
    });
}

#[test]
fn layers_without_a_plan_equal_burns_layers_and_refuse_distributed_tensors() {
    worlds(1, |world| {
        let mesh = line(&world, 1);
        let layer = linear(1, 3, 2);
        let x = numbers(2, [4, 3]);
        let own = Linear { weight: layer.weight.clone(), bias: layer.bias.clone() };
        assert_eq!(
            values(layer.forward(x.clone()).unwrap().local::<2>().unwrap()),
            values(own.forward(x.clone()))
        );
        let error = layer.forward(shard_tensor(x, &mesh, &[Replicate]).unwrap()).unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
    });
}
