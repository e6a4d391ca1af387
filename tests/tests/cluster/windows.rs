//! Windows: memory that a worker's process shares with a shard server on its host.

use std::{
    cell::RefCell,
    fs,
    io::{self, Read, Write},
    time::Duration,
};

use futures_util::future::join_all;
use zeroshard_client::{
    Array, Cluster as Client, Error, Job, Status, Target, TensorData, TensorId, Transport,
};
use zeroshard_model::{DType, JobSpec, TensorSpec};
use zeroshard_proto::pb;
use zeroshard_shm::Pieces;
use zeroshard_tests::{
    Cluster, Process,
    phase::Phase,
    stock, synthetic, training,
    window::{self, RawWindow},
};

use crate::{
    adamw, connect, fork::until_status, job, options, phases::paused, sgd, start, start_over,
    tiers::find_metric, until,
};

/// How often a worker is killed, and how often a server.
const WORKERS: usize = if cfg!(feature = "long") { 200 } else { 12 };
const SERVERS: usize = if cfg!(feature = "long") { 200 } else { 2 };

/// The elements of a tensor of a slice and a part of a second one.
const NUMEL: usize = 4_194_304 + 300_000;

/// A job with tensors that are in windows, and small ones that are not.
fn spec(name: &str, world: u32, dtype: DType) -> JobSpec {
    let large = TensorSpec { dtype, ..TensorSpec::new("large", [NUMEL as u64]) };
    let middle = TensorSpec { dtype, ..TensorSpec::new("middle", [400, 300]) };
    job(name, world, adamw(), vec![large, middle, TensorSpec::new("small", [7])])
}

/// Trains three steps, in which rank i uses `transports[i]`. Returns the final hash.
async fn trained(
    cluster: &Cluster,
    name: &str,
    dtypes: [DType; 2],
    over: [Transport; 2],
) -> String {
    let [parameters, wire] = dtypes;
    let spec = spec(name, 2, parameters);
    connect(cluster.address()).await.create_job(&spec).await.unwrap();
    let mut ranks = Vec::new();
    for (rank, transport) in (0..).zip(over) {
        let options = options().transport(Some(transport)).wire(wire);
        let client = Client::connect(cluster.address(), options).await.unwrap();
        ranks.push(client.join(name, rank).await.unwrap());
    }
    ranks[0].initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
    for step in 0..3 {
        for report in join_all(ranks.iter().map(|rank| training::step(rank, step))).await {
            assert!(report.unwrap().applied);
        }
        join_all(ranks.iter().map(|rank| training::pull(rank, step + 1))).await;
    }
    ranks[0].state_hash(3).await.unwrap()
}

/// The bytes that went through windows of all servers.
pub(crate) fn window_bytes(cluster: &Cluster, operation: &str) -> u64 {
    let name = format!("window_bytes_total{{operation=\"{operation}\"}}");
    cluster.shards.iter().filter_map(|shard| find_metric(shard, &name)).sum::<f64>() as u64
}

// promise: same-bits
#[tokio::test]
async fn shared_memory_and_grpc_and_both_in_one_job_give_the_same_bits() {
    // A GPU keeps parameters in its own memory.
    let cluster = Cluster::start_with(2, &["--device", "cpu"]);
    let mut before = [0, 0];
    for dtypes in [[DType::F32; 2], [DType::F32, DType::Bf16], [DType::Bf16; 2]] {
        let name = |over: &str| format!("{}-{}-{over}", dtypes[0], dtypes[1]);
        let grpc = trained(&cluster, &name("grpc"), dtypes, [Transport::Grpc; 2]).await;
        assert_eq!(["pull", "push"].map(|of| window_bytes(&cluster, of)), before);
        let shm = trained(&cluster, &name("shm"), dtypes, [Transport::Shm; 2]).await;
        let after = ["pull", "push"].map(|of| window_bytes(&cluster, of));
        assert!(after[1] > before[1], "{dtypes:?}");
        // Parameters are rounded to the wire dtype on their way, which a window does not do.
        assert_eq!(after[0] > before[0], dtypes[0] == dtypes[1], "{dtypes:?}");
        let both =
            trained(&cluster, &name("both"), dtypes, [Transport::Auto, Transport::Grpc]).await;
        assert_eq!((&shm, &both), (&grpc, &grpc), "{dtypes:?}");
        before = ["pull", "push"].map(|of| window_bytes(&cluster, of));
    }
}

