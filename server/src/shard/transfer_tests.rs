//! Pushes and pulls of boxes, from message to message.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt, TryStreamExt};
use http::HeaderMap;
use http_body_util::Full;
use tokio::sync::mpsc::Receiver;
use tokio_util::sync::CancellationToken;
use zeroshard_kernels::Cpu;
use zeroshard_model::{
    Attempt, DType,
    DimPlacement::{Partial, Shard},
    Error, JobSpec, Manifest, Placement, ProcessMesh, Reduction, Result, Server, TensorBox,
    TensorLayout, TensorSpec,
};
use zeroshard_proto::{
    convert::box_message,
    frame::{Event, Extent, Reader, Writer},
    pb::{self, push_begin::Contents, serve_request::Event as Said},
};
use zeroshard_shard::{
    budget::Budget, device::Device, fair::Resources, job::Opening, slice::Apply,
};

use super::{
    events::Events,
    job::{Job, Origin},
    pull, push,
    store::{Limits, Store},
};
use crate::{access::Caller, failure::Failure, memory::Budgets, metrics::Metrics};

const EPOCH: u64 = 1;
const JOB_ID: u64 = 77;

/// The lease of a rank.
fn lease(rank: u32) -> u64 {
    1000 + u64::from(rank)
}

/// One server with one job.
pub(super) struct Subject {
    pub(super) store: Arc<Store<Cpu>>,
    said: Receiver<Said>,
}

impl Subject {
    pub(super) fn new(spec: JobSpec) -> Self {
        Self::pinning(spec, u64::MAX)
    }

    /// With this budget for the memory that pulls hold.
    fn pinning(spec: JobSpec, pins: u64) -> Self {
        let limits = Limits {
            wait: std::time::Duration::from_secs(60),
            max_message: 1 << 20,
            budgets: Budgets {
                memory: u64::MAX,
                arrays: u64::MAX,
                parked: 0,
                pinned: 0,
                history: 0,
                held: u64::MAX,
                snapshots: 0,
                outboxes: 1 << 30,
            },
        };
        let mut store = Store::new(
            vec![Device::new(Arc::new(Cpu::new()), None)],
            limits,
            Metrics::new(),
            Failure::default(),
        );
        store.held = Budget::new(pins);
        let store = Arc::new(store);
        let events = Events::default();
        let said = events.connect();
        let servers = vec![Server { id: 9, incarnation: 1, address: "host:1".to_owned() }];
        let placement = Placement::new(servers, 1, vec![0; spec.manifest.slices().len()]).unwrap();
        let world = spec.world;
        let opening = Opening {
            id: JOB_ID,
            spec,
            epoch: EPOCH,
            placement,
            server: 9,
            version: None,
            is_restored: false,
            closed: CancellationToken::new(),
            devices: store.devices.clone(),
            shares: Resources::new().shares(),
            budget: store.budget.clone(),
        };
        let job = Arc::new(Job::open(opening, Origin::default(), events).unwrap());
        (0..world).for_each(|rank| job.grant(rank, lease(rank)));
        store.insert(job);
        Self { store, said }
    }

    /// Pushes `values` of slice 0 from element `offset` on as `rank`, for a step or as initial
    /// values.
    async fn push(&self, rank: u32, step: Option<u64>, offset: u64, values: &[f32]) -> Result<()> {
        self.push_to(0, rank, step, offset, values).await
    }

    pub(super) async fn push_to(
        &self,
        slice: u32,
        rank: u32,
        step: Option<u64>,
        offset: u64,
        values: &[f32],
    ) -> Result<()> {
        let mut writer = Writer::default();
        writer.begin(begin(rank, step));
        let payload = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        writer.extent(Extent { slice, offset, wire: DType::F32.into() }, payload);
        writer.flush();
        let frames: BytesMut = std::iter::from_fn(|| writer.next_frame()).flatten().collect();
        let pusher = push::Pusher { caller: Caller::Trusted, weight: 1, headers: HeaderMap::new() };
        push::push(&self.store, pusher, Full::new(frames.freeze()), None).await.map(|_| ())
    }

    /// The next message from the server to the coordinator, except about leases.
    pub(super) async fn told(&mut self) -> Said {
        loop {
            match self.said.recv().await.expect("it says something") {
                Said::Granted(_) => {}
                other => return other,
            }
        }
    }

    /// Waits until all initial parameters have arrived, and publishes them.
    pub(super) async fn publish(&mut self) {
        assert!(matches!(self.told().await, Said::Initialised(_)));
        self.store.job("job", JOB_ID).unwrap().publish(EPOCH).unwrap();
    }

