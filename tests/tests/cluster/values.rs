//! New values come with the steps: batch-norm statistics, bit for bit, and parameters that programs
//! have written to.
//!
//! promise: exactly-once

use futures_util::future::join_all;
use zeroshard_client::{
    Attempt, Cluster as Client, Commit, Error, Job, Slots, Target, TensorData, TensorId, Values,
};
use zeroshard_model::{DType, JobSpec, TensorSpec};
use zeroshard_tests::{Cluster, stock, training};

use crate::{adamw, connect, job, options, sgd, start, until};

/// The index of the statistics in the job below.
const STATISTICS: usize = 1;

fn spec(name: &str, world: u32) -> JobSpec {
    let statistics = TensorSpec { buffer: true, ..TensorSpec::new("statistics", [70_000]) };
    job(name, world, adamw(), vec![TensorSpec::new("w", [100]), statistics])
}

fn words(seed: u32) -> Vec<u8> {
    // All bit patterns must survive, because counters are not floating-point numbers.
    (0..70_000u32).flat_map(|i| (i ^ seed).wrapping_mul(0x9E37_79B1).to_le_bytes()).collect()
}

fn content(seed: u32) -> Vec<TensorData> {
    vec![TensorData::new(
        TensorId::new(STATISTICS),
        Values::new(words(seed).into(), DType::F32).unwrap(),
    )]
}

async fn pull(job: &Job, version: u64) -> Vec<u8> {
    let mut bytes = vec![0; 4 * 70_000];
    let data = Slots::new(&mut bytes, DType::F32).unwrap();
    job.pull(version, vec![Target::new(TensorId::new(STATISTICS), data)]).await.unwrap();
    bytes
}

async fn step(jobs: &[Job], step: u64) {
    for report in join_all(jobs.iter().map(|job| training::step(job, step))).await {
        assert!(report.unwrap().applied);
    }
}

#[tokio::test]
async fn a_pushed_buffer_is_the_content_of_the_next_version_bit_for_bit_over_any_wire_dtype() {
    let cluster = Cluster::start(2);
    for wire in DType::ALL {
        let spec = spec(&format!("moves-{wire}"), 2);
        let mut jobs = start(cluster.address(), &spec).await;
        for job in jobs.drain(..) {
            job.leave().await.unwrap();
        }
        for rank in 0..2 {
            let client = Client::connect(cluster.address(), options().wire(wire)).await.unwrap();
            jobs.push(client.join(&spec.name, rank).await.unwrap());
        }
        jobs[0].attempt(0).unwrap().push_values(content(1)).await.unwrap();
        jobs[0].attempt(0).unwrap().push_values(content(2)).await.unwrap();
        step(&jobs, 0).await;
        assert!(pull(&jobs[1], 1).await == words(1), "what comes again is skipped");
        step(&jobs, 1).await;
        assert!(pull(&jobs[1], 2).await == words(1), "nothing was pushed");
        jobs[0].attempt(2).unwrap().push_values(content(3)).await.unwrap();
        let attempts: Vec<_> = jobs.iter().map(|job| job.attempt(2).unwrap()).collect();
        for discarded in join_all(attempts.iter().map(Attempt::discard)).await {
            discarded.unwrap();
        }
        step(&jobs, 2).await;
        assert!(
            pull(&jobs[0], 3).await == words(1),
            "what was pushed in a discarded attempt does not count"
        );
    }
}

#[tokio::test]
async fn a_new_epoch_drops_pushed_buffers() {
    let cluster = Cluster::start(1);
    let mut jobs = start(cluster.address(), &spec("dropped", 2)).await;
    let before = pull(&jobs[0], 0).await;
    jobs[0].attempt(0).unwrap().push_values(content(1)).await.unwrap();
    let epoch = jobs[0].epoch();
    drop(jobs.pop());
    until("the epoch has moved", || jobs[0].epoch() > epoch).await;
    jobs.push(connect(cluster.address()).await.join("dropped", 1).await.unwrap());
    // The first call after the change of the epoch reports that the attempt was aborted.
    let aborted = jobs[0].attempt(0).unwrap().push_values(content(2)).await;
    assert!(matches!(aborted, Err(Error::StepAborted { .. })), "{aborted:?}");
    step(&jobs, 0).await;
    assert!(pull(&jobs[0], 1).await == before);
}