/// A job of one rank with one large tensor, whose values are 0 and decrease by 1 in each step.
pub(crate) async fn counting(cluster: &Cluster, name: &str, numel: usize) -> Job {
    let spec = job(name, 1, sgd(1.0), vec![TensorSpec::new("w", [numel as u64])]);
    let client = connect(cluster.address()).await;
    client.create_job(&spec).await.unwrap();
    let rank = client.join(name, 0).await.unwrap();
    rank.initialise(vec![TensorData::new(TensorId::new(0), vec![0.0; numel])]).await.unwrap();
    rank
}

pub(crate) async fn count(rank: &Job, step: u64, numel: usize) {
    let attempt = rank.attempt(step).unwrap();
    attempt.push(vec![TensorData::new(TensorId::new(0), vec![1.0; numel])]).await.unwrap();
    assert!(attempt.commit(zeroshard_client::Commit::default()).await.unwrap().applied);
}

/// Pulls slice 0 at `version` through a window, without ending the hold.
async fn referred(
    cluster: &Cluster,
    window: &RawWindow,
    job: &str,
    version: u64,
) -> pb::PullResponse {
    let request = stock::read(job, version, [0]);
    let request = pb::PullRequest { window: window.number, ..request };
    let answer = stock::pull(cluster.shards[0].address(), request).await.unwrap();
    assert_eq!(answer.len(), 1, "{answer:?}");
    answer.into_iter().next().unwrap()
}

