//! Compares training at ZeRO's levels on two ranks with one process. The ranks form a mesh 2 x 1
//! (different data) or 1 x 2 (each layer is sharded).

use std::collections::HashMap;
use std::time::Duration;

use burn::module::ParamId;
use burn::optim::{GradientsParams, Optimizer as _, SgdConfig};
use zeroshard_client::Cluster;

use super::dist_model::{DemoNet, batch, mean_square, net, sharded};
use super::*;
use crate::parallel::parameters;

type Sharded = GroupSharded<Graph, DemoNet<Graph>>;

#[derive(Clone, Copy)]
struct Run {
    /// The number of replicas, which train on different data: 1 or 2.
    dp: usize,
    /// The number of passes per step.
    passes: usize,
    max_norm: Option<f64>,
}

const STEPS: usize = 5;

/// The loss, the norm of the gradient and the clip coefficient of each step.
type Steps = Vec<[f64; 3]>;

fn loss(net: &DemoNet<Graph>, number: usize) -> Result<Tensor<Graph, 1>> {
    let Batch { inputs, mut labels } = batch(number);
    let output = net.run(inputs)?.remove(0).local()?;
    Ok(mean_square(output, labels.remove(0).local()?))
}

fn at(
    level: Level,
    dp: usize,
    world: &World,
    settings: ServerOptions,
    runtime: &Handle,
) -> Sharded {
    let mesh = world.mesh(ProcessMesh::dense([dp, 2 / dp], ["dp", "tp"]).unwrap()).unwrap();
    let net = sharded(&mesh.sub_mesh(&["tp"]).unwrap());
    group_sharded_parallel(net, level, &mesh, settings, runtime).unwrap()
}

/// Runs one step. With `dp == 2`, the two ranks use different batches.
fn step(model: &mut Sharded, run: Run, step: usize) -> [f64; 3] {
    let place = if run.dp == 1 { 0 } else { model.optimizer().rank() as usize };
    for pass in 0..run.passes {
        let loss =
            model.forward(|net| loss(net, (step * run.passes + pass) * run.dp + place)).unwrap();
        model.backward(loss).unwrap();
    }
    let report = model.step().unwrap();
    [report.loss.unwrap(), report.gradient_norm, report.clip_coefficient]
}

fn train(level: Level, buffer_max_size: usize, run: Run) -> (Steps, Vec<StateTensor>) {
    let mut ranks = with_cluster(2, |world, settings, runtime| {
        let settings = ServerOptions { max_norm: run.max_norm, ..settings };
        let mut model =
            at(level, run.dp, &world, settings, runtime).with_buffer_max_size(buffer_max_size);
        let steps: Steps = (0..STEPS).map(|number| step(&mut model, run, number)).collect();
        let state = model.state_dict().unwrap();
        model.optimizer().leave().unwrap();
        (steps, state)
    });
    assert_eq!(ranks[0], ranks[1], "every rank receives the same reports and reads the same state");
    ranks.remove(0)
}

fn norm(gradients: &HashMap<ParamId, HostValues>) -> f64 {
    gradients
        .values()
        .flat_map(|values| values.iter())
        .map(|x| f64::from(*x).powi(2))
        .sum::<f64>()
        .sqrt()
}

/// Trains the whole module in one process.
fn dense(mut module: DemoNet<Graph>, run: Run) -> Steps {
    let mut optimizer = SgdConfig::new().init::<Graph, DemoNet<Graph>>();
    let mut steps = Steps::new();
    for step in 0..STEPS {
        let batches = run.passes * run.dp;
        let losses = (0..batches).map(|number| loss(&module, step * batches + number).unwrap());
        let loss = losses.reduce(|a, b| a + b).unwrap().div_scalar(run.dp as f64);
        let gradients = loss.backward();
        let norm = norm(&parameters::gradients::<Graph, _>(&module, &gradients));
        let clip = run.max_norm.map_or(1.0, |max| max / norm.max(max));
        steps.push([f64::from(loss.into_scalar()), norm, clip]);
        let gradients = GradientsParams::from_grads(gradients, &module);
        module = optimizer.step(RATE * clip, module, gradients);
    }
    steps
}