#[tokio::test]
async fn invalid_pushes_of_buffers_are_refused() {
    let cluster = Cluster::start(1);
    let spec = spec("refused", 2);
    let jobs = start(cluster.address(), &spec).await;
    let before = jobs[0].state_hash(0).await.unwrap();
    let refused = jobs[0].attempt(0).unwrap().push(content(1)).await;
    assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
    // The client omits the buffers of a rank that does not upload them, and the server refuses
    // them.
    jobs[1].attempt(0).unwrap().push_values(content(1)).await.unwrap();
    let whole = stock::extent(1, 0, &[0.0; 2]);
    let mut half = whole.clone();
    half.dtype = zeroshard_proto::pb::Dtype::Bf16.into();
    for (rank, extent) in [(1, whole), (0, half)] {
        let messages = vec![stock::open(stock::replacement(&jobs[rank], 0)), extent];
        let refused = stock::push(cluster.shards[0].address(), messages).await;
        let is_right = match rank {
            1 => matches!(refused, Err(Error::Refused { .. })),
            _ => matches!(refused, Err(Error::Invalid { .. })),
        };
        assert!(is_right, "rank {rank}: {refused:?}");
    }
    assert_eq!(jobs[0].state_hash(0).await.unwrap(), before);
    step(&jobs, 0).await;
    assert_eq!(pull(&jobs[0], 1).await, pull(&jobs[1], 1).await);
}

/// The values of tensor 0 at `version`.
async fn weights(job: &Job, version: u64) -> Vec<f32> {
    let mut bytes = vec![0; 4 * 100];
    let data = Slots::new(&mut bytes, DType::F32).unwrap();
    job.pull(version, vec![Target::new(TensorId::new(0), data)]).await.unwrap();
    bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

#[tokio::test]
async fn a_step_starts_from_the_values_that_a_program_has_written_to_a_parameter() {
    let cluster = Cluster::start(2);
    for dtype in [DType::F32, DType::Bf16] {
        let tensor = TensorSpec { dtype, ..TensorSpec::new("w", [100]) };
        let spec = job(&format!("written-{dtype}"), 2, sgd(1.0), vec![tensor]);
        let jobs = start(cluster.address(), &spec).await;
        let push = |step: u64, value: f32, gradient: f32| {
            let jobs = &jobs;
            async move {
                let of = |value: f32| vec![TensorData::new(TensorId::new(0), vec![value; 100])];
                jobs[0].attempt(step).unwrap().push_values(of(value)).await.unwrap();
                for job in jobs {
                    let attempt = job.attempt(step).unwrap();
                    match gradient.is_nan() {
                        true => attempt.push_absent(&[TensorId::new(0)]).await.unwrap(),
                        false => attempt.push(of(gradient)).await.unwrap(),
                    }
                }
                let commit = || Commit::default().written(vec![7]);
                let commits = jobs.iter().map(|job| training::commit(job, step, commit()));
                join_all(commits).await.into_iter().all(|report| report.unwrap().applied)
            }
        };
        assert!(push(0, 4.0, 0.5).await);
        assert_eq!(weights(&jobs[1], 1).await, [3.5; 100], "the step is applied to them");
        assert!(!push(1, 8.0, f32::INFINITY).await);
        assert_eq!(weights(&jobs[1], 2).await, [8.0; 100], "they count in a skipped step");
        push(2, 16.0, f32::NAN).await;
        assert_eq!(weights(&jobs[1], 3).await, [16.0; 100], "and without a gradient");
        step(&jobs, 3).await;
        assert_ne!(weights(&jobs[1], 4).await, [16.0; 100], "they count once");
    }
}