    /// The contents of a pull of version 0 as f32, and the beginning of each message.
    async fn pull(&self, request: pb::PullRequest) -> Result<(Vec<f32>, Vec<u64>)> {
        let dtype = pb::Dtype::from(DType::F32).into();
        let request = pb::PullRequest { job: "job".into(), dtype, ..request };
        let frames: Vec<Bytes> = pull::pull(&self.store, &request, &http::HeaderMap::new(), None)?
            .boxed()
            .try_collect()
            .await?;
        let frames: BytesMut = frames.into_iter().flatten().collect();
        let mut reader = Reader::new(Full::new(frames.freeze()), 1 << 20);
        let (mut values, mut offsets) = (Vec::new(), Vec::new());
        while let Some(event) = reader.next().await? {
            match event {
                Event::Begin(_) | Event::Reference(_) => panic!("only payloads were asked for"),
                Event::Extent(extent, _) => offsets.push(extent.offset),
                Event::Payload(bytes) => {
                    values.extend(bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)));
                }
            }
        }
        Ok((values, offsets))
    }
}

fn begin(rank: u32, step: Option<u64>) -> pb::PushBegin {
    let contents = match step {
        Some(step) => Contents::Gradients(pb::Gradients { step, ..Default::default() }),
        None => Contents::Upload(pb::Upload::default()),
    };
    pb::PushBegin {
        job: "job".into(),
        job_id: JOB_ID,
        rank,
        lease: lease(rank),
        epoch: EPOCH,
        covers: Vec::new(),
        contents: Some(contents),
        ..Default::default()
    }
}

fn boxed(tensor: usize, offset: &[u64], size: &[u64]) -> pb::Box {
    box_message(&TensorBox { offset: offset.into(), size: size.into() }, tensor)
}

fn extent(offset: u64, length: u64) -> pb::Extent {
    pb::Extent { slice: 0, offset, length }
}

fn what(result: Result<impl std::fmt::Debug>) -> String {
    match result {
        Err(Error::Invalid { what, .. }) => what,
        Err(Error::Refused { sentence }) => sentence,
        other => panic!("{other:?}"),
    }
}

const ROWS: u64 = 64;
const COLUMNS: u64 = 100;

/// A matrix, and another that is tied to it; element i has the value i.
async fn matrix() -> Subject {
    let tied =
        TensorSpec { alias_of: Some("w".into()), ..TensorSpec::new("tied", [ROWS, COLUMNS]) };
    let manifest = Manifest::new(vec![TensorSpec::new("w", [ROWS, COLUMNS]), tied]).unwrap();
    let mut subject = Subject::new(JobSpec::new("job", manifest, vec!["sgd".parse().unwrap()]));
    let values: Vec<f32> = (0..ROWS * COLUMNS).map(|i| i as f32).collect();
    subject.push(0, None, 0, &values).await.unwrap();
    subject.publish().await;
    subject
}

#[tokio::test]
async fn a_box_is_pulled_as_its_elements_with_positions_in_the_box() {
    let subject = matrix().await;
    let expected: Vec<f32> = (3..63)
        .flat_map(|row| (10..60).map(move |column| (row * COLUMNS + column) as f32))
        .collect();
    // The box is requested of the tensor itself, and of the tensor that is tied to it.
    for tensor in [0, 1] {
        let boxes = vec![boxed(tensor, &[3, 10], &[60, 50])];
        let request = pb::PullRequest { boxes, chunk_bytes: 4096, ..Default::default() };
        let sent = || {
            let mut sent = 0;
            subject
                .store
                .job("job", 0)
                .unwrap()
                .count(|series| [sent, _] = series.sent_and_skipped());
            sent
        };
        let before = sent();
        let all = pb::PullRequest { extents: vec![extent(0, 0)], ..request.clone() };
        assert_eq!(subject.pull(all).await.unwrap(), (expected.clone(), vec![0, 1024, 2048]));
        assert_eq!(sent() - before, 4 * 60 * 50);
        let some = pb::PullRequest { extents: vec![extent(2990, 0), extent(49, 2)], ..request };
        let parts = [&expected[2990..], &expected[49..51]].concat();
        assert_eq!(subject.pull(some).await.unwrap(), (parts, vec![2990, 49]));
    }
    // Rows are one run.
    let rows = pb::PullRequest {
        boxes: vec![boxed(0, &[5, 0], &[2, COLUMNS])],
        extents: vec![extent(0, 0)],
        ..Default::default()
    };
    let expected: Vec<f32> = (500..700).map(|i| i as f32).collect();
    assert_eq!(subject.pull(rows).await.unwrap().0, expected);
}

