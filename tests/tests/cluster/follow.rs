//! Readers follow a job, and receive what its steps have changed.
//!
//! promise: consistent-reads

use std::{
    collections::{BTreeMap, HashMap, hash_map::DefaultHasher},
    hash::{Hash, Hasher},
    ops::Range,
    time::Duration,
};

use half::{bf16, f16};
use tokio::sync::watch;
use zeroshard_client::{
    Cluster as Client, Commit, Copied, Error, Follow, FollowedVersion, Follower, Job, Pin, Slots,
    Target, TensorData, TensorId,
};
use zeroshard_model::{DType, JobSpec, TensorSpec, geometry::blocks::SLICE};
use zeroshard_tests::{Cluster, Process, synthetic, training};

use crate::{
    adamw,
    checkpoints::{directory, policy, until_saved},
    connect, job, options,
    replicas::{replace, step, until_redundant},
    restored::train,
    sgd, start,
};

/// A hash of all values per version and dtype, as the trainer has pulled them.
#[derive(Default)]
pub(crate) struct Truth(watch::Sender<HashMap<(u64, DType), u64>>);

impl Truth {
    /// Pulls a version as a rank.
    pub(crate) async fn record(&self, job: &Job, version: u64) {
        self.insert(job.spec(), version, &training::pull(job, version).await.unwrap());
    }

    /// Pulls the newest version as a reader, and checks its number.
    pub(crate) async fn record_pinned(&self, client: &Client, job: &str, version: u64) {
        let pinned = client.pin(job, &Pin::default()).await.unwrap();
        assert_eq!(pinned.version(), version);
        let tensors = pinned.spec().manifest.tensors().iter();
        let mut values: Vec<_> = tensors.map(|of| vec![f32::NAN; of.numel() as usize]).collect();
        let targets = values.iter_mut().enumerate();
        let targets = targets.map(|(tensor, data)| Target::new(TensorId::new(tensor), data));
        pinned.pull(targets.collect()).await.unwrap();
        self.insert(pinned.spec(), version, &values);
    }

    fn insert(&self, spec: &JobSpec, version: u64, values: &[Vec<f32>]) {
        let mut hashes = Vec::new();
        for dtype in DType::ALL {
            let hash = hash_of(spec, dtype, |tensor| encoded(&values[tensor], dtype));
            hashes.push(((version, dtype), hash));
        }
        self.0.send_modify(|all| all.extend(hashes));
    }

    pub(crate) async fn train(&self, job: &Job, steps: Range<u64>) {
        for number in steps {
            self.record(job, number).await;
            step(job, number).await;
        }
    }

    /// Waits until the trainer has pulled a version.
    pub(crate) async fn until(&self, version: u64) {
        let mut all = self.0.subscribe();
        let pulled = all.wait_for(|all| all.contains_key(&(version, DType::F32)));
        let pulled = tokio::time::timeout(options().timeout, pulled).await;
        assert!(pulled.is_ok(), "the trainer has not pulled version {version} in time");
    }

    /// Compares a reader's version with the trainer's, and waits until the trainer has pulled it.
    pub(crate) async fn check(&self, reader: &Reader) {
        let (version, dtype) = (reader.follower.version().unwrap(), reader.dtype);
        self.until(version).await;
        let found = hash_of(reader.follower.spec(), dtype, |tensor| reader.arrays[&tensor].clone());
        assert_eq!(found, self.0.borrow()[&(version, dtype)], "{dtype}: version {version}");
    }
}

pub(crate) fn encoded(values: &[f32], dtype: DType) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(values.len() * dtype.size());
    for &value in values {
        match dtype {
            DType::F32 => bytes.extend_from_slice(&value.to_le_bytes()),
            DType::Bf16 => bytes.extend_from_slice(&bf16::from_f32(value).to_le_bytes()),
            DType::F16 => bytes.extend_from_slice(&f16::from_f32(value).to_le_bytes()),
        }
    }
    bytes
}

