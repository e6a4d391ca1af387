//! Gradients and parameters as int8 on the wire: the same bits whatever moves them, and the same
//! faults survived.
//!
//! promise: same-bits

use futures_util::future::{join_all, try_join_all};
use zeroshard_client::{
    Commit, Error, Job, Options, Overflow, Pin, Target, TensorData, TensorId, Transport, Wire,
};
use zeroshard_loops::{Level, int8};
use zeroshard_model::{
    DType, DimPlacement, JobSpec, ProcessMesh, Reduction, StridedBox, TensorLayout, TensorSpec,
};
use zeroshard_proto::pb;
use zeroshard_tests::{Cluster, Trained, Training, groups, stock, synthetic, training};

use crate::{
    adamw, connect, job, options,
    replicas::{replace, train_while_killing},
    sgd, start_with, until_commits_wait,
};

/// Int8 in both directions.
fn both() -> Options {
    options().wire(Wire::Int8).parameter_wire(Some(Wire::Int8))
}

/// Int8 for gradients only.
fn gradients() -> Options {
    options().wire(Wire::Int8)
}

fn spec(name: &str, world: u32) -> JobSpec {
    job(name, world, adamw(), synthetic::kinds_and_large(&adamw()))
}

async fn run(cluster: &Cluster, spec: &JobSpec, options: Options, buckets: usize) -> Trained {
    let commit = Commit::default().max_norm(0.5);
    let training = Training { options, buckets, commit, ..Training::new(spec.clone()) };
    let trained = training.run(cluster.address()).await.unwrap();
    connect(cluster.address()).await.delete_job(&spec.name).await.unwrap();
    trained
}

#[tokio::test]
async fn servers_chunks_transports_and_buckets_change_no_bit() {
    let mut expected = [None, None];
    for servers in [1, 2, 3] {
        let cluster = Cluster::start_with(servers, &["--device", "cpu"]);
        for (options, expected) in [gradients(), both()].into_iter().zip(&mut expected) {
            let spec = JobSpec { min_servers: servers as u32, ..spec("bits", 2) };
            for (chunk_bytes, transport, buckets) in [
                (1 << 20, Transport::Grpc, 1),
                (1_000, Transport::Grpc, 3),
                (40_000, Transport::Shm, 1),
                (12_345, Transport::Auto, 100),
            ] {
                let options = options.clone().chunk_bytes(chunk_bytes).transport(Some(transport));
                let trained = run(&cluster, &spec, options, buckets).await;
                let expected = expected.get_or_insert_with(|| trained.clone());
                assert!(*expected == trained, "{servers} servers, {chunk_bytes} {transport}");
            }
        }
    }
    let [of_gradients, of_both] = expected.map(|trained| trained.unwrap());
    // The encoding of parameters changes what the ranks compute with, and nothing on the servers.
    assert_eq!(of_gradients.hash, of_both.hash);
    assert_ne!(of_gradients.parameters, of_both.parameters);
    let cluster = Cluster::start(1);
    let plain = run(&cluster, &spec("bits", 2), options(), 1).await;
    assert_ne!(plain.hash, of_gradients.hash);
    let seeded = JobSpec { rounding_seed: 1, ..spec("bits", 2) };
    assert_ne!(run(&cluster, &seeded, gradients(), 1).await.hash, of_gradients.hash);
}

#[tokio::test]
async fn ranks_over_grpc_and_shared_memory_in_one_job_have_the_same_bits() {
    let cluster = Cluster::start_with(2, &["--device", "cpu"]);
    let mut hashes = Vec::new();
    for (number, transports) in [
        [Transport::Grpc, Transport::Grpc],
        [Transport::Shm, Transport::Shm],
        [Transport::Shm, Transport::Grpc],
    ]
    .into_iter()
    .enumerate()
    {
        let spec = spec(&format!("mixed-{number}"), 2);
        connect(cluster.address()).await.create_job(&spec).await.unwrap();
        let mut jobs = Vec::new();
        for (rank, transport) in (0..).zip(transports) {
            let options = both().transport(Some(transport));
            let client = zeroshard_client::Cluster::connect(cluster.address(), options).await;
            jobs.push(client.unwrap().join(&spec.name, rank).await.unwrap());
        }
        jobs[0].initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
        let mut pulled = Vec::new();
        for step in 0..3 {
            let reports = join_all(jobs.iter().map(|job| training::step(job, step))).await;
            assert!(reports.into_iter().all(|report| report.unwrap().applied));
            pulled =
                try_join_all(jobs.iter().map(|job| training::pull(job, step + 1))).await.unwrap();
            assert!(pulled[0] == pulled[1], "all ranks compute with the same parameters");
        }
        hashes.push((jobs[0].state_hash(3).await.unwrap(), pulled));
    }
    assert!(hashes.iter().all(|of| *of == hashes[0]));
}

