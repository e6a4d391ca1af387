//! Epochs change while ranks push to a job with very many slices.

use std::time::Duration;

use zeroshard_client::{Cluster as Client, Commit, Error, Job, Options, StepReport, TensorId};
use zeroshard_model::{JobSpec, Optimizer, TensorSpec};
use zeroshard_tests::{Cluster, Training, synthetic};

const SLICES: usize = 150_000;
const EPOCHS: u64 = 300;

fn spec(name: &str) -> JobSpec {
    let tensors = (0..SLICES).map(|index| TensorSpec::new(format!("t{index}"), [4]));
    let adamw: Optimizer = "adamw".parse().unwrap();
    synthetic::job(name, 3, adamw, tensors.collect()).unwrap()
}

fn options() -> Options {
    Options::default().timeout(Duration::from_secs(300))
}

async fn connect(address: &str) -> Client {
    Client::connect(address, options()).await.unwrap()
}

/// Runs step 0 until it is decided, with the same data in every attempt. Also returns the number of
/// aborts.
async fn step(job: &Job) -> (StepReport, u64) {
    let mut aborted = 0;
    loop {
        let attempt = job.attempt(0).unwrap();
        let tried = async {
            attempt.push(synthetic::gradients(&job.spec().manifest, job.rank(), 0)).await?;
            attempt.commit(Commit::default()).await
        };
        match tried.await {
            Ok(report) => return (report, aborted),
            Err(Error::StepAborted { .. } | Error::RankLeft { .. }) => aborted += 1,
            Err(error) => panic!("rank {}: {error}", job.rank()),
        }
    }
}

/// Every gradient that was acknowledged in the last epoch counts. Otherwise the step would never be
/// complete, or the hash of the state would differ.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_hundred_epoch_changes_erase_no_acknowledged_gradient() {
    let cluster = Cluster::start(2);
    let calm = Training { steps: 1, options: options(), ..Training::new(spec("calm")) };
    let expected = calm.run(cluster.address()).await.unwrap().hash;

    connect(cluster.address()).await.create_job(&spec("stormy")).await.unwrap();
    let first = connect(cluster.address()).await.join("stormy", 0).await.unwrap();
    let second = connect(cluster.address()).await.join("stormy", 1).await.unwrap();
    first.initialise(synthetic::parameters(&first.spec().manifest)).await.unwrap();
    let storm = async {
        let client = connect(cluster.address()).await;
        let mut third = client.join("stormy", 2).await.unwrap();
        let mut values = [0.0; 4];
        let target = vec![zeroshard_client::Target::new(TensorId::new(0), &mut values[..])];
        third.pull(0, target).await.unwrap();
        // Between two changes, the other ranks push between none and all of their gradients.
        let all = 2 * 4 * 4 * SLICES as u64;
        for epoch in 0..EPOCHS {
            let pushed = cluster.payload()[1] + epoch * 7919 % 97 * all / 90;
            // Two ranks that have pushed all of their gradients wait in their commits.
            let both_wait = || {
                let commits = "in_flight{method=\"/zeroshard.v1.CoordinatorService/Commit\"} 2\n";
                cluster.coordinator.get("/metrics").contains(commits)
            };
            while cluster.payload()[1] < pushed && !both_wait() {
                tokio::task::yield_now().await;
            }
            drop(third);
            third = client.join("stormy", 2).await.unwrap();
        }
        let report = step(&third).await;
        (report, third)
    };
    let ((one, aborted), (two, _), ((three, _), third)) =
        tokio::join!(step(&first), step(&second), storm);
    println!("{EPOCHS} epoch changes; rank 0 ran the step {} times", aborted + 1);
    assert!(aborted > 0);
    assert_eq!((&one, &two), (&two, &three));
    assert!(first.epoch() > EPOCHS);
    assert_eq!(third.state_hash(1).await.unwrap(), expected);
}