/// Returns a hash of all parameters.
fn hash_of(spec: &JobSpec, dtype: DType, values: impl Fn(usize) -> Vec<u8>) -> u64 {
    let mut hasher = DefaultHasher::new();
    let tensors = spec.manifest.tensors().iter().enumerate();
    for (tensor, of) in tensors.filter(|(_, of)| !of.buffer && of.alias_of.is_none()) {
        let values = values(tensor);
        assert_eq!(values.len(), of.numel() as usize * dtype.size());
        values.hash(&mut hasher);
    }
    hasher.finish()
}

/// A reader with arrays of its own.
pub(crate) struct Reader {
    pub(crate) follower: Follower,
    dtype: DType,
    arrays: BTreeMap<usize, Vec<u8>>,
    /// The versions that were applied.
    pub(crate) seen: Vec<u64>,
    /// The number of bytes of changes, without full copies.
    pub(crate) bytes: u64,
}

impl Reader {
    async fn new(client: &Client, job: &str, dtype: DType) -> Self {
        Self::with(client, job, Follow { dtype, ..Follow::default() }).await
    }

    pub(crate) async fn with(client: &Client, job: &str, follow: Follow) -> Self {
        let dtype = follow.dtype;
        let follower = client.follow(job, follow).await.unwrap();
        let tensors = follower.tensors().into_iter();
        let arrays = tensors.map(|tensor| {
            let numel = follower.spec().manifest.tensors()[tensor].numel() as usize;
            (tensor, vec![0xaa; numel * follower.dtype_of(tensor).size()])
        });
        let arrays = arrays.collect();
        Self { follower, dtype, arrays, seen: Vec::new(), bytes: 0 }
    }

    async fn apply(&mut self, version: &mut FollowedVersion) -> Result<(), Error> {
        let dtypes: BTreeMap<usize, DType> =
            self.arrays.keys().map(|&tensor| (tensor, self.follower.dtype_of(tensor))).collect();
        let targets = self.arrays.iter_mut().map(|(&tensor, array)| Target {
            tensor: TensorId::new(tensor),
            bounds: None,
            data: Slots::new(array, dtypes[&tensor]).unwrap(),
        });
        let targets = targets.collect();
        self.follower.apply(version, targets).await?;
        self.seen.push(version.version().version);
        if version.copied().is_none() {
            self.bytes += version.bytes();
        }
        Ok(())
    }

    /// Applies the next version.
    pub(crate) async fn next(&mut self) -> FollowedVersion {
        let mut version = self.follower.next().await.unwrap();
        self.apply(&mut version).await.unwrap();
        assert_eq!(self.follower.version(), Some(version.version().version));
        version
    }

    /// Follows the job until version `end`, and checks every version. Waits for `skips` versions
    /// between two requests.
    pub(crate) async fn follow(mut self, end: u64, skips: u64, truth: &Truth) -> Self {
        loop {
            let version = self.next().await.version().version;
            truth.check(&self).await;
            if version == end {
                assert!(self.seen.is_sorted_by(|one, other| one < other), "{:?}", self.seen);
                return self;
            }
            let wanted = end.min(version + skips);
            truth.until(wanted).await;
        }
    }
}

/// Tensors of several dtypes, one of which has more than one slice.
pub(crate) fn tensors() -> Vec<TensorSpec> {
    let mut tensors = synthetic::kinds_and_large(&adamw());
    for tensor in &mut tensors {
        match &*tensor.name {
            "bias" | "large" => tensor.dtype = DType::Bf16,
            "one" => tensor.dtype = DType::F16,
            _ => {}
        }
    }
    tensors
}

