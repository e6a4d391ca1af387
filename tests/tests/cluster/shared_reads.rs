//! Readers on the host of the servers: what they have pinned is copied from shared memory.

use std::time::Duration;

use zeroshard_client::{
    Cluster as Client, Error, Pin, Pinned, Status, Target, TensorId, Transport,
};
use zeroshard_net::transport::endpoint;
use zeroshard_proto::pb::{self, shard_service_client::ShardServiceClient};
use zeroshard_tests::{
    Cluster, stock,
    window::{self, RawWindow},
};

use crate::{
    fork::until_status,
    options, until,
    windows::{count, counting, values, window_bytes, windows_in},
};

/// The elements of a tensor of two slices.
const LARGE: usize = 4_194_304 + 300_000;

async fn reader(cluster: &Cluster, over: Transport) -> Client {
    Client::connect(cluster.address(), options().transport(Some(over))).await.unwrap()
}

/// Pulls the pinned tensor, and returns its value, which all of its elements have.
async fn pulled(pinned: &Pinned) -> f32 {
    let mut values = vec![f32::NAN; LARGE];
    pinned.pull(vec![Target::new(TensorId::new(0), &mut values)]).await.unwrap();
    assert!(values.iter().all(|value| *value == values[0]));
    values[0]
}

#[tokio::test]
async fn a_reader_copies_a_pinned_version_from_shared_memory_while_training_goes_on() {
    let cluster = Cluster::start_with(2, &["--device", "cpu"]);
    let rank = counting(&cluster, "read", LARGE).await;
    count(&rank, 0, LARGE).await;
    let shared = reader(&cluster, Transport::Shm).await;
    let first = shared.pin("read", &Pin::default()).await.unwrap();
    let before = window_bytes(&cluster, "pull");
    assert_eq!(pulled(&first).await, -1.0);
    assert_eq!(window_bytes(&cluster, "pull"), before + 4 * LARGE as u64);
    for step in 1..4 {
        count(&rank, step, LARGE).await;
        assert_eq!(pulled(&first).await, -1.0, "{step}");
    }
    let last = shared.pin("read", &Pin::default()).await.unwrap();
    assert_eq!((pulled(&last).await, pulled(&first).await), (-4.0, -1.0));
    let before = window_bytes(&cluster, "pull");
    let over_grpc = reader(&cluster, Transport::Grpc).await;
    let over_grpc = over_grpc.pin("read", &Pin::default()).await.unwrap();
    assert_eq!(pulled(&over_grpc).await, -4.0);
    assert_eq!(window_bytes(&cluster, "pull"), before);
    let one = |status: &Status| windows_in(status, "read") == (1, None);
    until_status(&cluster, "the window of the rank is counted, and no other", one).await;
}

/// Opens the call of a pin of slice 0, and returns the call and the pin's number.
async fn pin(address: &str, job: &str, version: u64) -> (tonic::Streaming<pb::PinResponse>, u64) {
    let channel = endpoint(address).unwrap().connect().await.unwrap();
    let request =
        pb::PinRequest { job: job.to_owned(), version, slices: vec![0], ..Default::default() };
    let call = ShardServiceClient::new(channel).pin(request).await.unwrap();
    let mut call = call.into_inner();
    let number = call.message().await.unwrap().unwrap().pin;
    (call, number)
}

// promise: consistent-reads
#[tokio::test]
async fn what_a_reader_reads_stays_after_its_pin_until_it_ends_its_hold_or_its_socket() {
    let cluster = Cluster::start_with(1, &["--device", "cpu"]);
    let rank = counting(&cluster, "kept", 1_000_000).await;
    count(&rank, 0, 1_000_000).await;
    let address = cluster.shards[0].address();
    let (call, number) = pin(address, "kept", 1).await;
    let request = pb::OpenWindowRequest { pin: number, lease: 0, ..window::request(&rank) };
    let window = RawWindow::open_with(address, request.clone()).await.unwrap();
    let read =
        pb::PullRequest { pin: number, window: window.number, ..stock::read("kept", 1, [0]) };
    let held = stock::pull(address, read.clone()).await.unwrap().remove(0);
    assert!(held.hold != 0 && !held.lasts, "a reader copies");
    drop(call);
    // Then the pin has ended.
    let ended = async || window::prepare(address, request.clone()).await.is_err();
    let ended = async { while !ended().await {} };
    tokio::time::timeout(Duration::from_secs(30), ended).await.expect("the pin ends");
    for step in 1..4 {
        count(&rank, step, 1_000_000).await;
    }
    assert!(values(&window, &held).iter().all(|&value| value == -1.0));
    assert!(matches!(stock::pull(address, read).await, Err(Error::VersionGone { .. })));
    let (resident, shard) = (cluster.shards[0].memory(), &cluster.shards[0]);
    drop(window);
    until("the hold has ended", || shard.memory() + 3_000_000 < resident).await;
}

#[tokio::test]
async fn a_window_of_a_reader_needs_a_pin_and_takes_no_push() {
    let cluster = Cluster::start_with(1, &["--device", "cpu"]);
    let rank = counting(&cluster, "narrow", 300_000).await;
    let address = cluster.shards[0].address();
    let (_call, number) = pin(address, "narrow", 0).await;
    let request = pb::OpenWindowRequest { pin: number, lease: 0, ..window::request(&rank) };
    for wrong in [
        pb::OpenWindowRequest { pin: number ^ 1, ..request.clone() },
        pb::OpenWindowRequest { job_id: request.job_id ^ 1, ..request.clone() },
    ] {
        window::prepare(address, wrong).await.unwrap_err();
    }
    let window = RawWindow::open_with(address, request).await.unwrap();
    let begin = pb::PushBegin { window: window.number, ..stock::begin(&rank, Some(0)) };
    let referred = pb::PushRequest { bytes: 64, hold: 1, ..stock::extent(0, 0, &[]) };
    let pushed = stock::push(address, vec![stock::open(begin), referred]).await;
    assert!(matches!(pushed, Err(Error::Refused { .. })), "{pushed:?}");
    count(&rank, 0, 300_000).await;
}