#[tokio::test]
async fn a_small_budget_for_early_gradients_changes_no_bit() {
    let expected = run(&Cluster::start(2), &spec("parked", 3), gradients(), 1).await;
    for parked in ["1000", "100000"] {
        // What does not fit is refused at any element, and sent again from its tile.
        let cluster = Cluster::start_with(2, &["--parked-bytes", parked]);
        assert!(expected == run(&cluster, &spec("parked", 3), gradients(), 1).await, "{parked}");
    }
}

#[tokio::test]
async fn ranks_with_other_encodings_train_together() {
    let cluster = Cluster::start_with(1, &["--parked-bytes", "20000"]);
    let spec = spec("mixed", 3);
    let mut hashes = Vec::new();
    for chunk_bytes in [1 << 20, 1004] {
        let client = connect(cluster.address()).await;
        client.create_job(&spec).await.unwrap();
        let mut jobs = Vec::new();
        for (rank, wire) in (0..).zip([DType::F32.into(), Wire::Int8, DType::Bf16.into()]) {
            let options = options().wire(wire).chunk_bytes(chunk_bytes);
            let client = zeroshard_client::Cluster::connect(cluster.address(), options).await;
            jobs.push(client.unwrap().join(&spec.name, rank).await.unwrap());
        }
        jobs[0].initialise(synthetic::parameters(&spec.manifest)).await.unwrap();
        for step in 0..2 {
            try_join_all(jobs.iter().map(|job| training::step(job, step))).await.unwrap();
        }
        hashes.push(jobs[0].state_hash(2).await.unwrap());
        drop(jobs);
        client.delete_job(&spec.name).await.unwrap();
    }
    assert_eq!(hashes[0], hashes[1]);
}

#[tokio::test]
async fn a_push_has_at_most_27_hundredths_of_the_bytes_of_f32() {
    let cluster = Cluster::start(2);
    let mut bytes = Vec::new();
    for (name, options) in [("f32", options()), ("int8", both())] {
        let jobs =
            start_with(options.transport(Some(Transport::Grpc)), cluster.address(), &spec(name, 1))
                .await;
        let before = (cluster.payload(), jobs[0].traffic());
        training::pull(&jobs[0], 0).await.unwrap();
        training::step(&jobs[0], 0).await.unwrap();
        let after = (cluster.payload(), jobs[0].traffic());
        let [pulled, pushed] = [0, 1].map(|of| after.0[of] - before.0[of]);
        assert_eq!(pushed, after.1.pushed_bytes - before.1.pushed_bytes);
        assert_eq!(pulled, after.1.pulled_bytes - before.1.pulled_bytes);
        bytes.push([pulled, pushed]);
    }
    for of in [0, 1] {
        let share = bytes[1][of] as f64 / bytes[0][of] as f64;
        assert!((0.25..0.27).contains(&share), "{bytes:?}");
    }
}

/// The hash after undisturbed steps of one rank.
async fn calm(name: &str, world: u32, steps: u64) -> String {
    let training = Training { steps, options: gradients(), ..Training::new(spec(name, world)) };
    training.run(Cluster::start(1).address()).await.unwrap().hash
}

#[tokio::test]
async fn a_run_survives_the_death_of_servers_with_the_same_bits() {
    const STEPS: u64 = 15;
    let expected = calm("calm", 2, STEPS).await;
    let mut cluster = Cluster::start(3);
    let spec = JobSpec { min_servers: 3, replicas: 2, ..spec("killed", 2) };
    let jobs = start_with(gradients(), cluster.address(), &spec).await;
    let hash = train_while_killing(&mut cluster, &jobs, (STEPS, 5), replace).await;
    assert_eq!(hash, expected);
}

