//! The manners of a hostile job.

use std::sync::atomic::Ordering;

use futures_util::future::{try_join, try_join_all};
use tonic::{Request, Streaming};
use zeroshard_client::{Cluster, Error as ClusterError};
use zeroshard_model::{JobSpec, Result};
use zeroshard_proto::pb;
use zeroshard_tests::stock;

use super::{
    Manner,
    worker::{Rank, Stop, WorkerOptions},
};

/// The number of ranks of the job with huge tensors. Each has its own connections.
const HUGE_RANKS: u32 = 4;
/// The factor by which its tensors are larger.
const HUGER: u64 = 16;
/// The maximum number of open pulls that are not read.
const UNREAD: usize = 128;
/// The number of pulls that are opened before each step.
const UNREAD_PER_STEP: usize = 8;
/// The number of tasks that create and delete jobs in a storm.
const CREATORS: usize = 64;
/// The number of tasks that request the status in a storm.
const ASKERS: usize = 32;

pub(super) struct Hostile {
    options: WorkerOptions,
    cluster: Cluster,
    /// The ranks of the job with huge tensors.
    huge: Vec<Rank>,
    unread: Vec<Streaming<pb::PullResponse>>,
}

impl Hostile {
    /// Creates the job with huge tensors.
    pub(super) async fn start(options: &WorkerOptions) -> Result<Self> {
        let cluster = options.connect().await?;
        let name = format!("{}/huge", options.job);
        let spec = options.spec(&name, options.tensors, options.numel as u64 * HUGER)?;
        cluster.create_job(&JobSpec { world: HUGE_RANKS, ..spec }).await?;
        let ranks = (0..HUGE_RANKS).map(async |rank| {
            let cluster = options.connect().await?;
            Rank::join(&cluster, &name, rank).await
        });
        let huge = try_join_all(ranks).await?;
        Ok(Self { options: options.clone(), cluster, huge, unread: Vec::new() })
    }

    /// Keeps this manner until `stop` is set. `rank` is the rank of the job itself.
    pub(super) async fn behave(
        &mut self,
        manner: Manner,
        rank: &mut Rank,
        stop: &Stop,
    ) -> Result<()> {
        match manner {
            Manner::WellBehaved => Ok(()),
            Manner::SlowReader => self.read_nothing(rank, stop).await,
            Manner::HugeTensors => {
                while !is_set(stop) {
                    try_join_all(self.huge.iter_mut().map(flood)).await?;
                }
                Ok(())
            }
            Manner::JobStorm => self.storm(stop).await,
            Manner::LargeJob => {
                let name = format!("{}/large", self.options.job);
                while !is_set(stop) {
                    let spec = self.options.spec(&name, 1, self.options.large)?;
                    self.cluster.create_job(&spec).await?;
                    self.cluster.delete_job(&name).await?;
                }
                Ok(())
            }
        }
    }

    /// Makes steps, and opens pulls that it does not read, each on its own connection.
    async fn read_nothing(&mut self, rank: &mut Rank, stop: &Stop) -> Result<()> {
        let placement = self.cluster.describe_job(&self.options.job).await?.placement;
        let bearer = format!("Bearer {}", self.options.token.reveal().unwrap_or_default());
        while !is_set(stop) {
            if self.unread.len() < UNREAD {
                for _ in 0..UNREAD_PER_STEP {
                    let server = self.unread.len() % placement.servers().len();
                    let slices =
                        (0..placement.slices()).filter(|&s| placement.primary(s) == server);
                    let slices: Vec<u32> = slices.map(|slice| slice as u32).collect();
                    let pull = stock::read(&self.options.job, rank.version, slices);
                    let mut pull = Request::new(pull);
                    if let Ok(bearer) = bearer.parse() {
                        pull.metadata_mut().insert("authorization", bearer);
                    }
                    let address = &placement.servers()[server].address;
                    self.unread.push(stock::open_pull(address, pull).await?);
                }
            }
            rank.report_step().await?;
        }
        self.unread.clear();
        Ok(())
    }

    /// Creates and deletes jobs, and asks for the status.
    async fn storm(&self, stop: &Stop) -> Result<()> {
        let create = |number: usize| async move {
            let name = format!("{}/storm-{number}", self.options.job);
            let spec = self.options.spec(&name, 1, 1)?;
            while !is_set(stop) {
                self.refused(self.cluster.create_job(&spec).await)?;
                self.refused(self.cluster.delete_job(&name).await)?;
            }
            Ok(())
        };
        let ask = |_| async move {
            while !is_set(stop) {
                self.refused(self.cluster.status().await.map(drop))?;
            }
            Ok(())
        };
        let creators = try_join_all((0..CREATORS).map(create));
        try_join(creators, try_join_all((0..ASKERS).map(ask))).await.map(drop)
    }

    /// Ignores refusals because of a limit, so that a storm continues.
    fn refused(&self, answer: Result<()>) -> Result<()> {
        match answer {
            Err(ClusterError::LimitExceeded { .. } | ClusterError::UnknownJob { .. }) => Ok(()),
            other => other,
        }
    }
}

fn is_set(stop: &Stop) -> bool {
    stop.load(Ordering::Relaxed)
}

/// Makes a step of a rank, with a separate stream for each tensor.
async fn flood(rank: &mut Rank) -> Result<()> {
    let attempt = rank.job.attempt(rank.version)?;
    let tensors = rank.job.spec().manifest.tensors().len();
    let pushes = (0..tensors).map(|tensor| attempt.push(vec![rank.gradient(tensor)]));
    try_join_all(pushes).await?;
    rank.commit().await?;
    rank.pull().await
}
