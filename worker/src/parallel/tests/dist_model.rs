//! Tests `DistModel` in its modes, with the parameters on shard servers.

use burn::optim::{GradientsParams, Optimizer as _, SgdConfig};

use super::*;

/// The model of Paddle's example: two linear layers, the first sharded by columns and the second by
/// rows.
#[derive(Module, Debug)]
pub(super) struct DemoNet<B: Backend> {
    pub(super) linear_0: ParallelLinear<B>,
    pub(super) linear_1: ParallelLinear<B>,
}

pub(super) fn net() -> DemoNet<Graph> {
    DemoNet { linear_0: linear(1, 16, 16), linear_1: linear(3, 16, 8) }
}

impl<B: ParallelBackend> Parallelize<B> for DemoNet<B> {
    fn layers(&mut self) -> Vec<(String, Layer<'_, B>)> {
        vec![
            ("linear_0".into(), (&mut self.linear_0).into()),
            ("linear_1".into(), (&mut self.linear_1).into()),
        ]
    }
}

impl<B: ParallelBackend> StaticLayer<B> for DemoNet<B> {
    fn run(&self, mut inputs: Vec<Value<B>>) -> Result<Vec<Value<B>>> {
        let hidden = self.linear_0.forward(inputs.remove(0))?.map::<2>(relu)?;
        let output = match self.linear_1.forward(hidden)? {
            Value::Dist(output) => output.full::<2>()?,
            local => local.local::<2>()?,
        };
        Ok(vec![output.into()])
    }
}

pub(super) fn mean_square(output: Tensor<Graph, 2>, label: Tensor<Graph, 2>) -> Tensor<Graph, 1> {
    (output - label).powi_scalar(2).mean()
}

fn loss() -> Option<Loss<Graph>> {
    Some(Box::new(|mut outputs, mut labels| {
        Ok(mean_square(outputs.remove(0).local()?, labels.remove(0).local()?))
    }))
}

pub(super) fn batch(number: usize) -> Batch<Graph> {
    Batch {
        inputs: vec![numbers(20 + number, [4, 16]).into()],
        labels: vec![numbers(40 + number, [4, 8]).into()],
    }
}

fn tensors(number: usize) -> Vec<Value<Graph>> {
    let Batch { mut inputs, labels } = batch(number);
    inputs.extend(labels);
    inputs
}

pub(super) fn sharded(mesh: &Mesh) -> DemoNet<Graph> {
    let shard = |name: &str, layer: &mut Layer<'_, Graph>, mesh: &Mesh| match name {
        "linear_0" => layer.shard("weight", mesh, &[Shard(1)]),
        "linear_1" => layer.shard("weight", mesh, &[Shard(0)]),
        _ => Ok(()),
    };
    shard_layer(net(), mesh, shard, None, None).unwrap().layer
}

/// The results of `run` on two ranks, with a cluster of `servers` shard servers.
fn with_servers<T: Send>(
    servers: usize,
    run: impl Fn(Mesh, &dyn Fn(&mut DemoNet<Graph>) -> ServerOptimizer) -> T + Sync,
) -> Vec<T> {
    with_cluster(servers, |world, settings, runtime| {
        let mesh = line(&world, 2);
        let optimizer = |layer: &mut DemoNet<Graph>| {
            shard_optimizer(layer, &mesh, settings.clone(), runtime).unwrap()
        };
        run(mesh.clone(), &optimizer)
    })
}

fn model(
    mesh: &Mesh,
    optimizer: &dyn Fn(&mut DemoNet<Graph>) -> ServerOptimizer,
) -> DistModel<Graph, DemoNet<Graph>> {
    let mut layer = sharded(mesh);
    let optimizer = optimizer(&mut layer);
    to_static(layer, mesh, batch(0), loss(), Some(optimizer)).unwrap()
}

fn run_loss(model: &mut DistModel<Graph, DemoNet<Graph>>, tensors: Vec<Value<Graph>>) -> f32 {
    match model.call(tensors).unwrap() {
        Outcome::Loss(loss) => loss,
        Outcome::Outputs(outputs) => panic!("{outputs:?}"),
    }
}

/// The losses of training the whole model in one process.
fn dense(steps: usize) -> Vec<f32> {
    let mut module = net();
    let mut optimizer = SgdConfig::new().init::<Graph, DemoNet<Graph>>();
    let mut losses = Vec::new();
    for step in 0..steps {
        let Batch { inputs, mut labels } = batch(step % 4);
        let output = module.run(inputs).unwrap().remove(0).local::<2>().unwrap();
        let loss = mean_square(output, labels.remove(0).local().unwrap());
        losses.push(loss.clone().into_scalar());
        let gradients = GradientsParams::from_grads(loss.backward(), &module);
        module = optimizer.step(RATE, module, gradients);
    }
    losses
}

