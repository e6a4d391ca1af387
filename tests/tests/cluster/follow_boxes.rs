//! Readers follow boxes of tensors, as the ranks of a tensor-parallel rollout do.
//!
//! promise: consistent-reads

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use tokio::sync::watch;
use zeroshard_client::{
    Cluster as Client, Copied, Error, Follow, FollowedValues, FollowedVersion, Follower, Job, Pin,
    Slots, Target, TensorId,
};
use zeroshard_model::{DType, JobSpec, Manifest, StridedBox, TensorBox, TensorSpec};
use zeroshard_net::transport::MAX_CONTROL_MESSAGE;
use zeroshard_proto::{
    pb::{self, shard_service_client::ShardServiceClient},
    status::from_status,
};
use zeroshard_tests::{Cluster, training};

use crate::{
    adamw, connect,
    follow::encoded,
    job, options,
    replicas::{replace, step, until_redundant},
    sgd, start,
};

/// Tensors of one to four dimensions, one of which has two slices and rows that they share.
fn tensors() -> Vec<TensorSpec> {
    let bf16 = |of: TensorSpec| TensorSpec { dtype: DType::Bf16, ..of };
    vec![
        bf16(TensorSpec::new("wide", [1_030, 4_100])),
        TensorSpec::new("square", [64, 48]),
        bf16(TensorSpec::new("narrow", [50, 2])),
        TensorSpec::new("kernel", [6, 4, 3, 5]),
        TensorSpec::new("bias", [48]),
    ]
}

/// The part of a rank among two in each tensor with the dimension `dim`. The first part is larger
/// if the dimension has an odd size.
fn split(tensors: &[TensorSpec], dim: usize, rank: u64) -> BTreeMap<String, TensorBox> {
    let part = |of: &TensorSpec| {
        let mut bounds = TensorBox::whole(&of.shape);
        let (size, first) = (of.shape.get(dim)?, of.shape[dim].div_ceil(2));
        bounds.offset[dim] = rank * first;
        bounds.size[dim] = if rank == 0 { first } else { size - first };
        Some((of.name.clone(), bounds))
    };
    tensors.iter().filter_map(part).collect()
}

/// Returns the elements of a box, row-major.
fn cut(values: &[f32], shape: &[u64], bounds: &TensorBox) -> Vec<f32> {
    let of = StridedBox::new(shape, bounds.clone());
    of.runs(0..of.numel()).flat_map(|(_, run)| values[run].to_vec()).collect()
}

/// A reader of boxes.
struct Reader {
    follower: Follower,
    follow: Follow,
    values: FollowedValues,
    seen: Vec<u64>,
}

impl Reader {
    async fn new(client: &Client, job: &str, follow: Follow) -> Self {
        let follower = client.follow(job, follow.clone()).await.unwrap();
        let values = FollowedValues::new(&follower);
        Self { follower, follow, values, seen: Vec::new() }
    }

    async fn next(&mut self) -> FollowedVersion {
        let mut version = self.follower.next().await.unwrap();
        self.follower.apply(&mut version, self.values.targets().unwrap()).await.unwrap();
        self.seen.push(version.version().version);
        version
    }

    /// The values of the reader, by name.
    fn held(&self) -> BTreeMap<String, Vec<u8>> {
        let manifest = &self.follower.spec().manifest;
        let named = self.values.iter().map(|(tensor, dtype, bytes)| {
            assert_eq!(dtype, self.follow.dtype);
            (manifest.tensors()[tensor].name.clone(), bytes.to_vec())
        });
        named.collect()
    }
}

/// The values of `follow` in whole tensors.
fn expected(
    manifest: &Manifest,
    follow: &Follow,
    values: &[Vec<f32>],
) -> BTreeMap<String, Vec<u8>> {
    let of = |(tensor, values): (&TensorSpec, &Vec<f32>)| {
        let whole = TensorBox::whole(&tensor.shape);
        let bounds = follow.boxes.get(&tensor.name).unwrap_or(&whole);
        let bytes = encoded(&cut(values, &tensor.shape, bounds), follow.dtype);
        (tensor.name.clone(), bytes)
    };
    manifest.tensors().iter().zip(values).map(of).collect()
}

/// A hash of the values of each reader at each version, as the trainer has pulled them.
struct Truth {
    follows: Vec<Follow>,
    hashes: watch::Sender<HashMap<(u64, usize), u64>>,
}

fn hash_of(values: &BTreeMap<String, Vec<u8>>) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    values.hash(&mut hasher);
    hasher.finish()
}

