//! Gradients of one lease, epoch and attempt never count for another.
//!
//! promise: atomic-steps, exactly-once

use std::time::Duration;

use zeroshard_client::{Commit, Error, Job, TensorData, TensorId};
use zeroshard_model::{JobSpec, TensorSpec};
use zeroshard_proto::pb;
use zeroshard_tests::{Cluster, Training, stock, synthetic, training};

use crate::{adamw, connect, job, sgd, start, until};

fn spec(name: &str) -> JobSpec {
    job(name, 2, adamw(), synthetic::kinds(&adamw()))
}

/// The hash after one step without disturbances.
async fn undisturbed(address: &str) -> String {
    let calm = Training { steps: 1, ..Training::new(spec("undisturbed")) };
    calm.run(address).await.unwrap().hash
}

/// Pushes numbers other than the gradients of this step.
async fn push_other_gradients(job: &Job, step: u64) {
    let other = synthetic::gradients(&job.spec().manifest, 7, 1000 + step);
    job.attempt(step).unwrap().push(other).await.unwrap();
}

async fn both_step(first: &Job, second: &Job, step: u64) {
    let (one, other) = tokio::join!(training::step(first, step), training::step(second, step));
    assert_eq!(one.unwrap(), other.unwrap());
}

#[tokio::test]
async fn a_rank_that_leaves_during_a_push_and_joins_again_pushes_everything() {
    let cluster = Cluster::start(2);
    let expected = undisturbed(cluster.address()).await;
    let mut jobs = start(cluster.address(), &spec("half")).await;
    let (second, first) = (jobs.pop().unwrap(), jobs.pop().unwrap());
    let mut half = synthetic::gradients(&second.spec().manifest, 7, 1000);
    half.truncate(2);
    second.attempt(0).unwrap().push(half).await.unwrap();
    second.leave().await.unwrap();
    let second = connect(cluster.address()).await.join("half", 1).await.unwrap();
    until("rank 0 knows", || first.epoch() == second.epoch()).await;
    both_step(&first, &second, 0).await;
    assert_eq!(first.state_hash(1).await.unwrap(), expected);
}

#[tokio::test]
async fn a_push_needs_the_lease_of_its_rank() {
    let cluster = Cluster::start(1);
    let jobs = start(cluster.address(), &spec("leases")).await;
    let good = stock::begin(&jobs[0], Some(0));
    let push = async |begin: pb::PushBegin| {
        let messages = vec![stock::open(begin), stock::extent(0, 0, &[1.0])];
        stock::push(cluster.shards[0].address(), messages).await
    };
    for lease in [good.lease ^ 1, jobs[1].lease()] {
        let refused = push(pb::PushBegin { lease, ..good.clone() }).await;
        assert!(matches!(refused, Err(Error::LeaseLost { rank: 0, .. })), "{refused:?}");
    }
    for begin in [
        pb::PushBegin { lease: 0, ..good.clone() },
        pb::PushBegin { job_id: 0, ..good.clone() },
        pb::PushBegin { covers: vec![0, 1], ..good.clone() },
    ] {
        assert!(matches!(push(begin).await, Err(Error::Refused { .. })));
    }
    let replaced = push(pb::PushBegin { job_id: good.job_id ^ 1, ..good.clone() }).await;
    assert!(matches!(replaced, Err(Error::JobReplaced { .. })), "{replaced:?}");
    assert_eq!(push(good).await.unwrap().added, 1);
}

#[tokio::test]
async fn an_attempt_that_all_ranks_discard_leaves_no_trace_even_if_it_was_complete() {
    let cluster = Cluster::start(3);
    let expected = undisturbed(cluster.address()).await;
    let jobs = start(cluster.address(), &spec("discarded")).await;
    for round in 0..3 {
        for job in &jobs {
            assert_eq!(job.attempt(0).unwrap().number(), round);
            push_other_gradients(job, 0).await;
        }
        // Every slice has every gradient, as the servers have reported.
        let norm = jobs[0].attempt(0).unwrap().reduce(1.0).await.unwrap().gradient_norm;
        assert!(norm > 0.0);
        let [first, second] = [0, 1].map(|rank: usize| jobs[rank].attempt(0).unwrap());
        let (one, other) = tokio::join!(first.discard(), second.discard());
        one.and(other).unwrap();
        let late = first.push(synthetic::gradients(&jobs[0].spec().manifest, 0, 0)).await;
        assert!(matches!(late, Err(Error::StepAborted { step: 0, .. })), "{late:?}");
    }
    both_step(&jobs[0], &jobs[1], 0).await;
    assert_eq!(jobs[0].state_hash(1).await.unwrap(), expected);
}