#[tokio::test]
async fn a_step_that_is_aborted_and_run_again_has_the_same_bits() {
    let expected = calm("calm", 2, 2).await;
    let cluster = Cluster::start(2);
    let spec = spec("aborted", 2);
    let mut jobs = start_with(gradients(), cluster.address(), &spec).await;
    try_join_all(jobs.iter().map(|job| training::step(job, 0))).await.unwrap();
    let (second, first) = (jobs.pop().unwrap(), jobs.pop().unwrap());
    // Rank 1 is lost after half of its gradients, while rank 0 waits for it.
    let mut half = synthetic::gradients(&spec.manifest, 1, 1);
    half.truncate(3);
    second.attempt(1).unwrap().push(half).await.unwrap();
    let whole = synthetic::gradients(&spec.manifest, 0, 1);
    first.attempt(1).unwrap().push(whole).await.unwrap();
    let lost = async {
        until_commits_wait(&cluster, 1).await;
        drop(second);
    };
    let (aborted, ()) = tokio::join!(training::commit(&first, 1, Commit::default()), lost);
    assert!(matches!(aborted, Err(Error::StepAborted { step: 1, .. })), "{aborted:?}");
    let client = zeroshard_client::Cluster::connect(cluster.address(), gradients()).await.unwrap();
    let second = client.join("aborted", 1).await.unwrap();
    try_join_all([&first, &second].map(|job| training::step(job, 1))).await.unwrap();
    assert_eq!(first.state_hash(2).await.unwrap(), expected);
}

#[tokio::test]
async fn groups_push_their_sums_as_int8_with_the_same_bits_on_any_number_of_servers() {
    let mut first = None;
    for servers in [1, 3] {
        let cluster = Cluster::start(servers);
        let spec = JobSpec { group_size: 2, min_servers: servers as u32, ..spec("groups", 4) };
        let jobs = start_with(both(), cluster.address(), &spec).await;
        let mut pulled = Vec::new();
        for step in 0..2 {
            let before = cluster.payload()[1];
            groups::step(&jobs, step, &Commit::default()).await.unwrap();
            let pushed = cluster.payload()[1] - before;
            let numel: usize =
                synthetic::gradients(&spec.manifest, 0, 0).iter().map(|of| of.data.len()).sum();
            assert!((pushed as f64) < 2.0 * 0.27 * 4.0 * numel as f64, "{pushed} of {numel}");
            let parts = groups::pull(&jobs[..2], 0, step + 1).await.unwrap();
            let whole = training::pull(&jobs[3], step + 1).await.unwrap();
            // Of a piece as of the whole tensor, because pieces begin with a tile.
            assert!(parts.iter().all(|(tensor, part)| *part == whole[tensor.index()]));
            pulled.push(whole);
        }
        let trained = (jobs[0].state_hash(2).await.unwrap(), pulled);
        assert!(trained == *first.get_or_insert(trained.clone()), "{servers} servers");
    }
}

/// A job with a matrix whose columns, and one whose rows are sharded, on a mesh of 2 x 2.
fn meshed() -> JobSpec {
    let tensor = |name: &str, dim| {
        let placements = vec![DimPlacement::Partial(Reduction::Avg), DimPlacement::Shard(dim)];
        let layout = Some(TensorLayout { mesh: 0, placements });
        TensorSpec { layout, ..TensorSpec::new(name, [2_111, 2_003]) }
    };
    let mesh = ProcessMesh::dense([2, 2], ["dp", "tp"]).unwrap();
    let tensors = vec![tensor("columns", 1), tensor("rows", 0)];
    JobSpec { meshes: vec![mesh.into()], ..job("boxes", 4, sgd(1.0), tensors) }
}

/// The box of `rank` of each tensor, in values that depend on `seed`.
fn boxes(spec: &JobSpec, rank: u32, seed: u64) -> Vec<Vec<f32>> {
    let tensors = spec.manifest.tensors().iter().enumerate();
    let boxed = |(index, tensor): (usize, &TensorSpec)| {
        let all = synthetic::values(seed + index as u64, tensor.numel() as usize);
        let strided = StridedBox::new(&tensor.shape, spec.local_box(index, rank));
        strided.runs(0..strided.numel()).flat_map(|(_, run)| all[run].to_vec()).collect()
    };
    tensors.map(boxed).collect()
}

async fn push_and_pull_boxes(spec: &JobSpec, job: &Job) -> Vec<Vec<f32>> {
    let data = |seed| {
        let values = boxes(spec, job.rank(), seed).into_iter().enumerate();
        values.map(|(tensor, data)| TensorData::new(TensorId::new(tensor), data)).collect()
    };
    job.initialise(data(0)).await.unwrap();
    job.initialised().await.unwrap();
    let attempt = job.attempt(0).unwrap();
    attempt.push(data(100 + 100 * u64::from(job.rank() / 2))).await.unwrap();
    attempt.commit(Commit::default()).await.unwrap();
    let mut values = boxes(spec, job.rank(), 0);
    let targets = values.iter_mut().enumerate();
    let targets = targets.map(|(tensor, data)| Target::new(TensorId::new(tensor), data)).collect();
    job.pull(1, targets).await.unwrap();
    values
}

