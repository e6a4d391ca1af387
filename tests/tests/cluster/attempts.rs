//! Gradients of one attempt never count in another, and a step that was decided is told as decided.

use futures_util::future::join_all;
use zeroshard_client::{Commit, Error};
use zeroshard_tests::{Cluster, Training, synthetic, training};

use crate::{adamw, connect, job, start, until};

#[tokio::test]
async fn what_is_left_of_a_backward_pass_is_refused_after_its_epoch() {
    let cluster = Cluster::start(2);
    let spec = |name| job(name, 2, adamw(), synthetic::kinds(&adamw()));
    let calm = Training { steps: 1, ..Training::new(spec("calm")) };
    let expected = calm.run(cluster.address()).await.unwrap().hash;
    let mut jobs = start(cluster.address(), &spec("buckets")).await;
    let (second, first) = (jobs.pop().unwrap(), jobs.pop().unwrap());
    let mut gradients = synthetic::gradients(&first.spec().manifest, 0, 7);
    let rest = gradients.split_off(2);
    let attempt = first.attempt(0).unwrap();
    attempt.push(gradients.clone()).await.unwrap();
    assert_eq!(first.attempt(0).unwrap().epoch(), attempt.epoch());

    drop(second);
    until("rank 0 knows", || first.epoch() > attempt.epoch()).await;
    let second = connect(cluster.address()).await.join("buckets", 1).await.unwrap();
    for bucket in [rest.clone(), rest] {
        match attempt.push(bucket).await {
            Err(Error::StepAborted { step: 0, epoch, .. }) => assert!(epoch > attempt.epoch()),
            other => panic!("{other:?}"),
        }
        assert!(first.attempt(0).unwrap().epoch() > attempt.epoch());
    }
    let late = attempt.push_absent(&[0]).await;
    assert!(matches!(late, Err(Error::StepAborted { .. })), "{late:?}");
    let late = attempt.discard().await;
    assert!(matches!(late, Err(Error::StepAborted { .. })), "{late:?}");
    for report in join_all([training::step(&first, 0), training::step(&second, 0)]).await {
        assert!(report.unwrap().applied);
    }
    assert_eq!(first.state_hash(1).await.unwrap(), expected);
}

#[tokio::test]
async fn a_step_that_was_decided_is_told_as_decided_also_after_its_epoch() {
    let cluster = Cluster::start(2);
    let mut jobs = start(cluster.address(), &job("decided", 2, adamw(), synthetic::small())).await;
    let (second, first) = (jobs.pop().unwrap(), jobs.pop().unwrap());
    let attempt = first.attempt(0).unwrap();
    attempt.push(synthetic::gradients(&first.spec().manifest, 0, 0)).await.unwrap();
    let (report, other) = tokio::join!(attempt.commit(Commit::default()), training::step(&second, 0));
    assert_eq!(report, other);
    drop(second);
    until("rank 0 knows", || first.epoch() > attempt.epoch()).await;
    // As after a commit whose answer was lost.
    assert_eq!(attempt.commit(Commit::default()).await, report);
    assert_eq!(training::commit(&first, 0, Commit::default()).await, report);
    for late in
        [attempt.push(synthetic::gradients(&first.spec().manifest, 0, 0)).await, attempt.discard().await]
    {
        assert!(matches!(late, Err(Error::StepMismatch { step: 0, current: 1, .. })), "{late:?}");
    }
}
