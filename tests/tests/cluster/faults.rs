//! Workers and servers are lost, and start in any order.

use std::sync::atomic::{AtomicU64, Ordering};

use zeroshard_client::{Commit, Error, Job, Result, StepReport};
use zeroshard_model::JobSpec;
use zeroshard_proto::pb;
use zeroshard_tests::{Cluster, FaultProxy, Process, Training, stock, synthetic, training};

use crate::{adamw, connect, job, sgd, start, until, until_commits_wait};

fn spec(name: &str, world: u32) -> JobSpec {
    job(name, world, adamw(), synthetic::kinds(&adamw()))
}

async fn both(first: &Job, second: &Job, number: u64) -> (Result<StepReport>, Result<StepReport>) {
    tokio::join!(training::step(first, number), training::step(second, number))
}

// promise: atomic-steps
#[tokio::test]
async fn a_step_that_loses_a_worker_is_aborted_and_repeated_with_the_same_bits() {
    let cluster = Cluster::start(3);
    let calm = Training { steps: 2, ..Training::new(spec("calm", 2)) };
    let expected = calm.run(cluster.address()).await.unwrap().hash;

    let mut jobs = start(cluster.address(), &spec("lossy", 2)).await;
    let (second, first) = (jobs.pop().unwrap(), jobs.pop().unwrap());
    let (one, other) = both(&first, &second, 0).await;
    assert_eq!(one.unwrap(), other.unwrap());
    // Rank 1 is lost after half of its gradients were pushed, while rank 0 waits for it.
    let mut half = synthetic::gradients(&first.spec().manifest, 1, 1);
    half.truncate(3);
    second.attempt(1).unwrap().push(half).await.unwrap();
    let epoch = first.epoch();
    first
        .attempt(1)
        .unwrap()
        .push(synthetic::gradients(&first.spec().manifest, 0, 1))
        .await
        .unwrap();
    let lost = async {
        until_commits_wait(&cluster, 1).await;
        drop(second);
    };
    let (aborted, ()) = tokio::join!(training::commit(&first, 1, Commit::default()), lost);
    match aborted {
        Err(Error::StepAborted { step: 1, epoch: new, cause, .. }) => {
            assert!(new > epoch);
            assert!(cause.contains("rank 1"), "{cause}");
        }
        other => panic!("{other:?}"),
    }
    // Rank 1 joins again. Both ranks run the step again, and nothing of the first try counts.
    let second = connect(cluster.address()).await.join("lossy", 1).await.unwrap();
    assert_eq!(second.version(), Some(1));
    let (one, other) = both(&first, &second, 1).await;
    assert_eq!(one.unwrap(), other.unwrap());
    assert_eq!(first.state_hash(2).await.unwrap(), expected);
    assert!(
        cluster
            .coordinator
            .get("/metrics")
            .contains("zeroshard_steps_total{outcome=\"aborted\"} 1")
    );
}

#[tokio::test]
async fn the_loss_of_a_worker_after_its_commit_aborts_the_step() {
    let cluster = Cluster::start(2);
    let expected = Training { steps: 1, ..Training::new(spec("calm", 2)) };
    let expected = expected.run(cluster.address()).await.unwrap().hash;
    let mut jobs = start(cluster.address(), &spec("committed", 2)).await;
    let (second, first) = (jobs.pop().unwrap(), jobs.pop().unwrap());
    second
        .attempt(0)
        .unwrap()
        .push(synthetic::gradients(&first.spec().manifest, 1, 0))
        .await
        .unwrap();
    tokio::select! {
        report = training::commit(&second, 0, Commit::default()) => panic!("rank 0 has not committed: {report:?}"),
        () = until_commits_wait(&cluster, 1) => {}
    }
    let epoch = first.epoch();
    drop(second);
    until("rank 0 knows", || first.epoch() > epoch).await;
    let second = connect(cluster.address()).await.join("committed", 1).await.unwrap();
    let (one, other) = both(&first, &second, 0).await;
    assert_eq!(one.unwrap(), other.unwrap());
    assert_eq!(first.state_hash(1).await.unwrap(), expected);
}

#[tokio::test]
async fn gradients_pushed_before_the_loss_of_a_rank_cannot_be_committed_after_it() {
    let cluster = Cluster::start(1);
    let mut jobs = start(cluster.address(), &spec("between", 2)).await;
    let (second, first) = (jobs.pop().unwrap(), jobs.pop().unwrap());
    first
        .attempt(0)
        .unwrap()
        .push(synthetic::gradients(&first.spec().manifest, 0, 0))
        .await
        .unwrap();
    let epoch = first.epoch();
    drop(second);
    until("rank 0 knows", || first.epoch() > epoch).await;
    // The servers have dropped the gradients, so that waiting would be useless.
    match first.attempt(0).unwrap().commit(Commit::default()).await {
        Err(Error::StepAborted { step: 0, epoch: new, .. }) => assert_eq!(new, first.epoch()),
        other => panic!("{other:?}"),
    }
    let second = connect(cluster.address()).await.join("between", 1).await.unwrap();
    let (one, other) = both(&first, &second, 0).await;
    assert_eq!(one.unwrap(), other.unwrap());
}