#[test]
fn training_equals_one_process_and_has_the_same_bits_for_any_number_of_servers() {
    let expected = dense(8);
    let [one, three] = [1, 3].map(|servers| {
        let mut ranks = with_servers(servers, |mesh, optimizer| {
            let mut model = model(&mesh, optimizer);
            let losses: Vec<f32> =
                (0..8).map(|step| run_loss(&mut model, tensors(step % 4))).collect();
            let state = model.optimizer().unwrap().state_dict().unwrap();
            model.optimizer().unwrap().leave().unwrap();
            (losses, state)
        });
        assert_eq!(ranks[0], ranks[1], "every rank has the same losses and reads the same state");
        ranks.remove(0)
    });
    assert_eq!(one, three);
    let (losses, state) = one;
    assert!((4..8).all(|step| losses[step] < losses[step - 4]), "{losses:?}");
    for (step, (found, expected)) in losses.iter().zip(&expected).enumerate() {
        assert!((found - expected).abs() <= 1e-5 * expected, "step {step}: {found}, {expected}");
    }
    assert_eq!(
        (state[0].name.as_str(), state[0].shape.as_slice()),
        ("linear_0.weight", [16, 16].as_slice())
    );
    assert_eq!(state.len(), 4);
}

#[test]
fn eval_and_predict_change_neither_a_parameter_nor_the_version() {
    with_servers(2, |mesh, optimizer| {
        let mut model = model(&mesh, optimizer);
        run_loss(&mut model, tensors(0));
        let state = |model: &DistModel<Graph, DemoNet<Graph>>| {
            let optimizer = model.optimizer().unwrap();
            (optimizer.version(), optimizer.state_dict().unwrap())
        };
        let before = state(&model);
        assert_eq!(before.0, 1);
        model.eval().unwrap();
        let loss = run_loss(&mut model, tensors(1));
        assert_eq!(run_loss(&mut model, tensors(1)), loss);
        model.predict().unwrap();
        let Outcome::Outputs(outputs) = model.call(batch(1).inputs).unwrap() else {
            panic!("expected outputs in predict mode")
        };
        let output = outputs["out0"].clone().local::<2>().unwrap();
        let label = numbers(41, [4, 8]);
        assert_eq!(
            mean_square(output, label).into_scalar(),
            loss,
            "the outputs in predict mode give the loss of eval mode"
        );
        assert_eq!(state(&model), before);
        model.train().unwrap();
        run_loss(&mut model, tensors(1));
        assert_eq!(state(&model).0, 2);
        model.optimizer().unwrap().leave().unwrap();
    });
}

#[test]
fn set_state_dict_continues_in_a_successor_with_the_state() {
    with_servers(2, |mesh, optimizer| {
        let mut model = model(&mesh, optimizer);
        run_loss(&mut model, tensors(0));
        let state = model.state_dict().unwrap();
        let after = run_loss(&mut model, tensors(1));
        let job = |model: &DistModel<Graph, DemoNet<Graph>>| {
            let optimizer = model.optimizer().unwrap();
            (optimizer.job().to_owned(), optimizer.version())
        };
        for name in ["demo.1", "demo.2"] {
            model.set_state_dict(state.clone()).unwrap();
            assert_eq!(job(&model), (name.to_owned(), 0));
            assert_eq!(model.state_dict().unwrap(), state);
            assert_eq!(run_loss(&mut model, tensors(1)), after);
        }
        model.optimizer().unwrap().leave().unwrap();
    });
}

#[test]
fn a_model_without_a_job_has_no_state() {
    worlds(1, |world| {
        let mesh = line(&world, 1);
        let mut model = to_static(sharded(&mesh), &mesh, batch(0), loss(), None).unwrap();
        assert!(matches!(model.state_dict(), Err(Error::Invalid(_))));
        assert!(matches!(model.set_state_dict(Vec::new()), Err(Error::Invalid(_))));
    });
}

