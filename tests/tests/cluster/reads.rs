//! A pull returns one version of every slice in the request.

use std::collections::BTreeMap;

use zeroshard_client::{Commit, Error, Job, Target, TensorData, TensorId};
use zeroshard_proto::{DType, Placement, TensorSpec, geometry::blocks::SLICE, pb};
use zeroshard_tests::{Cluster, stock, training};

use crate::{connect, job, sgd, start, until};

/// Trains such that all elements of version v have the value v.
async fn count_up(job: &Job, steps: u64) {
    let numel = job.spec().manifest.tensors()[0].numel() as usize;
    for step in 0..steps {
        job.attempt(step)
            .unwrap()
            .push(vec![TensorData::new(TensorId::new(0), vec![-1.0; numel])])
            .await
            .unwrap();
        assert!(job.attempt(step).unwrap().commit(Commit::default()).await.unwrap().applied);
    }
}

/// The slices by the address of their server.
fn by_server(placement: &Placement) -> BTreeMap<String, Vec<u32>> {
    let mut slices = BTreeMap::<_, Vec<u32>>::new();
    for slice in 0..placement.slices() {
        let server = &placement.servers()[placement.primary(slice)];
        slices.entry(server.address.clone()).or_default().push(slice as u32);
    }
    slices
}

/// The single value of all elements of the responses.
fn the_number(answer: &[pb::PullResponse]) -> Option<f32> {
    let words = answer.iter().flat_map(|message| message.payload.chunks_exact(4));
    let mut numbers = words.map(|word| f32::from_le_bytes(word.try_into().unwrap()));
    let first = numbers.next()?;
    numbers.all(|number| number == first).then_some(first)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_during_training_gets_exactly_the_version_or_an_error() {
    const STEPS: u64 = 25;
    let cluster = Cluster::start(2);
    let numel = 2 * SLICE + 1000;
    let spec = job("reads", 1, sgd(1.0), vec![TensorSpec::new("w", [numel as u64])]);
    let client = connect(cluster.address()).await;
    client.create_job(&spec).await.unwrap();
    let trainer = client.join("reads", 0).await.unwrap();
    trainer.initialise(vec![TensorData::new(TensorId::new(0), vec![0.0; numel])]).await.unwrap();
    let training = tokio::spawn(async move {
        count_up(&trainer, STEPS).await;
        trainer
    });
    let (mut read, mut gone, mut version) = (0, 0, 0);
    while version < STEPS {
        // The current version, and the next version, for which the pull waits.
        version = client.describe_job("reads").await.unwrap().version.unwrap_or(0);
        for version in [version, (version + 1).min(STEPS)] {
            let placement = client.describe_job("reads").await.unwrap().placement;
            for (address, slices) in by_server(&placement) {
                match stock::pull(&address, stock::read("reads", version, slices)).await {
                    Ok(answer) => {
                        assert_eq!(the_number(&answer), Some(version as f32));
                        read += 1;
                    }
                    Err(Error::VersionGone { version: asked, current, .. }) => {
                        assert!(asked == version && current > version);
                        gone += 1;
                    }
                    Err(other) => panic!("{other}"),
                }
            }
        }
    }
    training.await.unwrap();
    assert!(read >= 2, "{read} reads, {gone} gone");
}

#[tokio::test]
async fn a_started_pull_keeps_its_version_during_further_steps() {
    let cluster = Cluster::start(1);
    let numel = SLICE;
    let spec = job("slow", 1, sgd(1.0), vec![TensorSpec::new("w", [numel as u64])]);
    let client = connect(cluster.address()).await;
    client.create_job(&spec).await.unwrap();
    let trainer = client.join("slow", 0).await.unwrap();
    trainer.initialise(vec![TensorData::new(TensorId::new(0), vec![0.0; numel])]).await.unwrap();
    // More than the HTTP/2 windows hold: the server cannot have sent everything.
    let mut request = stock::read("slow", 0, vec![0; 8]);
    request.chunk_bytes = 1 << 20;
    let mut slow = stock::open_pull(cluster.shards[0].address(), request).await.unwrap();
    let mut answer = vec![slow.message().await.unwrap().unwrap()];
    count_up(&trainer, 3).await;
    while let Some(message) = slow.message().await.unwrap() {
        answer.push(message);
    }
    let bytes: usize = answer.iter().map(|message| message.payload.len()).sum();
    assert_eq!(bytes, 8 * 4 * numel);
    assert_eq!(the_number(&answer), Some(0.0));
    assert_eq!(training::pull(&trainer, 3).await.unwrap()[0], vec![3.0; numel]);
}

#[tokio::test]
async fn a_pull_of_the_next_version_can_be_sent_before_the_step() {
    let cluster = Cluster::start(2);
    let spec = job("ahead", 1, sgd(1.0), zeroshard_tests::synthetic::small());
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let (pulled, _) = tokio::join!(training::pull(&trainer, 1), training::step(&trainer, 0));
    assert_eq!(pulled.unwrap(), training::pull(&trainer, 1).await.unwrap());
}

#[tokio::test]
async fn a_waiting_reader_is_not_affected_by_the_loss_of_a_worker() {
    let cluster = Cluster::start(1);
    let spec = job("loss", 1, sgd(1.0), zeroshard_tests::synthetic::small());
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let request = stock::read("loss", 1, [0]);
    let trained = async {
        let pulls = "zeroshard_requests_in_flight{method=\"/zeroshard.v1.DataService/Pull\"} 1\n";
        until("the reader waits", || cluster.shards[0].get("/metrics").contains(pulls)).await;
        let epoch = trainer.epoch();
        drop(trainer);
        let client = connect(cluster.address()).await;
        let lost = async || client.describe_job("loss").await.unwrap().epoch > epoch;
        while !lost().await {}
        let trainer = client.join("loss", 0).await.unwrap();
        training::step(&trainer, 0).await.unwrap();
        training::pull(&trainer, 1).await.unwrap()
    };
    let (read, trained) = tokio::join!(stock::pull(cluster.shards[0].address(), request), trained);
    let bytes: Vec<u8> =
        read.unwrap().iter().flat_map(|message| message.payload.to_vec()).collect();
    assert!(trained[0].iter().flat_map(|value| value.to_le_bytes()).eq(bytes));
}

#[tokio::test]
async fn a_replaced_version_is_gone() {
    let cluster = Cluster::start(1);
    let spec = job("gone", 1, sgd(1.0), zeroshard_tests::synthetic::small());
    let trainer = start(cluster.address(), &spec).await.remove(0);
    training::step(&trainer, 0).await.unwrap();
    // The step is decided; it has been applied when its version is available.
    training::pull(&trainer, 1).await.unwrap();
    match training::pull(&trainer, 0).await {
        Err(Error::VersionGone { version: 0, current: 1, .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn any_range_can_be_read_in_any_dtype() {
    let cluster = Cluster::start(1);
    let spec = job("ranges", 1, sgd(1.0), vec![TensorSpec::new("w", [1000])]);
    start(cluster.address(), &spec).await;
    let values = zeroshard_tests::synthetic::values(1 << 40, 1000);
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let mut request = stock::read("ranges", 0, []);
        request.dtype = pb::Dtype::from(dtype).into();
        request.extents = vec![
            pb::Extent { slice: 0, offset: 990, length: 0 },
            pb::Extent { slice: 0, offset: 3, length: 5 },
        ];
        let answer = stock::pull(cluster.shards[0].address(), request).await.unwrap();
        let expected: Vec<u8> = [&values[990..], &values[3..8]]
            .concat()
            .into_iter()
            .flat_map(|value| match dtype {
                DType::F32 => value.to_le_bytes().to_vec(),
                DType::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
                DType::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
            })
            .collect();
        let pulled: Vec<u8> = answer.iter().flat_map(|message| message.payload.to_vec()).collect();
        assert_eq!(pulled, expected, "{dtype}");
    }
}

#[tokio::test]
async fn commit_and_pull_returns_the_next_version() {
    let cluster = Cluster::start(2);
    let spec = job("beside", 1, sgd(1.0), vec![TensorSpec::new("w", [2 * SLICE as u64 + 7])]);
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let numel = 2 * SLICE + 7;
    let mut next = vec![f32::NAN; numel];
    fn target(data: &mut Vec<f32>) -> Target<'_> {
        Target::new(TensorId::new(0), data)
    }
    for step in 0..3 {
        trainer
            .attempt(step)
            .unwrap()
            .push(vec![TensorData::new(TensorId::new(0), vec![-1.0; numel])])
            .await
            .unwrap();
        let targets = vec![target(&mut next)];
        let report = trainer
            .attempt(step)
            .unwrap()
            .commit_and_pull(Commit::default(), targets)
            .await
            .unwrap();
        assert_eq!((report.version, report.applied), (step + 1, true));
        assert!(next == training::pull(&trainer, step + 1).await.unwrap()[0]);
    }
    // A failed commit ends the pull, which would otherwise wait forever.
    let refused = trainer
        .attempt(9)
        .unwrap()
        .commit_and_pull(Commit::default(), vec![target(&mut next)])
        .await;
    assert!(matches!(refused, Err(Error::StepMismatch { .. })), "{refused:?}");
    // A failed pull does not hide the result of the step that produces the version.
    trainer
        .attempt(3)
        .unwrap()
        .push(vec![TensorData::new(TensorId::new(0), vec![-1.0; numel])])
        .await
        .unwrap();
    let mut short = vec![0.0; 3];
    let refused = trainer
        .attempt(3)
        .unwrap()
        .commit_and_pull(Commit::default(), vec![target(&mut short)])
        .await;
    assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
    assert_eq!(trainer.attempt(3).unwrap().commit(Commit::default()).await.unwrap().version, 4);
}

#[tokio::test]
async fn readers_that_stop_reading_cost_a_bounded_amount_of_memory_and_for_a_bounded_time() {
    const READERS: u64 = 8;
    const STEPS: u64 = 30;
    const SLICES: usize = 4;
    const MIB: u64 = 1 << 20;
    let cluster = Cluster::start_with(1, &["--wait-seconds", "1"]);
    let shard = &cluster.shards[0];
    let numel = SLICES * SLICE;
    let spec = job("stalled", 1, sgd(1.0), vec![TensorSpec::new("w", [numel as u64])]);
    let client = connect(cluster.address()).await;
    client.create_job(&spec).await.unwrap();
    let trainer = client.join("stalled", 0).await.unwrap();
    trainer.initialise(vec![TensorData::new(TensorId::new(0), vec![0.0; numel])]).await.unwrap();
    let data = vec![-1.0; numel];
    let step = async |step| {
        let attempt = trainer.attempt(step).unwrap();
        attempt.push(vec![TensorData::new(TensorId::new(0), data.clone())]).await.unwrap();
        assert!(attempt.commit(Commit::default()).await.unwrap().applied);
    };
    step(0).await;
    step(1).await;
    let (base, peak_before) = (shard.memory(), shard.peak_memory());
    let mut stalled = Vec::new();
    for version in 2..STEPS {
        if (stalled.len() as u64) < READERS {
            // More than the HTTP/2 windows hold, and the response is not read.
            let request =
                stock::read("stalled", version, (0..SLICES as u32).cycle().take(4 * SLICES));
            stalled.push(stock::open_pull(shard.address(), request).await.unwrap());
        }
        step(version).await;
    }
    // 256 MiB for all readers, plus the slice that is being sent to each of them.
    let bound = 256 * MIB + READERS * 4 * SLICE as u64;
    let peak = shard.peak_memory();
    assert!(peak < peak_before + bound, "{} MiB of {}", peak / MIB, (peak_before + bound) / MIB);
    let ended = format!("zeroshard_stalled_reads_total {READERS}\n");
    until("the readers are ended", || shard.get("/metrics").contains(&ended)).await;
    until("their memory is free", || shard.memory() < base + 32 * MIB).await;
    for mut reader in stalled {
        let mut last = reader.message().await;
        while let Ok(Some(_)) = last {
            last = reader.message().await;
        }
        assert!(last.is_err(), "it is told");
    }
    step(STEPS).await;
}
