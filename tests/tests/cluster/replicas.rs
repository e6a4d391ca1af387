//! Jobs with replicas: servers are killed while they train.
//!
//! promise: durability

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use zeroshard_client::{Error, Job, TensorData, TensorId};
use zeroshard_model::{JobSpec, TensorSpec};
pub(crate) use zeroshard_tests::training::step_despite_losses as step;
use zeroshard_tests::{Cluster, Process, Training, synthetic, training};

use crate::{adamw, connect, job, start, until};

fn spec(name: &str, replicas: u32) -> JobSpec {
    let tensors = synthetic::kinds_and_large(&adamw());
    JobSpec { min_servers: 3, replicas, ..job(name, 2, adamw(), tensors) }
}

/// The hash after `steps` undisturbed steps without replicas.
async fn calm(steps: u64) -> String {
    let cluster = Cluster::start(3);
    let run = Training { steps, ..Training::new(spec("calm", 1)) };
    run.run(cluster.address()).await.unwrap().hash
}

pub(crate) async fn train(job: &Job, steps: std::ops::Range<u64>, done: &AtomicU64) {
    for number in steps {
        training::pull(job, number).await.unwrap();
        step(job, number).await;
        done.fetch_max(number, Ordering::Relaxed);
    }
}

/// Waits until all slices have their replicas.
pub(crate) async fn until_redundant(coordinator: &Process, name: &str) {
    let whole = format!("zeroshard_job_degraded_slices{{job=\"{name}\"}} 0\n");
    until("all slices have their replicas", || coordinator.get("/metrics").contains(&whole)).await;
}

/// Kills a server, and starts another one without slices.
pub(crate) fn replace(cluster: &mut Cluster, server: usize) {
    cluster.shards[server].kill();
    cluster.shards[server] = Cluster::shard(cluster.coordinator.address(), &[]);
}

#[tokio::test]
async fn replicas_change_no_bit() {
    let expected = calm(3).await;
    let cluster = Cluster::start(4);
    for replicas in 2..4 {
        let run = Training::new(spec(&format!("replicas{replicas}"), replicas));
        let trained = run.run(cluster.address()).await.unwrap();
        assert_eq!(trained.hash, expected, "{replicas} replicas");
    }
}

/// Trains two ranks on three servers while `kill` is called after every `every` steps but the last
/// ones, each time with another server, when all slices have their replicas. Returns the hash.
pub(crate) async fn train_while_killing(
    cluster: &mut Cluster,
    jobs: &[Job],
    (steps, every): (u64, u64),
    kill: impl Fn(&mut Cluster, usize),
) -> String {
    let done = AtomicU64::new(0);
    let kills = async {
        for number in 1..steps / every {
            until("the next kill is due", || done.load(Ordering::Relaxed) >= number * every).await;
            until_redundant(&cluster.coordinator, &jobs[0].spec().name).await;
            kill(cluster, number as usize % 3);
        }
    };
    tokio::join!(train(&jobs[0], 0..steps, &done), train(&jobs[1], 0..steps, &done), kills);
    jobs[0].state_hash(steps).await.unwrap()
}

/// Trains 30 steps while `kill` is called five times, each time with another server. The hash must
/// be that of an undisturbed run, and all replicas must return.
async fn survives(name: &str, kill: impl Fn(&mut Cluster, usize)) {
    const STEPS: u64 = 30;
    let expected = calm(STEPS).await;
    let mut cluster = Cluster::start(3);
    let jobs = start(cluster.address(), &spec(name, 2)).await;
    assert_eq!(train_while_killing(&mut cluster, &jobs, (STEPS, 5), kill).await, expected);
    until_redundant(&cluster.coordinator, name).await;
}

#[tokio::test]
async fn a_run_survives_the_death_of_one_server_after_the_other() {
    survives("failover", replace).await;
}

#[tokio::test]
async fn a_run_survives_the_death_of_the_coordinator_and_a_server_at_the_same_instant() {
    survives("both", |cluster, server| {
        let address = cluster.coordinator.address().to_owned();
        cluster.coordinator.kill();
        cluster.shards[server].kill();
        cluster.coordinator = Cluster::coordinator_at(&address);
        cluster.shards[server] = Cluster::shard(&address, &[]);
    })
    .await;
}

#[tokio::test]
async fn a_run_survives_the_loss_of_a_whole_zone() {
    const STEPS: u64 = 12;
    let expected = calm(STEPS).await;
    let mut cluster = Cluster::start(0);
    // Without zones, about a sixth of the slices would be on the first two servers only.
    let zones = ["north", "north", "south", "south"];
    for zone in zones {
        cluster.shards.push(Cluster::shard(cluster.address(), &["--zone", zone]));
    }
    let client = connect(cluster.address()).await;
    let all = async || client.status().await.unwrap().servers;
    while all().await.len() < 4 {}
    let zone_of: BTreeMap<u64, String> =
        all().await.into_iter().map(|server| (server.server.id, server.zone)).collect();
    let spec = JobSpec { min_servers: 4, ..spec("zones", 2) };
    let jobs = start(cluster.address(), &spec).await;
    let placement = client.describe_job("zones").await.unwrap().placement;
    for slice in 0..placement.slices() {
        let server = |&owner: &u32| &placement.servers()[owner as usize].id;
        let zones: BTreeSet<&String> =
            placement.owners(slice).iter().map(|owner| &zone_of[server(owner)]).collect();
        assert_eq!(zones.len(), 2, "slice {slice}");
    }
    let done = AtomicU64::new(0);
    let kill = async {
        until("six steps are made", || done.load(Ordering::Relaxed) >= 6).await;
        cluster.shards[0].kill();
        cluster.shards[1].kill();
    };
    tokio::join!(train(&jobs[0], 0..STEPS, &done), train(&jobs[1], 0..STEPS, &done), kill);
    assert_eq!(jobs[0].state_hash(STEPS).await.unwrap(), expected);
}

