//! Policies on spikes, and the contributions that servers record.
//!
//! promise: durability

use futures_util::future::join_all;
use zeroshard_client::{Commit, Error, Job, Result, StepReport, TensorData};
use zeroshard_model::{JobSpec, SpikeAction, SpikePolicy};
use zeroshard_tests::{Cluster, synthetic};

use crate::{
    adamw,
    checkpoints::{directory, step_all},
    connect, job,
    restored::{train, train_by},
    rewinds::{begin, hashes, saved_often, zsctl},
    start,
};

/// The rank that sends spikes, and their factor.
const RANK: u32 = 1;
const FACTOR: f32 = 1e4;

fn policy(action: SpikeAction) -> Option<SpikePolicy> {
    Some(SpikePolicy { window: 3, limit: 1, ..SpikePolicy::new(action) })
}

/// Makes a step. The gradients of rank 1 for these batches are too large.
async fn step(job: &Job, step: u64, spikes: &[u64]) -> Result<StepReport> {
    let batch = job.line().batch(step);
    let is_spike = job.rank() == RANK && spikes.contains(&batch);
    let factor = if is_spike { FACTOR } else { 1.0 };
    let gradients = synthetic::scaled_gradients(&job.spec().manifest, job.rank(), batch, factor);
    let gradients = gradients.into_iter().map(|(tensor, values)| TensorData::new(tensor, values));
    let attempt = job.attempt(step)?;
    attempt.push(gradients.collect()).await?;
    attempt.commit(Commit::default()).await
}

#[tokio::test]
async fn a_spike_is_skipped_and_its_rank_and_tensor_are_named() {
    let cluster = Cluster::start(2);
    let tensors = synthetic::kinds_and_large(&adamw());
    let spikes = policy(SpikeAction::Skip);
    let spec = JobSpec { min_servers: 2, spikes, ..job("spiky", 2, adamw(), tensors) };
    let jobs = start(cluster.address(), &spec).await;
    for at in 0..5 {
        step_all(&jobs, at).await;
    }
    let before = jobs[0].state_hash(5).await.unwrap();
    let reports = join_all(jobs.iter().map(|job| step(job, 5, &[5]))).await;
    for report in reports {
        let report = report.unwrap();
        let why = report.spike.expect("a spike");
        assert!(!report.applied && report.overflow.is_none());
        assert!(why.contains("times the median") && why.contains("to which rank 1 con"), "{why}");
    }
    let skipped = jobs[0].state_hash(6).await.unwrap();
    assert_ne!(skipped, before, "the hash contains the version");
    // The servers recorded who sent what.
    let client = connect(cluster.address()).await;
    let found = client.contributions("spiky", Some(5)).await.unwrap();
    assert_eq!(found.arrived.keys().copied().collect::<Vec<_>>(), [0, 1]);
    let manifest = &jobs[0].spec().manifest;
    for rank in [0, 1] {
        let factor = if rank == RANK { FACTOR } else { 1.0 };
        let gradients = synthetic::scaled_gradients(manifest, rank, 5, factor);
        for (tensor, values) in gradients.into_iter().filter(|(_, values)| !values.is_empty()) {
            let name = &manifest.tensors()[tensor.index()].name;
            let norm = values.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>().sqrt();
            let of =
                |one: &&zeroshard_client::Contribution| one.rank == rank && one.tensor == *name;
            let one = found.contributions.iter().find(of).unwrap();
            assert!((one.norm - norm).abs() <= 1e-6 * norm, "{one:?} and {norm}");
        }
    }
    let printed = zsctl(&cluster, &["--json", "steps", "spiky", "--step", "5"]);
    let printed = String::from_utf8(printed.stdout).unwrap();
    assert_eq!(printed.lines().count(), found.contributions.len());
    let early = zsctl(&cluster, &["steps", "spiky", "--step", "4"]);
    assert!(String::from_utf8(early.stdout).unwrap().starts_with("step 4 of job"));
    // Equal gradients have equal hashes, whatever they were sent in.
    step_all(&jobs, 6).await;
    let hashes = |of: &zeroshard_client::StepContributions| {
        of.contributions.iter().map(|one| one.hash).collect::<Vec<_>>()
    };
    let six = client.contributions("spiky", None).await.unwrap();
    assert_eq!(six.step, 6);
    assert_ne!(hashes(&six), hashes(&found));
    // The second spike is over the limit.
    let stopped = join_all(jobs.iter().map(|job| step(job, 7, &[7]))).await;
    let Err(Error::JobFailed { reason, .. }) = &stopped[0] else { panic!("{stopped:?}") };
    assert!(reason.contains("It follows 1 spike within 1000 batches"), "{reason}");
}

/// Makes a step, in which the gradients of rank 1 for these batches are too large.
fn with(spikes: &'static [u64]) -> impl AsyncFn(&Job, u64) -> Result<StepReport> {
    async move |job: &Job, at: u64| step(job, at, spikes).await
}

#[tokio::test]
async fn a_job_that_rewinds_after_a_spike_has_the_state_of_one_without_that_batch() {
    let expected = hashes([0, 1, 2, 3, 4, 5, 7, 8, 9]).await;
    let directory = directory();
    let mut cluster = Cluster::start(3);
    let spikes = policy(SpikeAction::Rewind { steps: 1 });
    let spec = JobSpec { spikes, ..saved_often("spiky", directory.path(), 0) };
    let jobs = start(cluster.address(), &spec).await;
    begin(&jobs, directory.path(), 6).await;
    let trained = join_all(jobs.iter().map(|job| train_by(job, 6..8, with(&[6])))).await;
    for returned in trained {
        assert_eq!(returned.unwrap(), [6], "the newest checkpoint before the spike");
    }
    let line = jobs[0].line();
    assert_eq!((line.number, line.skips()), (1, &[std::ops::Range { start: 6, end: 7 }][..]));
    assert_eq!(jobs[0].state_hash(8).await.unwrap(), expected[8]);
    // The next coordinator judges alike: it knows the median, and the spike before.
    let address = cluster.address().to_owned();
    cluster.coordinator.kill();
    cluster.coordinator = Cluster::coordinator_at(&address);
    assert_eq!(train(&jobs[0], 8, 8).await, [0; 0]);
    let stopped = join_all(jobs.iter().map(|job| train_by(job, 8..9, with(&[9])))).await;
    let Err((_, Error::JobFailed { reason, .. })) = &stopped[0] else { panic!("{stopped:?}") };
    assert!(reason.contains("rank 1") && reason.contains("the limit of the policy"), "{reason}");
}
