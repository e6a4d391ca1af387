//! Jobs whose parameter groups have optimizers of different kinds.
//!
//! promise: same-bits

use std::collections::BTreeMap;

use zeroshard_client::{CreateJob, Error, Job, StateSelector, Target, TensorData, TensorId};
use zeroshard_model::{AppliedSteps, JobSpec, Optimizer, TensorSpec, successor_name};
use zeroshard_tests::{Cluster, synthetic};

use crate::{
    adamw,
    checkpoints::{directory, resume, step_all, url},
    connect, job,
    replicas::{replace, train_while_killing},
    start, until,
};

/// Both of the first have a momentum buffer, at different positions of their state. The third has
/// scalar state, and the last none.
fn optimizers() -> Vec<Optimizer> {
    let json = [
        r#"{"name":"rmsprop","momentum":0.9}"#,
        r#"{"name":"sgd","lr":0.1,"momentum":0.9}"#,
        r#"{"name":"nadam"}"#,
        r#"{"name":"asgd"}"#,
    ];
    json.iter().map(|json| serde_json::from_str(json).unwrap()).collect()
}

/// A job of two ranks whose tensors, in turn, have these optimizers.
fn spec(name: &str, optimizers: Vec<Optimizer>) -> JobSpec {
    let mut spec = job(name, 2, adamw(), Vec::new());
    let tensors = synthetic::kinds_and_large(&adamw()).into_iter().enumerate();
    let groups = optimizers.len();
    let tensors = tensors.map(|(at, tensor)| TensorSpec { group: (at % groups) as u32, ..tensor });
    spec.manifest = zeroshard_model::Manifest::new(tensors.collect()).unwrap();
    JobSpec { groups: optimizers, ..spec }
}

fn mixed(name: &str) -> JobSpec {
    spec(name, optimizers())
}

/// Master weights and optimizer state of the trained tensors at a version. State of one name is
/// pulled together.
async fn contents(job: &Job, version: u64) -> BTreeMap<(&'static str, usize), Vec<f32>> {
    let spec = job.spec();
    let mut named: BTreeMap<&'static str, Vec<usize>> = BTreeMap::new();
    for (index, tensor) in spec.manifest.tensors().iter().enumerate() {
        let Some(optimizer) = spec.optimizer_of(index).filter(|_| tensor.trains()) else {
            continue;
        };
        for &name in ["master"].iter().chain(optimizer.state()) {
            named.entry(name).or_default().push(index);
        }
    }
    let mut found = BTreeMap::new();
    for (name, tensors) in named {
        let part = match name {
            "master" => StateSelector::MasterWeights,
            name => StateSelector::OptimizerState(name),
        };
        let numel = |tensor: usize| spec.manifest.tensors()[tensor].numel() as usize;
        let mut values: Vec<Vec<f32>> =
            tensors.iter().map(|&tensor| vec![f32::NAN; numel(tensor)]).collect();
        let targets = tensors.iter().zip(&mut values);
        let targets = targets.map(|(&tensor, data)| Target::new(TensorId::new(tensor), data));
        job.pull_part(version, part, targets.collect()).await.unwrap();
        found.extend(tensors.into_iter().map(|tensor| (name, tensor)).zip(values));
    }
    found
}

#[tokio::test]
async fn a_tensor_trains_as_in_a_job_where_all_have_its_optimizer() {
    let cluster = Cluster::start(2);
    let together = start(cluster.address(), &mixed("together")).await;
    for step in 0..3 {
        step_all(&together, step).await;
    }
    let found = contents(&together[0], 3).await;
    let applied = together[0].applied_steps(3).await.unwrap();
    for (group, optimizer) in optimizers().into_iter().enumerate() {
        let alone = start(cluster.address(), &spec(optimizer.name(), vec![optimizer])).await;
        for step in 0..3 {
            step_all(&alone, step).await;
        }
        let of_group =
            |tensor: usize| together[0].spec().manifest.tensors()[tensor].group as usize == group;
        let own = contents(&alone[0], 3).await.into_iter().filter(|((_, it), _)| of_group(*it));
        let own: BTreeMap<_, _> = own.collect();
        assert!(!own.is_empty());
        let its = found.iter().filter(|((_, it), _)| of_group(*it));
        assert!(its.eq(own.iter()), "{optimizer}");
        let steps = alone[0].applied_steps(3).await.unwrap();
        for tensor in (0..steps.len()).filter(|&tensor| of_group(tensor)) {
            assert_eq!(applied[tensor], steps[tensor], "{optimizer}");
        }
    }
}

