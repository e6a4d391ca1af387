//! Readers follow a job through a mirror.
//!
//! promise: consistent-reads

use std::process::Command;

use zeroshard_client::{Cluster as Client, Copied, Error, Follow, Options, TensorData, TensorId};
use zeroshard_model::{DType, JobSpec, TensorSpec};
use zeroshard_net::Token;
use zeroshard_proto::{
    pb::{self, mirror_service_client::MirrorServiceClient},
    status::from_status,
};
use zeroshard_tests::{Cluster, Process, binary};

use crate::{
    adamw,
    checkpoints::{directory, policy, until_saved},
    connect,
    follow::{Reader, Truth, changes_sent, tensors},
    job,
    replicas::{replace, step, until_redundant},
    restored::train,
    sgd, start, until,
};

/// Starts a mirror of a job, which listens at `listen`.
fn mirror(address: &str, job: &str, listen: &str, flags: &[&str]) -> Process {
    let mut command = Command::new(binary("zsctl"));
    command.args(["--json", "--address", address, "mirror", job, "--listen", listen]);
    command.args(["--dtype", "bf16"]).args(flags);
    Process::start(command)
}

fn through(mirror: &str) -> Follow {
    Follow { dtype: DType::Bf16, mirror: Some(mirror.to_owned()), ..Follow::default() }
}

