//! A pull returns one version of every slice in the request.

use std::collections::{BTreeMap, BTreeSet};

use zeroshard_client::{
    Commit, Error, Job, Pin, Pinned, StateSelector, Target, TensorData, TensorId,
};
use zeroshard_model::{DType, Placement, TensorSpec, geometry::blocks::SLICE};
use zeroshard_proto::pb;
use zeroshard_tests::{Cluster, stock, training};

use crate::{adamw, connect, job, sgd, start, until};

/// Trains such that all elements of version v have the value v.
async fn count_up(job: &Job, steps: std::ops::Range<u64>) {
    let numel = job.spec().manifest.tensors()[0].numel() as usize;
    for step in steps {
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

// promise: consistent-reads
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
        count_up(&trainer, 0..STEPS).await;
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

// promise: consistent-reads
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
    count_up(&trainer, 0..3).await;
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
    assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
    assert_eq!(trainer.attempt(3).unwrap().commit(Commit::default()).await.unwrap().version, 4);
}

// promise: isolation
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

// promise: consistent-reads
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_pin_the_latest_version_of_a_fast_run_and_read_it_at_any_time() {
    let cluster = Cluster::start(2);
    let numel = 2 * SLICE + 1000;
    let spec = job("pins", 1, sgd(1.0), vec![TensorSpec::new("w", [numel as u64])]);
    let client = connect(cluster.address()).await;
    client.create_job(&spec).await.unwrap();
    let trainer = client.join("pins", 0).await.unwrap();
    trainer.initialise(vec![TensorData::new(TensorId::new(0), vec![0.0; numel])]).await.unwrap();
    let (enough, stop) = tokio::sync::oneshot::channel::<()>();
    let training = tokio::spawn(async move {
        for step in 0.. {
            count_up(&trainer, step..step + 1).await;
            if !stop.is_empty() {
                return trainer;
            }
        }
        unreachable!("the loop does not end")
    });
    let reader = connect(cluster.address()).await;
    let check = async |pinned: &Pinned| {
        let mut values = vec![f32::NAN; numel];
        pinned.pull(vec![Target::new(pinned.tensor("w").unwrap(), &mut values)]).await.unwrap();
        let expected = pinned.version() as f32;
        assert!(values.iter().all(|&value| value == expected), "version {expected}");
    };
    let mut pins = vec![pinned_while_empty(&reader, "pins").await];
    let mut versions = BTreeSet::new();
    let deadline = std::time::Instant::now() + crate::options().timeout;
    while versions.len() < 10 {
        assert!(std::time::Instant::now() < deadline, "{versions:?}");
        pins.push(reader.pin("pins", &Pin::default()).await.unwrap());
        versions.insert(pins.last().unwrap().version());
        if pins.len() > 4 {
            // Later versions have been made since this one was pinned.
            check(&pins.remove(0)).await;
        }
    }
    enough.send(()).unwrap();
    training.await.unwrap();
    for pinned in &pins {
        check(pinned).await;
    }
}

/// Pins the latest version of a job whose initial parameters may not be complete yet.
async fn pinned_while_empty(reader: &zeroshard_client::Cluster, job: &str) -> Pinned {
    loop {
        match reader.pin(job, &Pin::default()).await {
            Err(Error::Refused { .. }) => {}
            pinned => return pinned.unwrap(),
        }
    }
}

/// The error of a read of whole tensors, or their first values.
async fn read(pinned: &Pinned, tensors: &[&str]) -> Result<Vec<f32>, Error> {
    let mut values = Vec::new();
    for name in tensors {
        let tensor = pinned.tensor(name)?;
        let numel = pinned.spec().manifest.tensors()[tensor.index()].numel() as usize;
        let mut one = vec![f32::NAN; numel];
        pinned.pull(vec![Target::new(tensor, &mut one)]).await?;
        values.push(one[0]);
    }
    Ok(values)
}

#[tokio::test]
async fn a_pin_keeps_some_tensors_until_its_limit_or_until_the_reader_leaves() {
    let cluster = Cluster::start(2);
    let tensors = ["a", "b"].map(|name| TensorSpec::new(name, [10]));
    let spec = job("some", 1, sgd(1.0), tensors.to_vec());
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let step = async |number| training::step(&trainer, number).await.unwrap();
    let reader = connect(cluster.address()).await;
    let unknown = Pin { tensors: Some(vec!["c".into()]), ..Pin::default() };
    assert!(matches!(reader.pin("some", &unknown).await, Err(Error::Refused { .. })));
    let all = reader.pin("some", &Pin::default()).await.unwrap();
    let one = Pin { tensors: Some(vec!["a".into()]), ..Pin::default() };
    let one = reader.pin("some", &one).await.unwrap();
    let before = read(&all, &["a", "b"]).await.unwrap();
    step(0).await;
    training::pull(&trainer, 1).await.unwrap();
    assert_eq!(read(&all, &["b", "a", "a"]).await.unwrap(), [before[1], before[0], before[0]]);
    assert_eq!(read(&one, &["a"]).await.unwrap(), [before[0]]);
    let gone = |read: Result<Vec<f32>, Error>| {
        assert!(matches!(read, Err(Error::VersionGone { version: 0, current: 1, .. })), "{read:?}");
    };
    assert!(matches!(read(&one, &["b"]).await, Err(Error::Refused { .. })), "not pinned");
    gone(reader.pin("some", &Pin { version: Some(0), ..Pin::default() }).await.map(|_| vec![]));
    // A pin of a version that does not exist yet waits for it.
    let third = Pin { version: Some(2), ..Pin::default() };
    let (third, ()) = tokio::join!(reader.pin("some", &third), async { _ = step(1).await });
    assert_eq!(third.unwrap().version(), 2);
    let short = Pin { limit: std::time::Duration::from_millis(1), ..Pin::default() };
    let short = reader.pin("some", &short).await.unwrap();
    step(2).await;
    while read(&short, &["a"]).await.is_ok() {}
    // The memory is released when the last reader has left.
    let pinned = || {
        cluster.shards.iter().any(|shard| {
            !shard.get("/metrics").contains("zeroshard_memory_bytes{kind=\"pinned\"} 0\n")
        })
    };
    until("pins are shown", pinned).await;
    drop((all, one, short));
    until("the pins are released", || !pinned()).await;
}

/// A part of the state of a tensor with ten elements.
async fn state_of(
    pinned: &Pinned,
    part: StateSelector<'_>,
    tensor: usize,
) -> Result<Vec<f32>, Error> {
    let mut values = vec![f32::NAN; 10];
    pinned.pull_part(part, vec![Target::new(TensorId::new(tensor), &mut values)]).await?;
    Ok(values)
}

// promise: isolation
#[tokio::test]
async fn a_pin_keeps_the_optimizer_state_and_the_steps_of_its_version() {
    let cluster = Cluster::start(2);
    let tensors = ["a", "b"].map(|name| TensorSpec::new(name, [10]));
    let spec = job("states", 1, adamw(), tensors.to_vec());
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let reader = connect(cluster.address()).await;
    training::step(&trainer, 0).await.unwrap();
    let [part, other] = ["exp_avg", "exp_avg_sq"].map(StateSelector::OptimizerState);
    let mut expected = [vec![f32::NAN; 10], vec![f32::NAN; 10]];
    let targets = expected.iter_mut().enumerate();
    let targets = targets.map(|(index, values)| Target::new(TensorId::new(index), values));
    trainer.pull_part(1, part, targets.collect()).await.unwrap();
    let all = Pin { optimizer_state: true, ..Pin::default() };
    let pinned = reader.pin("states", &all).await.unwrap();
    let parameters = reader.pin("states", &Pin::default()).await.unwrap();
    for number in 1..4 {
        training::step(&trainer, number).await.unwrap();
    }
    for (index, expected) in expected.iter().enumerate() {
        assert_eq!(&state_of(&pinned, part, index).await.unwrap(), expected);
        assert_ne!(&state_of(&pinned, other, index).await.unwrap(), expected);
        let refused = state_of(&parameters, part, index).await;
        assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
    }
    let steps = pinned.applied_steps().unwrap().iter().map(|steps| steps.count);
    assert_eq!(steps.collect::<Vec<_>>(), [1, 1]);
    assert!(matches!(parameters.applied_steps(), Err(Error::Refused { .. })));
}

#[tokio::test]
async fn pins_beyond_the_memory_for_them_are_refused_and_do_not_disturb_training() {
    let cluster = Cluster::start_with(1, &["--pinned-bytes", "100"]);
    let tensors = ["a", "b"].map(|name| TensorSpec::new(name, [20]));
    let spec = job("full", 1, sgd(1.0), tensors.to_vec());
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let reader = connect(cluster.address()).await;
    let one = Pin { tensors: Some(vec!["a".into()]), ..Pin::default() };
    let other = Pin { tensors: Some(vec!["b".into()]), ..Pin::default() };
    // Pins of one version share its memory.
    let held = (reader.pin("full", &one).await.unwrap(), reader.pin("full", &one).await.unwrap());
    let refused = reader.pin("full", &other).await.unwrap_err();
    let text = refused.to_string();
    assert!(
        matches!(refused, Error::OutOfMemory { .. }) && text.contains("--pinned-bytes"),
        "{text}"
    );
    drop(held);
    training::step(&trainer, 0).await.unwrap();
    // The server notices shortly that the reader has left.
    let again = async { while reader.pin("full", &other).await.is_err() {} };
    tokio::time::timeout(std::time::Duration::from_secs(30), again).await.unwrap();
}

#[tokio::test]
async fn a_pin_ends_with_the_server_that_keeps_the_version() {
    let mut cluster = Cluster::start(1);
    let tensors = ["a", "b"].map(|name| TensorSpec::new(name, [20]));
    let spec = job("ended", 1, sgd(1.0), tensors.to_vec());
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let mut unknown = stock::read("ended", 0, [0]);
    unknown.pin = 5;
    let refused = stock::pull(cluster.shards[0].address(), unknown).await;
    assert!(matches!(refused, Err(Error::VersionGone { version: 0, .. })), "{refused:?}");
    let pinned = connect(cluster.address()).await.pin("ended", &Pin::default()).await.unwrap();
    assert!(read(&pinned, &["a", "b"]).await.is_ok());
    cluster.shards[0].kill();
    let began = std::time::Instant::now();
    let lost = read(&pinned, &["a"]).await;
    assert!(matches!(lost, Err(Error::Unavailable { .. })), "{lost:?}");
    assert!(began.elapsed() < crate::options().timeout, "it was not repeated until its deadline");
    drop(trainer);
}