/// Trains one rank that sends new values of all buffers in each step. If it `kills`, it kills two
/// servers meanwhile, and one afterwards. Returns the hash.
async fn train_with_buffers(cluster: &mut Cluster, replicas: u32, kills: bool) -> String {
    const STEPS: u64 = 8;
    let buffer = |i| TensorSpec { buffer: true, ..TensorSpec::new(format!("b{i}"), [5_000]) };
    let tensors = [TensorSpec::new("w", [4_000_000])].into_iter().chain((0..40).map(buffer));
    let spec = job(&format!("buffers{replicas}"), 1, adamw(), tensors.collect());
    let spec = JobSpec { min_servers: 4, replicas, ..spec };
    let jobs = start(cluster.address(), &spec).await;
    let values = |number: u64| {
        let of = |i: usize| vec![(number * 100) as f32 + i as f32; 5_000];
        (1..41).map(|i| TensorData::new(TensorId::new(i), of(i))).collect()
    };
    for number in 0..STEPS {
        if kills && (number == 2 || number == 4) {
            until_redundant(&cluster.coordinator, &spec.name).await;
            cluster.shards.pop().unwrap().kill();
        }
        loop {
            match jobs[0].attempt(number).unwrap().push_values(values(number)).await {
                Ok(()) => {}
                Err(Error::StepAborted { .. }) => continue,
                Err(error) => panic!("step {number}: {error}"),
            }
            match training::step(&jobs[0], number).await {
                Ok(_) => break,
                Err(Error::StepAborted { .. }) => {}
                Err(error) => panic!("step {number}: {error}"),
            }
        }
    }
    if kills {
        // The last backups serve the readers from now on.
        until_redundant(&cluster.coordinator, &spec.name).await;
        cluster.shards.pop().unwrap().kill();
    }
    jobs[0].state_hash(STEPS).await.unwrap()
}

#[tokio::test]
async fn new_values_are_kept_while_slices_get_new_backups() {
    let expected = train_with_buffers(&mut Cluster::start(4), 1, false).await;
    assert_eq!(train_with_buffers(&mut Cluster::start(4), 2, true).await, expected);
}

#[tokio::test]
async fn a_run_whose_last_copy_is_lost_fails() {
    let mut cluster = Cluster::start(3);
    let jobs = start(cluster.address(), &spec("lost", 2)).await;
    let (first, second) = tokio::join!(training::step(&jobs[0], 0), training::step(&jobs[1], 0));
    assert_eq!(first.unwrap(), second.unwrap());
    // Otherwise it could copy all slices to the third server before the second one is killed.
    cluster.coordinator.stand_still(Duration::from_secs(2));
    cluster.shards[0].kill();
    cluster.shards[1].kill();
    let failed = loop {
        match training::step(&jobs[0], 1).await {
            Err(Error::StepAborted { .. }) => {}
            result => break result.unwrap_err(),
        }
    };
    assert!(matches!(failed, Error::JobFailed { .. }), "{failed}");
}

#[tokio::test]
async fn a_server_that_joins_later_becomes_the_missing_backup() {
    let mut cluster = Cluster::start(3);
    let expected = calm(4).await;
    let jobs = start(cluster.address(), &spec("later", 2)).await;
    let done = AtomicU64::new(0);
    let train = |steps: std::ops::Range<u64>| {
        futures_util::future::join(
            train(&jobs[0], steps.clone(), &done),
            train(&jobs[1], steps, &done),
        )
    };
    train(0..1).await;
    cluster.shards[0].kill();
    until("the loss is noticed", || jobs[0].epoch() > 1).await;
    until_redundant(&cluster.coordinator, "later").await;
    cluster.shards[1].kill();
    train(1..2).await;
    // A single server is left.
    let address = cluster.coordinator.address().to_owned();
    cluster.shards[0] = Cluster::shard(&address, &[]);
    train(2..3).await;
    until_redundant(&cluster.coordinator, "later").await;
    cluster.shards[2].kill();
    train(3..4).await;
    assert_eq!(jobs[0].state_hash(4).await.unwrap(), expected);
}

#[tokio::test]
async fn a_bit_that_flips_in_the_memory_of_a_server_is_found_and_the_slice_named() {
    // The memory of a GPU cannot be written to from outside of the server.
    let cluster = Cluster::start_with(2, &["--device", "cpu"]);
    let spec = JobSpec { min_servers: 2, compare_every: 2, ..spec("flipped", 2) };
    let jobs = start(cluster.address(), &spec).await;
    let done = AtomicU64::new(0);
    tokio::join!(train(&jobs[0], 0..3, &done), train(&jobs[1], 0..3, &done));
    let values = training::pull(&jobs[0], 3).await.unwrap();
    let trained = spec.manifest.tensors().iter().position(|tensor| tensor.trains()).unwrap();
    let flipped = cluster.shards[1].flip_bit(&values[trained][..8.min(values[trained].len())]);
    assert!(flipped > 0, "server 1 holds tensor {trained}");
    let both = async |step| {
        let (one, _) = tokio::join!(training::step(&jobs[0], step), training::step(&jobs[1], step));
        one
    };
    both(3).await.unwrap();
    // Version 4 is compared; the servers report it while the next step is under way.
    let mut step = 4;
    let error = loop {
        match both(step).await {
            Ok(_) => step += 1,
            Err(error) => break error.to_string(),
        }
        assert!(step < 100, "the servers of a slice have different content");
    };
    let name = &spec.manifest.tensors()[trained].name;
    assert!(error.contains(&format!("of tensor {name:?}) at version 4")), "{error}");
}
