//! Tests data parallelism.

use burn::optim::{GradientsParams, Optimizer, SgdConfig};

use super::*;

/// A module with a parameter that every rank uses, and one that only some ranks use.
#[derive(Module, Debug)]
struct Two<B: Backend> {
    used: Param<Tensor<B, 1>>,
    spare: Param<Tensor<B, 1>>,
}

fn two() -> Two<Graph> {
    let new = || Param::from_tensor(Tensor::ones([1], &Default::default()).require_grad());
    Two { used: new(), spare: new() }
}

fn gradient(found: &GradientsParams, parameter: &Param<Tensor<Graph, 1>>) -> Option<f32> {
    found.get::<Flex, 1>(parameter.id).map(|gradient| gradient.into_scalar())
}

/// A loss whose gradient is `factor` for both parameters, or only for the first one.
fn loss(module: &Two<Graph>, factor: f32, both: bool) -> Tensor<Graph, 1> {
    let first = module.used.val().mul_scalar(factor);
    if both { first + module.spare.val().mul_scalar(factor) } else { first }
}

type Parallel = DataParallel<Graph, Two<Graph>>;

/// The results of `run` on two ranks, which receives a `DataParallel` and the rank.
fn parallel<T: Send>(
    find_unused_parameters: bool,
    run: impl Fn(Parallel, u32) -> T + Sync,
) -> Vec<T> {
    with_job(2, 2, |world, job, runtime| {
        let options =
            DataParallelOptions { find_unused_parameters, ..DataParallelOptions::default() };
        let parallel = DataParallel::new(two(), &line(&world, 2), options, &job, runtime).unwrap();
        run(parallel, world.rank())
    })
}

/// A module on one rank, which uses no cluster.
fn alone<M: Module<Graph>>(module: M) -> Result<DataParallel<Graph, M>> {
    let mut made = worlds(1, |world| world);
    let runtime = crate::collectives::testing::runtime();
    let job = JobOptions {
        address: "nowhere".to_owned(),
        name: "demo".to_owned(),
        min_servers: 1,
        idle_timeout: None,
        options: Options::default(),
    };
    let mesh = line(&made.remove(0), 1);
    DataParallel::new(module, &mesh, DataParallelOptions::default(), &job, runtime.handle())
}

#[test]
fn all_ranks_receive_the_parameters_of_the_first_rank() {
    with_job(1, 3, |world, job, runtime| {
        let (module, options) =
            (linear(world.rank() as usize, 3, 2), DataParallelOptions::default());
        let parallel = DataParallel::new(module, &line(&world, 3), options, &job, runtime).unwrap();
        assert_eq!(values(parallel.module().weight.val()), values(linear(0, 3, 2).weight.val()));
    });
}

#[test]
fn gradients_are_the_mean_over_the_ranks() {
    parallel(false, |mut parallel, rank| {
        let factor = 1.0 + rank as f32;
        let pass = parallel.forward(|module| loss(module, factor, true));
        parallel.backward(pass).unwrap();
        let found = parallel.gradients();
        assert_eq!(gradient(&found, &parallel.module().used), Some(1.5));
        assert_eq!(
            gradient(&parallel.gradients(), &parallel.module().used),
            None,
            "gradients() has removed the gradients"
        );
    });
}

#[test]
fn gradients_accumulated_in_no_sync_are_part_of_the_next_synchronisation() {
    parallel(false, |mut parallel, rank| {
        let [first, second] = if rank == 0 { [1.0, 10.0] } else { [2.0, 20.0] };
        parallel.no_sync(|parallel| {
            let pass = parallel.forward(|module| loss(module, first, true));
            parallel.backward(pass).unwrap();
        });
        let pass = parallel.forward(|module| loss(module, second, true));
        parallel.backward(pass).unwrap();
        let found = parallel.gradients();
        assert_eq!(gradient(&found, &parallel.module().used), Some(16.5));
    });
}

#[test]
fn no_sync_takes_effect_at_the_forward_pass() {
    parallel(false, |mut parallel, rank| {
        let own = 1.0 + rank as f32;
        let inside =
            parallel.no_sync(|parallel| parallel.forward(|module| loss(module, own, true)));
        parallel.backward(inside).unwrap();
        let found = parallel.gradients();
        assert_eq!(
            gradient(&found, &parallel.module().used),
            Some(own),
            "forward inside, backward outside"
        );
        let outside = parallel.forward(|module| loss(module, own, true));
        parallel.no_sync(|parallel| parallel.backward(outside).unwrap());
        let found = parallel.gradients();
        assert_eq!(
            gradient(&found, &parallel.module().used),
            Some(1.5),
            "forward outside, backward inside"
        );
    });
}

