//! A step is applied by every slice or by none, and follows the formula of the optimizer.

use futures_util::future::join_all;
use zeroshard_client::{Commit, Error, Job, Overflow, StepReport, TensorData, TensorId};
use zeroshard_model::{JobSpec, Manifest, TensorSpec};
use zeroshard_tests::{Cluster, Training, synthetic, training};

use crate::{adamw, job, sgd, start};

/// Pushes `gradients` of each rank at step `number`, and commits with `commit`. Returns the report
/// of rank 0.
async fn step(
    jobs: &[Job],
    gradients: impl Fn(u32) -> Vec<TensorData>,
    number: u64,
    commit: &Commit,
) -> StepReport {
    let ranks = jobs.iter().map(async |job| {
        let attempt = job.attempt(number).unwrap();
        attempt.push(gradients(job.rank())).await.unwrap();
        attempt.commit(commit.clone()).await.unwrap()
    });
    join_all(ranks).await.swap_remove(0)
}

fn filled(manifest: &Manifest, value: f32) -> Vec<TensorData> {
    let trains = manifest.tensors().iter().enumerate().filter(|(_, spec)| spec.trains());
    let filled = |(tensor, spec): (usize, &TensorSpec)| {
        TensorData::new(TensorId::new(tensor), vec![value; spec.numel() as usize])
    };
    trains.map(filled).collect()
}

// promise: atomic-steps
#[tokio::test]
async fn an_overflow_skips_the_step_on_every_slice_and_names_tensor_and_rank() {
    let cluster = Cluster::start(3);
    let spec = job("overflow", 2, adamw(), synthetic::kinds(&adamw()));
    let jobs = start(cluster.address(), &spec).await;
    let before = training::pull(&jobs[0], 0).await.unwrap();
    for (step_number, bad) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().enumerate() {
        let gradients = |rank: u32| {
            let mut gradients = synthetic::gradients(&spec.manifest, rank, 0);
            if rank == 1 {
                // The last element of "bias", which is on one server only.
                let bias =
                    gradients.iter_mut().find(|gradient| gradient.tensor.index() == 5).unwrap();
                let mut data = synthetic::values(5, bias.data.len());
                data[65_536] = bad;
                bias.data = data.into();
            }
            gradients
        };
        let report = step(&jobs, gradients, step_number as u64, &Commit::default()).await;
        assert!(!report.applied);
        assert!(!report.gradient_norm.is_finite());
        assert_eq!(report.overflow, Some(Overflow { tensor: TensorId::new(5), rank: Some(1) }));
        assert_eq!(report.version, step_number as u64 + 1);
        assert_eq!(training::pull(&jobs[0], report.version).await.unwrap(), before);
    }
    // The step count of the optimizer has not changed either: the next step is a first step.
    let fresh = job("fresh", 2, adamw(), synthetic::kinds(&adamw()));
    let fresh_jobs = start(cluster.address(), &fresh).await;
    let gradients = |rank: u32| synthetic::gradients(&spec.manifest, rank, 0);
    assert!(step(&jobs, gradients, 3, &Commit::default()).await.applied);
    assert!(step(&fresh_jobs, gradients, 0, &Commit::default()).await.applied);
    let after = training::pull(&jobs[0], 4).await.unwrap();
    assert_eq!(after, training::pull(&fresh_jobs[0], 1).await.unwrap());
    assert_ne!(after, before);
}

#[tokio::test]
async fn finite_gradients_whose_sum_overflows_skip_the_step_and_name_no_rank() {
    let cluster = Cluster::start(2);
    let spec = job("sum", 2, sgd(1.0), synthetic::small());
    let jobs = start(cluster.address(), &spec).await;
    let report = step(&jobs, |_| filled(&spec.manifest, f32::MAX), 0, &Commit::default()).await;
    assert_eq!(
        (report.applied, report.overflow),
        (false, Some(Overflow { tensor: TensorId::new(0), rank: None }))
    );
}

