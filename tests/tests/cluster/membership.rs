//! Ranks: taken, left in order, joined again.

use zeroshard_client::{Commit, Error};
use zeroshard_proto::pb;
use zeroshard_tests::{Cluster, Training, synthetic, training};

use crate::{adamw, connect, job, sgd, start};

#[tokio::test]
async fn a_rank_has_one_worker_at_a_time() {
    let cluster = Cluster::start(1);
    let spec = job("taken", 1, sgd(1.0), synthetic::small());
    let first = start(cluster.address(), &spec).await.remove(0);
    match connect(cluster.address()).await.join("taken", 0).await {
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
async fn who_leaves_in_order_disturbs_nobody() {
    let cluster = Cluster::start(2);
    let spec = |name| job(name, 2, adamw(), synthetic::kinds(&adamw()));
    let expected = Training { steps: 1, ..Training::new(spec("calm")) };
    let expected = expected.run(cluster.address()).await.unwrap().hash;
    let mut jobs = start(cluster.address(), &spec("leave")).await;
    let (second, first) = (jobs.pop().unwrap(), jobs.pop().unwrap());
    let epoch = first.epoch();
    first.attempt(0).unwrap().push(synthetic::gradients(&first.spec().manifest, 0, 0)).await.unwrap();
    let replaced = async {
        second.leave().await.unwrap();
        let second = connect(cluster.address()).await.join("leave", 1).await.unwrap();
        assert_eq!(second.epoch(), epoch);
        let report = training::step(&second, 0).await.unwrap();
        // Who is dropped without leaving is lost, and that is a new epoch.
        (report, second)
    };
    // Rank 0's commit is open all the time.
    let (report, (other, _second)) = tokio::join!(training::commit(&first, 0, Commit::default()), replaced);
    assert_eq!(report.unwrap(), other);
    assert_eq!(first.epoch(), epoch);
    assert_eq!(first.state_hash(1).await.unwrap(), expected);
}

#[tokio::test]
async fn what_is_said_with_a_lease_that_has_ended_is_refused() {
    let cluster = Cluster::start(1);
    let spec = job("lease", 1, sgd(1.0), synthetic::small());
    let client = connect(cluster.address()).await;
    client.create_job(&spec).await.unwrap();
    let first = client.join("lease", 0).await.unwrap();
    first.initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    client.delete_job("lease").await.unwrap();
    // Deleted under it: every call ends, with what happened.
    let step = training::step(&first, 0).await;
    assert!(matches!(step, Err(Error::JobFailed { .. } | Error::UnknownJob { .. })), "{step:?}");
    client.create_job(&spec).await.unwrap();
    assert_eq!(client.describe_job("lease").await.unwrap().version, None);
}

#[tokio::test]
async fn several_jobs_run_side_by_side_and_do_not_touch_each_other() {
    let cluster = Cluster::start(2);
    let training = |name: &str| Training::new(job(name, 2, adamw(), synthetic::kinds(&adamw())));
    let alone = training("alone").run(cluster.address()).await.unwrap();
    let names = ["a", "b", "c", "d"];
    let address = cluster.address();
    let runs = names.map(async |name| training(name).run(address).await);
    for trained in futures_util::future::join_all(runs).await {
        assert!(trained.unwrap() == alone);
    }
    let status: pb::StatusResponse = connect(cluster.address()).await.status().await.unwrap();
    assert_eq!(status.jobs.len(), 5);
    assert!(status.jobs.iter().all(|job| job.version == Some(3) && job.joined.is_empty()));
}
