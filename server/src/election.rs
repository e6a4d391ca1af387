//! The election of the leading coordinator, with leases and elections of etcd.
//!
//! Each candidate has a lease in etcd, and a key that exists as long as the lease. The candidate
//! whose key was created first is the leader, and the revision that created the key is its term.
//! A leader that cannot renew its lease in time stops deciding before the lease ends in etcd, hence
//! before another can be elected. (The clocks of machines may differ, but not their rates.)

use std::{
    collections::hash_map::RandomState,
    convert::Infallible,
    hash::{BuildHasher, Hasher},
    time::{Duration, Instant},
};

use tokio::time::{sleep, timeout};
use tonic::transport::Channel;
use zeroshard_proto::{Error, Result, transport::Addresses};

use crate::{config::Etcd, coordinator::leadership::Leadership};
use pb::{LeaseGrantRequest, LeaseKeepAliveRequest, LeaseRevokeRequest, lease_client::LeaseClient};
use votes::{CampaignRequest, election_client::ElectionClient};

/// The lease service of etcd.
#[allow(missing_docs, unreachable_pub, reason = "generated code")]
mod pb {
    tonic::include_proto!("etcdserverpb");
}

/// The election service of etcd.
#[allow(missing_docs, unreachable_pub, reason = "generated code")]
mod votes {
    tonic::include_proto!("v3electionpb");
}

/// The pause before another try after an error is random, between this and its double.
const PAUSE: Duration = Duration::from_millis(250);

/// A leader stops deciding when less than this part of its lease is left.
const RESERVE: u32 = 10;

/// A candidate for the leadership of a cluster.
#[derive(Debug)]
pub(crate) struct Candidate {
    lease: LeaseClient<Channel>,
    election: ElectionClient<Channel>,
    etcd: Etcd,
    duration: Duration,
    /// The address of this coordinator, which is shown in etcd.
    address: String,
}

/// The lease of a candidate.
#[derive(Debug)]
struct Lease {
    id: i64,
    duration: Duration,
    /// The end of the lease, unless it is renewed.
    until: Instant,
}

/// A leader, which has to renew its lease.
#[derive(Debug)]
pub(crate) struct Leader<'a> {
    candidate: &'a Candidate,
    lease: Lease,
    /// The right to decide.
    pub(crate) leadership: Leadership,
}

impl Candidate {
    /// A candidate at `address` whose lease ends after `duration` without a renewal.
    ///
    /// # Errors
    /// [`Error::Invalid`] for invalid addresses of etcd.
    pub(crate) fn new(etcd: Etcd, duration: Duration, address: String) -> Result<Self> {
        let channel = Addresses::parse(&etcd.members())?.connect_lazy();
        let (lease, election) = (LeaseClient::new(channel.clone()), ElectionClient::new(channel));
        Ok(Self { lease, election, etcd, duration, address })
    }

    /// Waits until this candidate is the leader. Errors are logged, and the candidate tries again.
    pub(crate) async fn campaign(&self) -> Leader<'_> {
        loop {
            match self.run().await {
                Ok(leader) => return leader,
                Err(error) => {
                    tracing::warn!(%error, "the election failed; trying again");
                    sleep(pause()).await;
                }
            }
        }
    }

    async fn run(&self) -> Result<Leader<'_>> {
        let mut lease = self.grant().await?;
        let request = CampaignRequest {
            name: self.etcd.election().as_bytes().to_vec(),
            lease: lease.id,
            value: self.address.as_bytes().to_vec(),
        };
        tracing::info!(election = self.etcd.election(), "waiting to be elected");
        let mut election = self.election.clone();
        let elected = tokio::select! {
            elected = election.campaign(request) => elected,
            ended = lease.keep(self, |_| true) => match ended {
                Err(error) => return Err(error),
                Ok(never) => match never {},
            },
        };
        let leader = match elected {
            Ok(elected) => elected.into_inner().leader.unwrap_or_default(),
            Err(status) => {
                self.revoke(&lease).await;
                return Err(self.failed(&status));
            }
        };
        let leadership = Leadership::elected(leader.rev as u64, lease.until);
        Ok(Leader { candidate: self, lease, leadership })
    }

    async fn grant(&self) -> Result<Lease> {
        let (sent, mut client) = (Instant::now(), self.lease.clone());
        let request = LeaseGrantRequest { ttl: self.duration.as_secs() as i64 };
        let granted = self.limit(self.duration, client.lease_grant(request)).await?.into_inner();
        if !granted.error.is_empty() {
            return Err(Error::Unavailable { peer: self.peer(), cause: granted.error });
        }
        let duration = seconds(granted.ttl);
        Ok(Lease { id: granted.id, duration, until: usable(sent, duration) })
    }

    /// Ends a lease, so that another candidate need not wait for its end.
    async fn revoke(&self, lease: &Lease) {
        let mut client = self.lease.clone();
        let revoked = client.lease_revoke(LeaseRevokeRequest { id: lease.id });
        if let Err(error) = self.limit(Duration::from_secs(1), revoked).await {
            tracing::debug!(%error, "the lease was not revoked");
        }
    }

    async fn limit<T>(
        &self,
        limit: Duration,
        call: impl Future<Output = Result<T, tonic::Status>>,
    ) -> Result<T> {
        match timeout(limit, call).await {
            Ok(answer) => answer.map_err(|status| self.failed(&status)),
            Err(_) => {
                let cause = format!("no answer within {limit:?}");
                Err(Error::Unavailable { peer: self.peer(), cause })
            }
        }
    }

    fn peer(&self) -> String {
        format!("etcd {}", self.etcd.members())
    }

    fn failed(&self, status: &tonic::Status) -> Error {
        let cause = status.message().to_owned();
        Error::Unavailable { peer: self.peer(), cause }
    }
}