#[tokio::test]
async fn replicas_a_checkpoint_and_a_successor_change_no_bit() {
    const STEPS: u64 = 6;
    let one = Cluster::start(1);
    let calm = start(one.address(), &mixed("calm")).await;
    for step in 0..STEPS {
        step_all(&calm, step).await;
    }
    let expected = calm[0].state_hash(STEPS).await.unwrap();
    let (directory, mut three) = (directory(), Cluster::start(3));
    let replicas = JobSpec { replicas: 2, min_servers: 3, ..mixed("killed") };
    let jobs = start(three.address(), &JobSpec { compare_every: 1, ..replicas }).await;
    assert_eq!(train_while_killing(&mut three, &jobs, (STEPS, 2), replace).await, expected);
    let place = url(directory.path());
    connect(three.address()).await.save_checkpoint("killed", Some(&place)).await.unwrap();

    let others = resume(one.address(), &mixed("restored"), directory.path(), "killed").await;
    // Another server holds a part of the successor, and pulls it.
    let _second = Cluster::shard(one.address(), &[]);
    let name = successor_name("restored");
    let mut create = CreateJob::new(JobSpec { name: name.clone(), min_servers: 2, ..mixed("") });
    create.from = Some(others[0].at(STEPS));
    let client = connect(one.address()).await;
    client.create_job(create).await.unwrap();
    let after = [client.join(&name, 0).await.unwrap(), client.join(&name, 1).await.unwrap()];
    let tensors = after[0].spec().manifest.tensors().iter().enumerate();
    let owners = tensors.filter(|(_, tensor)| tensor.alias_of.is_none());
    let owners: Vec<TensorId> = owners.map(|(index, _)| TensorId::new(index)).collect();
    after[0].keep(AppliedSteps::default(), &owners).await.unwrap();
    until("all ranks know", || after.iter().all(|job| job.version() == Some(0))).await;
    assert!(contents(&after[1], 0).await == contents(&others[0], STEPS).await);
    let applied = others[0].applied_steps(STEPS).await.unwrap();
    assert_eq!(after[0].applied_steps(0).await.unwrap(), applied);
    step_all(&others, STEPS).await;
    step_all(&calm, STEPS).await;
    let [found, expected] = [&others[0], &calm[0]].map(|job| job.state_hash(STEPS + 1));
    assert_eq!(found.await.unwrap(), expected.await.unwrap());
}

// promise: invalid-input
#[tokio::test]
async fn state_is_uploaded_to_the_tensors_that_have_it() {
    let cluster = Cluster::start(1);
    let tensor = |name: &str, group| TensorSpec { group, ..TensorSpec::new(name, [3]) };
    let tensors = (0..4).map(|group| tensor(&format!("t{group}"), group)).collect();
    let manifest = zeroshard_model::Manifest::new(tensors).unwrap();
    let spec = JobSpec::new("uploads", manifest, optimizers());
    let client = connect(cluster.address()).await;
    client.create_job(&spec).await.unwrap();
    let job = client.join("uploads", 0).await.unwrap();
    let data = |tensors: &[usize], value: f32| -> Vec<TensorData> {
        let of = |&tensor: &usize| TensorData::new(TensorId::new(tensor), vec![value; 3]);
        tensors.iter().map(of).collect()
    };
    let applied = |tensor, scalars: &[f32]| spec.applied_to(tensor, 5, scalars).unwrap();
    let momentum = applied(0, &[]);
    job.initialise_state("momentum_buffer", momentum, data(&[0, 1], 0.5)).await.unwrap();
    let refused = job.initialise_state("momentum_buffer", momentum, data(&[2], 0.5)).await;
    assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
    let refused = job.initialise_at(momentum, data(&[1, 2], 0.0)).await;
    assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
    job.initialise_at(momentum, data(&[0, 1], 0.0)).await.unwrap();
    job.initialise_at(applied(2, &[0.25]), data(&[2], 0.0)).await.unwrap();
    job.initialise_at(applied(3, &[0.25, 1.0]), data(&[3], 0.0)).await.unwrap();
    until("the job has begun", || job.version() == Some(0)).await;
    let found = contents(&job, 0).await;
    assert_eq!(found[&("momentum_buffer", 0)], [0.5; 3]);
    assert_eq!(found[&("momentum_buffer", 1)], [0.5; 3]);
    assert_eq!(found[&("exp_avg", 2)], [0.0; 3]);
    let steps = job.applied_steps(0).await.unwrap();
    assert_eq!(steps[2], applied(2, &[0.25]));
    assert_eq!(steps[3], applied(3, &[0.25, 1.0]));
}
