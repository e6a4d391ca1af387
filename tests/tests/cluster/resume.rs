//! State is pulled from one job and uploaded to another, which continues in the same way.
//!
//! promise: exactly-once, same-bits

use std::collections::BTreeMap;

use futures_util::future::join_all;
use zeroshard_client::{Commit, Error, Job, StateSelector, Target, TensorData, TensorId};
use zeroshard_model::{AppliedSteps, DType, JobSpec, Optimizer, TensorSpec, optimizer::StateShape};
use zeroshard_proto::pb::{self, push_begin::Contents, state_selector::Part};
use zeroshard_tests::{Cluster, stock, synthetic, training};

use crate::{adamw, connect, job, sgd, start, until};

/// A part of all tensors that own their storage and have this part.
async fn pull_part(job: &Job, version: u64, part: StateSelector<'_>) -> Vec<(usize, Vec<f32>)> {
    let tensors = job.spec().manifest.tensors().iter().enumerate();
    let has = |spec: &TensorSpec| match part {
        StateSelector::OptimizerState(name) => spec.trains() && has_state(job.spec(), spec, name),
        _ => true,
    };
    let owned = tensors.filter(|(_, spec)| spec.alias_of.is_none() && has(spec));
    let mut values: Vec<_> =
        owned.map(|(tensor, spec)| (tensor, vec![f32::NAN; spec.numel() as usize])).collect();
    let targets = values.iter_mut().map(|(tensor, data)| Target::new(TensorId::new(*tensor), data));
    job.pull_part(version, part, targets.collect()).await.unwrap();
    values
}

/// Returns whether the optimizer has this state tensor for a trained tensor of this shape.
fn has_state(job: &JobSpec, tensor: &TensorSpec, name: &str) -> bool {
    let optimizer = &job.groups[tensor.group as usize];
    let shapes = optimizer.state_shapes(&tensor.shape);
    let mut named = optimizer.state().iter().zip(shapes);
    named.any(|(state, shape)| *state == name && shape != StateShape::Absent)
}

async fn steps(jobs: &[Job], data: u64, step: u64) {
    for job in jobs {
        job.attempt(step)
            .unwrap()
            .push(synthetic::gradients(&job.spec().manifest, job.rank(), data))
            .await
            .unwrap();
    }
    for report in
        join_all(jobs.iter().map(|job| training::commit(job, step, Commit::default()))).await
    {
        assert!(report.unwrap().applied);
    }
}

/// Joins all ranks without initialising the job.
async fn join_all_ranks(address: &str, spec: &JobSpec) -> Vec<Job> {
    let cluster = connect(address).await;
    cluster.create_job(spec).await.unwrap();
    let mut jobs = Vec::new();
    for rank in 0..spec.world {
        jobs.push(connect(address).await.join(&spec.name, rank).await.unwrap());
    }
    jobs
}

async fn continues_elsewhere(optimizer: Optimizer, dtype: DType) {
    let (one, three) = (Cluster::start(1), Cluster::start(3));
    let mut tensors = synthetic::kinds_and_large(&optimizer);
    tensors.iter_mut().for_each(|tensor| tensor.dtype = dtype);
    let spec = job("resumed", 2, optimizer, tensors);
    let jobs = start(one.address(), &spec).await;
    for step in 0..2 {
        steps(&jobs, step, step).await;
    }
    let states = optimizer.state().iter().map(|name| StateSelector::OptimizerState(name));
    let mut parts = BTreeMap::new();
    for name in optimizer.state() {
        let part = StateSelector::OptimizerState(name);
        parts.insert(*name, pull_part(&jobs[1], 2, part).await);
    }
    parts.insert("master", pull_part(&jobs[1], 2, StateSelector::MasterWeights).await);
    let applied = jobs[0].applied_steps(2).await.unwrap();
    assert_eq!(applied[0].count, 2);
    assert_eq!(applied[3].count, 0, "frozen");

    let others = join_all_ranks(three.address(), &spec).await;
    let gradients = |part: &str| -> Vec<TensorData> {
        let values = parts[part].clone().into_iter();
        values.map(|(tensor, data)| TensorData::new(TensorId::new(tensor), data)).collect()
    };
    for part in optimizer.state() {
        others[0].initialise_state(part, applied[0], gradients(part)).await.unwrap();
        others[0].initialise_state(part, applied[0], gradients(part)).await.unwrap();
    }
    others[0].initialise_at(applied[0], gradients("master")).await.unwrap();
    until("both know", || others.iter().all(|job| job.version() == Some(0))).await;
    assert_eq!(others[0].applied_steps(0).await.unwrap(), applied);
    steps(&jobs, 2, 2).await;
    steps(&others, 2, 0).await;
    for part in states.chain([StateSelector::MasterWeights, StateSelector::Parameters]) {
        let (here, there) =
            (pull_part(&jobs[0], 3, part).await, pull_part(&others[0], 1, part).await);
        assert!(here == there, "{part:?} of {optimizer}");
    }
    assert_eq!(jobs[0].applied_steps(3).await.unwrap(), others[0].applied_steps(1).await.unwrap());
}

#[tokio::test]
async fn a_run_of_adamw_continues_in_another_cluster() {
    continues_elsewhere(adamw(), DType::F32).await;
}

#[tokio::test]
async fn a_run_in_half_precision_continues_from_its_master_weights() {
    let json = r#"{"name":"rmsprop","momentum":0.9,"centered":true}"#;
    continues_elsewhere(serde_json::from_str(json).unwrap(), DType::Bf16).await;
}

