//! Joining a job: the first message of its lease, and the task that follows the next ones.

use std::sync::{Arc, Mutex, atomic::AtomicU64};

use tokio::sync::watch;
#[cfg(doc)]
use zeroshard_model::Error;
use zeroshard_model::{JobSpec, Result, local::LocalTensor};
use zeroshard_net::trace;
use zeroshard_proto::pb;

use super::{
    Job, Member,
    attempts::Attempts,
    membership::{Membership, SentData},
    watcher::{Watcher, take_rank},
};
use crate::{Cluster, windows::Windows};

impl Cluster {
    /// Joins the job as `rank`. If the rank has an earlier lease, the call waits until that lease
    /// ends. If `ZEROSHARD_OTLP_ENDPOINT` is set, this process sends the traces of its steps to
    /// that collector from now on.
    ///
    /// # Errors
    /// [`Error::UnknownJob`], [`Error::RankTaken`], [`Error::Invalid`] for a rank out of range, and
    /// for an invalid collector or trace ratio in the environment.
    pub async fn join(&self, job: &str, rank: u32) -> Result<Job> {
        Job::join(self.clone(), job, rank, None).await
    }

    /// Joins the job like [`Self::join`], and announces `address`, `host:port`, to the other ranks
    /// as the address of this worker.
    ///
    /// # Errors
    /// Those of [`Self::join`].
    pub async fn join_at(&self, job: &str, rank: u32, address: &str) -> Result<Job> {
        Job::join(self.clone(), job, rank, Some(address)).await
    }
}

impl Job {
    async fn join(cluster: Cluster, job: &str, rank: u32, address: Option<&str>) -> Result<Self> {
        trace::start_from_environment("zeroshard-worker")?;
        let request = pb::JoinRequest {
            job: job.to_owned(),
            rank,
            address: address.map(str::to_owned),
            ..Default::default()
        };
        // An earlier lease of the rank may have to end first.
        let limit = cluster.options.timeout;
        let (first, stream) = take_rank(&cluster, request.clone(), limit).await?;
        let spec = JobSpec::try_from(first.spec.clone().unwrap_or_default())?;
        let (id, locals) = (first.job_id, LocalTensor::all(&spec, rank));
        let request = pb::JoinRequest { lease: first.lease, job_id: id, ..request };
        let (told, membership) = watch::channel(Membership::new(first)?);
        let (spec, attempts) = (Arc::new(spec), Arc::<Attempts>::default());
        let restored = membership.borrow().restored.map_or(0, |restored| restored.epoch);
        let user_data = Arc::<Mutex<SentData>>::default();
        let watcher = Watcher {
            cluster: cluster.clone(),
            request,
            told,
            attempts: attempts.clone(),
            user_data: user_data.clone(),
        };
        let watcher = tokio::spawn(watcher.run(stream));
        let member = Member {
            restoration: AtomicU64::new(restored),
            windows: Windows::new(&cluster.options),
            cluster,
            spec,
            id,
            rank,
            locals,
            membership,
            watcher,
            attempts,
            user_data,
        };
        Ok(Self(Arc::new(member)))
    }
}