fn assert_levels_agree(run: Run) -> Steps {
    let (steps, state) = train(Level::Os, 1 << 23, run);
    for (level, buffer_max_size) in [(Level::OsG, 1 << 23), (Level::OsG, 0), (Level::PGOs, 100)] {
        let other = train(level, buffer_max_size, run);
        assert_eq!(other, (steps.clone(), state.clone()), "{level}, buckets of {buffer_max_size}");
    }
    for (found, expected) in steps.iter().flatten().zip(dense(net(), run).iter().flatten()) {
        assert!(
            (found - expected).abs() <= 1e-4 * expected,
            "{found} and {expected} in one process"
        );
    }
    steps
}

#[test]
fn levels_give_the_same_bits_and_the_losses_of_one_process() {
    for dp in [2, 1] {
        assert_levels_agree(Run { dp, passes: 1, max_norm: None });
    }
}

#[test]
fn gradients_of_several_passes_are_summed() {
    assert_levels_agree(Run { dp: 2, passes: 3, max_norm: None });
}

#[test]
fn clipping_uses_the_norm_of_one_process() {
    for dp in [2, 1] {
        let steps = assert_levels_agree(Run { dp, passes: 1, max_norm: Some(0.5) });
        assert!(steps.iter().all(|[_, norm, clip]| *norm > 0.5 && *clip < 1.0), "{steps:?}");
    }
}

fn elements(model: &Sharded) -> usize {
    parameters::list(model.module()).iter().map(|parameter| parameter.elements()).sum()
}

#[test]
fn at_p_g_os_parameters_are_held_only_from_forward_to_backward() {
    with_cluster(1, |world, settings, runtime| {
        let mut model = at(Level::PGOs, 2, &world, settings, runtime);
        let all = 16 * 16 + 16 + 16 * 8 + 8;
        assert_eq!(elements(&model), 0, "before the first step");
        for number in 0..2 {
            let first = model.forward(|net| loss(net, number)).unwrap();
            assert_eq!(elements(&model), all);
            assert_eq!(
                model.summon_full_params(|net| loss(net, number)).unwrap().into_scalar(),
                first.clone().into_scalar()
            );
            assert_eq!(elements(&model), all, "the backward pass has not run yet");
            model.backward(first).unwrap();
            assert_eq!(elements(&model), 0, "after backward");
            model.step().unwrap();
            assert_eq!(elements(&model), 0, "between steps");
        }
        model.summon_full_params(|net| loss(net, 0)).unwrap();
        assert_eq!(elements(&model), 0, "after summon_full_params");
        model.optimizer().leave().unwrap();
    });
}

#[test]
fn at_the_other_levels_parameters_are_always_held() {
    with_cluster(1, |world, settings, runtime| {
        let mut model = at(Level::OsG, 1, &world, settings, runtime);
        let before = elements(&model);
        step(&mut model, Run { dp: 1, passes: 1, max_norm: None }, 0);
        assert_eq!(elements(&model), before);
        model.optimizer().leave().unwrap();
    });
}

#[test]
fn the_gradients_of_a_shared_parameter_are_added() {
    let tied = || {
        let linear_0 = net().linear_0;
        DemoNet { linear_1: linear_0.clone(), linear_0 }
    };
    let tied_loss = |net: &DemoNet<Graph>| -> Result<Tensor<Graph, 1>> {
        let output = net.run(batch(0).inputs)?.remove(0).local::<2>()?;
        Ok(output.powi_scalar(2).mean())
    };
    let module = tied();
    let gradients = tied_loss(&module).unwrap().backward();
    let expected = norm(&parameters::gradients::<Graph, _>(&module, &gradients));
    for level in Level::ALL {
        with_cluster(1, |world, settings, runtime| {
            let mut model =
                group_sharded_parallel(tied(), level, &line(&world, 2), settings, runtime).unwrap();
            assert_eq!(model.state_dict().unwrap().len(), 2);
            let loss = model.forward(tied_loss).unwrap();
            model.backward(loss).unwrap();
            let norm = model.step().unwrap().gradient_norm;
            assert!((norm - expected).abs() <= 1e-5 * expected, "{level}: {norm} and {expected}");
            model.optimizer().leave().unwrap();
        });
    }
}

