//! Arrays of any dtype are pushed and pulled, and averages are returned.

use futures_util::future::join_all;
use zeroshard_client::{Commit, Overflow, Slots, Target, TensorData, TensorId, Values};
use zeroshard_model::{DType, Optimizer, optimizer::Average};
use zeroshard_tests::{
    Cluster,
    synthetic::{self, tensor_ids},
    training,
};

use crate::{job, options, sgd, start};

fn average() -> Optimizer {
    Optimizer::Average(Average {})
}

/// Numbers that every dtype represents exactly.
fn exact(numel: usize) -> Vec<f32> {
    (0..numel).map(|i| (i % 128) as f32 * 0.5 - 32.0).collect()
}

fn bytes_of(values: &[f32], dtype: DType) -> Vec<u8> {
    let encode = |value: &f32| match dtype {
        DType::F32 => value.to_le_bytes().to_vec(),
        DType::Bf16 => half::bf16::from_f32(*value).to_le_bytes().to_vec(),
        DType::F16 => half::f16::from_f32(*value).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(encode).collect()
}

#[tokio::test]
async fn values_and_targets_of_any_dtype_work_with_any_wire_dtype() {
    let cluster = Cluster::start(2);
    let numel = 70_001;
    for wire in DType::ALL {
        let spec = job(&format!("wire-{wire}"), 1, sgd(1.0), vec![synthetic_tensor(numel)]);
        let client = zeroshard_client::Cluster::connect(cluster.address(), options().wire(wire))
            .await
            .unwrap();
        client.create_job(&spec).await.unwrap();
        let job = client.join(&spec.name, 0).await.unwrap();
        job.initialise(vec![TensorData::new(TensorId::new(0), vec![0.0; numel])]).await.unwrap();
        let mut expected = vec![0.0; numel];
        for (step, dtype) in (0..).zip(DType::ALL) {
            let data = Values::new(bytes_of(&exact(numel), dtype).into(), dtype).unwrap();
            job.attempt(step)
                .unwrap()
                .push(vec![TensorData::new(TensorId::new(0), data)])
                .await
                .unwrap();
            assert!(job.attempt(step).unwrap().commit(Commit::default()).await.unwrap().applied);
            expected.iter_mut().zip(exact(numel)).for_each(|(sum, value)| *sum -= value);
            for target in DType::ALL {
                let mut bytes = vec![0u8; numel * target.size() + 1];
                let data = Slots::new(&mut bytes[1..], target).unwrap();
                job.pull(step + 1, vec![Target::new(TensorId::new(0), data)]).await.unwrap();
                assert!(
                    bytes[1..] == bytes_of(&expected, target),
                    "{dtype} over {wire} to {target}"
                );
            }
        }
    }
}

fn synthetic_tensor(numel: usize) -> zeroshard_model::TensorSpec {
    zeroshard_model::TensorSpec::new("w", [numel as u64])
}

#[tokio::test]
async fn the_next_version_of_an_average_is_the_mean_gradient() {
    let cluster = Cluster::start(3);
    let spec = job("average", 2, average(), synthetic::kinds_and_large(&average()));
    let jobs = start(cluster.address(), &spec).await;
    let before = training::pull(&jobs[0], 0).await.unwrap();
    for job in &jobs {
        let mut gradients = synthetic::gradients(&spec.manifest, job.rank(), 0);
        gradients.retain(|gradient| gradient.tensor.index() != 5);
        job.attempt(0).unwrap().push(gradients).await.unwrap();
        job.attempt(0).unwrap().push_absent(&tensor_ids([5])).await.unwrap();
    }
    join_all(jobs.iter().map(|job| training::commit(job, 0, Commit::default()))).await;
    let after = training::pull(&jobs[1], 1).await.unwrap();
    for (tensor, tensor_spec) in spec.manifest.tensors().iter().enumerate() {
        let of = |rank: u64| {
            synthetic::values((rank << 48) | ((1 << 20) + tensor as u64), after[tensor].len())
        };
        let expected = match tensor {
            5 => before[5].clone(),
            6 => after[0].clone(),
            _ if tensor_spec.trains() => {
                of(0).iter().zip(of(1)).map(|(a, b)| (a + b) * 0.5).collect()
            }
            _ => before[tensor].clone(),
        };
        assert!(after[tensor] == expected, "{}", tensor_spec.name);
    }
}

#[tokio::test]
async fn an_average_that_is_not_finite_is_returned_unchanged_and_named() {
    let cluster = Cluster::start(1);
    let spec = job("infinite", 2, average(), synthetic::small());
    let jobs = start(cluster.address(), &spec).await;
    for job in &jobs {
        let bad = if job.rank() == 1 { f32::INFINITY } else { 2.0 };
        let gradients = [(0, vec![bad; 1000]), (1, vec![1.0; 3])];
        let gradients =
            gradients.map(|(tensor, data)| TensorData::new(TensorId::new(tensor), data));
        job.attempt(0).unwrap().push(gradients.into()).await.unwrap();
    }
    let commit = Commit::default().max_norm(1e-3);
    let reports = join_all(jobs.iter().map(|job| training::commit(job, 0, commit.clone()))).await;
    let report = reports[0].as_ref().unwrap();
    assert_eq!(
        (report.applied, report.overflow),
        (true, Some(Overflow { tensor: TensorId::new(0), rank: Some(1) }))
    );
    assert_eq!(report.clip_coefficient, 1.0);
    assert_eq!(
        training::pull(&jobs[0], 1).await.unwrap(),
        [vec![f32::INFINITY; 1000], vec![1.0; 3]]
    );
}
