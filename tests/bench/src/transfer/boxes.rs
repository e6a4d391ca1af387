//! Compares boxes of a square matrix with an array of the same number of elements. This measures
//! the cost of rows that are not adjacent in memory.

use std::time::Instant;

use serde_json::json;
use zeroshard_client::{Cluster, Commit, Job, Target, TensorData, TensorId, Values};
use zeroshard_model::{
    DimPlacement, JobSpec, Manifest, Optimizer, ProcessMesh, TensorLayout, TensorSpec,
    optimizer::Sgd,
};

use crate::{Error, sample::median, table::Table};

/// The number of ranks over which the matrix is sharded.
const RANKS: u32 = 2;

/// Measures a `side` x `side` matrix of f32, of which each of two ranks holds half: by rows, by
/// columns, and as a separate array. Prints the median of `repeat` measurements.
pub(super) async fn run(side: usize, repeat: usize, json: bool) -> Result<(), Error> {
    let servers = zeroshard_tests::Cluster::start(1);
    let mut held = Vec::new();
    for (name, placement) in [("array", None), ("Shard(0)", Some(0)), ("Shard(1)", Some(1))] {
        held.push((name, Held::start(servers.address(), name, side, placement).await?));
    }
    let mut samples = vec![(Vec::new(), Vec::new()); held.len()];
    for round in 0..=repeat {
        for ((_, held), (pulls, pushes)) in held.iter_mut().zip(&mut samples) {
            let pull = timed(held.pull(0)).await?;
            let push = timed(held.push(0)).await?;
            held.finish().await?;
            if round > 0 {
                pulls.push(pull);
                pushes.push(push);
            }
        }
    }
    let bytes = side * side / RANKS as usize * size_of::<f32>();
    let mut table = Table::new(json, &["bench", "of", "bytes", "gbps", "ratio_array"]);
    let gbps = |seconds: Vec<f64>| bytes as f64 / median(seconds) / 1e9;
    let medians: Vec<_> =
        samples.into_iter().map(|(pulls, pushes)| [gbps(pulls), gbps(pushes)]).collect();
    for (bench, what) in ["pull", "push"].into_iter().enumerate() {
        for ((name, _), gbps) in held.iter().zip(&medians) {
            table.row(json!({
                "bench": what, "of": name, "bytes": bytes, "gbps": gbps[bench], "ratio_array": gbps[bench] / medians[0][bench],
            }));
        }
    }
    table.finish();
    Ok(())
}

/// A rank's part of a tensor. The other ranks are in this process too, and are not measured.
struct Held {
    jobs: Vec<Job>,
    version: u64,
    gradient: Values,
    parameters: Vec<f32>,
}

impl Held {
    async fn start(
        address: &str,
        name: &str,
        side: usize,
        shard_dim: Option<usize>,
    ) -> Result<Self, Error> {
        let numel = side * side / RANKS as usize;
        let cluster = Cluster::connect(address, Default::default()).await?;
        let tensor = match shard_dim {
            None => TensorSpec::new("tensor", [numel as u64]),
            Some(dim) => TensorSpec {
                layout: Some(TensorLayout { mesh: 0, placements: vec![DimPlacement::Shard(dim)] }),
                ..TensorSpec::new("tensor", [side as u64; 2])
            },
        };
        let ranks = shard_dim.map_or(1, |_| RANKS);
        let spec = JobSpec {
            world: ranks,
            meshes: vec![ProcessMesh::dense([ranks as usize], ["tp"])?.into()],
            ..JobSpec::new(name, Manifest::new(vec![tensor])?, vec![Optimizer::Sgd(Sgd::default())])
        };
        cluster.create_job(&spec).await?;
        let gradient = Values::from(vec![0.5f32; numel]);
        let mut jobs = Vec::new();
        for rank in 0..ranks {
            let job = cluster.join(name, rank).await?;
            job.initialise(vec![TensorData::new(TensorId::new(0), gradient.clone())]).await?;
            jobs.push(job);
        }
        Ok(Self { jobs, version: 0, gradient, parameters: vec![0.0; numel] })
    }

    async fn pull(&mut self, rank: usize) -> Result<(), Error> {
        let target = Target::new(TensorId::new(0), &mut self.parameters);
        Ok(self.jobs[rank].pull(self.version, vec![target]).await?)
    }

    async fn push(&self, rank: usize) -> Result<(), Error> {
        let gradient = TensorData::new(TensorId::new(0), self.gradient.clone());
        Ok(self.jobs[rank].attempt(self.version)?.push(vec![gradient]).await?)
    }

    /// Contributes for the other ranks, and completes the step.
    async fn finish(&mut self) -> Result<(), Error> {
        for rank in 1..self.jobs.len() {
            self.push(rank).await?;
        }
        let commit = async |job: &Job| job.attempt(self.version)?.commit(Commit::default()).await;
        let commits = self.jobs.iter().map(commit);
        let reports = futures_util::future::try_join_all(commits).await?;
        self.version = reports[0].version;
        // Wait for the step, so that it does not take time from the next measurement.
        self.pull(0).await
    }
}

async fn timed(work: impl Future<Output = Result<(), Error>>) -> Result<f64, Error> {
    let began = Instant::now();
    work.await?;
    Ok(began.elapsed().as_secs_f64())
}