#[tokio::test]
async fn a_run_continues_from_its_scalar_state() {
    let json = r#"{"name":"nadam","momentum_decay":0.5}"#;
    continues_elsewhere(serde_json::from_str(json).unwrap(), DType::F32).await;
}

#[tokio::test]
async fn a_run_continues_from_the_second_moments_of_rows_and_columns() {
    continues_elsewhere("adafactor".parse().unwrap(), DType::Bf16).await;
}

#[tokio::test]
async fn a_run_without_state_continues_from_its_parameters() {
    continues_elsewhere(sgd(0.5), DType::F32).await;
}

#[tokio::test]
async fn the_uploads_of_a_rank_lost_before_version_0_are_dropped() {
    let cluster = Cluster::start(2);
    let spec = job("lost", 1, adamw(), synthetic::small());
    let mut jobs = join_all_ranks(cluster.address(), &spec).await;
    let state = |tensor, numel: usize| TensorData::new(TensorId::new(tensor), vec![0.5; numel]);
    jobs[0]
        .initialise_state("exp_avg", AppliedSteps::new(9), vec![state(0, 1000), state(1, 3)])
        .await
        .unwrap();
    drop(jobs.pop());
    // The rank is free when the coordinator has noticed the loss; joining waits for it.
    let job = connect(cluster.address()).await.join("lost", 0).await.unwrap();
    job.initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    until("version 0 is there", || job.version() == Some(0)).await;
    assert_eq!(job.applied_steps(0).await.unwrap(), [0, 0].map(AppliedSteps::new));
    for (_, state) in pull_part(&job, 0, StateSelector::OptimizerState("exp_avg")).await {
        assert!(state.iter().all(|&value| value == 0.0));
    }
}

#[tokio::test]
async fn unknown_parts_are_refused() {
    let cluster = Cluster::start(1);
    let spec = job("parts", 1, adamw(), synthetic::kinds(&adamw()));
    let jobs = start(cluster.address(), &spec).await;
    let job = &jobs[0];
    let before = job.state_hash(0).await.unwrap();
    let mut frozen = vec![0.0; 129];
    let mut one = vec![0.0; 1];
    for (tensor, name) in [(7, "momentum_buffer"), (3, "exp_avg"), (7, "master")] {
        let data = if tensor == 3 { &mut frozen } else { &mut one };
        let targets = vec![Target::new(TensorId::new(tensor), data)];
        let refused = job.pull_part(0, StateSelector::OptimizerState(name), targets).await;
        let is_right = match tensor {
            3 => matches!(refused, Err(Error::Refused { .. })),
            _ => matches!(refused, Err(Error::Invalid { .. })),
        };
        assert!(is_right, "{tensor} {name}: {refused:?}");
    }
    // The uploads are too late, of an unknown part, of the master weights, of a frozen tensor, and
    // of no part.
    for (tensor, part, numel) in
        [(7, "exp_avg", 1), (7, "sum", 1), (7, "master", 1), (3, "exp_avg", 129), (7, "", 1)]
    {
        let data = vec![TensorData::new(TensorId::new(tensor), vec![1.0; numel])];
        let refused = job.initialise_state(part, AppliedSteps::new(3), data).await;
        let is_right = match (tensor, part) {
            (3, _) | (_, "exp_avg") => matches!(refused, Err(Error::Refused { .. })),
            _ => matches!(refused, Err(Error::Invalid { .. })),
        };
        assert!(is_right, "{tensor} {part:?}: {refused:?}");
    }
    let address = cluster.shards[0].address();
    for part in [Some(Part::MasterWeights(Default::default())), None] {
        let upload = pb::Upload { part: Some(pb::StateSelector { part }), ..Default::default() };
        let contents = Some(Contents::Upload(upload));
        let begin = pb::PushBegin { contents, ..stock::begin(job, None) };
        assert!(matches!(
            stock::push(address, vec![stock::open(begin)]).await,
            Err(Error::Refused { .. })
        ));
    }
    // A repeated upload of parameters with a different number of steps changes nothing.
    job.initialise_at(AppliedSteps::new(5), synthetic::parameters(&spec.manifest)).await.unwrap();
    assert_eq!(job.applied_steps(0).await.unwrap(), [AppliedSteps::default(); 9]);
    assert_eq!(job.state_hash(0).await.unwrap(), before);
}

// promise: consistent-reads
#[tokio::test]
async fn a_part_is_read_at_exactly_the_version_by_any_reader() {
    let cluster = Cluster::start(1);
    let spec = job("read", 1, adamw(), synthetic::small());
    let jobs = start(cluster.address(), &spec).await;
    let part = Some(Part::OptimizerState("exp_avg".to_owned()));
    let part = Some(pb::StateSelector { part });
    let request = pb::PullRequest { part, ..stock::read("read", 1, vec![0]) };
    let address = cluster.shards[0].address();
    let (early, report) =
        tokio::join!(stock::pull(address, request.clone()), training::step(&jobs[0], 0));
    assert!(report.unwrap().applied);
    let early: Vec<u8> =
        early.unwrap().iter().flat_map(|message| message.payload.to_vec()).collect();
    let (_, state) =
        pull_part(&jobs[0], 1, StateSelector::OptimizerState("exp_avg")).await.swap_remove(0);
    assert!(state.iter().flat_map(|value| value.to_le_bytes()).eq(early));
    assert!(state.iter().any(|&value| value != 0.0));
    training::step(&jobs[0], 1).await.unwrap();
    // The report follows the decision; the servers may still be applying it.
    training::pull(&jobs[0], 2).await.unwrap();
    assert!(matches!(
        stock::pull(address, request).await,
        Err(Error::VersionGone { version: 1, current: 2, .. })
    ));
}
