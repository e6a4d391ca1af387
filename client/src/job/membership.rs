//! The membership of a job according to the coordinator, and waiting for its changes.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::watch;
use zeroshard_model::{Error, Placement, Result};
use zeroshard_net::{Deadline, deadline::MARGIN};
use zeroshard_proto::{pb, status::from_status};

use super::{Job, attempt::Attempts};
use crate::{Cluster, retry::drops_job};

/// The coordinator announces the end of a job at most this long after the servers have reported it.
pub(super) const NEWS_TIMEOUT: Duration = Duration::from_secs(5);

/// The wait for a rank whose lease has ended. It is either free or has another worker.
const AGAIN_WAIT: Duration = Duration::from_secs(1);

/// The contents of all messages so far.
#[derive(Debug, Clone)]
pub(super) struct Membership {
    /// The lease of the rank. It changes when the rank joins again.
    pub(super) lease: u64,
    pub(super) epoch: u64,
    pub(super) version: Option<u64>,
    pub(super) placement: Arc<Placement>,
    /// The addresses of the ranks that have announced one.
    pub(super) peers: BTreeMap<u32, String>,
    /// The last time that the job was restored from a checkpoint while its ranks were waiting.
    pub(super) restored: Option<pb::Restored>,
    /// The reason for the end of the lease, if it has ended.
    pub(super) ended: Option<Error>,
}

impl Membership {
    /// Creates the membership from the first message of a stream, which is complete.
    pub(super) fn new(message: pb::JoinResponse) -> Result<Self> {
        let placement = Arc::new(message.placement.clone().unwrap_or_default().try_into()?);
        let mut membership = Self {
            lease: message.lease,
            epoch: message.epoch,
            version: None,
            placement,
            peers: BTreeMap::new(),
            restored: None,
            ended: None,
        };
        membership.update(pb::JoinResponse { placement: None, ..message })?;
        Ok(membership)
    }

    /// Applies a later message, which contains the changes. An error leaves the membership
    /// unchanged.
    fn update(&mut self, message: pb::JoinResponse) -> Result<()> {
        if let Some(placement) = message.placement {
            self.placement = Arc::new(placement.try_into()?);
        }
        (self.lease, self.epoch) = (message.lease, message.epoch);
        self.restored = message.restored.or(self.restored);
        // A published version remains published.
        self.version = message.version.or(self.version);
        for pb::Peer { rank, address } in message.peers {
            match address {
                None => self.peers.remove(&rank),
                Some(address) => self.peers.insert(rank, address),
            };
        }
        Ok(())
    }
}

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

/// The data for checkpoints that the rank has sent last, which a new coordinator does not have.
#[derive(Debug, Clone, Default)]
pub(super) struct SentData {
    /// The epoch in which the rank has sent it.
    pub(super) epoch: u64,
    pub(super) version: u64,
    pub(super) data: Bytes,
}

impl SentData {
    /// The version and the data; none if the job was restored from a checkpoint since. The job may
    /// reach the version again, with other data.
    fn current(&self, restored: Option<pb::Restored>) -> (u64, Bytes) {
        match restored.is_some_and(|restored| self.epoch < restored.epoch) {
            true => (0, Bytes::new()),
            false => (self.version, self.data.clone()),
        }
    }
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

impl Job {
    /// Runs `work`, unless the lease ends or the job returns to a checkpoint first. A server only
    /// knows that it was told to drop the job; its error is replaced by the coordinator's reason.
    pub(super) async fn unless_ended<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let mut membership = self.0.membership.clone();
        let before = membership.borrow().restored;
        let ends = |now: &Membership| now.ended.is_some() || now.restored != before;
        let error = tokio::select! {
            biased;
            result = work => match result {
                Err(error) if drops_job(&error) || matches!(error, Error::RolledBack { .. }) => {
                    error
                }
                result => return result,
            },
            Ok(now) = membership.wait_for(ends) => {
                let now = now.clone();
                return Err(self.reason(&now));
            }
        };
        match tokio::time::timeout(self.news_timeout(), membership.wait_for(ends)).await {
            Ok(Ok(now)) => {
                let now = now.clone();
                Err(self.reason(&now))
            }
            _ => Err(error),
        }
    }

    /// Why calls end whose lease has ended, or whose job has returned to a checkpoint. The attempts
    /// of the job end with them.
    fn reason(&self, now: &Membership) -> Error {
        self.end_rolled_back();
        let restored = || now.restored.map(|restored| self.rolled_back(restored.version));
        let lost = || Error::LeaseLost { job: self.0.spec.name.clone(), rank: self.0.rank };
        now.ended.clone().or_else(restored).unwrap_or_else(lost)
    }