#[tokio::test]
async fn the_mean_gradient_and_its_norm_are_those_of_one_process() {
    let cluster = Cluster::start(3);
    let tensors = synthetic::kinds_and_large(&sgd(0.5));
    let spec = job("mean", 2, sgd(0.5), tensors);
    let jobs = start(cluster.address(), &spec).await;
    let before = training::pull(&jobs[0], 0).await.unwrap();
    let gradients = |rank: u32| synthetic::gradients(&spec.manifest, rank, 0);
    let report = step(&jobs, gradients, 0, &Commit::default().max_norm(0.25)).await;
    let after = training::pull(&jobs[0], 1).await.unwrap();

    let values = |rank: u64, tensor: usize, numel: usize| {
        synthetic::values((rank << 48) | ((1 << 20) + tensor as u64), numel)
    };
    let training = spec.manifest.tensors().iter().enumerate().filter(|(_, spec)| spec.trains());
    let sums: Vec<(usize, Vec<f32>)> = training
        .map(|(tensor, spec)| {
            let numel = spec.numel() as usize;
            let pairs = values(0, tensor, numel).into_iter().zip(values(1, tensor, numel));
            (tensor, pairs.map(|(a, b)| a + b).collect())
        })
        .collect();
    let squares = sums.iter().flat_map(|(_, sum)| sum).map(|&sum| f64::from(sum).powi(2));
    let norm = squares.sum::<f64>().sqrt() / 2.0;
    let difference = (report.gradient_norm - norm).abs() / norm;
    assert!(difference < 1e-10, "{} and {norm}", report.gradient_norm);
    assert_eq!(report.clip_coefficient, 0.25 / report.gradient_norm);
    let coefficient = (report.clip_coefficient / 2.0) as f32;
    for (tensor, sum) in sums {
        for ((after, before), sum) in after[tensor].iter().zip(&before[tensor]).zip(sum) {
            let expected = before - 0.5 * (sum * coefficient);
            assert!((after - expected).abs() <= 1e-6, "{after} and {expected}");
        }
    }
    // A limit above the norm has no effect.
    let report = step(
        &jobs,
        |rank| synthetic::gradients(&spec.manifest, rank, 1),
        1,
        &Commit::default().max_norm(1e9),
    )
    .await;
    assert_eq!(report.clip_coefficient, 1.0);
}

#[tokio::test]
async fn a_loss_scale_of_a_power_of_two_changes_no_bit() {
    let cluster = Cluster::start(2);
    let mut hashes = Vec::new();
    for (name, scale) in [("plain", 1.0), ("scaled", 1024.0)] {
        let spec = job(name, 2, adamw(), synthetic::small());
        let jobs = start(cluster.address(), &spec).await;
        let gradients = |rank: u32| {
            let plain = (0..2usize).zip([1000, 3]);
            let scaled = plain.map(|(tensor, numel)| {
                let values = synthetic::values(u64::from(rank) * 2 + tensor as u64, numel);
                let data = values.into_iter().map(|value| value * scale as f32).collect::<Vec<_>>();
                TensorData::new(TensorId::new(tensor), data)
            });
            scaled.collect()
        };
        let commit = Commit::default().loss_scale(scale).max_norm(0.5);
        let report = step(&jobs, gradients, 0, &commit).await;
        hashes.push((jobs[0].state_hash(1).await.unwrap(), report.gradient_norm));
    }
    assert_eq!(hashes[0], hashes[1]);
}