#[tokio::test]
async fn boxes_of_a_mesh_have_tiles_of_their_own_and_the_same_bits_on_any_number_of_servers() {
    let mut first = None;
    for (servers, chunk_bytes) in [(1, 1 << 20), (3, 10_000)] {
        let cluster = Cluster::start(servers);
        let spec = JobSpec { min_servers: servers as u32, ..meshed() };
        connect(cluster.address()).await.create_job(&spec).await.unwrap();
        let joined = (0..4).map(|rank| {
            let address = cluster.address();
            async move {
                let options = both().chunk_bytes(chunk_bytes);
                let client = zeroshard_client::Cluster::connect(address, options).await.unwrap();
                client.join("boxes", rank).await.unwrap()
            }
        });
        let jobs = join_all(joined).await;
        let values = join_all(jobs.iter().map(|job| push_and_pull_boxes(&spec, job))).await;
        assert!(values[0] == values[2] && values[1] == values[3], "of the same box");
        let start = boxes(&spec, 0, 0);
        let of_replica = [boxes(&spec, 0, 100), boxes(&spec, 0, 200)];
        for tensor in 0..2 {
            for (at, value) in values[0][tensor].iter().enumerate() {
                let mean = (of_replica[0][tensor][at] + of_replica[1][tensor][at]) / 2.0;
                let error = (value - (start[tensor][at] - mean)).abs();
                assert!(error < 3.0 / 127.0, "{error} at {at} of {tensor}");
            }
        }
        let trained = (jobs[0].state_hash(1).await.unwrap(), values);
        assert!(trained == *first.get_or_insert(trained.clone()), "{servers} servers");
    }
}

#[tokio::test]
async fn infinity_and_nan_are_found_and_named_as_with_f32() {
    let cluster = Cluster::start(2);
    for (number, options) in [options(), gradients()].into_iter().enumerate() {
        let spec = spec(&format!("overflow-{number}"), 2);
        let jobs = start_with(options, cluster.address(), &spec).await;
        let mut versions = Vec::new();
        for (step, bad) in (0..).zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY]) {
            for job in &jobs {
                let mut gradients = synthetic::gradients(&spec.manifest, job.rank(), step);
                if job.rank() == 1 {
                    let last = gradients.last_mut().unwrap();
                    let mut values = synthetic::values(7, last.data.len());
                    *values.last_mut().unwrap() = bad;
                    last.data = values.into();
                }
                job.attempt(step).unwrap().push(gradients).await.unwrap();
            }
            let commit = |job| training::commit(job, step, Commit::default());
            let report = try_join_all(jobs.iter().map(commit)).await.unwrap().remove(0);
            let overflow = Overflow { tensor: TensorId::new(8), rank: Some(1) };
            assert_eq!((report.applied, report.overflow), (false, Some(overflow)));
            versions.push((step, report.version));
        }
        // A largest finite value is none.
        for job in &jobs {
            let mut gradients = synthetic::gradients(&spec.manifest, job.rank(), 3);
            if job.rank() == 1 {
                gradients[0].data = vec![f32::MAX; gradients[0].data.len()].into();
            }
            job.attempt(3).unwrap().push(gradients).await.unwrap();
        }
        let commit = |job| training::commit(job, 3, Commit::default());
        let reports = try_join_all(jobs.iter().map(commit)).await.unwrap();
        assert_eq!((reports[0].applied, &reports[0].overflow), (true, &None), "{number}");
        assert_eq!(versions, [(0, 1), (1, 2), (2, 3)]);
    }
}

/// A message of a push with tiles.
fn tiles(slice: u32, offset: u64, payload: Vec<u8>) -> pb::PushRequest {
    let dtype = pb::Dtype::Int8.into();
    pb::PushRequest { slice, offset, dtype, payload: payload.into(), ..Default::default() }
}