    pub(super) fn rolled_back(&self, version: u64) -> Error {
        Error::RolledBack { job: self.0.spec.name.clone(), version }
    }

    /// How long the coordinator may take to announce what becomes of a job that a server has
    /// dropped.
    pub(super) fn news_timeout(&self) -> Duration {
        match self.0.spec.is_restored_on_loss() {
            true => self.0.cluster.options.timeout,
            false => NEWS_TIMEOUT,
        }
    }

    pub(super) fn current(&self) -> Result<Membership> {
        let membership = self.0.membership.borrow().clone();
        match membership.ended {
            Some(error) => Err(error),
            None => Ok(membership),
        }
    }

    /// Waits until this rank has another lease than `lease`, which has ended.
    ///
    /// # Errors
    /// The reason for the end of the membership; [`Error::Timeout`].
    pub(super) async fn wait_for_lease_after(&self, lease: u64, deadline: Deadline) -> Result<()> {
        let mut membership = self.0.membership.clone();
        let again = membership.wait_for(|now| now.lease != lease || now.ended.is_some());
        let waiting_for =
            || format!("rank {} of job {:?} to join again", self.0.rank, self.0.spec.name);
        // The same reason as in `wait_for_news`.
        let _ = deadline.limit(waiting_for, again).await?;
        self.current().map(|_| ())
    }

    /// Waits until the coordinator has announced an epoch later than `epoch`.
    pub(super) async fn wait_for_news(&self, epoch: u64, deadline: Deadline) -> Result<()> {
        let mut membership = self.0.membership.clone();
        let later = membership.wait_for(|now| now.epoch > epoch || now.ended.is_some());
        let waiting_for = || format!("{} to announce the epoch after {epoch}", self.0.cluster.peer);
        // The watcher keeps the sender until the lease has ended, and announces the end first.
        let _ = deadline.limit(waiting_for, later).await?;
        self.current().map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(rank: u32, address: &str) -> pb::Peer {
        pb::Peer { rank, address: Some(address.into()) }
    }

    fn placement(id: u64) -> pb::Placement {
        let server = pb::Server { id, address: "host:1".into(), incarnation: 1 };
        pb::Placement { servers: vec![server], replicas: 1, owners: vec![0] }
    }

    fn first() -> Membership {
        let peers = vec![peer(0, "a:1"), peer(2, "c:1")];
        let message = pb::JoinResponse {
            epoch: 3,
            peers,
            placement: Some(placement(7)),
            ..Default::default()
        };
        Membership::new(message).unwrap()
    }

    #[test]
    fn a_later_message_changes_only_the_fields_that_it_contains() {
        let mut now = first();
        let peers = vec![peer(1, "b:1"), pb::Peer { rank: 2, address: None }];
        now.update(pb::JoinResponse { epoch: 4, version: Some(0), peers, ..Default::default() })
            .unwrap();
        assert_eq!((now.epoch, now.version, now.placement.servers()[0].id), (4, Some(0), 7));
        assert_eq!(
            now.peers.into_iter().collect::<Vec<_>>(),
            [(0, "a:1".into()), (1, "b:1".into())]
        );

        let mut now = first();
        now.version = Some(5);
        let moved =
            pb::JoinResponse { epoch: 3, placement: Some(placement(8)), ..Default::default() };
        now.update(moved).unwrap();
        assert_eq!((now.version, now.placement.servers()[0].id, now.peers.len()), (Some(5), 8, 2));
    }

    #[test]
    fn data_of_a_version_that_was_lost_is_not_sent_again() {
        let sent = SentData { epoch: 4, version: 7, data: Bytes::from_static(b"data") };
        let current = |epoch| sent.current(Some(pb::Restored { epoch, version: 5 }));
        let lost = (0, Bytes::new());
        let kept = (7, sent.data.clone());
        assert_eq!(
            [sent.current(None), current(3), current(4)],
            [kept.clone(), kept.clone(), kept]
        );
        assert_eq!(current(5), lost);
    }

    #[test]
    fn an_invalid_placement_changes_nothing() {
        let mut now = first();
        let broken = pb::Placement { owners: vec![9], ..placement(8) };
        let message = pb::JoinResponse { epoch: 9, placement: Some(broken), ..Default::default() };
        assert!(now.update(message).is_err());
        assert_eq!((now.epoch, now.placement.servers()[0].id), (3, 7));
    }
}