#[tokio::test]
async fn hyperparameters_can_differ_by_parameter_group_and_by_step() {
    let cluster = Cluster::start(2);
    let mut tensors = synthetic::small();
    tensors[1].group = 1;
    let spec = JobSpec { groups: vec![sgd(1.0), sgd(0.0)], ..job("groups", 1, sgd(1.0), tensors) };
    let jobs = start(cluster.address(), &spec).await;
    let versions = [
        (Commit::default(), [1.0, 0.0]),
        (Commit::default().groups(vec![sgd(0.0), sgd(0.25)]), [0.0, 0.25]),
        (Commit::default(), [1.0, 0.0]),
    ];
    let mut before = training::pull(&jobs[0], 0).await.unwrap();
    for (number, (commit, lr)) in (0..).zip(versions) {
        step(&jobs, |_| filled(&spec.manifest, -1.0), number, &commit).await;
        let after = training::pull(&jobs[0], number + 1).await.unwrap();
        for tensor in 0..2 {
            let moved = before[tensor].iter().map(|before| before + lr[tensor]);
            assert!(moved.eq(after[tensor].iter().copied()), "tensor {tensor} at step {number}");
        }
        before = after;
    }
}

// promise: no-silent-difference
#[tokio::test]
async fn ranks_that_disagree_about_a_step_are_told_the_differing_value() {
    let cluster = Cluster::start(1);
    let spec = job("disagreement", 2, sgd(1.0), synthetic::small());
    let jobs = start(cluster.address(), &spec).await;
    for job in &jobs {
        job.attempt(0)
            .unwrap()
            .push(synthetic::gradients(&spec.manifest, job.rank(), 0))
            .await
            .unwrap();
    }
    let others = [
        ("lr of parameter group 0", Commit::default().groups(vec![sgd(0.5)])),
        ("loss_scale", Commit::default().loss_scale(2.0)),
        ("max_norm", Commit::default().max_norm(1.0)),
        (
            "factor of the gradient of tensor \"b\"",
            Commit::default().gradient_factors(vec![1.0, 0.5]),
        ),
    ];
    for (about, commit) in others {
        let commits = [
            training::commit(&jobs[0], 0, Commit::default()),
            training::commit(&jobs[1], 0, commit),
        ];
        for refused in join_all(commits).await {
            match refused {
                Err(Error::Disagreement { step: 0, what, .. }) => assert_eq!(what, about),
                other => panic!("{other:?}"),
            }
        }
    }
    let commits = jobs.iter().map(|job| training::commit(job, 0, Commit::default()));
    for report in join_all(commits).await {
        assert!(report.unwrap().applied);
    }
}

#[tokio::test]
async fn the_report_has_the_mean_loss_if_every_rank_passed_one() {
    let cluster = Cluster::start(1);
    let spec = job("loss", 2, sgd(1.0), synthetic::small());
    let jobs = start(cluster.address(), &spec).await;
    for (step, losses, mean) in
        [(0, [Some(1.0), Some(4.0)], Some(2.5)), (1, [Some(1.0), None], None)]
    {
        let ranks = jobs.iter().map(async |job| {
            job.attempt(step)
                .unwrap()
                .push(synthetic::gradients(&spec.manifest, job.rank(), step))
                .await
                .unwrap();
            job.attempt(step)
                .unwrap()
                .commit(Commit::default().loss(losses[job.rank() as usize]))
                .await
                .unwrap()
        });
        for report in join_all(ranks).await {
            assert_eq!((report.loss, report.world), (mean, 2));
        }
    }
}

#[tokio::test]
async fn a_frozen_tensor_keeps_its_bits_and_a_tied_tensor_those_of_its_owner() {
    let cluster = Cluster::start(2);
    let spec = job("frozen", 1, adamw(), synthetic::kinds(&adamw()));
    let trained = Training::new(spec.clone()).run(cluster.address()).await.unwrap();
    let frozen = [3, 4];
    for (tensor, initial) in [(3, 129), (4, 3)] {
        assert_eq!(
            trained.parameters[tensor],
            synthetic::values((1 << 40) + tensor as u64, initial)
        );
    }
    assert_eq!(trained.parameters[6], trained.parameters[0]);
    for (tensor, spec) in spec.manifest.tensors().iter().enumerate() {
        let changed = !frozen.contains(&tensor) && spec.numel() > 0 && spec.alias_of.is_none();
        let initial = synthetic::values((1 << 40) + tensor as u64, spec.numel() as usize);
        assert!(!changed || trained.parameters[tensor] != initial, "{}", spec.name);
    }
}