fn refusal<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    match result {
        Err(error @ (Error::Invalid { .. } | Error::Refused { .. })) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn what_cannot_be_int8_is_refused_and_changes_nothing() {
    let cluster = Cluster::start(1);
    let spec = job("refused", 1, sgd(1.0), vec![TensorSpec::new("w", [300])]);
    let jobs = start_with(gradients(), cluster.address(), &spec).await;
    let (job, address) = (&jobs[0], cluster.shards[0].address());
    let before = job.state_hash(0).await.unwrap();
    let push = async |begin, message| stock::push(address, vec![stock::open(begin), message]).await;
    let gradient = || stock::begin(job, Some(0));
    let scale = 1f32.to_le_bytes();
    let payload = |elements: usize| [&scale[..], &vec![1; elements]].concat();
    // Cut inside of a tile, at either end.
    for (offset, elements) in [(1, 128), (0, 127), (0, 1), (256, 43)] {
        let refused = refusal(push(gradient(), tiles(0, offset, payload(elements))).await);
        assert!(refused.contains("multiples of 128 elements"), "{refused}");
    }
    // Behind the end, at any distance.
    for offset in [256, 384, u64::MAX - 127] {
        let refused = refusal(push(gradient(), tiles(0, offset, payload(128))).await);
        assert!(refused.contains("within the 300 elements"), "{refused}");
    }
    for bytes in [0, 3, 4, 136] {
        let refused = push(gradient(), tiles(0, 0, vec![0; bytes])).await;
        match bytes {
            0 => {} // a message without an extent
            _ => assert!(refusal(refused).contains("one or more tiles")),
        }
    }
    let refused = refusal(push(stock::replacement(job, 0), tiles(0, 0, payload(128))).await);
    assert!(refused.contains("as int8") && refused.contains("send f32"), "{refused}");
    let refused = refusal(push(stock::begin(job, None), tiles(0, 0, payload(128))).await);
    assert!(refused.contains("as int8"), "{refused}");

    let read = |part| pb::PullRequest {
        dtype: pb::Dtype::Int8.into(),
        part,
        ..stock::read("refused", 0, [0])
    };
    let master = pb::state_selector::Part::MasterWeights(pb::state_selector::MasterWeights {});
    let master = pb::StateSelector { part: Some(master) };
    let refused = refusal(stock::pull(address, read(Some(master))).await);
    assert!(refused.contains("only parameters"), "{refused}");
    let mut cut = read(None);
    cut.extents[0].offset = 5;
    assert!(refusal(stock::pull(address, cut).await).contains("multiples of 128 elements"));
    assert_eq!(job.state_hash(0).await.unwrap(), before);

    // A stock client reads tiles.
    let answer = stock::pull(address, read(None)).await.unwrap();
    let mut values = vec![0; 300 * 4];
    int8::decode(Level::best(), &answer[0].payload, &mut values, DType::F32);
    let values: Vec<f32> =
        values.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
    let exact = &synthetic::parameters(&spec.manifest)[0];
    let [mut expected, error] = [vec![0.0; 300], vec![1.01 / 127.0; 300]];
    zeroshard_client::Slots::from(&mut expected)
        .fill(0..300, &f32_bytes(exact), DType::F32)
        .unwrap();
    let near = values.iter().zip(&expected).zip(&error).all(|((a, b), e)| (a - b).abs() <= *e);
    assert!(near && values != expected);
}

/// The values of a tensor of [`synthetic::parameters`], little endian.
fn f32_bytes(data: &TensorData) -> Vec<u8> {
    let values = synthetic::values((1 << 40) + data.tensor.index() as u64, data.data.len());
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[tokio::test]
async fn readers_and_state_are_exact_unless_a_reader_asks_for_int8() {
    let cluster = Cluster::start(2);
    let spec = spec("read", 1);
    let jobs = start_with(both(), cluster.address(), &spec).await;
    training::step(&jobs[0], 0).await.unwrap();
    let read = async |options: Options| {
        let client = zeroshard_client::Cluster::connect(cluster.address(), options).await.unwrap();
        let pinned = client.pin("read", &Pin::default()).await.unwrap();
        assert_eq!(pinned.version(), 1);
        let tensors = spec.manifest.tensors().iter();
        let mut values: Vec<Vec<f32>> = tensors.map(|t| vec![0.0; t.numel() as usize]).collect();
        let targets = values.iter_mut().enumerate();
        let targets = targets.map(|(tensor, data)| Target::new(TensorId::new(tensor), data));
        pinned.pull(targets.collect()).await.unwrap();
        values
    };
    let exact = read(options()).await;
    assert!(read(gradients()).await == exact, "gradients as int8 do not concern readers");
    let rounded = read(both()).await;
    assert!(rounded == training::pull(&jobs[0], 1).await.unwrap() && rounded != exact);
    for name in ["running_mean", "frozen", "large"] {
        let tensor = spec.manifest.find(name).unwrap();
        let is_exact = rounded[tensor.index()] == exact[tensor.index()];
        assert_eq!(is_exact, name != "large", "{name}");
        assert_eq!(jobs[0].rounds(tensor).unwrap(), !is_exact, "{name}");
    }
}
