//! Tests valid and invalid plans.

use super::*;
use crate::collectives;

/// A module with other modules, a norm and a layer that no style supports.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    blocks: Vec<Mlp<B>>,
    norm: ParallelNorm<B>,
    tail: ParallelLinear<B>,
    #[module(skip)]
    hooks: Hooks,
}

impl Net<Graph> {
    fn new() -> Self {
        Self {
            blocks: vec![Mlp::new([3, 5, 3]), Mlp::new([3, 4, 3])],
            norm: ParallelNorm::new(3, &Default::default()),
            tail: linear(8, 3, 3),
            hooks: Hooks::default(),
        }
    }
}

impl<B: ParallelBackend> Net<B> {
    fn forward(&self, x: impl Into<Value<B>>) -> Result<Value<B>> {
        let mut inputs = self.hooks.inputs(vec![x.into()])?;
        let mut x = inputs.remove(0);
        for block in &self.blocks {
            x = block.forward(x)?;
        }
        Ok(self.hooks.outputs(vec![self.tail.forward(x)?])?.remove(0))
    }
}

impl<B: ParallelBackend> Parallelize<B> for Net<B> {
    fn layers(&mut self) -> Vec<(String, Layer<'_, B>)> {
        let Self { blocks, norm, tail, .. } = self;
        let blocks = blocks
            .iter_mut()
            .enumerate()
            .map(|(i, block)| (format!("blocks.{i}"), Layer::Module(block)));
        let own = [
            ("norm".to_owned(), norm.into()),
            ("tail".to_owned(), tail.into()),
            ("pool".to_owned(), Layer::Other("a pooling layer")),
        ];
        blocks.chain(own).collect()
    }

    fn hooks(&mut self) -> Option<&mut Hooks> {
        Some(&mut self.hooks)
    }
}

fn dense(x: Tensor<Graph, 2>) -> Vec<f32> {
    values(Net::new().forward(x).unwrap().local::<2>().unwrap())
}

#[test]
fn patterns_match_layers_inside_modules() {
    worlds(2, |world| {
        let mesh = line(&world, 2);
        let (up, down) = (ColwiseParallel::default(), RowwiseParallel::default());
        let net = parallelize_module(
            Net::new(),
            &mesh,
            &[("blocks.*.up", &up), ("blocks.[0-9].d?wn", &down)],
        )
        .unwrap();
        assert_eq!(net.blocks[0].up.weight.dims(), [3, 3 - world.rank() as usize]);
        assert_eq!(net.tail.weight.dims(), [3, 3], "layers that no key matches are not changed");
        let x = numbers(9, [4, 3]);
        assert_close(
            &values(net.forward(x.clone()).unwrap().local::<2>().unwrap()),
            &dense(x),
            "dense",
        );
    });
}

#[test]
fn pairwise_applies_to_inner_modules_and_not_to_a_single_linear_layer() {
    worlds(2, |world| {
        let mesh = line(&world, 2);
        let net =
            parallelize_module(Net::new(), &mesh, &[("", &PairwiseParallel::default())]).unwrap();
        assert_eq!(net.blocks[1].down.weight.dims(), [2, 3]);
        assert_eq!(net.tail.weight.dims(), [3, 3]);
        let x = numbers(9, [4, 3]);
        assert_close(
            &values(net.forward(x.clone()).unwrap().local::<2>().unwrap()),
            &dense(x),
            "dense",
        );
    });
}

