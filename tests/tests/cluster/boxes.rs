//! Tensors on meshes: each rank transfers only its box, and the result equals that of whole
//! gradients.

use DimPlacement::{Partial, Replicate, Shard};
use futures_util::future::join_all;
use zeroshard_client::{Commit, Job, Target, TensorData, TensorId};
use zeroshard_model::{
    DimPlacement, Error, JobSpec, ProcessMesh, Reduction, StridedBox, TensorLayout, TensorSpec,
};
use zeroshard_tests::{Cluster, synthetic};

use crate::{adamw, connect, hasty, job, until};

const AVG: DimPlacement = Partial(Reduction::Avg);
/// More than one slice; the rows and columns are not divisible by slices, blocks or ranks.
const MATRIX: [u64; 2] = [2_111, 2_003];

/// A job with matrices on a mesh `dp` x `tp`: sharded by columns, sharded by rows, and replicated.
fn meshed(name: &str, dp: usize, tp: usize) -> JobSpec {
    let tensor = |name: &str, shape: &[u64], along_tp| TensorSpec {
        layout: Some(TensorLayout { mesh: 0, placements: vec![AVG, along_tp] }),
        ..TensorSpec::new(name, shape)
    };
    let tensors = vec![
        tensor("columns", &MATRIX, Shard(1)),
        tensor("rows", &[1_031, 67], Shard(0)),
        tensor("norm", &[1_234], Replicate),
        tensor("few", &[2, 3], Shard(0)),
    ];
    let mesh = ProcessMesh::dense([dp, tp], ["dp", "tp"]).unwrap();
    JobSpec { meshes: vec![mesh.into()], ..job(name, (dp * tp) as u32, adamw(), tensors) }
}

/// The same job without a mesh: `dp` ranks with whole gradients.
fn whole(name: &str, dp: usize) -> JobSpec {
    let mut tensors = meshed(name, dp, 1).manifest.tensors().to_vec();
    tensors.iter_mut().for_each(|tensor| tensor.layout = None);
    job(name, dp as u32, adamw(), tensors)
}

/// The boxes of `rank` in whole tensors whose values depend on `seed`.
fn boxes(spec: &JobSpec, rank: u32, seed: u64) -> Vec<TensorData> {
    let boxed = |(index, tensor): (usize, &TensorSpec)| {
        let all = synthetic::values(seed * 100 + index as u64, tensor.numel() as usize);
        let strided = StridedBox::new(&tensor.shape, spec.local_box(index, rank));
        let runs = strided.runs(0..strided.numel());
        let values: Vec<f32> = runs.flat_map(|(_, run)| all[run].to_vec()).collect();
        TensorData::new(TensorId::new(index), values)
    };
    spec.manifest.tensors().iter().enumerate().map(boxed).collect()
}

async fn start(cluster: &Cluster, spec: &JobSpec) -> Vec<Job> {
    let client = connect(cluster.address()).await;
    client.create_job(spec).await.unwrap();
    let joined = (0..spec.world).map(|rank| async move {
        let job = connect(cluster.address()).await.join(&spec.name, rank).await.unwrap();
        job.initialise(boxes(spec, rank, 0)).await.unwrap();
        job
    });
    let jobs = join_all(joined).await;
    until("all ranks know of version 0", || jobs.iter().all(|job| job.version() == Some(0))).await;
    jobs
}

/// Runs three clipped steps, in which the ranks of one replica hold parts of the same gradient.
/// Returns the hash of the result.
async fn train(cluster: &Cluster, spec: &JobSpec, ranks_a_replica: u32) -> String {
    let jobs = start(cluster, spec).await;
    for step in 0..3 {
        let steps = jobs.iter().map(|job| async move {
            let replica = u64::from(job.rank() / ranks_a_replica);
            job.attempt(step)
                .unwrap()
                .push(boxes(spec, job.rank(), 10 * (step + 1) + replica))
                .await
                .unwrap();
            job.attempt(step).unwrap().commit(Commit::default().max_norm(0.5)).await.unwrap()
        });
        let reports = join_all(steps).await;
        assert!(
            reports.iter().all(|report| *report == reports[0] && report.clip_coefficient < 1.0)
        );
    }
    let hash = jobs[0].state_hash(3).await.unwrap();
    drop(jobs);
    connect(cluster.address()).await.delete_job(&spec.name).await.unwrap();
    hash
}

// promise: same-bits
#[tokio::test]
async fn a_mesh_gives_the_bits_of_whole_gradients_on_any_number_of_servers() {
    let mut expected = [None, None];
    for servers in [1, 3] {
        let cluster = Cluster::start(servers);
        for (dp, expected) in [1, 2].into_iter().zip(&mut expected) {
            let of = |spec| JobSpec { min_servers: servers as u32, ..spec };
            let hash = train(&cluster, &of(whole("whole", dp)), 1).await;
            assert_eq!(*expected.get_or_insert_with(|| hash.clone()), hash, "{servers} servers");
            for tp in [2, 3] {
                let boxes = train(&cluster, &of(meshed("boxes", dp, tp)), tp as u32).await;
                assert_eq!(boxes, hash, "{dp} x {tp} on {servers} servers");
            }
        }
    }
}

