//! Ranks are taken, left in order, and joined again.

use zeroshard_client::{Cluster as Client, Commit, Error};
use zeroshard_tests::{Cluster, Training, synthetic, training};

use crate::{adamw, connect, hasty, job, sgd, start, until, until_commits_wait};

#[tokio::test]
async fn a_rank_has_one_worker_at_a_time() {
    let cluster = Cluster::start(1);
    let spec = job("taken", 1, sgd(1.0), synthetic::small());
    let first = start(cluster.address(), &spec).await.remove(0);
    // Another worker waits for the end of the lease, until its deadline.
    match Client::connect(cluster.address(), hasty()).await.unwrap().join("taken", 0).await {
        Err(Error::RankTaken { job, rank: 0 }) => assert_eq!(job, "taken"),
        other => panic!("{other:?}"),
    }
    assert!(training::step(&first, 0).await.unwrap().applied);
    first.leave().await.unwrap();
    let second = connect(cluster.address()).await.join("taken", 0).await.unwrap();
    assert_eq!(second.version(), Some(1));
    assert!(training::step(&second, 1).await.unwrap().applied);
}

#[tokio::test]
async fn a_wait_for_a_leaving_rank_ends_at_once_and_the_next_worker_completes_the_step() {
    let cluster = Cluster::start(2);
    let spec = |name| job(name, 2, adamw(), synthetic::kinds(&adamw()));
    let expected = Training { steps: 1, ..Training::new(spec("calm")) };
    let expected = expected.run(cluster.address()).await.unwrap().hash;
    let mut jobs = start(cluster.address(), &spec("leave")).await;
    let (second, first) = (jobs.pop().unwrap(), jobs.pop().unwrap());
    let attempt = first.attempt(0).unwrap();
    attempt.push(synthetic::gradients(&first.spec().manifest, 0, 0)).await.unwrap();
    let leaves = async {
        until_commits_wait(&cluster, 1).await;
        second.leave().await.unwrap();
    };
    let (left, ()) = tokio::join!(attempt.commit(Commit::default()), leaves);
    assert!(matches!(left, Err(Error::RankLeft { rank: 1, step: 0, .. })), "{left:?}");
    let second = connect(cluster.address()).await.join("leave", 1).await.unwrap();
    // The gradients that were pushed while the other worker had the rank are dropped.
    until("rank 0 knows", || first.epoch() == second.epoch()).await;
    let gone = attempt.push(vec![]).await;
    assert!(matches!(gone, Err(Error::StepAborted { step: 0, .. })), "{gone:?}");
    let (one, other) = tokio::join!(training::step(&first, 0), training::step(&second, 0));
    assert_eq!(one.unwrap(), other.unwrap());
    assert_eq!(first.state_hash(1).await.unwrap(), expected);
}

#[tokio::test]
async fn calls_with_an_ended_lease_are_refused() {
    let cluster = Cluster::start(1);
    let spec = job("lease", 1, sgd(1.0), synthetic::small());
    let client = connect(cluster.address()).await;
    client.create_job(&spec).await.unwrap();
    let first = client.join("lease", 0).await.unwrap();
    first.initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    client.delete_job("lease").await.unwrap();
    // The job is deleted during the calls: every call ends with an error that states the reason.
    let step = training::step(&first, 0).await;
    assert!(matches!(step, Err(Error::JobFailed { .. } | Error::UnknownJob { .. })), "{step:?}");
    client.create_job(&spec).await.unwrap();
    assert_eq!(client.describe_job("lease").await.unwrap().version, None);
}

#[tokio::test]
async fn several_jobs_run_at_the_same_time_without_interference() {
    let cluster = Cluster::start(2);
    let training = |name: &str| Training::new(job(name, 2, adamw(), synthetic::kinds(&adamw())));
    let alone = training("alone").run(cluster.address()).await.unwrap();
    let names = ["a", "b", "c", "d"];
    let address = cluster.address();
    let runs = names.map(async |name| training(name).run(address).await);
    for trained in futures_util::future::join_all(runs).await {
        assert!(trained.unwrap() == alone);
    }
    let status = connect(cluster.address()).await.status().await.unwrap();
    assert_eq!(status.jobs.len(), 5);
    assert!(status.jobs.iter().all(|job| job.version == Some(3) && job.joined.is_empty()));
}
