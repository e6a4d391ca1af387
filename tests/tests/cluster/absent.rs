//! Ranks without a gradient: they count as zeros, and a tensor without any gradient is not stepped.
//!
//! promise: exactly-once

use futures_util::future::join_all;
use zeroshard_client::{Absent, Commit, Error, Job, StepReport, TensorData, TensorId};
use zeroshard_model::{AppliedSteps, JobSpec, TensorSpec};
use zeroshard_proto::pb::{self, push_begin::Contents};
use zeroshard_tests::{
    Cluster, stock,
    synthetic::{self, tensor_ids},
    training,
};

use crate::{adamw, connect, job, start};

fn spec(name: &str, world: u32) -> JobSpec {
    job(name, world, adamw(), synthetic::kinds_and_large(&adamw()))
}

/// The gradients of `rank`, with some tensors zero.
fn gradients(spec: &JobSpec, rank: u32, step: u64, zero: &[usize]) -> Vec<TensorData> {
    let mut gradients = synthetic::gradients(&spec.manifest, rank, step);
    for gradient in gradients.iter_mut().filter(|gradient| zero.contains(&gradient.tensor.index()))
    {
        gradient.data = vec![0.0; gradient.data.len()].into();
    }
    gradients
}

async fn commit(jobs: &[Job], step: u64) -> StepReport {
    let commits =
        join_all(jobs.iter().map(|job| training::commit(job, step, Commit::default()))).await;
    let mut reports: Vec<StepReport> = commits.into_iter().map(Result::unwrap).collect();
    assert!(reports.iter().all(|report| *report == reports[0]));
    reports.swap_remove(0)
}

/// The tensors from which each rank is absent: the large one, a small one, and for the last rank
/// all of them.
fn absent_of(rank: u32) -> Vec<usize> {
    match rank {
        0 => vec![8],
        1 => vec![0, 2],
        _ => vec![0, 2, 5, 7, 8],
    }
}

// promise: same-bits
#[tokio::test]
async fn absent_gradients_give_the_bits_of_zeros_on_any_number_of_servers_in_any_order() {
    let mut hashes = Vec::new();
    for servers in [1, 3] {
        let cluster = Cluster::start(servers);
        for world in [2, 3] {
            for absent_first in [None, Some(true), Some(false)] {
                let spec = JobSpec { min_servers: servers as u32, ..spec("absent", world) };
                let jobs = start(cluster.address(), &spec).await;
                for step in 0..2 {
                    for job in &jobs {
                        let absent = absent_of(job.rank());
                        let mut all = gradients(&spec, job.rank(), step, &absent);
                        let Some(absent_first) = absent_first else {
                            job.attempt(step).unwrap().push(all).await.unwrap();
                            continue;
                        };
                        all.retain(|gradient| !absent.contains(&gradient.tensor.index()));
                        if absent_first {
                            job.attempt(step)
                                .unwrap()
                                .push_absent(&tensor_ids(absent.clone()))
                                .await
                                .unwrap();
                        }
                        job.attempt(step).unwrap().push(all).await.unwrap();
                        // The declaration is repeated, and includes tensors of which nothing is
                        // missing.
                        job.attempt(step)
                            .unwrap()
                            .push_absent(&tensor_ids(absent.clone()))
                            .await
                            .unwrap();
                        job.attempt(step)
                            .unwrap()
                            .push_absent(&tensor_ids(
                                [0, 8].map(|t| if absent.contains(&t) { t } else { 5 }),
                            ))
                            .await
                            .unwrap();
                    }
                    let report = commit(&jobs, step).await;
                    assert!(report.applied);
                    let tensors: Vec<_> = report
                        .absent
                        .iter()
                        .map(|absent| (absent.tensor.index(), absent.rank))
                        .collect();
                    match (absent_first, world) {
                        (None, _) => assert_eq!(tensors, []),
                        (_, 2) => assert_eq!(tensors, [(0, 1), (2, 1), (8, 0)]),
                        _ => assert_eq!(tensors, [(0, 1), (2, 1), (5, 2), (7, 2), (8, 0)]),
                    }
                    assert!(report.absent.iter().all(|absent| !absent.everywhere));
                }
                hashes.push((world, jobs[0].state_hash(2).await.unwrap()));
                connect(cluster.address()).await.delete_job("absent").await.unwrap();
            }
        }
    }
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), 2, "one for each number of ranks");
}

