//! The contributions to a step: which rank sent how large a gradient, and when.

use std::{collections::BTreeMap, time::Duration};

use futures_util::future::try_join_all;
use zeroshard_model::{Error, Result};
use zeroshard_proto::pb;

use crate::{Cluster, state::ask};

/// The contributions to one step of a job.
#[derive(Debug, Clone)]
pub struct StepContributions {
    /// The step, which took version `step` to `step + 1`.
    pub step: u64,
    /// By tensor in manifest order, then by rank.
    pub contributions: Vec<Contribution>,
    /// By rank: the time from the first gradient of the step to the last one of the rank, at the
    /// server that waited longest.
    pub arrived: BTreeMap<u32, Duration>,
}

/// What a rank contributed to a tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Contribution {
    /// The name of the tensor.
    pub tensor: String,
    /// The rank that pushed the gradient. In a job with groups it is a part of the group's sum.
    pub rank: u32,
    /// The L2 norm of what it pushed: before the mean over the ranks, and with the loss scale.
    pub norm: f64,
    /// A hash of what it pushed. Runs that send equal gradients have equal hashes.
    pub hash: u64,
}

impl Cluster {
    /// Returns the contributions to a step of a job. `None`: to the last one that was decided. The
    /// servers keep those to the last steps: up to 1,000 steps, and 65,536 contributions on each
    /// server.
    ///
    /// # Errors
    /// [`Error::UnknownJob`]; [`Error::Refused`] if no step has been decided, or if a server does
    /// not have the contributions to this step; [`Error::Timeout`], also if the step is still open.
    pub async fn contributions(&self, job: &str, step: Option<u64>) -> Result<StepContributions> {
        let of = self.describe_job(job).await?;
        let last = of.version.and_then(|version| version.checked_sub(1));
        let step = step.or(last).ok_or_else(|| {
            Error::refused(format!("job {job:?} has made no step yet; look again after the first"))
        })?;
        let request =
            pb::ContributionsRequest { job: job.to_owned(), job_id: of.id, step, line: of.line };
        let answers = of.placement.servers().iter().map(|server| {
            ask(self, server, "contributions", |mut client| {
                let request = request.clone();
                async move { client.contributions(request).await }
            })
        });
        let mut figures = BTreeMap::<(u32, u32), (f64, u64)>::new();
        let mut arrived = BTreeMap::<u32, Duration>::new();
        for pb::ContributionsResponse { contributions, arrivals } in try_join_all(answers).await? {
            for one in contributions {
                let (squares, hash) = figures.entry((one.tensor, one.rank)).or_default();
                *squares += one.sum_of_squares;
                *hash = hash.wrapping_add(one.hash);
            }
            for pb::Arrival { rank, microseconds } in arrivals {
                let latest = arrived.entry(rank).or_default();
                *latest = Duration::from_micros(microseconds).max(*latest);
            }
        }
        let tensors = of.spec.manifest.tensors();
        let contribution = |((tensor, rank), (squares, hash)): ((u32, u32), (f64, u64))| {
            let tensor = tensors.get(tensor as usize)?.name.clone();
            Some(Contribution { tensor, rank, norm: squares.sqrt(), hash })
        };
        let contributions = figures.into_iter().filter_map(contribution).collect();
        Ok(StepContributions { step, contributions, arrived })
    }
}