#[test]
fn the_last_of_an_odd_number_of_linear_layers_is_not_distributed() {
    struct Five([ParallelLinear<Graph>; 5]);
    impl Parallelize<Graph> for Five {
        fn layers(&mut self) -> Vec<(String, Layer<'_, Graph>)> {
            self.0.iter_mut().enumerate().map(|(i, layer)| (i.to_string(), layer.into())).collect()
        }
    }
    worlds(2, |world| {
        let mesh = line(&world, 2);
        let new = || Five([0, 1, 2, 3, 4].map(|i| linear(2 * i, 4, 4)));
        let run = |net: &Five, x: Tensor<Graph, 2>| {
            net.0
                .iter()
                .fold(Value::from(x), |x, layer| layer.forward(x).unwrap())
                .local::<2>()
                .unwrap()
        };
        let net = parallelize_module(new(), &mesh, &[("", &PairwiseParallel::default())]).unwrap();
        let sizes: Vec<_> = net.0.iter().map(|layer| layer.weight.dims()).collect();
        assert_eq!(sizes, [[4, 2], [2, 4], [4, 2], [2, 4], [4, 4]]);
        let x = numbers(9, [2, 4]);
        assert_close(&values(run(&net, x.clone())), &values(run(&new(), x)), "dense");
    });
}

#[test]
fn inputs_and_outputs_of_a_module_are_redistributed() {
    worlds(2, |world| {
        let mesh = line(&world, 2);
        let style = PrepareModuleInputOutput {
            input: PrepareModuleInput {
                input_layouts: vec![Some(Shard(0))],
                desired_input_layouts: vec![Some(Replicate)],
                use_local_output: true,
            },
            output: PrepareModuleOutput {
                output_layouts: vec![Some(Replicate)],
                desired_output_layouts: vec![Some(Shard(0))],
                use_local_output: true,
            },
        };
        let net = parallelize_module(Net::new(), &mesh, &[("", &style)]).unwrap();
        let whole = numbers(9, [4, 3]);
        let rank = world.rank() as usize;
        let rows = whole.clone().narrow(0, 2 * rank, 2);
        let y = values(net.forward(rows).unwrap().local::<2>().unwrap());
        assert_close(&y, &dense(whole)[6 * rank..6 * rank + 6], "rows");
        let error = net.hooks.inputs::<Graph>(vec![]).unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
    });
}

#[test]
fn a_module_receives_distributed_tensors_unless_use_local_output_is_set() {
    worlds(2, |world| {
        let mesh = line(&world, 2);
        for local in [true, false] {
            let input = PrepareModuleInput {
                input_layouts: vec![Some(Shard(0)), None],
                desired_input_layouts: vec![Some(Replicate), None],
                use_local_output: local,
            };
            let output = PrepareModuleOutput {
                output_layouts: vec![Some(Shard(0))],
                desired_output_layouts: vec![Some(Replicate)],
                use_local_output: local,
            };
            let net = parallelize_module(Net::new(), &mesh, &[("", &input)]).unwrap();
            let inputs = net
                .hooks
                .inputs(vec![numbers(1, [2, 3]).into(), numbers(2, [1, 1]).into()])
                .unwrap();
            assert_eq!(matches!(inputs[0], Value::Local(_)), local);
            assert!(
                matches!(inputs[1], Value::Local(_)),
                "a tensor without a layout is not changed"
            );
            let net = parallelize_module(Net::new(), &mesh, &[("", &output)]).unwrap();
            let outputs = net.hooks.outputs(vec![numbers(1, [2, 3]).into()]).unwrap();
            assert_eq!(matches!(outputs[0], Value::Local(_)), local);
        }
    });
}

#[test]
fn lists_of_layouts_of_different_lengths_are_refused() {
    worlds(1, |world| {
        let mesh = line(&world, 1);
        for desired in [vec![], vec![None], vec![Some(Replicate); 2]] {
            let style = PrepareModuleInput {
                input_layouts: vec![Some(Replicate)],
                desired_input_layouts: desired,
                use_local_output: false,
            };
            let refused = parallelize_module(Net::new(), &mesh, &[("", &style)]).map(drop);
            assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
        }
    });
}

#[test]
fn a_key_that_matches_nothing_is_an_error_that_names_the_layers() {
    worlds(1, |world| {
        let mesh = line(&world, 1);
        let error =
            parallelize_module(Net::new(), &mesh, &[("block.*.up", &ColwiseParallel::default())])
                .unwrap_err();
        let Error::UnmatchedKey { key, layers } = &error else { panic!("{error}") };
        assert_eq!(key, "block.*.up");
        assert!(layers.iter().any(|layer| layer == "blocks.1.down"), "{layers:?}");
    });
}