/// The bytes of one worker's pull and push of a step, according to the servers' metrics.
async fn bytes_of_a_worker(cluster: &Cluster, spec: &JobSpec) -> [u64; 2] {
    let jobs = start(cluster, spec).await;
    let before = cluster.payload();
    let shapes = spec.manifest.tensors().iter().enumerate();
    let mut values: Vec<Vec<f32>> =
        shapes.map(|(tensor, _)| vec![0.0; spec.local_box(tensor, 0).numel() as usize]).collect();
    jobs[0]
        .pull(
            0,
            values
                .iter_mut()
                .enumerate()
                .map(|(tensor, data)| Target::new(TensorId::new(tensor), data))
                .collect(),
        )
        .await
        .unwrap();
    jobs[0].attempt(0).unwrap().push(boxes(spec, 0, 1)).await.unwrap();
    let after = cluster.payload();
    [after[0] - before[0], after[1] - before[1]]
}

#[tokio::test]
async fn a_tensor_parallel_worker_moves_its_share_of_the_bytes() {
    let cluster = Cluster::start(2);
    let matrices = |name: &str, tp: Option<usize>| {
        let tensor = |name: &str, dim| TensorSpec {
            layout: tp.map(|_| TensorLayout { mesh: 0, placements: vec![Shard(dim)] }),
            ..TensorSpec::new(name, [1_024, 768])
        };
        let mesh = ProcessMesh::dense([tp.unwrap_or(1)], ["tp"]).unwrap();
        let spec = job(
            name,
            tp.unwrap_or(1) as u32,
            adamw(),
            vec![tensor("columns", 1), tensor("rows", 0)],
        );
        JobSpec { meshes: vec![mesh.into()], ..spec }
    };
    let dense = bytes_of_a_worker(&cluster, &matrices("dense", None)).await;
    assert_eq!(dense, [2 * 4 * 1_024 * 768; 2]);
    for tp in [2, 4] {
        let boxes = bytes_of_a_worker(&cluster, &matrices(&format!("tp {tp}"), Some(tp))).await;
        assert_eq!(boxes.map(|bytes| bytes * tp as u64), dense, "{tp} ranks");
    }
}

// promise: no-silent-hang
#[tokio::test]
async fn a_missing_gradient_is_named_with_its_coordinates_in_the_mesh() {
    let cluster = Cluster::start(1);
    let spec = meshed("missing", 2, 2);
    let jobs = start(&cluster, &spec).await;
    let hasty = zeroshard_client::Cluster::connect(cluster.address(), hasty()).await.unwrap();
    jobs[3].leave().await.unwrap();
    let late = hasty.join("missing", 3).await.unwrap();
    for job in &jobs[..3] {
        until("it knows of the epoch", || job.epoch() == late.epoch()).await;
        job.attempt(0).unwrap().push(boxes(&spec, job.rank(), 1)).await.unwrap();
    }
    let mut values = vec![0.0; spec.local_box(0, 3).numel() as usize];
    let waited = late.pull(1, vec![Target::new(TensorId::new(0), &mut values)]).await;
    let Err(Error::Timeout { waiting_for, .. }) = waited else { panic!("{waited:?}") };
    assert!(waiting_for.contains("gradient of rank 3 (dp 1, tp 1)"), "{waiting_for}");
}

#[tokio::test]
async fn ranks_learn_the_addresses_of_the_others() {
    let cluster = Cluster::start(1);
    let spec = meshed("peers", 1, 2);
    connect(cluster.address()).await.create_job(&spec).await.unwrap();
    let join = async |rank: u32| {
        let client = connect(cluster.address()).await;
        client.join_at("peers", rank, &format!("127.0.0.1:{}", 9000 + rank)).await.unwrap()
    };
    let first = join(0).await;
    let (peer, second) = tokio::join!(first.peer(1), join(1));
    assert_eq!(peer.unwrap(), "127.0.0.1:9001");
    assert_eq!(second.peer(0).await.unwrap(), "127.0.0.1:9000");

    let hasty = zeroshard_client::Cluster::connect(cluster.address(), hasty()).await.unwrap();
    second.leave().await.unwrap();
    let silent = hasty.join("peers", 1).await.unwrap();
    let waited = silent.peer(1).await;
    let Err(Error::Timeout { waiting_for, .. }) = waited else { panic!("{waited:?}") };
    assert!(waiting_for.contains("rank 1 (dp 0, tp 1)"), "{waiting_for}");
}
