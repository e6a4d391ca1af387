//! Compares distributed tensors and layers on several ranks with their results on one rank.

mod data_parallel;
mod dist_model;
mod dist_tensor;
mod group_sharded;
mod layers;
mod plan;
mod prepare;
mod server_optimizer;

use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::grads::Gradients;
use burn::backend::{Autodiff, Flex};
use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use tokio::runtime::Handle;
use zeroshard_client::Options;
use zeroshard_server::embedded;

use super::*;
use crate::collectives::testing::together;

type Graph = Autodiff<Flex>;

/// Prevents two tests from running at the same time. Their ranks would wait for each other, see
/// [`World::backward`].
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The results of `run` on `count` ranks.
fn worlds<T: Send>(count: usize, run: impl Fn(World) -> T + Sync) -> Vec<T> {
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    together(count, |peers| run(World::new(Arc::<crate::collectives::Peers>::clone(peers))))
}

/// A learning rate at which training is stable.
const RATE: f64 = 0.01;

/// The results of `run` on `ranks` ranks. `run` receives the options of a job on a cluster of
/// `servers` shard servers.
fn with_job<T: Send>(
    servers: usize,
    ranks: usize,
    run: impl Fn(World, JobOptions, &Handle) -> T + Sync,
) -> Vec<T> {
    let runtime = crate::collectives::testing::runtime();
    let cluster =
        runtime.block_on(embedded::Cluster::start(embedded::Options::new(servers))).unwrap();
    let results = worlds(ranks, |world| {
        let job = JobOptions {
            address: cluster.address(),
            name: "demo".to_owned(),
            min_servers: servers as u32,
            idle_timeout: None,
            options: Options::default().token(cluster.token().clone()),
        };
        run(world, job, runtime.handle())
    });
    runtime.block_on(cluster.shutdown()).unwrap();
    results
}

/// The results of `run` on two ranks, with the options of a job that is trained with SGD.
fn with_cluster<T: Send>(
    servers: usize,
    run: impl Fn(World, ServerOptions, &Handle) -> T + Sync,
) -> Vec<T> {
    with_job(servers, 2, |world, job, runtime| {
        let mut sgd: zeroshard_model::Optimizer = "sgd".parse().unwrap();
        sgd.set_lr(RATE);
        run(world, ServerOptions { job, optimizer: sgd, max_norm: None }, runtime)
    })
}

/// The mesh of all ranks, with one dimension.
fn line(world: &World, size: usize) -> Mesh {
    world.mesh(ProcessMesh::dense([size], ["tp"]).unwrap()).unwrap()
}

/// Runs a backward pass, and waits until all ranks have completed theirs.
fn backward<const D: usize>(mesh: &Mesh, loss: &Tensor<Graph, D>) -> Gradients {
    let gradients = mesh.world().backward(loss).unwrap();
    mesh.world().agree(mesh.process_mesh(), "the backward pass", "done").unwrap();
    gradients
}

/// Pseudo-random numbers, the same on every rank.
fn numbers<const D: usize>(seed: usize, shape: [usize; D]) -> Tensor<Graph, D> {
    let count = shape.iter().product();
    let value = |i: usize| (i * 7919 + seed * 104_729 + 1) % 2003;
    let values: Vec<f32> = (0..count).map(|i| value(i) as f32 / 1001.5 - 1.0).collect();
    Tensor::from_data(TensorData::new(values, shape), &Default::default())
}

fn values<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().into_vec().unwrap()
}

fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(
            (found - expected).abs() <= 1e-5 * expected.abs().max(1.0),
            "{what}: {found}, {expected}"
        );
    }
}

/// The part of `whole` that this rank holds.
fn part<const D: usize>(whole: Tensor<Flex, D>, mesh: &Mesh, placements: &[Placement]) -> Vec<f32> {
    values(shard_tensor(whole, mesh, placements).unwrap().to_local::<D>().unwrap())
}

fn linear(seed: usize, from: usize, to: usize) -> ParallelLinear<Graph> {
    Linear {
        weight: Param::from_tensor(numbers(seed, [from, to]).require_grad()),
        bias: Some(Param::from_tensor(numbers(seed + 1, [to]).require_grad())),
    }
    .into()
}

/// Two linear layers.
#[derive(Module, Debug)]
struct Mlp<B: Backend> {
    up: ParallelLinear<B>,
    down: ParallelLinear<B>,
}

impl Mlp<Graph> {
    fn new([from, hidden, to]: [usize; 3]) -> Self {
        Self { up: linear(1, from, hidden), down: linear(5, hidden, to) }
    }
}

impl<B: ParallelBackend> Mlp<B> {
    fn forward(&self, x: impl Into<Value<B>>) -> Result<Value<B>> {
        self.down.forward(self.up.forward(x)?.map::<2>(relu)?)
    }
}

impl<B: ParallelBackend> Parallelize<B> for Mlp<B> {
    fn layers(&mut self) -> Vec<(String, Layer<'_, B>)> {
        vec![("up".into(), (&mut self.up).into()), ("down".into(), (&mut self.down).into())]
    }
}