#[tokio::test]
async fn a_stale_epoch_is_refused_with_the_current_epoch() {
    let cluster = Cluster::start(1);
    let mut jobs = start(cluster.address(), &spec("stale", 2)).await;
    let (second, first) = (jobs.pop().unwrap(), jobs.pop().unwrap());
    let old = first.epoch();
    drop(second);
    until("rank 0 knows", || first.epoch() > old).await;
    // The server learns of the epoch before it accepts a push of that epoch.
    first
        .attempt(0)
        .unwrap()
        .push(synthetic::gradients(&first.spec().manifest, 0, 0))
        .await
        .unwrap();
    let begin = pb::PushBegin { epoch: old, ..stock::begin(&first, Some(0)) };
    let messages = vec![stock::open(begin), stock::extent(1, 0, &[1.0])];
    match stock::push(cluster.shards[0].address(), messages).await {
        Err(Error::StaleEpoch { epoch, current, .. }) => {
            assert_eq!((epoch, current), (old, first.epoch()))
        }
        other => panic!("{other:?}"),
    }
    let request = pb::PullRequest { epoch: old, ..stock::read("stale", 0, [0]) };
    let pulled = stock::pull(cluster.shards[0].address(), request).await;
    assert!(matches!(pulled, Err(Error::StaleEpoch { .. })), "{pulled:?}");
}

// promise: durability
#[tokio::test]
async fn a_killed_server_fails_the_job_and_is_named() {
    let mut cluster = Cluster::start(3);
    let spec = JobSpec { min_servers: 3, ..spec("killed", 2) };
    let jobs = start(cluster.address(), &spec).await;
    let (one, other) = both(&jobs[0], &jobs[1], 0).await;
    assert!(one.is_ok() && other.is_ok());
    let dead = cluster.shards.remove(1);
    let address = dead.address().to_owned();
    jobs[0].attempt(1).unwrap().push(synthetic::gradients(&spec.manifest, 0, 1)).await.unwrap();
    // One call waits for the other rank, and one for the next version.
    let (commit, pull, ()) = tokio::join!(
        training::commit(&jobs[0], 1, Commit::default()),
        training::pull(&jobs[1], 2),
        async { drop(dead) } // killed
    );
    for error in [commit.unwrap_err(), pull.unwrap_err()] {
        assert!(
            matches!(&error, Error::JobFailed { reason, .. } if reason.contains(&address)),
            "{error}"
        );
    }
    // Later calls fail at once, and the status shows the failure.
    let attempt = jobs[1].attempt(1).map(drop);
    assert!(matches!(attempt, Err(Error::JobFailed { .. })), "{attempt:?}");
    let push = jobs[0].attempt(1).unwrap().push(synthetic::gradients(&spec.manifest, 0, 1)).await;
    assert!(matches!(push, Err(Error::JobFailed { .. })), "{push:?}");
    let client = connect(cluster.address()).await;
    let status = client.status().await.unwrap();
    let failure = status.jobs[0].failure.as_ref().unwrap();
    assert!(failure.contains(&address), "{failure}");
    assert_eq!(status.servers.len(), 2);
    assert!(matches!(client.join("killed", 0).await, Err(Error::JobFailed { .. })));
    // The remaining servers continue with other jobs. After the deletion the name can be used
    // again.
    client.delete_job("killed").await.unwrap();
    let again = Training::new(job("killed", 1, sgd(1.0), synthetic::small()));
    assert_eq!(again.run(cluster.address()).await.unwrap().reports.len(), 3);
}

#[tokio::test]
async fn a_killed_coordinator_ends_every_wait() {
    let cluster = Cluster::start(1);
    let spec = job("headless", 2, sgd(1.0), synthetic::small());
    connect(cluster.address()).await.create_job(&spec).await.unwrap();
    let client =
        zeroshard_client::Cluster::connect(cluster.address(), crate::hasty()).await.unwrap();
    let job = client.join("headless", 0).await.unwrap();
    job.initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    training::pull(&job, 0).await.unwrap();
    let mut coordinator = cluster.coordinator;
    coordinator.kill();
    assert!(training::step(&job, 0).await.is_err());
    assert!(training::pull(&job, 1).await.is_err());
}