#[test]
fn a_layer_of_an_unsupported_type_is_an_error() {
    worlds(1, |world| {
        let mesh = line(&world, 1);
        let (columns, rows, pairs) =
            (ColwiseParallel::default(), RowwiseParallel::default(), PairwiseParallel::default());
        let sequence = SequenceParallel::default();
        let input = PrepareModuleInput {
            input_layouts: vec![],
            desired_input_layouts: vec![],
            use_local_output: false,
        };
        let plans: [(&str, &dyn ParallelStyle<Graph>); 7] = [
            ("pool", &columns),
            ("norm", &columns),
            ("blocks.0", &rows),
            ("tail", &pairs),
            ("pool", &sequence),
            ("tail", &input),
            ("blocks.0", &input),
        ];
        for (key, style) in plans {
            let error = parallelize_module(Net::new(), &mesh, &[(key, style)]).unwrap_err();
            assert!(
                matches!(&error, Error::Unsupported { layer, .. } if layer == key),
                "{key}: {error}"
            );
        }
    });
}

#[test]
fn distributing_a_layer_twice_is_an_error() {
    worlds(1, |world| {
        let mesh = line(&world, 1);
        let (columns, pairs) = (ColwiseParallel::default(), PairwiseParallel::default());
        let once = || parallelize_module(Net::new(), &mesh, &[("tail", &columns)]).unwrap();
        for error in [
            parallelize_module(once(), &mesh, &[("tail", &columns)]).unwrap_err(),
            parallelize_module(Net::new(), &mesh, &[("tail", &columns), ("t*", &columns)])
                .unwrap_err(),
            parallelize_module(Net::new(), &mesh, &[("", &pairs), ("blocks.0.up", &columns)])
                .unwrap_err(),
        ] {
            assert!(matches!(error, Error::AlreadyParallel { .. }), "{error}");
        }
    });
}

#[test]
fn a_mesh_of_two_dimensions_is_refused() {
    worlds(2, |world| {
        let mesh = world.mesh(ProcessMesh::dense([1, 2], ["dp", "tp"]).unwrap()).unwrap();
        let style = ColwiseParallel::default();
        let error = parallelize_module(Net::new(), &mesh, &[("tail", &style)]).unwrap_err();
        assert!(error.to_string().contains("sub_mesh"), "{error}");
        let tensor_parallel = mesh.sub_mesh(&["tp"]).unwrap();
        assert!(parallelize_module(Net::new(), &tensor_parallel, &[("tail", &style)]).is_ok());
    });
}

#[test]
fn a_disagreement_about_the_plan_names_both_plans() {
    let errors = worlds(2, |world| {
        let mesh = line(&world, 2);
        let (columns, rows) = (ColwiseParallel::default(), RowwiseParallel::default());
        let style: &dyn ParallelStyle<Graph> = if world.rank() == 0 { &columns } else { &rows };
        parallelize_module(Net::new(), &mesh, &[("tail", style)]).map(drop).unwrap_err()
    });
    let both = |error: &Error| {
        let Error::Collective(collectives::Error::Disagreement { at, theirs }) = error else {
            return false;
        };
        let calls = format!("{} {theirs}", at.operation);
        calls.contains("Colwise") && calls.contains("Rowwise")
    };
    assert!(errors.iter().any(both), "{errors:?}");
}

