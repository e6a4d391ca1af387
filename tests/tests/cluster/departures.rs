//! Ranks that leave, join late, or take over a rank.
//!
//! promise: no-silent-hang

use std::sync::atomic::{AtomicU64, Ordering};

use zeroshard_client::{Error, Job};
use zeroshard_model::{Departure, JobSpec};
use zeroshard_tests::{Cluster, FaultProxy, Training, synthetic, training};

use crate::{connect, job, sgd, start, until, until_calls_wait};

fn spec(name: &str, world: u32) -> JobSpec {
    job(name, world, sgd(1.0), synthetic::small())
}

#[tokio::test]
async fn a_commit_after_a_rank_has_left_fails_at_once_and_succeeds_with_the_next_worker() {
    let cluster = Cluster::start(1);
    let mut jobs = start(cluster.address(), &spec("left", 2)).await;
    let (second, first) = (jobs.pop().unwrap(), jobs.pop().unwrap());
    let epoch = first.epoch();
    second.leave().await.unwrap();
    until("rank 0 knows", || first.epoch() > epoch).await;
    let left = training::step(&first, 0).await;
    assert!(matches!(left, Err(Error::RankLeft { rank: 1, step: 0, .. })), "{left:?}");
    let second = connect(cluster.address()).await.join("left", 1).await.unwrap();
    let (one, other) = tokio::join!(training::step(&first, 0), training::step(&second, 0));
    assert_eq!(one.unwrap(), other.unwrap());
}

#[tokio::test]
async fn with_departure_absent_a_job_continues_without_a_done_rank() {
    let cluster = Cluster::start(2);
    let spec = JobSpec { departure: Departure::Absent, ..spec("uneven", 2) };
    let mut jobs = start(cluster.address(), &spec).await;
    let (second, first) = (jobs.pop().unwrap(), jobs.pop().unwrap());
    let (one, other) = tokio::join!(training::step(&first, 0), training::step(&second, 0));
    assert_eq!(one.unwrap(), other.unwrap());
    let epoch = first.epoch();
    let (report, left) = tokio::join!(training::step(&first, 1), second.leave_done());
    left.unwrap();
    let reports = [report.unwrap(), training::step(&first, 2).await.unwrap()];
    for report in reports {
        assert!(report.absent.iter().all(|absent| absent.rank == 1 && !absent.everywhere));
        assert_eq!(report.absent.len(), 2);
    }
    assert_eq!(first.epoch(), epoch);
    // The result is the same as if rank 1 had sent zeros.
    let parameters = training::pull(&first, 3).await.unwrap();
    let numel = parameters[0].len();
    let mut expected = synthetic::values(1 << 40, numel);
    for step in 0..3 {
        let gradient = |rank: u64| synthetic::values((rank << 48) | ((step + 1) << 20), numel);
        let second = if step == 0 { gradient(1) } else { vec![0.0; numel] };
        for ((value, a), b) in expected.iter_mut().zip(gradient(0)).zip(second) {
            *value -= (a + b) * 0.5;
        }
    }
    assert_eq!(parameters[0], expected);
}

#[tokio::test]
async fn ranks_rest_until_all_do_and_then_train_together_again() {
    let cluster = Cluster::start(2);
    let mut jobs = start(cluster.address(), &spec("resting", 2)).await;
    let (second, first) = (jobs.pop().unwrap(), jobs.pop().unwrap());
    let (one, other) = tokio::join!(training::step(&first, 0), training::step(&second, 0));
    assert_eq!(one.unwrap(), other.unwrap());
    let attempt = second.attempt(1).unwrap();
    let (rested, ()) = tokio::join!(attempt.rest(false), async {
        for step in 1..3 {
            assert_eq!(training::step(&first, step).await.unwrap().resting, [1]);
        }
        let rested = first.attempt(3).unwrap().rest(false).await.unwrap();
        assert_eq!((rested.step, rested.last), (3, 0));
    });
    assert_eq!(rested.unwrap().step, 3);
    let (one, other) = tokio::join!(training::step(&first, 3), training::step(&second, 3));
    let report = one.unwrap();
    assert!(report.absent.is_empty() && report.resting.is_empty());
    assert_eq!(report, other.unwrap());
    // The result is the same as if rank 1 had sent zeros in steps 1 and 2.
    let parameters = training::pull(&first, 4).await.unwrap();
    let numel = parameters[0].len();
    let mut expected = synthetic::values(1 << 40, numel);
    for step in 0..4 {
        let gradient = |rank: u64| synthetic::values((rank << 48) | ((step + 1) << 20), numel);
        let second = if step == 0 || step == 3 { gradient(1) } else { vec![0.0; numel] };
        for ((value, a), b) in expected.iter_mut().zip(gradient(0)).zip(second) {
            *value -= (a + b) * 0.5;
        }
    }
    assert_eq!(parameters[0], expected);
}

