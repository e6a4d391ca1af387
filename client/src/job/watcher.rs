//! The task that follows the coordinator's messages about a membership until the lease ends, and
//! the calls that begin their stream.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::sync::watch;
use zeroshard_model::{Error, Result};
use zeroshard_net::deadline::MARGIN;
use zeroshard_proto::{pb, status::from_status};

use super::{
    attempts::Attempts,
    membership::{Membership, SentData},
};
use crate::Cluster;

/// The wait for a rank whose lease has ended. It is either free or has another worker.
const AGAIN_WAIT: Duration = Duration::from_secs(1);

/// Passes on the coordinator's messages until the lease ends.
#[derive(Debug)]
pub(super) struct Watcher {
    pub(super) cluster: Cluster,
    /// The request that continues the lease after a restart of the coordinator, and without its
    /// lease joins again.
    pub(super) request: pb::JoinRequest,
    pub(super) told: watch::Sender<Membership>,
    pub(super) attempts: Arc<Attempts>,
    pub(super) user_data: Arc<Mutex<SentData>>,
}

type Memberships = tonic::Streaming<pb::JoinResponse>;

/// Asks for a rank, and waits at most `limit` for the end of an earlier lease. Returns the first
/// message and the stream of the next ones.
///
/// # Errors
/// [`Error::UnknownJob`], [`Error::RankTaken`], [`Error::LeaseLost`] if the job ends meanwhile.
pub(super) async fn take_rank(
    cluster: &Cluster,
    request: pb::JoinRequest,
    limit: Duration,
) -> Result<(pb::JoinResponse, Memberships)> {
    let what = format!("a lease for rank {} of job {:?}", request.rank, request.job);
    let (first, stream) = cluster
        .tries(&cluster.peer, &what, |left| {
            // The stream has no deadline: it lasts as long as the lease.
            let mut client = Cluster::client(cluster.connection.clone());
            let wait_ms = left.saturating_sub(MARGIN).min(limit).as_millis();
            let wait_ms = u32::try_from(wait_ms).unwrap_or(u32::MAX).max(1);
            let request = pb::JoinRequest { wait_ms, ..request.clone() };
            async move {
                let mut stream = client.join(request).await?.into_inner();
                let first = stream.message().await?;
                Ok(tonic::Response::new((first, stream)))
            }
        })
        .await?;
    let lost = || Error::LeaseLost { job: request.job.clone(), rank: request.rank };
    Ok((first.ok_or_else(lost)?, stream))
}

impl Watcher {
    pub(super) async fn run(mut self, mut stream: Memberships) {
        let ended = loop {
            let broken = match self.follow(&mut stream).await {
                Ok(()) => break self.lost(),
                Err(error) => error,
            };
            if !matches!(broken, Error::Unavailable { .. }) {
                // The coordinator has ended the lease on purpose.
                break self.reason(broken);
            }
            tracing::warn!(error = %broken, "the membership stream failed; connecting again");
            let attached = match self.attach().await {
                Ok(stream) => {
                    // Its first message has all peers.
                    self.told.send_modify(|membership| membership.peers.clear());
                    Ok(stream)
                }
                Err(Error::LeaseLost { .. }) => self.join_again().await,
                Err(error) => Err(self.reason(error)),
            };
            stream = match attached {
                Ok(stream) => stream,
                Err(error) => break error,
            };
        };
        self.told.send_modify(|membership| membership.ended = Some(ended));
    }

    /// The reason for the end of the membership after `error`.
    fn reason(&self, error: Error) -> Error {
        match error {
            Error::JobFailed { .. } | Error::JobReplaced { .. } => error,
            _ => self.lost(),
        }
    }

    fn lost(&self) -> Error {
        Error::LeaseLost { job: self.request.job.clone(), rank: self.request.rank }
    }

    /// Joins the job again, after the coordinator has ended the lease because it had no connection
    /// to this worker for too long. The end of the lease has begun a new epoch, so that nothing
    /// that was sent under the old lease counts.
    ///
    /// # Errors
    /// The reason for the end of the membership: another worker has the rank, or the job is gone.
    async fn join_again(&mut self) -> Result<Memberships> {
        if self.told.borrow().version.is_none() {
            // The servers have dropped the initial parameters that this rank uploaded.
            return Err(self.lost());
        }
        let request = pb::JoinRequest { lease: 0, ..self.request.clone() };
        let (first, stream) = match take_rank(&self.cluster, request, AGAIN_WAIT).await {
            Ok(joined) => joined,
            Err(error @ (Error::JobFailed { .. } | Error::JobReplaced { .. })) => {
                return Err(error);
            }
            Err(error) => {
                tracing::warn!(%error, "the rank could not join the job again");
                return Err(self.lost());
            }
        };
        if first.job_id != self.request.job_id {
            return Err(Error::JobReplaced { job: self.request.job.clone() });
        }
        tracing::warn!(
            job = self.request.job,
            rank = self.request.rank,
            epoch = first.epoch,
            "the lease had ended; the rank has joined the job again"
        );
        self.request.lease = first.lease;
        let mut now = self.told.borrow().clone();
        now.peers.clear();
        now.update(first)?;
        self.cluster.shards.forget(&self.told.borrow().placement, &now.placement);
        self.told.send_replace(now);
        Ok(stream)
    }

    /// Passes on messages until the stream ends. Returns the error of a stream that breaks.
    async fn follow(&mut self, stream: &mut Memberships) -> Result<()> {
        let failed = |status: tonic::Status| from_status(&status, &self.cluster.peer);
        while let Some(message) = stream.message().await.map_err(failed)? {
            let mut now = self.told.borrow().clone();
            now.update(message)?;
            self.cluster.shards.forget(&self.told.borrow().placement, &now.placement);
            self.told.send_replace(now);
        }
        Ok(())
    }

    /// Continues the lease with a new stream.
    ///
    /// # Errors
    /// [`Error::LeaseLost`] if the coordinator has ended the lease meanwhile.
    async fn attach(&mut self) -> Result<Memberships> {
        let stream = self.cluster.tries(&self.cluster.peer, "a stream for the lease", |_| {
            // The stream has no deadline: it lasts as long as the lease.
            let mut client = Cluster::client(self.cluster.connection.clone());
            let Membership { epoch, restored, .. } = *self.told.borrow();
            let (epoch, step, attempt) = self.attempts.latest(epoch);
            let sent = self.user_data.lock().unwrap_or_else(PoisonError::into_inner);
            let (user_data_version, user_data) = sent.current(restored);
            drop(sent);
            let request = pb::JoinRequest {
                epoch,
                step,
                attempt,
                user_data,
                user_data_version,
                ..self.request.clone()
            };
            async move { client.join(request).await }
        });
        stream.await
    }
}