#[test]
fn gradients_of_no_sync_can_be_synchronised_explicitly() {
    parallel(false, |mut parallel, rank| {
        let own = 1.0 + rank as f32;
        parallel.no_sync(|parallel| {
            let pass = parallel.forward(|module| loss(module, own, true));
            parallel.backward(pass).unwrap();
        });
        parallel.synchronise().unwrap();
        let found = parallel.gradients();
        assert_eq!(gradient(&found, &parallel.module().used), Some(1.5));
    });
}

#[test]
fn a_parameter_that_one_rank_used_is_averaged_with_find_unused_parameters() {
    parallel(true, |mut parallel, rank| {
        let pass = parallel.forward(|module| loss(module, 1.0, rank == 0));
        parallel.backward(pass).unwrap();
        let found = parallel.gradients();
        assert_eq!(gradient(&found, &parallel.module().spare), Some(0.5));
        // A parameter that no rank used.
        let pass = parallel.forward(|module| loss(module, 1.0, false));
        parallel.backward(pass).unwrap();
        let found = parallel.gradients();
        assert_eq!(gradient(&found, &parallel.module().spare), None);
    });
}

#[test]
fn an_unused_parameter_is_an_error_on_every_rank_that_names_parameter_and_rank() {
    let errors = parallel(false, |mut parallel, rank| {
        let both = rank == 0;
        let pass = parallel.forward(|module| loss(module, 1.0, both));
        parallel.backward(pass).unwrap_err()
    });
    for error in errors {
        assert_eq!(error, Error::UnusedParameter { parameter: "spare".to_owned(), rank: 1 });
    }
}

#[test]
fn buckets_equal_those_of_paddle() {
    #[derive(Module, Debug)]
    struct Sizes<B: Backend> {
        parameters: Vec<Param<Tensor<B, 1>>>,
    }
    let new = |size| {
        let zeros = Tensor::<Graph, 1>::zeros([size], &Default::default());
        Param::from_tensor(zeros.require_grad())
    };
    let sizes = [100_000, 100_000, 200_000, 1_000_000, 7_000_000, 10];
    let parallel = alone(Sizes { parameters: sizes.map(new).to_vec() }).unwrap();
    assert_eq!(parallel.buckets(), [vec![0, 1, 2], vec![3, 4], vec![5]]);
}

#[test]
fn a_module_without_trained_parameters_is_refused() {
    assert!(matches!(alone(two().no_grad()).map(drop), Err(Error::Invalid(_))));
}

#[test]
fn ranks_with_different_parameters_are_refused() {
    let errors = with_job(1, 2, |world, job, runtime| {
        let (module, options) =
            (linear(0, 3, 2 + world.rank() as usize), DataParallelOptions::default());
        DataParallel::new(module, &line(&world, 2), options, &job, runtime).map(drop).unwrap_err()
    });
    assert!(errors.iter().any(|error| error.to_string().contains("weight [3, 3]")), "{errors:?}");
}

#[test]
fn ranks_with_the_same_optimizer_keep_equal_parameters() {
    let weights = parallel(false, |mut parallel, rank| {
        let mut optimizer = SgdConfig::new().init::<Graph, Two<Graph>>();
        for step in 0..3 {
            let factor = (step * 2 + rank) as f32;
            let pass = parallel.forward(|module| loss(module, factor, true));
            parallel.backward(pass).unwrap();
            let gradients = parallel.gradients();
            parallel = parallel.update(|module| optimizer.step(0.1, module, gradients));
        }
        parallel.into_module().used.val().into_scalar()
    });
    assert_eq!(weights[0], weights[1]);
    assert!((weights[0] - (1.0 - 0.1 * (0.5 + 2.5 + 4.5))).abs() < 1e-6, "{weights:?}");
}

#[test]
fn one_rank_works_without_a_cluster() {
    let mut parallel = alone(two()).unwrap();
    let pass = parallel.forward(|module| loss(module, 3.0, true));
    parallel.backward(pass).unwrap();
    assert_eq!(gradient(&parallel.gradients(), &parallel.module().used), Some(3.0));
    let pass = parallel.forward(|module| loss(module, 3.0, false));
    let unused = Error::UnusedParameter { parameter: "spare".to_owned(), rank: 0 };
    assert_eq!(parallel.backward(pass).unwrap_err(), unused);
}

#[test]
fn the_job_ends_when_the_last_rank_leaves() {
    with_job(1, 2, |world, job, runtime| {
        let (mesh, options) = (line(&world, 2), DataParallelOptions::default());
        for _ in 0..2 {
            let parallel = DataParallel::new(two(), &mesh, options, &job, runtime).unwrap();
            parallel.leave().unwrap();
            mesh.world().agree(mesh.process_mesh(), "the job", "left").unwrap();
        }
    });
}