#[tokio::test]
async fn a_resting_rank_is_told_at_once_that_another_was_lost_or_has_left() {
    let cluster = Cluster::start(1);
    for lost in [false, true] {
        let name = if lost { "lost" } else { "gone" };
        let mut jobs = start(cluster.address(), &spec(name, 2)).await;
        let (second, first) = (jobs.pop().unwrap(), jobs.pop().unwrap());
        let attempt = second.attempt(0).unwrap();
        let (rested, ()) = tokio::join!(attempt.rest(false), async {
            until_calls_wait(&cluster.coordinator, "CoordinatorService/Rest", 1).await;
            // The step in which the rest began is decided.
            for step in 0..2 {
                training::step(&first, step).await.unwrap();
            }
            if lost { drop(first) } else { first.leave().await.unwrap() }
        });
        match rested {
            Err(Error::RankLeft { rank: 0, .. }) if !lost => {}
            Err(Error::StepAborted { cause, .. }) if lost => assert!(cause.contains("rank 0")),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_replacement_waits_for_the_end_of_an_open_lease() {
    let cluster = Cluster::start(1);
    let first = start(cluster.address(), &spec("replaced", 1)).await.remove(0);
    let client = connect(cluster.address()).await;
    let (second, ()) = tokio::join!(client.join("replaced", 0), async {
        until_calls_wait(&cluster.coordinator, "CoordinatorService/Join", 2).await;
        drop(first);
    });
    let second = second.unwrap();
    assert_eq!(second.version(), Some(0));
    assert!(training::step(&second, 0).await.unwrap().applied);
}

#[tokio::test]
async fn an_early_rank_waits_for_version_0() {
    let cluster = Cluster::start(2);
    let spec = spec("early", 2);
    let calm =
        Training { steps: 1, ..Training::new(JobSpec { name: "calm".to_owned(), ..spec.clone() }) };
    let expected = calm.run(cluster.address()).await.unwrap().hash;
    let client = connect(cluster.address()).await;
    client.create_job(&spec).await.unwrap();
    let early = client.join("early", 1).await.unwrap();
    let late = async {
        let late = client.join("early", 0).await.unwrap();
        until_calls_wait(&cluster.shards[0], "DataService/Push", 1).await;
        late.initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
        training::step(&late, 0).await
    };
    let (one, other) = tokio::join!(training::step(&early, 0), late);
    assert_eq!(one.unwrap(), other.unwrap());
    assert_eq!(early.state_hash(1).await.unwrap(), expected);
}

#[tokio::test]
async fn ranks_whose_leases_ended_with_their_connections_join_again_with_the_same_bits() {
    const STEPS: u64 = 40;
    let cluster = Cluster::start(2);
    let calm = Training { steps: STEPS, ..Training::new(spec("calm", 2)) };
    let expected = calm.run(cluster.address()).await.unwrap().hash;

    let proxy = FaultProxy::start().await.unwrap();
    proxy.forward_to(cluster.address());
    let jobs = start(proxy.address(), &spec("cut", 2)).await;
    let (leases, epoch) = ([jobs[0].lease(), jobs[1].lease()], jobs[0].epoch());
    let done = AtomicU64::new(0);
    let train = async |job: &Job| {
        for step in 0..STEPS {
            loop {
                match training::step(job, step).await {
                    Ok(_) => break,
                    // Either the coordinator had decided the step before, and the rank gets its
                    // report, or no rank does.
                    Err(Error::StepAborted { .. }) => {}
                    Err(error) => panic!("rank {} at step {step}: {error}", job.rank()),
                }
            }
            done.fetch_max(step, Ordering::Relaxed);
        }
    };
    let cuts = async {
        for cut in 1..8 {
            until("the next cut is due", || done.load(Ordering::Relaxed) >= cut * 4).await;
            // Later and later in a step, up to the report of its decision.
            proxy.cut_after(150 * cut);
        }
    };
    tokio::join!(train(&jobs[0]), train(&jobs[1]), cuts);
    assert_eq!(jobs[0].state_hash(STEPS).await.unwrap(), expected);
    assert!(jobs[0].epoch() > epoch);
    assert!(jobs.iter().zip(leases).all(|(job, lease)| job.lease() != lease));
}

#[tokio::test]
async fn a_rank_that_another_worker_has_taken_does_not_come_back() {
    let cluster = Cluster::start(1);
    let proxy = FaultProxy::start().await.unwrap();
    proxy.forward_to(cluster.address());
    let spec = spec("taken", 1);
    connect(cluster.address()).await.create_job(&spec).await.unwrap();
    let first = connect(proxy.address()).await.join("taken", 0).await.unwrap();
    first.initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    // The second worker waits for the rank, and gets it when the connection of the first is cut.
    let second = connect(cluster.address()).await;
    let cut = async {
        until_calls_wait(&cluster.coordinator, "CoordinatorService/Join", 2).await;
        proxy.cut();
    };
    let (second, ()) = tokio::join!(second.join("taken", 0), cut);
    let second = second.unwrap();
    training::step(&second, 0).await.unwrap();
    let lost = training::step(&first, 0).await;
    assert!(matches!(lost, Err(Error::LeaseLost { rank: 0, .. })), "{lost:?}");
    training::step(&second, 1).await.unwrap();
}