/// The bytes of changes that a server has sent.
pub(crate) fn changes_sent(shard: &Process) -> u64 {
    let metrics = shard.get("/metrics");
    let line = metrics.lines().find(|line| line.contains("job_change_bytes_total{"));
    line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_have_every_version_that_they_report_while_a_server_is_killed() {
    const STEPS: u64 = 30;
    let mut cluster = Cluster::start(2);
    let spec = JobSpec { min_servers: 2, replicas: 2, ..job("live", 1, adamw(), tensors()) };
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let (truth, client) = (Truth::default(), connect(cluster.address()).await);
    let training = async {
        truth.train(&trainer, 0..15).await;
        until_redundant(&cluster.coordinator, "live").await;
        replace(&mut cluster, 0);
        truth.train(&trainer, 15..STEPS).await;
        truth.record(&trainer, STEPS).await;
    };
    let early = async {
        let reader = Reader::new(&client, "live", DType::Bf16).await;
        reader.follow(STEPS, 0, &truth).await
    };
    let slow = async {
        let reader = Reader::new(&client, "live", DType::F32).await;
        reader.follow(STEPS, 4, &truth).await
    };
    let late = async {
        truth.until(8).await;
        let reader = Reader::new(&client, "live", DType::F16).await;
        reader.follow(STEPS, 0, &truth).await
    };
    let ((), early, slow, late) = tokio::join!(training, early, slow, late);
    for reader in [&early, &slow, &late] {
        let copies: u64 = reader.follower.copies().values().sum();
        assert_eq!(reader.follower.copies()[&Copied::Joined], 1);
        println!(
            "{}: {} versions, {copies} full copies {:?}, {} bytes of changes",
            reader.dtype,
            reader.seen.len(),
            reader.follower.copies(),
            reader.bytes
        );
    }
    let slow = slow.seen.len() as u64;
    assert!(slow <= STEPS / 4 + 2, "a reader that asks seldom skips versions: {slow}");
    // The backup has recorded the same changes as the server that was killed.
    assert_eq!(*early.follower.copies(), [(Copied::Joined, 1)].into());
}

#[tokio::test]
async fn a_reader_asks_primaries_and_backups_in_turn() {
    let cluster = Cluster::start(2);
    let tensors = vec![TensorSpec::new("w", [1_000])];
    let spec = JobSpec { min_servers: 2, replicas: 2, ..job("turns", 1, sgd(0.1), tensors) };
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let (truth, client) = (Truth::default(), connect(cluster.address()).await);
    until_redundant(&cluster.coordinator, "turns").await;
    let mut reader = Reader::new(&client, "turns", DType::Bf16).await;
    truth.record(&trainer, 0).await;
    reader.next().await;
    for number in 0..6 {
        step(&trainer, number).await;
        truth.record(&trainer, number + 1).await;
        assert_eq!(reader.next().await.copied(), None);
        truth.check(&reader).await;
    }
    for shard in &cluster.shards {
        assert!(changes_sent(shard) > 0, "{} has sent no change", shard.address());
    }
}

#[tokio::test]
async fn arrays_that_somebody_has_written_to_get_a_full_copy() {
    let cluster = Cluster::start(2);
    let tensors = vec![TensorSpec::new("w", [SLICE as u64 + 10]), TensorSpec::new("b", [3])];
    let spec = job("written", 1, sgd(0.1), tensors);
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let (truth, client) = (Truth::default(), connect(cluster.address()).await);
    let mut reader = Reader::new(&client, "written", DType::Bf16).await;
    truth.record(&trainer, 0).await;
    assert_eq!(reader.next().await.copied(), Some(Copied::Joined));
    truth.check(&reader).await;
    for number in 0..4 {
        step(&trainer, number).await;
        truth.record(&trainer, number + 1).await;
        if number == 2 {
            reader.arrays.get_mut(&1).unwrap()[1] ^= 1;
        }
        let before = reader.arrays.clone();
        let mut version = reader.follower.next().await.unwrap();
        assert_eq!(reader.arrays, before, "nothing is written before `apply`");
        assert_eq!(version.copied(), None);
        reader.apply(&mut version).await.unwrap();
        truth.check(&reader).await;
        let expected = (number == 2).then_some(Copied::Differed);
        assert_eq!((version.copied(), version.version().version), (expected, number + 1));
        // The arrays have the version already, so it cannot be applied again.
        if version.copied().is_none() {
            let again = reader.apply(&mut version).await;
            assert!(matches!(again, Err(Error::Refused { .. })), "{again:?}");
        }
        truth.check(&reader).await;
    }
    assert_eq!(reader.follower.copies()[&Copied::Differed], 1);
}

#[tokio::test]
async fn full_copies_wait_for_the_room_of_other_ones() {
    const NUMEL: u64 = 300_000;
    // A pin takes more than half of it. Pins of one version share their memory.
    let bytes = (NUMEL * 6).to_string();
    let cluster = Cluster::start_with(1, &["--pinned-bytes", &bytes]);
    let spec = job("full", 1, sgd(0.1), vec![TensorSpec::new("w", [NUMEL])]);
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let (truth, client) = (Truth::default(), connect(cluster.address()).await);
    let other = client.pin("full", &Pin::default()).await.unwrap();
    truth.train(&trainer, 0..1).await;
    truth.record(&trainer, 1).await;
    let refused = client.pin("full", &Pin::default()).await.unwrap_err();
    assert!(matches!(refused, Error::OutOfMemory { .. }), "{refused}");
    let readers = (0..3).map(|_| async {
        let mut reader = Reader::new(&client, "full", DType::Bf16).await;
        assert_eq!(reader.next().await.copied(), Some(Copied::Joined));
        truth.check(&reader).await;
    });
    let mut readers = std::pin::pin!(futures_util::future::join_all(readers));
    let early = tokio::time::timeout(Duration::from_millis(300), readers.as_mut()).await;
    assert!(early.is_err(), "there is no room yet");
    drop(other);
    readers.await;
}

#[tokio::test]
async fn a_skipped_step_is_an_empty_change_and_a_rewind_a_full_copy() {
    const NUMEL: usize = 40_000;
    let (directory, cluster) = (directory(), Cluster::start(2));
    let tensors = vec![TensorSpec::new("w", [NUMEL as u64])];
    let checkpoints = Some(policy(directory.path(), 2));
    let spec = JobSpec { checkpoints, ..job("back", 1, sgd(0.1), tensors) };
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let (truth, client) = (Truth::default(), connect(cluster.address()).await);
    let mut reader = Reader::new(&client, "back", DType::F32).await;
    reader.next().await;
    step(&trainer, 0).await;
    assert_eq!(reader.next().await.copied(), None);
    let gradient = TensorData::new(TensorId::new(0), vec![f32::NAN; NUMEL]);
    trainer.attempt(1).unwrap().push(vec![gradient]).await.unwrap();
    let report = training::commit(&trainer, 1, Commit::default()).await.unwrap();
    assert!(!report.applied);
    let before = reader.arrays.clone();
    let skipped = reader.next().await;
    assert_eq!((skipped.version().version, skipped.changed_fraction()), (2, Some(0.0)));
    assert!(skipped.bytes() < 10 && reader.arrays == before, "{} bytes", skipped.bytes());
    until_saved(directory.path(), "back", 2).await;
    truth.train(&trainer, 2..4).await;
    truth.record(&trainer, 4).await;
    // The trainer goes on as soon as a step is decided, before the servers have applied it.
    while reader.next().await.version().version < 4 {}
    truth.check(&reader).await;
    assert_eq!(client.rewind("back", 2, None, &[]).await.unwrap(), 1);
    assert_eq!(train(&trainer, 4, 5).await, [2]);
    truth.record_pinned(&client, "back", 5).await;
    let rewound = reader.next().await;
    let version = rewound.version();
    assert_eq!((version.version, version.line), (5, 1));
    assert_eq!(rewound.copied(), Some(Copied::Rewound));
    truth.check(&reader).await;
    // The trainer, whose window is from before the rewind, reads the same values.
    truth.record(&trainer, 5).await;
    truth.check(&reader).await;
    step(&trainer, 5).await;
    truth.record_pinned(&client, "back", 6).await;
    let next = reader.next().await;
    assert_eq!((next.version().version, next.copied()), (6, None));
    truth.check(&reader).await;
}
