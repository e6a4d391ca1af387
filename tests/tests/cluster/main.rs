//! What the design promises, and what operators are told, held by clusters of the shipped binaries:
//! real processes, real sockets on port 0, driven through the client.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod absent;
mod attempts;
mod boxes;
mod buffers;
mod command_line;
mod departures;
mod dtypes;
mod exactly_once;
mod faults;
mod isolation;
mod membership;
mod norms;
mod operations;
mod reads;
mod refusals;
mod resume;
mod same_bits;
mod shutdown;
mod steps;
mod succession;
mod token;
mod waits;

use std::time::Duration;

use zeroshard_client::{Cluster, Job, Options};
use zeroshard_proto::{JobSpec, Optimizer, TensorSpec, optimizer::Sgd};
use zeroshard_tests::synthetic;

/// With a deadline that ends a test which would hang.
fn options() -> Options {
    Options { deadline: Duration::from_secs(30), ..Options::default() }
}

/// For what is expected to run into its deadline.
fn hasty() -> Options {
    Options { deadline: Duration::from_millis(700), ..Options::default() }
}

async fn connect(address: &str) -> Cluster {
    Cluster::connect(address, options()).await.unwrap()
}

/// Plain SGD: what comes out can be computed by hand.
fn sgd(lr: f64) -> Optimizer {
    Optimizer::Sgd(Sgd { lr, ..Sgd::default() })
}

fn adamw() -> Optimizer {
    "adamw".parse().unwrap()
}

fn job(name: &str, world: u32, optimizer: Optimizer, tensors: Vec<TensorSpec>) -> JobSpec {
    synthetic::job(name, world, optimizer, tensors).unwrap()
}

/// Creates the job and joins it with every rank; the initial parameters are there.
async fn start(address: &str, spec: &JobSpec) -> Vec<Job> {
    let cluster = connect(address).await;
    cluster.create_job(spec).await.unwrap();
    let mut jobs = Vec::new();
    for rank in 0..spec.world {
        // A connection of its own, as workers have.
        jobs.push(connect(address).await.join(&spec.name, rank).await.unwrap());
    }
    jobs[0].initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    // Who is lost earlier takes the parameters along.
    until("all ranks know of version 0", || jobs.iter().all(|job| job.version() == Some(0))).await;
    jobs
}

/// Returns when `condition` holds; asks again and again, since nobody tells.
async fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = std::time::Instant::now() + options().deadline;
    while !condition() {
        assert!(std::time::Instant::now() < deadline, "waited in vain until {what}");
        tokio::task::yield_now().await;
    }
}

/// Returns when so many commits wait at the coordinator.
async fn until_commits_wait(cluster: &zeroshard_tests::Cluster, commits: usize) {
    until_calls_wait(&cluster.coordinator, "CoordinatorService/Commit", commits).await;
}

/// Returns when so many calls of `method` are open at a server.
async fn until_calls_wait(server: &zeroshard_tests::Process, method: &str, calls: usize) {
    let open =
        format!("zeroshard_requests_in_flight{{method=\"/zeroshard.v1.{method}\"}} {calls}\n");
    until(&format!("{calls} calls of {method} wait"), || server.get("/metrics").contains(&open))
        .await;
}