#[test]
fn a_frozen_parameter_does_not_change_and_is_part_of_the_state() {
    for level in Level::ALL {
        with_cluster(1, |world, settings, runtime| {
            let frozen = DemoNet { linear_0: net().linear_0.no_grad(), ..net() };
            let mut model =
                group_sharded_parallel(frozen, level, &line(&world, 2), settings, runtime).unwrap();
            let before = model.state_dict().unwrap();
            (0..2).for_each(|number| {
                _ = step(&mut model, Run { dp: 2, passes: 2, max_norm: None }, number)
            });
            let after = model.state_dict().unwrap();
            let changed: Vec<bool> =
                before.iter().zip(&after).map(|(before, after)| before != after).collect();
            assert_eq!(changed, [false, false, true, true], "{level}");
            model.optimizer().leave().unwrap();
        });
    }
}

#[test]
fn the_gradients_of_a_rank_without_a_pass_count_as_zeros() {
    with_cluster(1, |world, settings, runtime| {
        let mut model = at(Level::OsG, 2, &world, settings, runtime);
        if world.rank() == 0 {
            let loss = model.forward(|net| loss(net, 0)).unwrap();
            model.backward(loss).unwrap();
        }
        let report = model.step().unwrap();
        let all = dense(net(), Run { dp: 1, passes: 1, max_norm: None })[0][1];
        assert!((report.gradient_norm - all / 2.0).abs() <= 1e-5 * all);
        assert_eq!((report.applied, report.loss, report.absent.len()), (true, None, 4));
        model.optimizer().leave().unwrap();
    });
}

#[test]
fn a_loss_scale_changes_no_bit_and_an_overflow_skips_the_step() {
    let run = Run { dp: 2, passes: 2, max_norm: None };
    let (_, expected) = train(Level::PGOs, 100, run);
    with_cluster(2, |world, settings, runtime| {
        let mut model = at(Level::OsG, 2, &world, settings, runtime);
        model.set_loss_scale(1024.0).unwrap();
        for number in 0..STEPS {
            step(&mut model, run, number);
        }
        assert_eq!(model.state_dict().unwrap(), expected);
        let factor = if world.rank() == 0 { f32::INFINITY } else { 1.0 };
        let loss = model.forward(|net| Ok(loss(net, 0)?.mul_scalar(factor))).unwrap();
        model.backward(loss).unwrap();
        assert!(!model.step().unwrap().applied);
        assert_eq!(model.state_dict().unwrap(), expected);
        model.optimizer().leave().unwrap();
    });
}

#[test]
fn training_from_a_loaded_state_repeats_the_same_steps() {
    for level in Level::ALL {
        with_cluster(2, |world, settings, runtime| {
            let run = Run { dp: 2, passes: 1, max_norm: None };
            let mut model = at(level, 2, &world, settings, runtime);
            step(&mut model, run, 0);
            let state = model.state_dict().unwrap();
            let after: Steps = (1..3).map(|number| step(&mut model, run, number)).collect();
            // Accumulated gradients are dropped.
            let loss = model.forward(|net| loss(net, 0)).unwrap();
            model.backward(loss).unwrap();
            model.set_state_dict(state.clone()).unwrap();
            assert_eq!((model.optimizer().job(), model.optimizer().version()), ("demo.1", 0));
            assert_eq!(model.state_dict().unwrap(), state);
            assert_eq!(
                (1..3).map(|number| step(&mut model, run, number)).collect::<Steps>(),
                after
            );
            model.optimizer().leave().unwrap();
        });
    }
}