#[tokio::test]
async fn a_tensor_without_any_gradient_is_not_stepped() {
    let cluster = Cluster::start(2);
    let spec = spec("unused", 2);
    let jobs = start(cluster.address(), &spec).await;
    let before = training::pull(&jobs[0], 0).await.unwrap();
    for job in &jobs {
        let mut all = gradients(&spec, job.rank(), 0, &[]);
        all.retain(|gradient| gradient.tensor.index() != 8);
        job.attempt(0).unwrap().push(all).await.unwrap();
        job.attempt(0).unwrap().push_absent(&tensor_ids([8])).await.unwrap();
    }
    let absent = [Absent { tensor: TensorId::new(8), rank: 0, everywhere: true }];
    assert_eq!(jobs[0].attempt(0).unwrap().reduce(1.0).await.unwrap().absent, absent);
    assert_eq!(commit(&jobs, 0).await.absent, absent);
    let after = training::pull(&jobs[0], 1).await.unwrap();
    assert_eq!(after[8], before[8], "not even weight decay");
    assert_ne!(after[0], before[0]);
    let mut applied = [1, 0, 1, 0, 0, 1, 0, 1, 0].map(AppliedSteps::new);
    assert_eq!(jobs[1].applied_steps(1).await.unwrap(), applied);
    // A step without any gradient is a step, too.
    for job in &jobs {
        job.attempt(1).unwrap().push_absent(&tensor_ids([0, 1, 2, 5, 7, 8])).await.unwrap();
    }
    let report = commit(&jobs, 1).await;
    assert_eq!((report.version, report.gradient_norm, report.absent.len()), (2, 0.0, 5));
    assert_eq!(training::pull(&jobs[0], 2).await.unwrap(), after);
    assert_eq!(jobs[1].applied_steps(2).await.unwrap(), applied);
    // The first step with a gradient has the step count 1.
    for job in &jobs {
        job.attempt(2).unwrap().push(gradients(&spec, job.rank(), 2, &[])).await.unwrap();
    }
    assert!(commit(&jobs, 2).await.absent.is_empty());
    applied = [2, 0, 2, 0, 0, 2, 0, 2, 1].map(AppliedSteps::new);
    assert_eq!(jobs[0].applied_steps(3).await.unwrap(), applied);
}

#[tokio::test]
async fn the_absence_of_a_lost_rank_is_dropped() {
    let cluster = Cluster::start(1);
    let spec = job("lost", 2, adamw(), synthetic::small());
    let mut jobs = start(cluster.address(), &spec).await;
    for job in &jobs {
        job.attempt(0).unwrap().push_absent(&tensor_ids([0, 1])).await.unwrap();
    }
    let epoch = jobs[0].epoch();
    drop(jobs.pop());
    crate::until("the epoch has moved", || jobs[0].epoch() > epoch).await;
    jobs.push(connect(cluster.address()).await.join("lost", 1).await.unwrap());
    assert!(matches!(
        jobs[0].attempt(0).unwrap().commit(Commit::default()).await,
        Err(Error::StepAborted { .. })
    ));
    for job in &jobs {
        job.attempt(0)
            .unwrap()
            .push(synthetic::gradients(&spec.manifest, job.rank(), 0))
            .await
            .unwrap();
    }
    assert!(commit(&jobs, 0).await.absent.is_empty());
}

#[tokio::test]
async fn an_invalid_absence_is_refused() {
    let cluster = Cluster::start(1);
    let spec = job("refused", 1, adamw(), synthetic::kinds(&adamw()));
    let jobs = start(cluster.address(), &spec).await;
    let before = jobs[0].state_hash(0).await.unwrap();
    // The tensors are unknown, frozen, a buffer, and tied.
    let refused = jobs[0].attempt(0).unwrap().push_absent(&tensor_ids([99])).await;
    assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
    for tensor in [3, 4, 6] {
        let refused = jobs[0].attempt(0).unwrap().push_absent(&tensor_ids([tensor])).await;
        assert!(matches!(refused, Err(Error::Refused { .. })), "{tensor}: {refused:?}");
    }
    assert!(matches!(
        jobs[0].attempt(7).unwrap().push_absent(&tensor_ids([0])).await,
        Err(Error::StepMismatch { .. })
    ));
    let frozen = spec.manifest.slices_of(3).start as u32;
    for slice in [frozen, 9_999] {
        let gradients = pb::Gradients { absent: vec![slice], ..Default::default() };
        let contents = Some(Contents::Gradients(gradients));
        let begin = pb::PushBegin { contents, ..stock::begin(&jobs[0], Some(0)) };
        let refused = stock::push(cluster.shards[0].address(), vec![stock::open(begin)]).await;
        let is_right = match slice == frozen {
            true => matches!(refused, Err(Error::Refused { .. })),
            false => matches!(refused, Err(Error::Invalid { .. })),
        };
        assert!(is_right, "{slice}: {refused:?}");
    }
    assert_eq!(jobs[0].state_hash(0).await.unwrap(), before);
}

#[tokio::test]
async fn absent_slices_beyond_the_limit_of_a_message_are_split() {
    let cluster = Cluster::start(1);
    let tensors: Vec<_> = (0..1500).map(|i| TensorSpec::new(format!("t{i}"), [2])).collect();
    let spec = job("many", 1, adamw(), tensors);
    let jobs = start(cluster.address(), &spec).await;
    jobs[0].attempt(0).unwrap().push_absent(&tensor_ids(0..1500)).await.unwrap();
    let report = commit(&jobs, 0).await;
    assert_eq!(report.absent.len(), 1500);
    assert!(report.absent.iter().all(|absent| absent.everywhere));
}
