//! The norm before the decision, steps that are thrown away, tensors that are not clipped.

use futures_util::future::join_all;
use zeroshard_client::{Cluster as Client, Commit, Error, Gradient, Job, StepReport};
use zeroshard_proto::TensorSpec;
use zeroshard_tests::{Cluster, synthetic, training};

use crate::{adamw, connect, hasty, job, sgd, start, until};

async fn push_all(jobs: &[Job], step: u64) {
    for job in jobs {
        job.push(step, synthetic::gradients(&job.spec().manifest, job.rank(), step)).await.unwrap();
    }
}

async fn commit_all(jobs: &[Job], commit: Commit) -> StepReport {
    join_all(jobs.iter().map(|job| job.commit(commit.clone()))).await.swap_remove(0).unwrap()
}

#[tokio::test]
async fn the_norm_comes_before_the_decision_and_is_the_decisions() {
    let cluster = Cluster::start(3);
    let spec = job("norm", 2, adamw(), synthetic::kinds_and_large(&adamw()));
    let jobs = start(cluster.address(), &spec).await;
    // Asked before anything has come, by both.
    let asked = join_all(jobs.iter().map(|job| job.reduce(0, 8.0)));
    let (reduced, ()) = tokio::join!(asked, push_all(&jobs, 0));
    let reduced: Vec<_> = reduced.into_iter().map(Result::unwrap).collect();
    assert_eq!(reduced[0], reduced[1]);
    let commit = Commit { loss_scale: 8.0, max_norm: Some(reduced[0].gradient_norm / 2.0), ..Commit::new(0) };
    let report = commit_all(&jobs, commit).await;
    assert_eq!(report.gradient_norm.to_bits(), reduced[0].gradient_norm.to_bits());
    assert_eq!((report.clip_coefficient, reduced[0].overflow), (0.5, None));
    assert_eq!(jobs[1].reduce(0, 8.0).await.unwrap(), reduced[0], "also when it is over");
    assert!(matches!(jobs[1].reduce(5, 1.0).await, Err(Error::StepMismatch { .. })));
    assert!(matches!(jobs[1].reduce(1, -1.0).await, Err(Error::Invalid { .. })));
}

#[tokio::test]
async fn who_waits_for_the_norm_hears_of_a_lost_rank_and_of_who_is_late() {
    let cluster = Cluster::start(1);
    let spec = job("late", 2, adamw(), synthetic::small());
    let mut jobs = start(cluster.address(), &spec).await;
    jobs[0].push(0, synthetic::gradients(&spec.manifest, 0, 0)).await.unwrap();
    let second = jobs.pop().unwrap();
    let open = "zeroshard_requests_in_flight{method=\"/zeroshard.v1.Coordinator/Reduce\"} 1\n";
    let lost = async {
        until("it waits", || cluster.coordinator.get("/metrics").contains(open)).await;
        drop(second);
    };
    let (reduced, ()) = tokio::join!(jobs[0].reduce(0, 1.0), lost);
    assert!(matches!(reduced, Err(Error::StepAborted { step: 0, .. })), "{reduced:?}");

    let spec = job("hasty", 1, adamw(), synthetic::small());
    let first = start(cluster.address(), &spec).await.remove(0);
    first.leave().await.unwrap();
    let first = Client::connect(cluster.address(), hasty()).await.unwrap().join("hasty", 0).await.unwrap();
    let Err(Error::Timeout { waiting_for, .. }) = first.reduce(0, 1.0).await else { panic!("timeout") };
    assert!(waiting_for.contains("gradients of step 0 of job \"hasty\""), "{waiting_for}");
}

#[tokio::test]
async fn a_discarded_step_moves_the_version_and_nothing_else() {
    let cluster = Cluster::start(2);
    let spec = job("discarded", 2, adamw(), synthetic::kinds(&adamw()));
    let jobs = start(cluster.address(), &spec).await;
    let before = training::pull(&jobs[0], 0).await.unwrap();
    push_all(&jobs, 0).await;
    let report = commit_all(&jobs, Commit { discard: true, ..Commit::new(0) }).await;
    assert_eq!((report.version, report.applied, report.overflow), (1, false, None));
    assert!(report.gradient_norm > 0.0);
    assert_eq!(training::pull(&jobs[0], 1).await.unwrap(), before);
    assert_eq!(jobs[0].applied_steps(1).await.unwrap(), [0; 9]);
    // With nothing pushed but absences.
    for job in &jobs {
        job.push_absent(1, &[0, 1, 2, 5, 7, 8]).await.unwrap();
    }
    assert!(!commit_all(&jobs, Commit { discard: true, ..Commit::new(1) }).await.applied);
    // And then goes on as if they had not been.
    let fresh = start(cluster.address(), &job("fresh", 2, adamw(), synthetic::kinds(&adamw()))).await;
    for (jobs, step) in [(&jobs, 2), (&fresh, 0)] {
        for job in jobs {
            job.push(step, synthetic::gradients(&spec.manifest, job.rank(), 0)).await.unwrap();
        }
        assert!(commit_all(jobs, Commit::new(step)).await.applied);
    }
    assert_eq!(training::pull(&jobs[0], 3).await.unwrap(), training::pull(&fresh[0], 1).await.unwrap());
}

#[tokio::test]
async fn ranks_that_disagree_about_discarding_are_told() {
    let cluster = Cluster::start(1);
    let jobs = start(cluster.address(), &job("disagree", 2, adamw(), synthetic::small())).await;
    push_all(&jobs, 0).await;
    let first = jobs[0].commit(Commit::new(0));
    let second = async {
        crate::until_commits_wait(&cluster, 1).await;
        let other = jobs[1].commit(Commit { discard: true, ..Commit::new(0) }).await;
        assert!(matches!(&other, Err(Error::Disagreement { what, .. }) if what == "discard"), "{other:?}");
        jobs[1].commit(Commit::new(0)).await
    };
    let (first, second) = tokio::join!(first, second);
    assert_eq!(first.unwrap(), second.unwrap());
}

#[tokio::test]
async fn what_is_not_clipped_neither_counts_nor_shrinks() {
    let cluster = Cluster::start(2);
    let tensors = vec![
        TensorSpec::new("clipped", [4]),
        TensorSpec { no_clip: true, ..TensorSpec::new("unclipped", [4]) },
    ];
    let spec = job("partly", 1, sgd(1.0), tensors);
    let client = connect(cluster.address()).await;
    client.create_job(&spec).await.unwrap();
    let job = client.join("partly", 0).await.unwrap();
    let all =
        |value: f32| (0..2).map(move |tensor| Gradient { tensor, data: vec![value; 4].into() }).collect();
    job.initialise(all(0.0)).await.unwrap();
    job.push(0, all(-8.0)).await.unwrap();
    let commit = Commit { loss_scale: 2.0, max_norm: Some(2.0), ..Commit::new(0) };
    let report = job.commit(commit).await.unwrap();
    assert_eq!((report.gradient_norm, report.clip_coefficient), (8.0, 0.25));
    assert_eq!(training::pull(&job, 1).await.unwrap(), [[1.0; 4], [4.0; 4]]);
}