#[tokio::test]
async fn boxes_that_do_not_fit_are_refused() {
    let subject = matrix().await;
    let pull = async |boxes: &[pb::Box], extents: &[pb::Extent]| {
        let (boxes, extents) = (boxes.to_vec(), extents.to_vec());
        what(subject.pull(pb::PullRequest { boxes, extents, ..Default::default() }).await)
    };
    assert_eq!(pull(&[boxed(2, &[0], &[1])], &[]).await, "tensor of a box");
    assert_eq!(pull(&[boxed(0, &[60, 0], &[5, 1])], &[]).await, "box of tensor \"w\"");
    assert_eq!(pull(&[boxed(0, &[60], &[1])], &[]).await, "box of tensor \"w\"");
    let one = |tensor| boxed(tensor, &[0, 0], &[2, 2]);
    let twice = "the request has more than one box of tensor \"w\" and the tensors tied to it";
    assert_eq!(pull(&[one(0), one(0)], &[]).await, twice);
    assert_eq!(pull(&[one(0), one(1)], &[]).await, twice);
    assert_eq!(pull(&[one(0)], &[extent(3, 2)]).await, "extent of slice 0");
    assert_eq!(pull(&[boxed(0, &[0, 0], &[0, 2])], &[extent(0, 0)]).await, "extent of slice 0");
    let outside =
        pb::PullRequest { boxes: vec![one(1)], extents: vec![extent(4, 1)], ..Default::default() };
    assert_eq!(
        subject.pull(outside).await.unwrap_err().to_string(),
        "extent of slice 0 is 1 elements from position 4; it must be within the 4 elements (of 6400) of the slice that are in the box \
         of \"w\""
    );
}

/// A matrix of four by four, with its columns sharded over `tp` and the mean over `dp`.
fn parallel() -> Subject {
    let mesh = ProcessMesh::dense([2, 2], ["dp", "tp"]).unwrap();
    let placements = [Partial(Reduction::Avg), Shard(1)];
    let layout = Some(TensorLayout { mesh: 0, placements: placements.to_vec() });
    let manifest = Manifest::new(vec![TensorSpec { layout, ..TensorSpec::new("w", [4, 4]) }]);
    let groups = vec!["adamw".parse().unwrap()];
    let spec = JobSpec::new("job", manifest.unwrap(), groups);
    Subject::new(JobSpec { world: 4, meshes: vec![Arc::new(mesh)], ..spec })
}

#[tokio::test]
async fn each_rank_pushes_its_box_and_missing_boxes_are_named_with_coordinates() {
    let mut subject = parallel();
    let job = subject.store.job("job", JOB_ID).unwrap();
    let waiting_for = || job.waiting_for().unwrap_or_default();
    assert_eq!(waiting_for(), "initial parameters of rank 0 (dp 0, tp 0) for tensor \"w\"");
    subject.push(0, None, 0, &[1.0; 8]).await.unwrap();
    assert_eq!(waiting_for(), "initial parameters of rank 1 (dp 0, tp 1) for tensor \"w\"");
    subject.push(1, None, 0, &[2.0; 8]).await.unwrap();
    subject.publish().await;
    let whole = pb::PullRequest { extents: vec![extent(0, 0)], ..Default::default() };
    assert_eq!(subject.pull(whole).await.unwrap().0, [1.0, 1.0, 2.0, 2.0].repeat(4));

    for rank in [2, 1, 0] {
        subject.push(rank, Some(0), 0, &[rank as f32; 8]).await.unwrap();
    }
    assert_eq!(waiting_for(), "gradient of rank 3 (dp 1, tp 1) for tensor \"w\"");
    subject.push(3, Some(0), 0, &[3.0; 8]).await.unwrap();
    let Said::Ready(ready) = subject.told().await else { panic!("ready") };
    assert_eq!(ready.slices[0].sum_of_squares, 8.0 * 4.0 + 8.0 * 16.0);
}

async fn refused(subject: &Subject, rank: u32, step: Option<u64>, offset: u64) -> Error {
    subject.push(rank, step, offset, &[7.0; 8]).await.unwrap_err()
}

#[tokio::test]
async fn elements_that_a_rank_does_not_hold_are_refused_and_change_nothing() {
    let mut subject = parallel();
    assert_eq!(
        refused(&subject, 1, None, 1).await.to_string(),
        "extent of slice 0 of tensor \"w\" is 8 elements from position 1; it must be within the 8 \
         elements that rank 1 (dp 0, tp 1) holds of the 16 elements of the slice"
    );
    assert!(
        matches!(refused(&subject, 2, None, 0).await, Error::Refused { .. }),
        "rank 0 uploads that box"
    );
    for rank in [0, 1] {
        subject.push(rank, None, 0, &[0.5; 8]).await.unwrap();
    }
    subject.publish().await;
    assert!(matches!(refused(&subject, 3, Some(0), u64::MAX).await, Error::Invalid { .. }));
    let whole = pb::PullRequest { extents: vec![extent(0, 0)], ..Default::default() };
    assert_eq!(subject.pull(whole).await.unwrap().0, [0.5; 16]);
    let job = subject.store.job("job", 0).unwrap();
    job.count(|series| assert_eq!(series.sent_and_skipped()[1], 0));
}