impl Truth {
    async fn record(&self, job: &Job, version: u64) {
        let values = training::pull(job, version).await.unwrap();
        let hashes = self.follows.iter().enumerate().map(|(reader, follow)| {
            let expected = expected(&job.spec().manifest, follow, &values);
            ((version, reader), hash_of(&expected))
        });
        let hashes: Vec<_> = hashes.collect();
        self.hashes.send_modify(|all| all.extend(hashes));
    }

    async fn train(&self, job: &Job, steps: std::ops::Range<u64>) {
        for number in steps {
            self.record(job, number).await;
            step(job, number).await;
        }
    }

    /// Follows the job until version `end`, and checks every version.
    async fn check(&self, client: &Client, job: &str, number: usize, end: u64) -> Reader {
        let mut reader = Reader::new(client, job, self.follows[number].clone()).await;
        loop {
            let version = reader.next().await.version().version;
            let mut all = self.hashes.subscribe();
            let pulled = all.wait_for(|all| all.contains_key(&(version, number)));
            let pulled = tokio::time::timeout(options().timeout, pulled).await;
            assert!(pulled.is_ok(), "the trainer has not pulled version {version} in time");
            let found = hash_of(&reader.held());
            let expected = self.hashes.borrow()[&(version, number)];
            assert_eq!(found, expected, "reader {number}: version {version}");
            if version == end {
                return reader;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_ranks_of_tensor_parallel_readers_have_their_boxes_while_a_server_is_killed() {
    const STEPS: u64 = 24;
    let mut cluster = Cluster::start(2);
    let spec = JobSpec { min_servers: 2, replicas: 2, ..job("parts", 1, adamw(), tensors()) };
    let follow = |dim, rank, dtype| {
        let boxes = split(spec.manifest.tensors(), dim, rank);
        Follow { dtype, boxes, ..Follow::default() }
    };
    let follows = vec![
        follow(0, 0, DType::F32),
        follow(0, 1, DType::F32),
        follow(1, 0, DType::Bf16),
        follow(1, 1, DType::Bf16),
    ];
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let client = connect(cluster.address()).await;
    let truth = Truth { follows, hashes: watch::Sender::default() };
    let training = async {
        truth.train(&trainer, 0..STEPS / 2).await;
        until_redundant(&cluster.coordinator, "parts").await;
        replace(&mut cluster, 0);
        truth.train(&trainer, STEPS / 2..STEPS).await;
        truth.record(&trainer, STEPS).await;
    };
    let reader = |number| truth.check(&client, "parts", number, STEPS);
    let ((), rows, others, columns, last) =
        tokio::join!(training, reader(0), reader(1), reader(2), reader(3));
    for reader in [rows, others, columns, last] {
        let copies: u64 = reader.follower.copies().values().sum();
        println!("{} versions, full copies {:?}", reader.seen.len(), reader.follower.copies());
        assert_eq!(reader.follower.copies()[&Copied::Joined], 1);
        assert!(
            copies < reader.seen.len() as u64 / 2,
            "{copies} of {} versions",
            reader.seen.len()
        );
        // A pin reads the same elements.
        let pinned = client.pin("parts", &Pin::default()).await.unwrap();
        assert_eq!(pinned.version(), STEPS);
        let manifest = &pinned.spec().manifest;
        let mut values = Vec::new();
        for tensor in manifest.tensors() {
            let bounds = reader.follow.boxes.get(&tensor.name).cloned();
            let numel = bounds.as_ref().map_or_else(|| tensor.numel(), TensorBox::numel);
            values.push((tensor, bounds, vec![f32::NAN; numel as usize]));
        }
        let targets = values.iter_mut().enumerate().map(|(tensor, (_, bounds, values))| Target {
            tensor: TensorId::new(tensor),
            bounds: bounds.clone(),
            data: Slots::from(&mut values[..]),
        });
        pinned.pull(targets.collect()).await.unwrap();
        let pulled = values
            .iter()
            .map(|(tensor, _, values)| (tensor.name.clone(), encoded(values, reader.follow.dtype)));
        assert!(reader.held() == pulled.collect::<BTreeMap<_, _>>());
    }
}

#[tokio::test]
async fn two_halves_receive_half_of_the_changes_each() {
    let cluster = Cluster::start(2);
    let tensors = vec![TensorSpec::new("w", [200, 300])];
    let spec = job("halves", 1, adamw(), tensors);
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let client = connect(cluster.address()).await;
    let mut readers = Vec::new();
    for boxes in [
        BTreeMap::new(),
        split(spec.manifest.tensors(), 0, 0),
        split(spec.manifest.tensors(), 0, 1),
        split(spec.manifest.tensors(), 1, 0),
        split(spec.manifest.tensors(), 1, 1),
    ] {
        let follow = Follow { dtype: DType::Bf16, boxes, ..Follow::default() };
        readers.push((Reader::new(&client, "halves", follow).await, 0));
    }
    for number in 0..6 {
        let values = training::pull(&trainer, number).await.unwrap();
        for (reader, bytes) in &mut readers {
            let version = reader.next().await;
            assert_eq!(version.version().version, number);
            let expected = expected(&spec.manifest, &reader.follow, &values);
            assert!(reader.held() == expected, "version {number}");
            match version.copied() {
                Some(_) => assert_eq!(number, 0),
                None => *bytes += version.bytes(),
            }
        }
        step(&trainer, number).await;
    }
    let bytes: Vec<u64> = readers.iter().map(|(_, bytes)| *bytes).collect();
    for half in &bytes[1..] {
        let fraction = *half as f64 / bytes[0] as f64;
        assert!((0.45..0.55).contains(&fraction), "bytes of the whole and of halves: {bytes:?}");
    }
}

#[tokio::test]
async fn an_array_of_a_box_that_somebody_has_written_to_gets_a_full_copy() {
    let cluster = Cluster::start(1);
    let spec = job("written", 1, sgd(0.1), vec![TensorSpec::new("w", [30, 20])]);
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let client = connect(cluster.address()).await;
    let boxes = split(spec.manifest.tensors(), 1, 1);
    let bounds = boxes["w"].clone();
    let follow = Follow { boxes, ..Follow::default() };
    let mut follower = client.follow("written", follow).await.unwrap();
    let mut array = vec![f32::NAN; 300];
    for number in 0..4 {
        if number == 2 {
            array[77] += 1.0;
        }
        let mut version = follower.next().await.unwrap();
        let target = Target::new(TensorId::new(0), &mut array[..]);
        follower.apply(&mut version, vec![target]).await.unwrap();
        let reason = match number {
            0 => Some(Copied::Joined),
            2 => Some(Copied::Differed),
            _ => None,
        };
        assert_eq!(version.copied(), reason, "version {number}");
        let values = training::pull(&trainer, number).await.unwrap();
        let expected = cut(&values[0], &[30, 20], &bounds);
        assert_eq!(encoded(&array, DType::F32), encoded(&expected, DType::F32));
        step(&trainer, number).await;
    }
}

#[tokio::test]
async fn a_box_without_elements_of_a_tensor_needs_an_empty_array() {
    let cluster = Cluster::start(1);
    let tensors = vec![TensorSpec::new("w", [3, 4]), TensorSpec::new("b", [1])];
    let spec = job("uneven", 1, sgd(0.1), tensors);
    let trainer = start(cluster.address(), &spec).await.remove(0);
    let client = connect(cluster.address()).await;
    // The second rank has no element of `b`.
    let boxes = split(spec.manifest.tensors(), 0, 1);
    let mut reader = Reader::new(&client, "uneven", Follow { boxes, ..Follow::default() }).await;
    for number in 0..3 {
        reader.next().await;
        let values = training::pull(&trainer, number).await.unwrap();
        assert!(reader.held() == expected(&spec.manifest, &reader.follow, &values));
        assert_eq!(reader.held()["b"].len(), 0);
        step(&trainer, number).await;
    }
    let boxes = split(spec.manifest.tensors(), 0, 1);
    let tensors = Some(vec!["b".to_owned()]);
    let boxes = boxes.into_iter().filter(|(name, _)| name == "b").collect();
    let refused = client.follow("uneven", Follow { boxes, tensors, ..Follow::default() }).await;
    assert!(matches!(refused.unwrap_err(), Error::Refused { .. }));
}

// promise: invalid-input
#[tokio::test]
async fn invalid_boxes_are_refused() {
    let cluster = Cluster::start(1);
    let tied = TensorSpec { alias_of: Some("w".to_owned()), ..TensorSpec::new("tied", [6, 4]) };
    let tensors = vec![TensorSpec::new("w", [6, 4]), tied, TensorSpec::new("b", [4])];
    let spec = job("refused", 1, sgd(0.1), tensors);
    let _trainer = start(cluster.address(), &spec).await.remove(0);
    let client = connect(cluster.address()).await;
    let of = |offset: &[u64], size: &[u64]| TensorBox { offset: offset.into(), size: size.into() };
    let row = of(&[1, 0], &[1, 4]);
    let with = |boxes: &[(&str, &TensorBox)]| Follow {
        boxes: boxes.iter().map(|(name, of)| ((*name).to_owned(), (*of).clone())).collect(),
        ..Follow::default()
    };
    let only_b = Follow { tensors: Some(vec!["b".to_owned()]), ..with(&[("w", &row)]) };
    let mirror = Follow { mirror: Some("127.0.0.1:1".to_owned()), ..with(&[("w", &row)]) };
    for (follow, expected) in [
        (with(&[("nothing", &row)]), "nothing"),
        (with(&[("w", &of(&[0], &[4]))]), "within the tensor's shape, [6, 4]"),
        (with(&[("w", &of(&[3, 0], &[4, 4]))]), "within the tensor's shape, [6, 4]"),
        (with(&[("w", &of(&[u64::MAX, 0], &[2, 4]))]), "within the tensor's shape, [6, 4]"),
        (with(&[("w", &row), ("tied", &of(&[0, 0], &[1, 4]))]), "have different boxes"),
        (only_b, "which it does not follow"),
        (mirror, "has whole tensors"),
    ] {
        let refused = client.follow("refused", follow.clone()).await.unwrap_err();
        assert!(refused.to_string().contains(expected), "{follow:?}: {refused}");
    }
    // Tied tensors with the same box are one tensor, and so is an array of another size refused.
    let follow = with(&[("w", &row), ("tied", &row)]);
    let mut follower = client.follow("refused", follow).await.unwrap();
    assert_eq!((follower.numel_of(0), follower.numel_of(1)), (4, 4));
    let mut version = follower.next().await.unwrap();
    let (mut whole, mut bias) = (vec![0.0f32; 24], vec![0.0f32; 4]);
    let targets = vec![
        Target::new(TensorId::new(0), &mut whole[..]),
        Target::new(TensorId::new(2), &mut bias[..]),
    ];
    let refused = follower.apply(&mut version, targets).await.unwrap_err();
    assert!(refused.to_string().contains("all 4 elements of the box"), "{refused}");
}

// promise: invalid-input
#[tokio::test]
async fn a_server_refuses_requests_with_invalid_boxes_and_with_too_many() {
    let cluster = Cluster::start(1);
    let spec = job("raw", 1, sgd(0.1), vec![TensorSpec::new("w", [100, 4])]);
    let _trainer = start(cluster.address(), &spec).await.remove(0);
    let address = format!("http://{}", cluster.shards[0].address());
    let client = ShardServiceClient::connect(address).await.unwrap();
    let client = client.max_decoding_message_size(MAX_CONTROL_MESSAGE);
    let of = |tensor, dims: &[(u64, u64)]| {
        let dims = dims.iter().map(|&(offset, size)| pb::BoxDim { offset, size });
        pb::Box { tensor, dims: dims.collect() }
    };
    let ask = async |boxes: Vec<pb::Box>| {
        let slices = pb::FollowedSlices { dtype: pb::Dtype::F32.into(), slices: vec![0], boxes };
        let (job, slices) = ("raw".to_owned(), vec![slices]);
        let mut request =
            tonic::Request::new(pb::ChangesRequest { job, slices, ..Default::default() });
        request.set_timeout(Duration::from_secs(30));
        let mut answer =
            client.clone().changes(request).await.map_err(|s| from_status(&s, "it"))?;
        let first = answer.get_mut().message().await.map_err(|s| from_status(&s, "it"))?;
        Ok::<_, Error>(first.unwrap().version)
    };
    for (boxes, expected) in [
        (vec![of(7, &[(0, 1), (0, 1)])], "tensor of a box"),
        (vec![of(u32::MAX, &[])], "tensor of a box"),
        (vec![of(0, &[])], "within the tensor's shape"),
        (vec![of(0, &[(0, 1)])], "within the tensor's shape"),
        (vec![of(0, &[(99, 2), (0, 4)])], "within the tensor's shape"),
        (vec![of(0, &[(u64::MAX, u64::MAX), (0, 4)])], "within the tensor's shape"),
        (vec![of(0, &[(0, 1), (0, 4)]); 2], "more than one box"),
    ] {
        let refused = ask(boxes.clone()).await.unwrap_err();
        assert!(refused.to_string().contains(expected), "{boxes:?}: {refused}");
    }
    for row in 0..64 {
        assert_eq!(ask(vec![of(0, &[(row, 1), (0, 4)])]).await, Ok(Some(0)));
    }
    let refused = ask(vec![of(0, &[(64, 1), (0, 4)])]).await.unwrap_err();
    assert!(refused.to_string().contains("64 boxes of tensor \"w\" are followed"), "{refused}");
    assert_eq!(ask(vec![of(0, &[(63, 1), (0, 4)])]).await, Ok(Some(0)));
    assert_eq!(ask(vec![of(0, &[(0, 100), (0, 4)])]).await, Ok(Some(0)), "the whole tensor");
}
