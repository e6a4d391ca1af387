//! Running averages of a job, which the servers keep.
//!
//! promise: same-bits

use zeroshard_client::{CreateJob, Error, Job, Pin, StateSelector, Target, TensorData, TensorId};
use zeroshard_model::{
    AppliedSteps, JobSpec, RunningAverage, Warmup, Weights, average, successor_name,
};
use zeroshard_tests::{Cluster, synthetic, training};

use crate::{
    adamw,
    checkpoints::{directory, resume, step_all, url},
    connect, job,
    replicas::{replace, train_while_killing},
    start, until,
};

const STEPS: u64 = 6;

/// A job of two ranks with three averages.
fn averaged(name: &str) -> JobSpec {
    let warm = Weights::Exponential { decay: 0.9, warmup: Warmup::Tenth };
    let averages = [
        RunningAverage::exponential("slow", 0.99),
        RunningAverage { weights: warm, ..RunningAverage::exponential("warm", 0.9) },
        RunningAverage {
            weights: Weights::Equal,
            start: 2,
            every: 2,
            ..RunningAverage::exponential("equal", 0.0)
        },
    ];
    let spec = job(name, 2, adamw(), synthetic::kinds_and_large(&adamw()));
    JobSpec { averages: averages.into(), ..spec }
}

/// The indices of the tensors that train.
fn trained(spec: &JobSpec) -> Vec<usize> {
    let tensors = spec.manifest.tensors().iter().enumerate();
    tensors.filter(|(_, tensor)| tensor.trains()).map(|(index, _)| index).collect()
}

/// A part of the trained tensors at a version.
async fn pulled(job: &Job, version: u64, part: StateSelector<'_>) -> Vec<Vec<f32>> {
    let spec = job.spec();
    let tensors = trained(spec);
    let numel = |&tensor: &usize| spec.manifest.tensors()[tensor].numel() as usize;
    let mut values: Vec<Vec<f32>> = tensors.iter().map(|of| vec![f32::NAN; numel(of)]).collect();
    let targets = tensors.iter().zip(&mut values);
    let targets = targets.map(|(&tensor, data)| Target::new(TensorId::new(tensor), data));
    job.pull_part(version, part, targets.collect()).await.unwrap();
    values
}

async fn average_of(job: &Job, version: u64, name: &str) -> Vec<Vec<f32>> {
    pulled(job, version, StateSelector::OptimizerState(&average::values_of(name))).await
}

#[tokio::test]
async fn an_average_is_that_of_float64_and_costs_the_workers_no_byte() {
    let cluster = Cluster::start(3);
    let jobs = start(cluster.address(), &averaged("averaged")).await;
    let plain =
        start(cluster.address(), &JobSpec { averages: [].into(), ..averaged("plain") }).await;
    let mut expected: Vec<Vec<f64>> = Vec::new();
    for step in 0..STEPS {
        step_all(&jobs, step).await;
        let master = pulled(&jobs[0], step + 1, StateSelector::MasterWeights).await;
        let exact = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<f64>>();
        let master: Vec<Vec<f64>> = master.into_iter().map(exact).collect();
        if step == 0 {
            expected = master;
            continue;
        }
        for (average, value) in expected.iter_mut().flatten().zip(master.iter().flatten()) {
            *average += (1.0 - 0.99) * (value - *average);
        }
    }
    let found = average_of(&jobs[0], STEPS, "slow").await;
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        assert!(
            (f64::from(*found) - expected).abs() <= 6e-8 * expected.abs(),
            "{found} {expected}"
        );
    }
    // The parameters, and what the ranks send and receive, are those of a job without averages.
    let traffic = || [&jobs, &plain].map(|jobs| jobs[1].traffic());
    let before = traffic();
    for (jobs, first) in [(&jobs, STEPS), (&plain, 0)] {
        for step in first..first + 2 {
            step_all(jobs, step).await;
        }
    }
    let after = traffic();
    let moved = [0, 1].map(|of| {
        let pulled = after[of].pulled_bytes - before[of].pulled_bytes;
        (pulled, after[of].pushed_bytes - before[of].pushed_bytes)
    });
    assert!(moved[0] == moved[1] && moved[0].1 > 0, "{moved:?}");
}