/// The bytes of changes that all servers of the cluster have sent.
fn sent(cluster: &Cluster) -> u64 {
    cluster.shards.iter().map(changes_sent).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_of_a_mirror_have_every_version_that_they_report_while_servers_and_mirrors_die() {
    const STEPS: u64 = 24;
    let mut cluster = Cluster::start(2);
    let spec = JobSpec { min_servers: 2, replicas: 2, ..job("live", 1, adamw(), tensors()) };
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let (truth, client) = (Truth::default(), connect(cluster.address()).await);
    let address = cluster.address().to_owned();
    let mut first = mirror(&address, "live", "127.0.0.1:0", &[]);
    let at = first.address().to_owned();
    // A mirror of the mirror.
    let second = mirror(&address, "live", "127.0.0.1:0", &["--mirror", &at]);
    let training = async {
        truth.train(&trainer, 0..8).await;
        first.kill();
        let again = mirror(&address, "live", &at, &[]);
        truth.train(&trainer, 8..15).await;
        until_redundant(&cluster.coordinator, "live").await;
        replace(&mut cluster, 0);
        truth.train(&trainer, 15..STEPS).await;
        truth.record(&trainer, STEPS).await;
        again
    };
    let near =
        async { Reader::with(&client, "live", through(&at)).await.follow(STEPS, 0, &truth).await };
    let slow =
        async { Reader::with(&client, "live", through(&at)).await.follow(STEPS, 4, &truth).await };
    let far = async {
        truth.until(5).await;
        let reader = Reader::with(&client, "live", through(second.address())).await;
        reader.follow(STEPS, 0, &truth).await
    };
    let (_again, near, slow, far) = tokio::join!(training, near, slow, far);
    for reader in [&near, &slow, &far] {
        println!("{} versions, full copies {:?}", reader.seen.len(), reader.follower.copies());
        assert_eq!(reader.follower.copies()[&Copied::Joined], 1);
    }
    let copied: u64 = near.follower.copies().values().sum();
    assert!(copied < near.seen.len() as u64 / 2, "{copied} of {} versions", near.seen.len());
}

#[tokio::test]
async fn servers_send_a_mirror_each_version_once() {
    let cluster = Cluster::start(2);
    let spec = job("once", 1, adamw(), vec![TensorSpec::new("w", [300_000])]);
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let (truth, client) = (Truth::default(), connect(cluster.address()).await);
    let mirror = mirror(cluster.address(), "once", "127.0.0.1:0", &[]);
    let mut readers = Vec::new();
    for _ in 0..4 {
        readers.push(Reader::with(&client, "once", through(mirror.address())).await);
    }
    truth.record(&trainer, 0).await;
    for reader in &mut readers {
        assert_eq!(reader.next().await.copied(), Some(Copied::Joined));
        truth.check(reader).await;
    }
    let before = sent(&cluster);
    for number in 0..5 {
        step(&trainer, number).await;
        truth.record(&trainer, number + 1).await;
        for reader in &mut readers {
            let version = reader.next().await;
            assert_eq!((version.version().version, version.copied()), (number + 1, None));
            truth.check(reader).await;
        }
    }
    let sent = sent(&cluster) - before;
    // A server also sends a byte per block with each hash.
    let hashes = 4 * 5 * 300_000_u64.div_ceil(16_384);
    let once = readers[0].bytes;
    assert!((once..=once + hashes).contains(&sent), "{sent} bytes sent, {once} for one reader");
}

#[tokio::test]
async fn readers_of_a_mirror_follow_a_rewind() {
    let (directory, cluster) = (directory(), Cluster::start(2));
    let checkpoints = Some(policy(directory.path(), 2));
    let tensors = vec![TensorSpec::new("w", [40_000])];
    let spec = JobSpec { checkpoints, ..job("back", 1, sgd(0.1), tensors) };
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let (truth, client) = (Truth::default(), connect(cluster.address()).await);
    let mirror = mirror(cluster.address(), "back", "127.0.0.1:0", &[]);
    let mut reader = Reader::with(&client, "back", through(mirror.address())).await;
    truth.train(&trainer, 0..2).await;
    until_saved(directory.path(), "back", 2).await;
    truth.train(&trainer, 2..4).await;
    truth.record(&trainer, 4).await;
    while reader.next().await.version().version < 4 {
        truth.check(&reader).await;
    }
    truth.check(&reader).await;
    assert_eq!(client.rewind("back", 2, None, &[]).await.unwrap(), 1);
    assert_eq!(train(&trainer, 4, 5).await, [2]);
    truth.record_pinned(&client, "back", 5).await;
    let rewound = loop {
        let version = reader.next().await;
        assert_eq!(version.version().line, 1);
        if version.version().version == 5 {
            break version;
        }
    };
    assert!(reader.follower.copies().contains_key(&Copied::Rewound), "{rewound:?}");
    truth.check(&reader).await;
}

#[tokio::test]
async fn a_reader_behind_the_history_of_a_mirror_makes_a_full_copy() {
    let cluster = Cluster::start(1);
    let spec = job("behind", 1, adamw(), vec![TensorSpec::new("w", [40_000])]);
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let (truth, client) = (Truth::default(), connect(cluster.address()).await);
    let (mut mirrors, mut readers) = (Vec::new(), Vec::new());
    truth.record(&trainer, 0).await;
    for bytes in ["1", "1000000"] {
        let flags = ["--history-bytes", bytes];
        let mirror = mirror(cluster.address(), "behind", "127.0.0.1:0", &flags);
        let mut reader = Reader::with(&client, "behind", through(mirror.address())).await;
        reader.next().await;
        mirrors.push(mirror);
        readers.push(reader);
    }
    for number in 0..3 {
        step(&trainer, number).await;
        truth.record(&trainer, number + 1).await;
    }
    for (reader, expected) in readers.iter_mut().zip([Some(Copied::Behind), None]) {
        loop {
            let version = reader.next().await;
            assert_eq!(version.copied(), expected);
            truth.check(reader).await;
            if version.version().version == 3 {
                break;
            }
        }
    }
}

#[tokio::test]
async fn the_metrics_of_a_mirror_count_versions_readers_bytes_and_copies() {
    const BYTES: usize = 300_000 * 2;
    let cluster = Cluster::start(1);
    let spec = job("counted", 1, adamw(), vec![TensorSpec::new("w", [300_000])]);
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let (truth, client) = (Truth::default(), connect(cluster.address()).await);
    let flags = ["--admin-listen", "127.0.0.1:0"];
    let mirror = mirror(cluster.address(), "counted", "127.0.0.1:0", &flags);
    assert_eq!(mirror.get("/healthz"), "ok\n");
    let has = |line: &str| {
        let line = line.replace("{", "{job=\"counted\"");
        mirror
            .get("/metrics")
            .lines()
            .any(|found| found.strip_prefix("zeroshard_mirror_") == Some(&line))
    };
    let mut reader = Reader::with(&client, "counted", through(mirror.address())).await;
    truth.record(&trainer, 0).await;
    reader.next().await;
    assert_eq!(mirror.get("/readyz"), "ready\n");
    for line in [
        "version{} 0".to_owned(),
        "copies_total{,reason=\"joined\"} 1".to_owned(),
        format!("received_bytes_total{{}} {BYTES}"),
        "sent_bytes_total{,kind=\"changes\"} 0".to_owned(),
        format!("sent_bytes_total{{,kind=\"copies\"}} {BYTES}"),
    ] {
        until(&line, || has(&line)).await;
    }
    let next = async { reader.next().await };
    let training = async {
        until("a reader waits", || has("readers{} 1")).await;
        step(&trainer, 0).await;
    };
    let (version, ()) = tokio::join!(next, training);
    for line in [
        "version{} 1".to_owned(),
        "lag_versions{} 0".to_owned(),
        "readers{} 0".to_owned(),
        format!("received_bytes_total{{}} {}", BYTES as u64 + version.bytes()),
        format!("sent_bytes_total{{,kind=\"changes\"}} {}", version.bytes()),
    ] {
        until(&line, || has(&line)).await;
    }
}

#[tokio::test]
async fn a_mirror_refuses_readers_whom_the_servers_refuse_and_jobs_that_it_does_not_follow() {
    let cluster = Cluster::start_guarded(1, "secret");
    let options = |token: &str| Options::default().token(Token::from(token.to_owned()));
    let client = Client::connect(cluster.address(), options("secret")).await.unwrap();
    let spec = job("guarded", 1, sgd(0.1), vec![TensorSpec::new("w", [100])]);
    client.create_job(&spec).await.unwrap();
    let trainer = client.join("guarded", 0).await.unwrap();
    let values = TensorData::new(TensorId::new(0), vec![1.0; 100]);
    trainer.initialise(vec![values]).await.unwrap();
    let mut command = Command::new(binary("zsctl"));
    command.env("ZEROSHARD_TOKEN", "secret").args(["--json", "--address", cluster.address()]);
    command.args(["mirror", "guarded", "--listen", "127.0.0.1:0"]);
    let mirror = Process::start(command);
    let follow =
        |dtype| Follow { dtype, mirror: Some(mirror.address().to_owned()), ..Follow::default() };
    let mut reader = Reader::with(&client, "guarded", follow(DType::F32)).await;
    assert_eq!(reader.next().await.version().version, 0);
    // A caller without the token, which has the description of the job from somebody else.
    let address = format!("http://{}", mirror.address());
    let mut raw = MirrorServiceClient::connect(address).await.unwrap();
    let request = pb::CopyRequest { job: "guarded".to_owned(), ..Default::default() };
    let refused = from_status(&raw.copy(request).await.unwrap_err(), "mirror");
    assert!(matches!(refused, Error::Unauthenticated { .. }), "{refused}");
    let authorized = |request: pb::CopyRequest| {
        let mut request = tonic::Request::new(request);
        request.metadata_mut().insert("authorization", "Bearer secret".parse().unwrap());
        request
    };
    let of = |dtype: i32, slices: Vec<u32>| {
        vec![pb::FollowedSlices { dtype, slices, boxes: Vec::new() }]
    };
    let mut boxed = of(pb::Dtype::F32.into(), vec![0]);
    let dims = vec![pb::BoxDim { offset: 0, size: 50 }];
    boxed[0].boxes.push(pb::Box { tensor: 0, dims });
    let f32 = pb::Dtype::F32.into();
    for (job, slices, expected) in [
        ("other", of(f32, vec![0]), "the mirror has job \"guarded\""),
        ("guarded", of(f32, vec![7]), "slice 7 of a reader's request"),
        ("guarded", of(f32, vec![u32::MAX]), "a slice of the job"),
        ("guarded", of(f32, vec![0; 1000]), "are not ascending"),
        ("guarded", [of(f32, vec![0]), of(f32, vec![0])].concat(), "in more than one dtype"),
        ("guarded", of(99, vec![0]), "dtype of a reader"),
        ("guarded", boxed, "a mirror has whole tensors"),
    ] {
        let request = pb::CopyRequest { job: job.to_owned(), slices, ..Default::default() };
        let refused = raw.copy(authorized(request)).await.unwrap_err();
        assert!(from_status(&refused, "mirror").to_string().contains(expected), "{refused}");
    }
    let mut other = client.follow("guarded", follow(DType::Bf16)).await.unwrap();
    let refused = match other.next().await {
        Ok(mut version) => other.apply(&mut version, Vec::new()).await.unwrap_err(),
        Err(error) => error,
    };
    assert!(refused.to_string().contains("that of the mirror, f32"), "{refused}");
}