pub(crate) fn values(window: &RawWindow, of: &pb::PullResponse) -> Vec<f32> {
    let bytes = window.parameters.bytes(of.at, of.bytes).unwrap();
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

// promise: consistent-reads
#[tokio::test]
async fn a_version_that_a_process_reads_is_not_overwritten_until_it_ends_the_hold_or_its_socket() {
    const LARGE: usize = 1_000_000;
    let cluster = Cluster::start_with(1, &["--device", "cpu"]);
    let rank = counting(&cluster, "held", LARGE).await;
    let shard = &cluster.shards[0];
    let mut window = RawWindow::open(shard.address(), &rank).await.unwrap();
    let mut held = Vec::new();
    for step in 0..3 {
        count(&rank, step, LARGE).await;
        held.push(referred(&cluster, &window, "held", step + 1).await);
    }
    for (version, of) in (1..).zip(&held) {
        assert!(values(&window, of).iter().all(|&value| value == -(version as f32)), "{version}");
    }
    let resident = shard.memory();
    // The server gives the memory back, because no hold and no version needs it.
    window.send(held[0].hold).unwrap();
    until("the hold has ended", || values(&window, &held[0])[0] == 0.0).await;
    assert!(values(&window, &held[1]).iter().all(|&value| value == -2.0));
    drop(window);
    until("all holds have ended", || shard.memory() + 7 * LARGE as u64 / 2 < resident).await;
    count(&rank, 3, LARGE).await;
}

/// Returns whether an address is in a segment of a server.
fn is_shown(address: usize) -> bool {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mut lines = maps.lines().filter(|line| line.contains("memfd:zeroshard"));
    lines.any(|line| {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let [start, end] = [start, end].map(|hex| usize::from_str_radix(hex, 16).unwrap());
        (start..end).contains(&address)
    })
}

#[tokio::test]
async fn an_array_shows_each_version_and_keeps_it_and_what_is_written_to_it_until_the_next() {
    const LARGE: usize = 1_000_000;
    let cluster = Cluster::start_with(1, &["--device", "cpu"]);
    let rank = counting(&cluster, "array", LARGE).await;
    let mut array = Array::zeros(LARGE, DType::F32);
    assert!(!is_shown(array.bytes().as_ptr() as usize));
    for step in 0..4 {
        rank.pull(step, vec![Target::new(TensorId::new(0), &mut array)]).await.unwrap();
        let value = -(step as f32);
        let values = bytemuck::cast_slice_mut::<_, f32>(array.bytes_mut());
        assert!(values.iter().all(|&found| found == value), "{step}");
        assert!(is_shown(values.as_ptr() as usize), "{step}");
        values[7] = 99.0;
        count(&rank, step, LARGE).await;
        let values = bytemuck::cast_slice::<_, f32>(array.bytes());
        assert_eq!((values[6], values[7], values[8]), (value, 99.0, value));
        assert!(values[9..].iter().all(|&found| found == value), "{step}");
    }
}

#[tokio::test]
async fn what_a_process_reads_stays_when_the_server_stops() {
    const LARGE: usize = 1_000_000;
    let mut cluster = Cluster::start_with(1, &["--device", "cpu"]);
    let rank = counting(&cluster, "stopped", LARGE).await;
    let window = RawWindow::open(cluster.shards[0].address(), &rank).await.unwrap();
    count(&rank, 0, LARGE).await;
    let held = referred(&cluster, &window, "stopped", 1).await;
    let shard = RefCell::new(cluster.shards.remove(0));
    shard.borrow().terminate();
    until("the server has stopped", || shard.borrow_mut().ended().is_some()).await;
    assert!(values(&window, &held).iter().all(|&value| value == -1.0));
}

// promise: invalid-input
#[tokio::test]
async fn a_reference_outside_of_its_window_is_refused_and_changes_nothing() {
    const LARGE: usize = 300_000;
    let cluster = Cluster::start_with(1, &["--device", "cpu"]);
    let rank = counting(&cluster, "attacked", LARGE).await;
    let other = counting(&cluster, "other", LARGE).await;
    let address = cluster.shards[0].address();
    let window = RawWindow::open(address, &rank).await.unwrap();
    let foreign = RawWindow::open(address, &other).await.unwrap();
    let begin = |window: u64| pb::PushBegin { window, ..stock::begin(&rank, Some(0)) };
    let refer = |at: u64, bytes: u64| {
        let dtype = pb::Dtype::F32.into();
        pb::PushRequest { dtype, hold: 1, at, bytes, ..Default::default() }
    };
    let end = window.outbox_bytes;
    for (begin, reference, expected) in [
        (begin(window.number), refer(end - 4, 8), "outbox"),
        (begin(window.number), refer(u64::MAX - 3, 4), "outbox"),
        (begin(window.number), refer(0, 3), "elements"),
        (begin(window.number), refer(0, 4 * LARGE as u64 + 4), "within the 300000 elements"),
        (begin(0), refer(0, 4), "names no window"),
        (begin(foreign.number), refer(0, 4), "window has ended"),
        (begin(77), refer(0, 4), "window has ended"),
    ] {
        let refused = stock::push(address, vec![stock::open(begin), reference]).await.unwrap_err();
        assert!(refused.to_string().contains(expected), "{refused}");
    }
    let both = pb::PushRequest { payload: vec![0; 4].into(), ..refer(0, 4) };
    let messages = vec![stock::open(begin(window.number)), both];
    let refused = stock::push(address, messages).await.unwrap_err().to_string();
    assert!(refused.contains("a payload and elements in the window"), "{refused}");
    // A pull of one job through a window of another.
    let request = pb::PullRequest { window: foreign.number, ..stock::read("attacked", 0, [0]) };
    assert!(stock::pull(address, request).await.is_err());
    count(&rank, 0, LARGE).await;
    assert_eq!(training::pull(&rank, 1).await.unwrap()[0], vec![-1.0; LARGE]);
}

// promise: invalid-input
#[tokio::test]
async fn only_the_holder_of_the_secret_and_the_lease_gets_a_window_and_once() {
    let cluster = Cluster::start_with(1, &["--device", "cpu"]);
    let rank = counting(&cluster, "private", 300_000).await;
    let address = cluster.shards[0].address();
    let request = window::request(&rank);
    for wrong in [
        pb::OpenWindowRequest { lease: request.lease ^ 1, ..request.clone() },
        pb::OpenWindowRequest { rank: 1, ..request.clone() },
        pb::OpenWindowRequest { job_id: request.job_id ^ 1, ..request.clone() },
    ] {
        window::prepare(address, wrong).await.unwrap_err();
    }
    let opened = window::prepare(address, request).await.unwrap();
    let is_refused = |numbers| {
        let mut socket = window::connect(&opened.socket, numbers).unwrap();
        socket.read(&mut [0; 8]).unwrap_or(0) == 0
    };
    for numbers in [[opened.window, opened.secret ^ 1], [0, opened.secret], [0, 0]] {
        assert!(is_refused(numbers));
    }
    // Garbage of any length, and a socket that sends nothing, cost nothing.
    let mut garbage = window::connect(&opened.socket, [u64::MAX; 2]).unwrap();
    let _ = garbage.write_all(&[0xa5; 1 << 16]);
    let silent: Vec<_> =
        (0..50).map(|_| window::connect(&opened.socket, [1, 2]).unwrap()).collect();
    let mut first = window::connect(&opened.socket, [opened.window, opened.secret]).unwrap();
    assert_eq!(first.read(&mut [0; 8]).unwrap(), 8);
    assert!(is_refused([opened.window, opened.secret]), "it is open already");
    drop(silent);
    count(&rank, 0, 300_000).await;
}

#[tokio::test]
async fn a_process_can_write_to_its_outbox_only_and_resize_nothing() {
    let cluster = Cluster::start_with(1, &["--device", "cpu"]);
    let rank = counting(&cluster, "sealed", 300_000).await;
    let mut window = RawWindow::open(cluster.shards[0].address(), &rank).await.unwrap();
    let [parameters, outbox] = &window.files;
    let file = |of: &std::os::fd::OwnedFd| fs::File::from(of.try_clone().unwrap());
    for of in [parameters, outbox] {
        for len in [0, 1 << 40] {
            assert!(file(of).set_len(len).is_err());
        }
    }
    assert!(file(parameters).write_all(&[1]).is_err());
    let size = window.outbox_bytes as usize;
    let len = file(parameters).metadata().unwrap().len() as usize;
    let refused = Pieces::new(parameters.try_clone().unwrap(), len, 4096).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied, "{refused}");
    let pieces = Pieces::new(outbox.try_clone().unwrap(), size, 4096).unwrap();
    pieces.take().unwrap().fill(7);
    // The server answers nothing to numbers of holds that do not exist.
    for number in [0, 1, u64::MAX] {
        window.send(number).unwrap();
    }
    window.socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    assert_eq!(window.receive().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    count(&rank, 0, 300_000).await;
}

/// The windows of a job, and why a rank has none.
pub(crate) fn windows_in(status: &Status, job: &str) -> (u32, Option<String>) {
    let jobs = status.servers.iter().flat_map(|server| &server.jobs);
    let mut of = jobs.filter(|held| held.job == job);
    of.next().map_or((0, None), |held| (held.windows, held.no_window.clone()))
}

#[tokio::test]
async fn the_status_shows_who_shares_memory_and_why_another_rank_does_not() {
    let cluster = Cluster::start_with(1, &["--device", "cpu"]);
    let jobs = start(cluster.address(), &spec("shown", 2, DType::F32)).await;
    join_all(jobs.iter().map(|rank| training::step(rank, 0))).await;
    let both = |status: &Status| windows_in(status, "shown") == (2, None);
    until_status(&cluster, "both ranks have a window", both).await;
    // A process that the server's socket does not reach asks for a window, and does not connect.
    let address = cluster.shards[0].address();
    window::prepare(address, window::request(&jobs[1])).await.unwrap();
    let is_told = |status: &Status| {
        let (windows, why) = windows_in(status, "shown");
        assert_eq!(windows, 2);
        why.is_some_and(|why| why.contains("rank 1 has not connected to the server's socket"))
    };
    until_status(&cluster, "the reason is told", is_told).await;
}

#[tokio::test]
async fn the_memory_of_a_killed_server_is_not_kept_by_a_worker() {
    let mut cluster = Cluster::start_with(2, &["--device", "cpu"]);
    for round in 0..SERVERS {
        let name = format!("left-{round}");
        let spec = JobSpec { replicas: 2, min_servers: 2, ..spec(&name, 1, DType::F32) };
        let rank = start_over(Some(Transport::Shm), cluster.address(), &spec).await.remove(0);
        assert!(training::step(&rank, 0).await.unwrap().applied);
        kill_the_first(&mut cluster).await;
        rank.leave().await.unwrap();
        // The other server would keep the jobs of all rounds.
        connect(cluster.address()).await.delete_job(&name).await.unwrap();
        cluster.shards[0] = Cluster::shard(cluster.address(), &["--device", "cpu"]);
    }
}

/// The inodes of the segments that a process maps.
fn segments(process: u32) -> Vec<String> {
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    let lines = maps.lines().filter(|line| line.contains("memfd:zeroshard"));
    lines.filter_map(|line| line.split_whitespace().nth(4).map(str::to_owned)).collect()
}

/// Kills a server whose parameters the worker of this process has read, and waits until the worker
/// has dropped its memory.
async fn kill_the_first(cluster: &mut Cluster) {
    // Other tests of this process map segments of other servers.
    let segments = segments(cluster.shards[0].id());
    assert!(!segments.is_empty());
    let are_kept = || self::segments(std::process::id()).iter().any(|of| segments.contains(of));
    assert!(are_kept(), "the worker reads parameters of both servers");
    cluster.shards[0].kill();
    until("the worker has dropped the memory", || !are_kept()).await;
}

/// The open descriptors of a process, and its resident shared memory in bytes.
fn resources(process: &Process) -> (usize, u64) {
    let folder = format!("/proc/{}", process.id());
    let status = fs::read_to_string(format!("{folder}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
    let kilobytes: u64 = line.trim().trim_end_matches("kB").trim().parse().unwrap();
    (fs::read_dir(format!("{folder}/fd")).unwrap().count(), kilobytes << 10)
}

// promise: isolation
#[tokio::test]
async fn a_worker_that_is_killed_leaves_no_memory_and_no_descriptor() {
    let cluster = Cluster::start_with(1, &["--device", "cpu"]);
    let spec = spec("killed", 1, DType::F32);
    // The job has its parameters, and no rank.
    drop(start_over(Some(Transport::Grpc), cluster.address(), &spec).await);
    let shard = &cluster.shards[0];
    let windows = || find_metric(shard, "windows").unwrap();
    let mut before = None;
    for (round, phase) in Phase::ALL.into_iter().cycle().take(WORKERS).enumerate() {
        let mut paused = paused(cluster.address(), "killed", 0, phase).await;
        assert_eq!(windows(), 1.0, "round {round}, {phase}");
        paused.kill().unwrap();
        paused.wait().unwrap();
        until("the window has ended", || windows() == 0.0).await;
        // A call of the worker may end a moment later.
        let first = *before.get_or_insert_with(|| resources(shard));
        let are_back = || {
            let (descriptors, bytes) = resources(shard);
            descriptors <= first.0 + 4 && bytes <= first.1 + (1 << 20)
        };
        until("descriptors and memory are back", are_back).await;
    }
}

// promise: isolation
#[tokio::test]
async fn a_server_without_memory_for_an_outbox_is_used_over_grpc_or_the_error_has_the_numbers() {
    let cluster = Cluster::start_with(1, &["--device", "cpu", "--memory", "256MiB"]);
    let spec = job("tight", 1, sgd(1.0), vec![TensorSpec::new("w", [5 << 20])]);
    let rank = start(cluster.address(), &spec).await.remove(0);
    assert!(training::step(&rank, 0).await.unwrap().applied);
    assert_eq!(window_bytes(&cluster, "push"), 0, "20 MiB do not fit into a sixteenth");
    let is_told = |status: &Status| {
        let (windows, why) = windows_in(status, "tight");
        assert_eq!(windows, 0);
        why.is_some_and(|why| why.contains("outboxes of this server may have 16777216"))
    };
    until_status(&cluster, "the reason is told", is_told).await;
    assert!(
        find_metric(&cluster.shards[0], "window_refusals_total{reason=\"memory\"}") > Some(0.0)
    );
    let options = options().transport(Some(Transport::Shm));
    rank.leave().await.unwrap();
    let client = Client::connect(cluster.address(), options).await.unwrap();
    let rank = client.join("tight", 0).await.unwrap();
    let refused = training::step(&rank, 1).await.unwrap_err();
    assert!(matches!(refused, Error::OutOfMemory { .. }), "{refused}");
    assert!(refused.to_string().contains("outboxes of this server may have 16777216 bytes"));
}