/// The message of a refusal.
fn refused<T: std::fmt::Debug>(result: Result<T>) -> String {
    match result {
        Err(Error::Invalid(refused)) => refused.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_state_of_a_different_module_is_refused_and_nothing_changes() {
    with_cluster(1, |world, settings, runtime| {
        let mut model = at(Level::Os, 1, &world, settings, runtime);
        let state = model.state_dict().unwrap();
        let with = |change: &dyn Fn(&mut Vec<StateTensor>)| {
            let mut state = state.clone();
            change(&mut state);
            state
        };
        let states = [
            (
                with(&|state| state[1].name = "other".to_owned()),
                "the job has no tensor \"other\", which the state has; it has [\"linear_0.weight\", ",
            ),
            (
                with(&|state| drop(state.pop())),
                "the state has no tensor \"linear_1.bias\", which the job has",
            ),
            (
                with(&|state| state.push(state[0].clone())),
                "the state has tensor \"linear_0.weight\" twice",
            ),
            (
                with(&|state| state[2].shape.reverse()),
                "tensor \"linear_1.weight\" of the state is of shape [8, 16] with 128 values; ",
            ),
            (
                with(&|state| state[3].values.truncate(7)),
                "tensor \"linear_1.bias\" of the state is of shape [8] with 7 values; ",
            ),
        ];
        for (state, expected) in states {
            let said = refused(model.set_state_dict(state));
            assert!(said.starts_with(expected), "{said}");
        }
        assert_eq!(model.optimizer().job(), "demo");
        assert_eq!(model.state_dict().unwrap(), state);
        model.optimizer().leave().unwrap();
    });
}

#[test]
fn a_state_is_not_loaded_into_an_existing_job() {
    with_cluster(1, |world, settings, runtime| {
        let job = JobOptions { name: "demo.1".to_owned(), ..settings.job.clone() };
        let other = ServerOptions { job, ..settings.clone() };
        let other = at(Level::Os, 1, &world, other, runtime);
        let state = other.state_dict().unwrap();
        other.optimizer().leave().unwrap();
        let mut model = at(Level::Os, 1, &world, settings, runtime);
        let refused = model.set_state_dict(state);
        let Err(Error::Invalid(zeroshard_model::Error::JobExists { job, difference })) = refused
        else {
            panic!("{refused:?}")
        };
        assert_eq!((job.as_str(), difference.as_str()), ("demo.1", "predecessor"));
        assert_eq!(model.optimizer().job(), "demo");
        model.optimizer().leave().unwrap();
    });
}

#[test]
fn a_job_with_an_idle_timeout_ends_when_its_successor_has_its_state() {
    with_cluster(1, |world, mut settings, runtime| {
        settings.job.idle_timeout = Some(Duration::from_secs(60));
        let JobOptions { address, options, .. } = settings.job.clone();
        let mut model = at(Level::Os, 2, &world, settings, runtime);
        model.set_state_dict(model.state_dict().unwrap()).unwrap();
        world.agree(line(&world, 2).process_mesh(), "the old job", "left").unwrap();
        let status = async { Cluster::connect(&address, options).await?.status().await };
        let jobs = runtime.block_on(status).unwrap().jobs;
        assert_eq!(jobs.iter().map(|job| job.name.as_str()).collect::<Vec<_>>(), ["demo.1"]);
        model.optimizer().leave().unwrap();
    });
}

#[test]
fn a_loss_of_earlier_parameters_is_refused() {
    for level in Level::ALL {
        with_cluster(1, |world, settings, runtime| {
            let run = Run { dp: 2, passes: 1, max_norm: None };
            let mut model = at(level, 2, &world, settings, runtime);
            let old = model.forward(|net| loss(net, 0)).unwrap();
            step(&mut model, run, 0);
            model.summon_full_params(|_| Ok(())).unwrap();
            let independent = "the loss does not depend on the module's current parameters; ";
            assert!(refused(model.backward(old)).starts_with(independent));
            let two = model.forward(|net| Ok(loss(net, 0)?.repeat(&[2]))).unwrap();
            assert_eq!(refused(model.backward(two)), "shape of a loss is [2]; it must be [1]");
            step(&mut model, run, 1);
            model.optimizer().leave().unwrap();
        });
    }
}

#[test]
fn a_loss_scale_must_be_positive_and_cannot_change_within_a_step() {
    with_cluster(1, |world, settings, runtime| {
        let mut model = at(Level::Os, 2, &world, settings, runtime);
        let positive = "loss scale is 0; it must be finite and more than 0";
        assert_eq!(refused(model.set_loss_scale(0.0)), positive);
        let loss = model.forward(|net| loss(net, 0)).unwrap();
        model.backward(loss).unwrap();
        let within = "the loss scale cannot change within a step; ";
        assert!(refused(model.set_loss_scale(2.0)).starts_with(within));
        model.step().unwrap();
        model.set_loss_scale(2.0).unwrap();
        model.optimizer().leave().unwrap();
    });
}