#[test]
fn programs_differ_between_modes_and_list_transfers() {
    with_servers(1, |mesh, optimizer| {
        let model = model(&mesh, optimizer);
        let programs = [Mode::Train, Mode::Eval, Mode::Predict]
            .map(|mode| model.dist_main_program(Some(mode)).unwrap());
        // Waits until no rank is in a backward pass.
        mesh.world().agree(mesh.process_mesh(), "the programs", "made").unwrap();
        let [train, eval, predict] = &programs;
        assert!(train != eval && eval != predict && train != predict);
        assert_eq!(&model.dist_main_program(None).unwrap(), train, "the current mode");
        mesh.world().agree(mesh.process_mesh(), "the programs", "made").unwrap();
        let count = |program: &Program, wanted: fn(&Operation) -> bool| {
            program.operations.iter().filter(|o| wanted(o)).count()
        };
        let pulls = |operation: &Operation| matches!(operation, Operation::Pull(_));
        let pushes = |operation: &Operation| {
            matches!(operation, Operation::Push(_) | Operation::Commit { .. })
        };
        assert!(programs.iter().all(|program| count(program, pulls) == 4));
        // Only rank 0 pushes the replicated biases.
        let expected = if mesh.rank() == 0 { 4 } else { 2 };
        assert_eq!(
            [train, eval, predict].map(|program| count(program, pushes)),
            [expected + 1, 0, 0]
        );
        let serial = model.serial_main_program(None).unwrap();
        assert_eq!(count(&serial, |operation| matches!(operation, Operation::Collective(_))), 0);
        assert!(count(train, |operation| matches!(operation, Operation::Collective(_))) > 0);
        let bytes = |program: &Program, tensor: &str| {
            let mut parts = program.operations.iter().filter_map(|operation| match operation {
                Operation::Pull(part) if part.tensor == tensor => Some(part.bytes),
                _ => None,
            });
            parts.next().unwrap()
        };
        assert_eq!(2 * bytes(train, "linear_0.weight"), bytes(&serial, "linear_0.weight"));
        let text = train.to_string();
        for line in [
            "dist main program, train",
            "pull linear_0.weight[0:16, ",
            "forward DemoNet",
            "all_reduce among [0, 1]",
            "backward",
            "push linear_1.weight[",
            "commit sgd",
        ] {
            assert!(text.contains(line), "{line:?} in\n{text}");
        }
        let startup = |program: Program| program.operations.len();
        assert_eq!(startup(model.dist_startup_program(None).unwrap()), expected);
        assert_eq!(startup(model.serial_startup_program(None).unwrap()), 4);
        model.optimizer().unwrap().leave().unwrap();
    });
}

#[test]
fn the_initial_mode_depends_on_the_loss_and_the_optimizer() {
    with_servers(1, |mesh, optimizer| {
        let mut layer = sharded(&mesh);
        let optimizer = optimizer(&mut layer);
        let model = to_static(layer.clone(), &mesh, batch(0), None, None).unwrap();
        assert_eq!(model.mode(), Mode::Predict);
        assert_eq!(
            to_static(layer.clone(), &mesh, batch(0), loss(), None).unwrap().mode(),
            Mode::Eval
        );
        let model = to_static(layer.clone(), &mesh, batch(0), loss(), Some(optimizer)).unwrap();
        assert_eq!(model.mode(), Mode::Train);
        model.optimizer().unwrap().leave().unwrap();
    });
}

#[test]
fn a_mode_without_its_loss_or_optimizer_is_refused_and_the_mode_stays() {
    worlds(1, |world| {
        let mesh = line(&world, 1);
        let mut evaluates = to_static(sharded(&mesh), &mesh, batch(0), loss(), None).unwrap();
        let missing = |refused: Result<()>| match refused {
            Err(Error::MissingPart { mode, missing }) => (mode, missing),
            other => panic!("{other:?}"),
        };
        assert_eq!(missing(evaluates.train()), ("train", "an optimizer"));
        assert_eq!(evaluates.mode(), Mode::Eval);
        let mut predicts = to_static(sharded(&mesh), &mesh, batch(0), None, None).unwrap();
        assert_eq!(missing(predicts.train()), ("train", "a loss"));
        assert_eq!(missing(predicts.eval()), ("eval", "a loss"));
        assert_eq!(
            missing(predicts.dist_main_program(Some(Mode::Eval)).map(drop)),
            ("eval", "a loss")
        );
        assert!(predicts.call(batch(0).inputs).is_ok());
    });
}

#[test]
fn a_wrong_number_of_tensors_is_refused() {
    worlds(1, |world| {
        let mesh = line(&world, 1);
        let mut model = to_static(sharded(&mesh), &mesh, batch(0), loss(), None).unwrap();
        assert!(matches!(model.call(batch(0).inputs), Err(Error::Invalid(_))));
        model.predict().unwrap();
        assert!(matches!(model.call(tensors(0)), Err(Error::Invalid(_))));
    });
}