impl Lease {
    /// Renews the lease, and passes each new end to `renewed`, until the lease is lost, or until
    /// `renewed` returns `false`.
    ///
    /// # Errors
    /// The reason for which the lease was not renewed.
    async fn keep(
        &mut self,
        candidate: &Candidate,
        mut renewed: impl FnMut(Instant) -> bool,
    ) -> Result<Infallible> {
        let ended = |cause: &str| Error::Unavailable {
            peer: candidate.peer(),
            cause: format!("the lease {cause}"),
        };
        let mut failed = None;
        sleep(self.duration / 3).await;
        loop {
            let sent = Instant::now();
            if self.until <= sent {
                return Err(failed.unwrap_or_else(|| ended("was not renewed in time")));
            }
            match self.renew(candidate, self.until - sent).await {
                Ok(duration) if duration.is_zero() => return Err(ended("has ended")),
                Ok(duration) => {
                    (self.until, failed) = (usable(sent, duration), None);
                    if !renewed(self.until) {
                        return Err(ended("was renewed too late"));
                    }
                    sleep(self.duration / 3).await;
                }
                Err(error) => {
                    tracing::debug!(%error, "the lease was not renewed; trying again");
                    failed = Some(error);
                    sleep(pause()).await;
                }
            }
        }
    }

    /// Renews the lease once. Returns its new duration: 0 if it has ended.
    async fn renew(&self, candidate: &Candidate, left: Duration) -> Result<Duration> {
        let mut client = candidate.lease.clone();
        let request = tokio_stream::once(LeaseKeepAliveRequest { id: self.id });
        let answer = async {
            let mut answers = client.lease_keep_alive(request).await?.into_inner();
            answers.message().await
        };
        let limit = (self.duration / 3).min(left);
        let answer = candidate.limit(limit, answer).await?;
        Ok(seconds(answer.unwrap_or_default().ttl))
    }
}

impl Leader<'_> {
    /// Renews the lease until it is lost, and returns the reason. The leadership has ended then.
    pub(crate) async fn hold(&mut self) -> Error {
        let leadership = self.leadership.clone();
        let kept = self.lease.keep(self.candidate, |until| leadership.extend(until)).await;
        leadership.end();
        let Err(error) = kept;
        error
    }

    /// Gives the leadership back, after the coordinator has stopped.
    pub(crate) async fn resign(self) {
        self.candidate.revoke(&self.lease).await;
    }
}

/// The time until which a lease may be used that was granted or renewed for `duration` by a request
/// that was sent at `sent`.
fn usable(sent: Instant, duration: Duration) -> Instant {
    sent + duration - duration / RESERVE
}

fn seconds(ttl: i64) -> Duration {
    Duration::from_secs(ttl.clamp(0, 1 << 20) as u64)
}

/// A random pause.
fn pause() -> Duration {
    let random = RandomState::new().build_hasher().finish();
    PAUSE + PAUSE.mul_f64((random % 1024) as f64 / 1024.0)
}