const SLICES: u32 = 4;
const NUMEL: usize = 1000;
/// The size of one slice.
const BYTES: u64 = 4 * NUMEL as u64;

/// Some small tensors of one slice each at version 0, with a budget for pulls to hold `pins` of
/// them.
async fn small(pins: u64) -> Subject {
    let tensor = |i| TensorSpec::new(format!("w{i}"), [NUMEL as u64]);
    let manifest = Manifest::new((0..SLICES).map(tensor).collect()).unwrap();
    let spec = JobSpec::new("job", manifest, vec!["sgd".parse().unwrap()]);
    let mut subject = Subject::pinning(spec, pins * BYTES);
    for slice in 0..SLICES {
        subject.push_to(slice, 0, None, 0, &[0.0; NUMEL]).await.unwrap();
    }
    subject.publish().await;
    subject
}

impl Subject {
    /// Starts a pull of all slices at version 0.
    fn begin(&self) -> impl futures_util::Stream<Item = Result<Bytes>> + Unpin + use<> {
        let request = pb::PullRequest {
            job: "job".into(),
            dtype: pb::Dtype::from(DType::F32).into(),
            extents: (0..SLICES).map(|slice| pb::Extent { slice, ..extent(0, 0) }).collect(),
            ..Default::default()
        };
        Box::pin(pull::pull(&self.store, &request, &http::HeaderMap::new(), None).unwrap())
    }

    async fn step(&self) {
        for slice in 0..SLICES {
            self.push_to(slice, 0, Some(0), 0, &[1.0; NUMEL]).await.unwrap();
        }
        let job = self.store.job("job", JOB_ID).unwrap();
        let apply = Apply {
            groups: &job.spec.groups,
            coefficient: 1.0,
            unclipped: 1.0,
            gradient_factors: &[],
        };
        job.decide(&Arc::default(), Attempt::first(EPOCH, 0), Some(apply)).unwrap();
    }
}

#[tokio::test]
async fn pulls_hold_slices_within_the_budget_and_lose_the_others_after_a_step() {
    let subject = small(2).await;
    let pull = subject.begin();
    assert_eq!(subject.store.held.used(), 2 * BYTES);
    let other = subject.begin();
    assert_eq!(subject.store.held.used(), 2 * BYTES, "it is room for all pulls");
    subject.step().await;
    let gone: Result<Vec<Bytes>> = pull.try_collect().await;
    assert!(matches!(gone, Err(Error::VersionGone { version: 0, current: 1, .. })), "{gone:?}");
    assert_eq!(subject.store.held.used(), 0);
    drop(other);

    let subject = small(SLICES.into()).await;
    let pull = subject.begin();
    subject.step().await;
    let frames: Vec<Bytes> = pull.try_collect().await.unwrap();
    assert!(frames.iter().map(Bytes::len).sum::<usize>() > SLICES as usize * BYTES as usize);
    assert_eq!(subject.store.held.used(), 0);
}

#[tokio::test]
async fn pulls_continue_one_slice_at_a_time_without_a_budget() {
    let subject = small(0).await;
    let (one, other) = (subject.begin(), subject.begin());
    let (one, other): (Result<Vec<Bytes>>, Result<Vec<Bytes>>) =
        tokio::join!(one.try_collect(), other.try_collect());
    assert_eq!(one.unwrap(), other.unwrap());
}

#[tokio::test]
async fn an_open_pull_of_a_deleted_job_fails() {
    let subject = small(SLICES.into()).await;
    let mut pull = subject.begin();
    subject.store.close("job", JOB_ID);
    let ended = pull.next().await.unwrap();
    assert!(matches!(ended, Err(Error::JobFailed { .. })), "{ended:?}");
}

#[tokio::test]
async fn an_update_does_not_bring_back_the_series_of_a_closed_job() {
    let subject = small(SLICES.into()).await;
    let stats = subject.store.stats();
    let text = || subject.store.metrics.text();
    assert!(text().contains("zeroshard_job_version{job=\"job\",role=\"shard\"} 0"));
    let open = subject.store.job("job", JOB_ID).unwrap();
    subject.store.close("job", JOB_ID);
    subject.store.show(&stats);
    open.count(|series| series.sent(1));
    assert!(!text().contains("job=\"job\""), "{}", text());
}