#[test]
fn shard_layer_calls_its_function_for_every_layer_and_replicates_the_rest() {
    worlds(2, |world| {
        let mesh = line(&world, 2);
        let mut names = Vec::new();
        let shard = |name: &str, layer: &mut Layer<'_, Graph>, mesh: &Mesh| {
            names.push(name.to_owned());
            if name == "blocks.0.up" { layer.shard("weight", mesh, &[Shard(0)]) } else { Ok(()) }
        };
        let sharded = shard_layer(Net::new(), &mesh, shard, None, None).unwrap();
        let expected = [
            "",
            "blocks.0",
            "blocks.0.up",
            "blocks.0.down",
            "blocks.1",
            "blocks.1.up",
            "blocks.1.down",
            "norm",
            "tail",
            "pool",
        ];
        assert_eq!(names, expected);
        let net = &sharded.layer;
        assert_eq!(net.blocks[0].up.weight.dims(), [2 - world.rank() as usize, 5]);
        assert_eq!(net.tail.weight.dims(), [3, 3]);
        let x = numbers(9, [4, 3]);
        let outputs = sharded
            .forward(vec![x.clone().into()], |net, mut inputs| {
                Ok(vec![net.forward(inputs.remove(0))?])
            })
            .unwrap();
        // Without an output_fn nothing is converted.
        let output = outputs.into_iter().next().unwrap().dist().unwrap();
        assert_close(&values(output.full::<2>().unwrap()), &dense(x), "dense");
    });
}

#[test]
fn shard_layer_replicates_along_each_dimension_of_the_mesh() {
    worlds(2, |world| {
        let mesh = world.mesh(ProcessMesh::dense([2, 1], ["x", "y"]).unwrap()).unwrap();
        let sharded = shard_layer(linear_only(), &mesh, |_, _, _| Ok(()), None, None).unwrap();
        let output = sharded.layer.0.forward(numbers(1, [2, 3])).unwrap().dist().unwrap();
        assert_eq!(output.placements(), [Replicate, Replicate]);
    });
}

struct Only(ParallelLinear<Graph>);

impl Parallelize<Graph> for Only {
    fn layers(&mut self) -> Vec<(String, Layer<'_, Graph>)> {
        vec![("fc".into(), (&mut self.0).into())]
    }
}

fn linear_only() -> Only {
    Only(linear(1, 3, 2))
}

#[test]
fn input_fn_and_output_fn_convert_tensors() {
    worlds(2, |world| {
        let mesh = line(&world, 2);
        let input: Convert<Graph> = Box::new(|inputs, mesh| {
            inputs
                .into_iter()
                .map(|x| Ok(shard_tensor(x.local::<2>()?, mesh, &[Shard(0)])?.into()))
                .collect()
        });
        let output: Convert<Graph> = Box::new(|outputs, _| {
            outputs.into_iter().map(|y| Ok(y.dist()?.full::<2>()?.into())).collect()
        });
        let sharded =
            shard_layer(linear_only(), &mesh, |_, _, _| Ok(()), Some(input), Some(output)).unwrap();
        let x = numbers(1, [3, 3]);
        let outputs = sharded.forward(vec![x.clone().into()], |net, mut inputs| {
            assert!(matches!(&inputs[0], Value::Dist(x) if x.placements() == [Shard(0)]));
            Ok(vec![net.0.forward(inputs.remove(0))?])
        });
        let y = outputs.unwrap().remove(0);
        assert!(matches!(y, Value::Local(_)));
        let expected = linear_only().0.forward(x).unwrap().local::<2>().unwrap();
        assert_close(&values(y.local::<2>().unwrap()), &values(expected), "dense");
    });
}

#[test]
fn unknown_and_already_distributed_parameters_are_refused() {
    worlds(1, |world| {
        let mesh = line(&world, 1);
        let shard = |name: &'static str, times: usize, placement: Placement| {
            let refused = shard_layer(
                linear_only(),
                &mesh,
                |path, layer: &mut Layer<'_, Graph>, mesh| {
                    if path == "fc" {
                        (0..times).try_for_each(|_| layer.shard(name, mesh, &[placement]))
                    } else {
                        Ok(())
                    }
                },
                None,
                None,
            );
            refused.map(drop).unwrap_err()
        };
        assert!(matches!(shard("scale", 1, Replicate), Error::Invalid(_)));
        assert!(matches!(shard("weight", 1, Shard(2)), Error::Invalid(_)));
        assert!(matches!(shard("weight", 1, PARTIAL), Error::Invalid(_)));
        assert!(matches!(shard("weight", 2, Shard(0)), Error::AlreadyParallel { .. }));
    });
}
