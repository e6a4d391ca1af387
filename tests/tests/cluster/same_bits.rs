//! The state depends only on the initial parameters, the contributions and the decisions.
//!
//! promise: same-bits

use futures_util::future::join_all;
use zeroshard_client::{Commit, Options, Transport};
use zeroshard_model::{DType, Optimizer};
use zeroshard_tests::{Cluster, Trained, Training, synthetic, training};

use crate::{adamw, connect, job, options, start};

/// Trains `training` under another name, and returns the result.
async fn train(cluster: &Cluster, name: &str, mut training: Training) -> Trained {
    training.spec.name = name.to_owned();
    training.options.timeout = options().timeout;
    let trained = training.run(cluster.address()).await.unwrap();
    connect(cluster.address()).await.delete_job(name).await.unwrap();
    trained
}

fn large(world: u32) -> Training {
    let spec = job("large", world, adamw(), synthetic::kinds_and_large(&adamw()));
    Training { commit: Commit::default().max_norm(0.5), ..Training::new(spec) }
}

#[tokio::test]
async fn the_number_of_servers_changes_no_bit_for_any_number_of_ranks() {
    let mut of_one_server: Vec<Trained> = Vec::new();
    for servers in [1, 2, 3, 7] {
        let cluster = Cluster::start(servers);
        for world in 1..=4 {
            // The job waits for all servers; otherwise the first ones could hold all slices.
            let mut training = large(world);
            training.spec.min_servers = servers as u32;
            let trained = train(&cluster, "servers", training).await;
            match of_one_server.get(world as usize - 1) {
                None => of_one_server.push(trained),
                Some(expected) => assert!(*expected == trained, "{servers} servers, {world} ranks"),
            }
        }
    }
    // The hash distinguishes runs.
    assert_ne!(of_one_server[0].hash, of_one_server[1].hash);
}

#[tokio::test]
async fn chunk_size_and_buckets_change_no_bit() {
    let cluster = Cluster::start(2);
    let expected = train(&cluster, "default", large(2)).await;
    for (chunk_bytes, buckets, transport) in [
        (64 << 10, 1, Transport::Grpc),
        (4 << 20, 3, Transport::Grpc),
        (12_345, 100, Transport::Grpc),
        (40_000, 3, Transport::Auto),
    ] {
        let options = Options::default().chunk_bytes(chunk_bytes).transport(Some(transport));
        let trained = train(&cluster, "other", Training { options, buckets, ..large(2) }).await;
        assert!(expected == trained, "chunks of {chunk_bytes} bytes in {buckets} buckets");
    }
}

#[tokio::test]
async fn the_order_in_which_ranks_push_changes_no_bit() {
    let cluster = Cluster::start(2);
    let spec = job("order", 3, adamw(), synthetic::kinds_and_large(&adamw()));
    let mut hashes = Vec::new();
    for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
        let jobs = start(cluster.address(), &spec).await;
        for step in 0..2 {
            for rank in order {
                jobs[rank]
                    .attempt(step)
                    .unwrap()
                    .push(synthetic::gradients(&spec.manifest, rank as u32, step))
                    .await
                    .unwrap();
            }
            for report in
                join_all(jobs.iter().map(|job| training::commit(job, step, Commit::default())))
                    .await
            {
                assert!(report.unwrap().applied);
            }
        }
        hashes.push(jobs[0].state_hash(2).await.unwrap());
        connect(cluster.address()).await.delete_job("order").await.unwrap();
    }
    assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{hashes:?}");
}

#[tokio::test]
async fn a_small_budget_for_early_gradients_changes_no_bit_and_cannot_deadlock() {
    let expected = train(&Cluster::start(2), "roomy", large(3)).await;
    // The budget is smaller than a chunk, so no rank can be early.
    let cluster = Cluster::start_with(2, &["--parked-bytes", "1000"]);
    let trained = train(&cluster, "narrow", large(3)).await;
    assert!(expected == trained);
}

#[tokio::test]
async fn every_optimizer_gives_the_same_bits_on_any_number_of_servers() {
    let (one, three) = (Cluster::start(1), Cluster::start(3));
    let mut hashes = Vec::new();
    for optimizer in Optimizer::defaults() {
        let spec = job("any", 2, optimizer, synthetic::kinds(&optimizer));
        let training = Training::new(spec);
        let expected = train(&one, optimizer.name(), training.clone()).await;
        assert!(expected == train(&three, optimizer.name(), training).await, "{optimizer}");
        assert!(expected.reports.iter().all(|report| report.applied));
        hashes.push(expected.hash);
    }
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), Optimizer::defaults().len(), "no two optimizers do the same");
}

#[tokio::test]
async fn parameters_and_wire_of_half_precision_give_the_same_bits_everywhere() {
    let (one, three) = (Cluster::start(1), Cluster::start(3));
    for dtype in [DType::Bf16, DType::F16] {
        let mut tensors = synthetic::kinds(&adamw());
        tensors.iter_mut().for_each(|tensor| tensor.dtype = dtype);
        let spec = job("half", 2, adamw(), tensors);
        for wire in [DType::F32, dtype] {
            let training = Training {
                options: Options::default()
                    .wire(wire)
                    .chunk_bytes(64 << 10)
                    .transport(Some(Transport::Grpc)),
                ..Training::new(spec.clone())
            };
            let expected = train(&one, "half", training.clone()).await;
            let trained =
                train(&three, "half", Training { options: options().wire(wire), ..training });
            assert!(expected == trained.await, "{dtype} over {wire}");
            let all = expected.parameters.iter().flatten();
            let rounded = |value: f32| match dtype {
                DType::Bf16 => half::bf16::from_f32(value).to_f32(),
                _ => half::f16::from_f32(value).to_f32(),
            };
            assert!(all.copied().all(|value| rounded(value) == value), "what is pulled is {dtype}");
        }
    }
}
