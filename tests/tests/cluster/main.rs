//! Tests of the promises in the design and of the information for operators, with clusters of the
//! shipped binaries: real processes and real sockets on port 0, controlled through the client.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod absent;
mod admin;
mod admission;
mod attacks;
mod attempts;
mod averages;
mod boxes;
mod capture;
mod checkpoints;
mod claims;
mod command_line;
mod departures;
mod dtypes;
mod eight_bits;
mod election;
mod exactly_once;
mod faults;
mod follow;
mod follow_boxes;
mod followed_files;
mod fork;
mod gpus;
mod groups;
mod identities;
mod int8;
mod isolation;
mod kinds;
mod links;
mod lying_mirrors;
mod membership;
mod mirror_access;
mod mirrors;
mod norms;
mod operations;
mod operators;
mod phases;
mod plan;
mod quotas;
mod reads;
mod refusals;
mod released;
mod replicas;
mod restart;
mod restored;
mod resume;
mod rewinds;
mod roles;
mod same_bits;
mod shared_reads;
mod shortage;
mod shutdown;
mod spikes;
mod status;
mod steps;
mod tiers;
mod tls;
mod token;
mod values;
mod waits;
mod windows;

use std::time::Duration;

use zeroshard_client::{Cluster, Job, Options, Transport};
use zeroshard_model::{JobSpec, Optimizer, TensorSpec, optimizer::Sgd};
use zeroshard_tests::synthetic;

/// Options with a deadline that ends a test that would otherwise hang.
fn options() -> Options {
    Options::default().timeout(zeroshard_tests::timeout())
}

/// Options for calls that are expected to reach their deadline.
fn hasty() -> Options {
    Options::default().timeout(Duration::from_millis(700))
}

async fn connect(address: &str) -> Cluster {
    Cluster::connect(address, options()).await.unwrap()
}

/// Plain SGD, whose results can be computed by hand.
fn sgd(lr: f64) -> Optimizer {
    Optimizer::Sgd(Sgd { lr, ..Sgd::default() })
}

fn adamw() -> Optimizer {
    "adamw".parse().unwrap()
}

fn job(name: &str, world: u32, optimizer: Optimizer, tensors: Vec<TensorSpec>) -> JobSpec {
    synthetic::job(name, world, optimizer, tensors).unwrap()
}

/// Creates the job, joins it with every rank, and uploads the initial parameters.
async fn start(address: &str, spec: &JobSpec) -> Vec<Job> {
    start_over(None, address, spec).await
}

/// Like [`start`], over this transport.
async fn start_over(transport: Option<Transport>, address: &str, spec: &JobSpec) -> Vec<Job> {
    start_with(options().transport(transport), address, spec).await
}

/// Like [`start`], with these options of all ranks.
async fn start_with(options: Options, address: &str, spec: &JobSpec) -> Vec<Job> {
    let cluster = Cluster::connect(address, options.clone()).await.unwrap();
    cluster.create_job(spec).await.unwrap();
    let mut jobs = Vec::new();
    for rank in 0..spec.world {
        // Each rank has its own connection, like a worker.
        let cluster = Cluster::connect(address, options.clone()).await.unwrap();
        jobs.push(cluster.join(&spec.name, rank).await.unwrap());
    }
    jobs[0].initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    // If a rank were lost earlier, its parameters would be dropped.
    until("all ranks know of version 0", || jobs.iter().all(|job| job.version() == Some(0))).await;
    jobs
}

/// Returns when `condition` holds. It polls, because there is no notification.
async fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = std::time::Instant::now() + options().timeout;
    while !condition() {
        assert!(std::time::Instant::now() < deadline, "waited in vain until {what}");
        tokio::task::yield_now().await;
    }
}

/// Returns when this number of commits wait at the coordinator.
async fn until_commits_wait(cluster: &zeroshard_tests::Cluster, commits: usize) {
    until_calls_wait(&cluster.coordinator, "CoordinatorService/Commit", commits).await;
}

/// Returns when this number of calls of `method` are open at a server.
async fn until_calls_wait(server: &zeroshard_tests::Process, method: &str, calls: usize) {
    let open =
        format!("zeroshard_requests_in_flight{{method=\"/zeroshard.v1.{method}\"}} {calls}\n");
    until(&format!("{calls} calls of {method} wait"), || server.get("/metrics").contains(&open))
        .await;
}