/// Starts servers, worker and coordinator in an order in which the first ones have no peer yet.
async fn started_in_order(coordinator_at: usize) {
    let proxy = FaultProxy::start().await.unwrap();
    let spec = JobSpec { min_servers: 2, ..job("order", 1, sgd(1.0), synthetic::small()) };
    // The worker tries until the coordinator and both servers are connected.
    let worker = async { Training::new(spec).run(proxy.address()).await };
    let servers = async {
        let mut shards: Vec<Process> = Vec::new();
        let mut coordinator = None;
        for place in 0..3 {
            if place == coordinator_at {
                let process = Cluster::coordinator();
                proxy.forward_to(process.address());
                coordinator = Some(process);
            } else {
                shards.push(Cluster::shard(proxy.address(), &[]));
            }
        }
        (coordinator, shards)
    };
    let (trained, _processes) = tokio::join!(worker, servers);
    assert_eq!(trained.unwrap().reports.len(), 3);
}

#[tokio::test]
async fn coordinator_servers_and_workers_can_start_in_any_order() {
    for coordinator_at in 0..3 {
        started_in_order(coordinator_at).await;
    }
}

// promise: durability
#[tokio::test]
async fn cut_control_connections_do_not_disturb_a_run() {
    const STEPS: u64 = 60;
    let calm = Cluster::start(3);
    let run = Training { steps: STEPS, ..Training::new(spec("calm", 2)) };
    let expected = run.run(calm.address()).await.unwrap().hash;
    let payload = calm.payload()[1];

    let coordinator = Cluster::coordinator();
    let proxy = FaultProxy::start().await.unwrap();
    proxy.forward_to(coordinator.address());
    // Two of three servers reach the coordinator through the proxy.
    let addresses = [proxy.address(), proxy.address(), coordinator.address()];
    let shards = addresses.map(|address| Cluster::shard(address, &[])).into();
    let cluster = Cluster { coordinator, shards };
    let spec = JobSpec { min_servers: 3, ..spec("cut", 2) };
    let jobs = start(cluster.address(), &spec).await;
    let (epoch, done) = (jobs[0].epoch(), AtomicU64::new(0));
    let train = async |job: &Job| {
        for step in 0..STEPS {
            training::step(job, step).await.unwrap();
            done.fetch_max(step, Ordering::Relaxed);
        }
    };
    let cuts = async {
        for cut in 1..6 {
            until("the next cut is due", || done.load(Ordering::Relaxed) >= cut * 10).await;
            let before = proxy.connections();
            proxy.cut();
            until("both dial again", || proxy.connections() >= before + 2).await;
            // The next connections break while the servers describe their jobs, or soon after.
            proxy.cut_after(400 * cut);
        }
    };
    tokio::join!(train(&jobs[0]), train(&jobs[1]), cuts);
    assert_eq!(jobs[0].state_hash(STEPS).await.unwrap(), expected);
    // No rank was lost, and no gradient was sent again.
    assert_eq!((jobs[0].epoch(), cluster.payload()[1]), (epoch, payload));
    assert!(proxy.cuts() > 5);
}

#[tokio::test]
async fn ranks_join_leave_and_discard_while_a_server_has_no_control_connection() {
    let coordinator = Cluster::coordinator();
    let proxy = FaultProxy::start().await.unwrap();
    proxy.forward_to(coordinator.address());
    let shards = [proxy.address(), coordinator.address()];
    let shards = shards.map(|address| Cluster::shard(address, &[])).into();
    let cluster = Cluster { coordinator, shards };
    let spec = JobSpec { min_servers: 2, ..spec("away", 2) };
    let mut jobs = start(cluster.address(), &spec).await;
    let (second, first) = (jobs.pop().unwrap(), jobs.pop().unwrap());
    let (one, other) = both(&first, &second, 0).await;
    assert_eq!(one.unwrap(), other.unwrap());
    let discard = async |job: &Job| {
        let attempt = job.attempt(1).unwrap();
        attempt.push(synthetic::gradients(&spec.manifest, job.rank(), 7)).await.unwrap();
        attempt.discard().await.unwrap();
    };
    proxy.cut();
    tokio::join!(discard(&first), discard(&second));
    // It is not connected yet, or is connecting.
    proxy.cut();
    second.leave().await.unwrap();
    let second = connect(cluster.address()).await.join("away", 1).await.unwrap();
    let (one, other) = both(&first, &second, 1).await;
    assert_eq!(one.unwrap(), other.unwrap());
    let calm = Training { steps: 2, ..Training::new(self::spec("calm", 2)) };
    let expected = calm.run(cluster.address()).await.unwrap().hash;
    assert_eq!(first.state_hash(2).await.unwrap(), expected);
}