#[tokio::test]
async fn a_commit_and_a_discard_of_one_attempt_are_refused_at_once() {
    let cluster = Cluster::start(1);
    let jobs = start(cluster.address(), &spec("torn")).await;
    for job in &jobs {
        push_other_gradients(job, 0).await;
    }
    let [first, second] = [0, 1].map(|rank: usize| jobs[rank].attempt(0).unwrap());
    let (committed, discarded) = tokio::join!(first.commit(Commit::default()), second.discard());
    assert!(matches!(committed, Err(Error::Disagreement { step: 0, .. })), "{committed:?}");
    assert!(matches!(discarded, Err(Error::Disagreement { step: 0, .. })), "{discarded:?}");
}

#[tokio::test]
async fn the_rest_of_an_aborted_attempt_is_refused_and_the_step_can_be_run_again() {
    let cluster = Cluster::start(2);
    let expected = undisturbed(cluster.address()).await;
    let mut jobs = start(cluster.address(), &spec("rest")).await;
    let (second, first) = (jobs.pop().unwrap(), jobs.pop().unwrap());
    let mut gradients = synthetic::gradients(&first.spec().manifest, 7, 1000);
    let rest = gradients.split_off(2);
    let attempt = first.attempt(0).unwrap();
    attempt.push(gradients).await.unwrap();
    let epoch = first.epoch();
    drop(second);
    until("rank 0 knows", || first.epoch() > epoch).await;
    for bucket in rest {
        let refused = attempt.push(vec![bucket]).await;
        assert!(matches!(refused, Err(Error::StepAborted { step: 0, .. })), "{refused:?}");
    }
    let second = connect(cluster.address()).await.join("rest", 1).await.unwrap();
    both_step(&first, &second, 0).await;
    assert_eq!(first.state_hash(1).await.unwrap(), expected);
}

#[tokio::test]
async fn a_decided_step_is_never_reported_as_aborted() {
    let cluster = Cluster::start(1);
    let mut jobs = start(cluster.address(), &spec("decided")).await;
    let (second, first) = (jobs.pop().unwrap(), jobs.pop().unwrap());
    let attempt = first.attempt(0).unwrap();
    both_step(&first, &second, 0).await;
    let epoch = first.epoch();
    drop(second);
    until("rank 0 knows", || first.epoch() > epoch).await;
    // The situation is the same as after a commit whose response was lost.
    assert_eq!(attempt.commit(Commit::default()).await.unwrap().version, 1);
}

// promise: consistent-reads
#[tokio::test]
async fn version_0_is_the_upload_of_one_worker() {
    let cluster = Cluster::start(2);
    let tensors = (0..4).map(|index| TensorSpec::new(format!("t{index}"), [1000]));
    let spec = JobSpec { min_servers: 2, ..job("uploads", 1, sgd(1.0), tensors.collect()) };
    let client = connect(cluster.address()).await;
    client.create_job(&spec).await.unwrap();
    let all = |value: f32| {
        (0..4).map(move |tensor| TensorData::new(TensorId::new(tensor), vec![value; 1000]))
    };
    let first = client.join("uploads", 0).await.unwrap();
    first.initialise(all(1.0).take(3).collect()).await.unwrap();
    // Three slices are complete, and must not be visible.
    let reader = || {
        let mut request = tonic::Request::new(stock::read("uploads", 0, [0]));
        request.set_timeout(Duration::from_secs(1));
        request
    };
    let mut early = Err(Error::Internal { cause: "never asked".to_owned() });
    for shard in &cluster.shards {
        early = stock::pull(shard.address(), reader()).await;
        assert!(matches!(early, Err(Error::Timeout { .. } | Error::NotHere { .. })), "{early:?}");
    }
    drop((first, early));
    let second = client.join("uploads", 0).await.unwrap();
    second.initialise(all(2.0).collect()).await.unwrap();
    let parameters = training::pull(&second, 0).await.unwrap();
    assert!(parameters.iter().flatten().all(|&value| value == 2.0));
}
