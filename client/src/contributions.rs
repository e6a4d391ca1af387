//! Asks servers who contributed to a step: which rank sent how large a gradient, and when.

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
    /// The contributions, ordered by tensor as in the manifest, then by rank.
    pub contributions: Vec<Contribution>,
    /// The arrival of each rank's last gradient, as the time since the first gradient of the step
    /// arrived. If servers differ, the longest time.
    pub arrived: BTreeMap<u32, Duration>,
}

/// One rank's contribution to a tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Contribution {
    /// The name of the tensor.
    pub tensor: String,
    /// The rank that pushed it. In a job with groups, the rank stands for its share of the sum.
    pub rank: u32,
    /// The L2 norm before ZeroShard takes the mean over the ranks and removes the loss scale.
    pub norm: f64,
    /// A hash of the gradient. Two runs that send the same gradient show the same hash.
    pub hash: u64,
}

impl Cluster {
    /// Returns the contributions to a step of a job. `None`: the last decided step. Each server
    /// keeps up to 1,000 steps, and up to 65,536 contributions in all of them.
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