#[tokio::test]
async fn averages_survive_killed_servers_a_checkpoint_and_a_successor() {
    let one = Cluster::start(1);
    let calm = start(one.address(), &averaged("calm")).await;
    for step in 0..STEPS {
        step_all(&calm, step).await;
    }
    let expected = calm[0].state_hash(STEPS).await.unwrap();
    let (directory, mut three) = (directory(), Cluster::start(3));
    let replicas = JobSpec { replicas: 2, min_servers: 3, compare_every: 1, ..averaged("killed") };
    let jobs = start(three.address(), &replicas).await;
    assert_eq!(train_while_killing(&mut three, &jobs, (STEPS, 2), replace).await, expected);
    let place = url(directory.path());
    connect(three.address()).await.save_checkpoint("killed", Some(&place)).await.unwrap();

    // Another number of servers.
    let others = resume(one.address(), &averaged("restored"), directory.path(), "killed").await;
    assert_eq!(others[0].state_hash(STEPS).await.unwrap(), expected);
    step_all(&others, STEPS).await;
    step_all(&calm, STEPS).await;
    let [found, expected] = [&others[0], &calm[0]].map(|job| job.state_hash(STEPS + 1));
    assert_eq!(found.await.unwrap(), expected.await.unwrap());

    // Another server holds a part of the successor, and pulls it.
    let _second = Cluster::shard(one.address(), &[]);
    let name = successor_name("restored");
    let spec = JobSpec { name: name.clone(), min_servers: 2, ..averaged("") };
    let mut create = CreateJob::new(spec.clone());
    create.from = Some(others[0].at(STEPS + 1));
    let client = connect(one.address()).await;
    client.create_job(create).await.unwrap();
    let after = [client.join(&name, 0).await.unwrap(), client.join(&name, 1).await.unwrap()];
    let tensors = after[0].spec().manifest.tensors().iter().enumerate();
    let owners = tensors.filter(|(_, tensor)| tensor.alias_of.is_none());
    let owners: Vec<TensorId> = owners.map(|(index, _)| TensorId::new(index)).collect();
    after[0].keep(AppliedSteps::default(), &owners).await.unwrap();
    until("all ranks know", || after.iter().all(|job| job.version() == Some(0))).await;
    for average in ["slow", "warm", "equal"] {
        let before = average_of(&others[0], STEPS + 1, average).await;
        assert!(average_of(&after[1], 0, average).await == before, "{average}");
    }
    let counts = after[0].applied_steps(0).await.unwrap();
    let with_slices = trained(after[0].spec()).into_iter();
    let with_slices = with_slices.filter(|&of| !spec.manifest.slices_of(of).is_empty());
    let counts: Vec<u64> = with_slices.map(|tensor| counts[tensor].averaged).collect();
    assert_eq!(counts, vec![STEPS + 1; counts.len()]);
}

#[tokio::test]
async fn a_job_with_other_averages_does_not_take_those_of_a_checkpoint() {
    let directory = directory();
    let cluster = Cluster::start(1);
    let jobs = start(cluster.address(), &averaged("saved")).await;
    step_all(&jobs, 0).await;
    let place = url(directory.path());
    let client = connect(cluster.address()).await;
    client.save_checkpoint("saved", Some(&place)).await.unwrap();
    let with = |name: &str, averages: &[RunningAverage]| JobSpec {
        averages: averages.into(),
        ..averaged(name)
    };
    // Without averages, those of the checkpoint are dropped.
    let none = resume(cluster.address(), &with("none", &[]), directory.path(), "saved").await;
    assert_eq!(none[0].version(), Some(1));
    let other = with("other", &[RunningAverage::exponential("other", 0.9)]);
    let mut create = CreateJob::new(other);
    create.restore = Some(zeroshard_model::Restore {
        url: place.clone(),
        job: "saved".to_owned(),
        version: zeroshard_model::RestoreVersion::Latest,
        line: None,
    });
    let refused = client.create_job(create).await.unwrap_err().to_string();
    assert!(refused.contains("slow, warm, equal instead of other"), "{refused}");
}

// promise: invalid-input
#[tokio::test]
async fn averages_are_pinned_by_name_and_cannot_be_uploaded() {
    let cluster = Cluster::start(2);
    let spec = averaged("pinned");
    let client = connect(cluster.address()).await;
    client.create_job(&spec).await.unwrap();
    let ranks = [client.join("pinned", 0).await.unwrap(), client.join("pinned", 1).await.unwrap()];
    let first = trained(&spec)[0];
    let numel = spec.manifest.tensors()[first].numel() as usize;
    let data = vec![TensorData::new(TensorId::new(first), vec![0.0; numel])];
    let uploaded = ranks[0].initialise_state("average.slow", AppliedSteps::default(), data).await;
    assert!(matches!(uploaded, Err(Error::Refused { .. })), "{uploaded:?}");
    ranks[0].initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    until("all ranks know", || ranks.iter().all(|job| job.version() == Some(0))).await;
    step_all(&ranks, 0).await;
    let expected = average_of(&ranks[0], 1, "slow").await;
    let pin = |name: &str| Pin { averages: vec![name.to_owned()], ..Pin::default() };
    let held = client.pin("pinned", &pin("slow")).await.unwrap();
    let mut values = vec![f32::NAN; numel];
    for other in ["average.warm", "exp_avg"] {
        let target = vec![Target::new(TensorId::new(first), &mut values)];
        let refused = held.pull_part(StateSelector::OptimizerState(other), target).await;
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("the parameters and average.slow"), "{other}: {refused}");
    }
    step_all(&ranks, 1).await;
    let target = vec![Target::new(TensorId::new(first), &mut values)];
    held.pull_part(StateSelector::OptimizerState("average.slow"), target).await.unwrap();
    assert_eq!(values, expected[0]);
    let unknown = client.pin("pinned", &pin("fast")).await.map(drop).unwrap_err().to_string();
    assert!(unknown.contains("\"fast\"") && unknown.contains("slow"), "{unknown}");
    training::pull(&ranks[0], 2).await.unwrap();
}
