//! The norm before the decision, and tensors that are not clipped.

use futures_util::future::join_all;
use zeroshard_client::{
    Cluster as Client, Commit, Error, Job, StateSelector, StepReport, Target, TensorData, TensorId,
};
use zeroshard_model::TensorSpec;
use zeroshard_tests::{Cluster, synthetic, training};

use crate::{adamw, connect, hasty, job, sgd, start, until};

async fn push_all(jobs: &[Job], step: u64) {
    for job in jobs {
        job.attempt(step)
            .unwrap()
            .push(synthetic::gradients(&job.spec().manifest, job.rank(), step))
            .await
            .unwrap();
    }
}

async fn commit_all(jobs: &[Job], step: u64, commit: Commit) -> StepReport {
    let commits = jobs.iter().map(|job| training::commit(job, step, commit.clone()));
    join_all(commits).await.swap_remove(0).unwrap()
}

#[tokio::test]
async fn the_norm_before_the_decision_equals_that_of_the_decision() {
    let cluster = Cluster::start(3);
    let spec = job("norm", 2, adamw(), synthetic::kinds_and_large(&adamw()));
    let jobs = start(cluster.address(), &spec).await;
    // Both ranks request the norm before any gradient has arrived.
    let asked = join_all(jobs.iter().map(async |job| job.attempt(0).unwrap().reduce(8.0).await));
    let (reduced, ()) = tokio::join!(asked, push_all(&jobs, 0));
    let reduced: Vec<_> = reduced.into_iter().map(Result::unwrap).collect();
    assert_eq!(reduced[0], reduced[1]);
    let commit = Commit::default().loss_scale(8.0).max_norm(reduced[0].gradient_norm / 2.0);
    let report = commit_all(&jobs, 0, commit).await;
    assert_eq!(report.gradient_norm.to_bits(), reduced[0].gradient_norm.to_bits());
    assert_eq!((report.clip_coefficient, reduced[0].overflow), (0.5, None));
    assert_eq!(
        jobs[1].attempt(0).unwrap().reduce(8.0).await.unwrap(),
        reduced[0],
        "also when it is over"
    );
    assert!(matches!(
        jobs[1].attempt(5).unwrap().reduce(1.0).await,
        Err(Error::StepMismatch { .. })
    ));
    assert!(matches!(jobs[1].attempt(1).unwrap().reduce(-1.0).await, Err(Error::Invalid { .. })));
}

// promise: no-silent-hang
#[tokio::test]
async fn a_wait_for_the_norm_reports_a_lost_rank_and_late_ranks() {
    let cluster = Cluster::start(1);
    let spec = job("late", 2, adamw(), synthetic::small());
    let mut jobs = start(cluster.address(), &spec).await;
    let attempt = jobs[0].attempt(0).unwrap();
    attempt.push(synthetic::gradients(&spec.manifest, 0, 0)).await.unwrap();
    let second = jobs.pop().unwrap();
    let open =
        "zeroshard_requests_in_flight{method=\"/zeroshard.v1.CoordinatorService/Reduce\"} 1\n";
    let lost = async {
        until("it waits", || cluster.coordinator.get("/metrics").contains(open)).await;
        drop(second);
    };
    let (reduced, ()) = tokio::join!(attempt.reduce(1.0), lost);
    assert!(matches!(reduced, Err(Error::StepAborted { step: 0, .. })), "{reduced:?}");

    let spec = job("hasty", 1, adamw(), synthetic::small());
    let first = start(cluster.address(), &spec).await.remove(0);
    first.leave().await.unwrap();
    let first =
        Client::connect(cluster.address(), hasty()).await.unwrap().join("hasty", 0).await.unwrap();
    let Err(Error::Timeout { waiting_for, .. }) = first.attempt(0).unwrap().reduce(1.0).await
    else {
        panic!("timeout")
    };
    assert!(waiting_for.contains("gradients of step 0 of job \"hasty\""), "{waiting_for}");
}

#[tokio::test]
async fn tensors_that_are_not_clipped_do_not_count_in_the_norm() {
    let cluster = Cluster::start(2);
    let tensors = vec![
        TensorSpec::new("clipped", [4]),
        TensorSpec { no_clip: true, ..TensorSpec::new("unclipped", [4]) },
    ];
    let spec = job("partly", 1, sgd(1.0), tensors);
    let client = connect(cluster.address()).await;
    client.create_job(&spec).await.unwrap();
    let job = client.join("partly", 0).await.unwrap();
    let all = |value: f32| {
        (0..2).map(move |tensor| TensorData::new(TensorId::new(tensor), vec![value; 4])).collect()
    };
    job.initialise(all(0.0)).await.unwrap();
    job.attempt(0).unwrap().push(all(-8.0)).await.unwrap();
    let commit = Commit::default().loss_scale(2.0).max_norm(2.0);
    let report = training::commit(&job, 0, commit).await.unwrap();
    assert_eq!((report.gradient_norm, report.clip_coefficient), (8.0, 0.25));
    assert_eq!(training::pull(&job, 1).await.unwrap(), [[1.0; 4], [4.0; 4]]);
}

#[tokio::test]
async fn the_gradient_of_the_open_step_can_be_read_and_has_a_factor_for_each_tensor() {
    let cluster = Cluster::start(3);
    let spec = job("factors", 2, sgd(1.0), synthetic::small());
    let jobs = start(cluster.address(), &spec).await;
    let before = training::pull(&jobs[0], 0).await.unwrap();
    let mut sums = [vec![0.0; 1000], vec![0.0; 3]];
    let targets = sums.iter_mut().enumerate();
    let targets = targets.map(|(tensor, sum)| Target::new(TensorId::new(tensor), sum)).collect();
    // The sum is requested before any gradient has arrived, and by one rank alone.
    let read = jobs[0].attempt(0).unwrap();
    let read = read.pull_gradient_sum(targets);
    let push = async {
        for (job, value) in jobs.iter().zip([1.0, 3.0]) {
            let data = [1000, 3].map(|numel| vec![value; numel]).into_iter().enumerate();
            let data = data.map(|(tensor, data)| TensorData::new(TensorId::new(tensor), data));
            job.attempt(0).unwrap().push(data.collect()).await.unwrap();
        }
    };
    let (read, ()) = tokio::join!(read, push);
    read.unwrap();
    assert!(sums.iter().flatten().all(|&sum| sum == 4.0));
    let reduced = jobs[1].attempt(0).unwrap().reduce(1.0).await.unwrap();
    assert_eq!(reduced.tensor_norms, [2.0 * 1000f64.sqrt(), 2.0 * 3f64.sqrt()]);
    assert!(reduced.absent.is_empty());

    let commit = Commit::default().gradient_factors(vec![0.5, -2.0]);
    let report = commit_all(&jobs, 0, commit).await;
    assert_eq!(report.gradient_norm, reduced.gradient_norm);
    let after = training::pull(&jobs[1], 1).await.unwrap();
    for (tensor, step) in [1.0, -4.0].into_iter().enumerate() {
        let expected = before[tensor].iter().map(|value| value - step);
        assert!(expected.eq(after[tensor].iter().copied()), "tensor {tensor}");
    }
    let mut sum = [0.0; 3];
    let gone = Target::new(TensorId::new(1), &mut sum[..]);
    let error = jobs[0].pull_part(0, StateSelector::GradientSum, vec![gone]).await;
    assert!(matches!(error, Err(Error::VersionGone { version: 0, .. })), "{error:?}");
}
