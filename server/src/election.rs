//! The election of the leading coordinator, with leases and elections of etcd.
//!
//! Each candidate has a lease in etcd, and a key that exists as long as the lease. The candidate
//! whose key was created first is the leader, and the revision that created the key is its term.
//! A leader that cannot renew its lease in time stops deciding before the lease ends in etcd, hence
//! before another can be elected. (The clocks of machines may differ, but not their rates.)

use std::{
    convert::Infallible,
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use pb::{LeaseGrantRequest, LeaseKeepAliveRequest, LeaseRevokeRequest, lease_client::LeaseClient};
use tokio::time::{sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use votes::{CampaignRequest, election_client::ElectionClient};
use zeroshard_model::{Error, Result};
use zeroshard_net::transport::{Addresses, Connection, Credentials};
use zeroshard_proto::status::from_status;

use crate::{config::Etcd, coordinator::leadership::Leadership, identity};

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
    etcd: Etcd,
    members: Vec<Addresses>,
    credentials: Credentials,
    /// The number of connections so far. Each is opened to the next member: one that answers may
    /// have lost the other members.
    connections: AtomicUsize,
    duration: Duration,
    /// The address of this coordinator, which is shown in etcd.
    address: String,
}

/// The lease of a candidate.
#[derive(Debug)]
struct Lease {
    id: i64,
    client: LeaseClient<Connection>,
    duration: Duration,
    /// The time at which the request for the last renewal was sent.
    renewed: Instant,
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
    /// A candidate at `address` whose lease ends after `duration` without a renewal. It uses
    /// the credentials for its connections to etcd.
    ///
    /// # Errors
    /// [`Error::Invalid`] for invalid addresses of etcd.
    pub(crate) fn new(
        etcd: Etcd,
        credentials: Credentials,
        duration: Duration,
        address: String,
    ) -> Result<Self> {
        let members = etcd.members().map(|member| Addresses::parse(&member));
        let members = members.collect::<Result<_>>()?;
        let connections = AtomicUsize::new(0);
        Ok(Self { etcd, members, credentials, connections, duration, address })
    }

    /// Waits until this candidate is the leader; `None` after `shutdown`. Errors are logged, and
    /// the candidate tries again.
    pub(crate) async fn campaign(&self, shutdown: &CancellationToken) -> Option<Leader<'_>> {
        while !shutdown.is_cancelled() {
            match self.run(shutdown).await {
                Ok(leader) => return leader,
                Err(error) => {
                    tracing::warn!(%error, "the election failed; trying again");
                    shutdown.run_until_cancelled(sleep(pause())).await;
                }
            }
        }
        None
    }

    async fn run(&self, shutdown: &CancellationToken) -> Result<Option<Leader<'_>>> {
        let connection = self.connect();
        let grant = self.grant(LeaseClient::new(connection.clone()));
        let Some(granted) = shutdown.run_until_cancelled(grant).await else {
            return Ok(None);
        };
        let mut lease = granted?;
        let request = CampaignRequest {
            name: self.etcd.election().as_bytes().to_vec(),
            lease: lease.id,
            value: self.address.as_bytes().to_vec(),
        };
        tracing::info!(election = self.etcd.election(), "waiting to be elected");
        let mut election = ElectionClient::new(connection);
        let elected = tokio::select! {
            elected = election.campaign(request) => Ok(Some(elected)),
            ended = lease.keep(self, |_| true) => match ended {
                Err(error) => Err(error),
                Ok(never) => match never {},
            },
            () = shutdown.cancelled() => Ok(None),
        };
        match elected {
            Ok(Some(Ok(elected))) if lease.until() > Instant::now() => {
                let leader = elected.into_inner().leader.unwrap_or_default();
                let leadership = Leadership::elected(leader.rev as u64, lease.until());
                Ok(Some(Leader { candidate: self, lease, leadership }))
            }
            other => {
                // Otherwise its key would be elected, or stay elected, until the lease ends.
                lease.revoke(self).await;
                match other {
                    Ok(Some(Ok(_))) => Err(self.ended("was not renewed in time")),
                    Ok(Some(Err(status))) => Err(self.failed(&status)),
                    Ok(None) => Ok(None),
                    Err(error) => Err(error),
                }
            }
        }
    }

    /// A connection to the next member.
    fn connect(&self) -> Connection {
        let number = self.connections.fetch_add(1, Ordering::Relaxed);
        self.members[number % self.members.len()].connect_lazy(&self.credentials)
    }

    async fn grant(&self, mut client: LeaseClient<Connection>) -> Result<Lease> {
        let renewed = Instant::now();
        let request = LeaseGrantRequest { ttl: self.duration.as_secs() as i64 };
        let granted = self.limit(self.duration, client.lease_grant(request)).await?.into_inner();
        if !granted.error.is_empty() {
            return Err(Error::Unavailable { peer: self.peer(), cause: granted.error });
        }
        Ok(Lease { id: granted.id, client, duration: seconds(granted.ttl), renewed })
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
        self.etcd.to_string()
    }

    fn failed(&self, status: &tonic::Status) -> Error {
        match from_status(status, &self.peer()) {
            // It says what to do about the certificates.
            error @ Error::Tls { .. } => error,
            _ => Error::Unavailable { peer: self.peer(), cause: status.message().to_owned() },
        }
    }

    fn ended(&self, how: &str) -> Error {
        Error::Unavailable { peer: self.peer(), cause: format!("the lease {how}") }
    }
}

impl Lease {
    /// The time until which the lease may be used. It lasts longer in etcd: there it began after
    /// the request was sent.
    fn until(&self) -> Instant {
        self.renewed + self.duration - self.duration / RESERVE
    }

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
        let mut failed = None;
        sleep_until((self.renewed + self.duration / 3).into()).await;
        loop {
            let sent = Instant::now();
            if self.until() <= sent {
                return Err(failed.unwrap_or_else(|| candidate.ended("was not renewed in time")));
            }
            match self.renew(candidate, self.until() - sent).await {
                Ok(duration) if duration.is_zero() => return Err(candidate.ended("has ended")),
                Ok(duration) => {
                    (self.renewed, self.duration, failed) = (sent, duration, None);
                    if !renewed(self.until()) {
                        return Err(candidate.ended("was renewed too late"));
                    }
                    sleep_until((self.renewed + self.duration / 3).into()).await;
                }
                Err(error) => {
                    tracing::debug!(%error, "the lease was not renewed; trying again");
                    failed = Some(error);
                    self.client = LeaseClient::new(candidate.connect());
                    sleep(pause()).await;
                }
            }
        }
    }

    /// Renews the lease once. Returns its new duration: 0 if it has ended.
    async fn renew(&self, candidate: &Candidate, left: Duration) -> Result<Duration> {
        let mut client = self.client.clone();
        let request = tokio_stream::once(LeaseKeepAliveRequest { id: self.id });
        let answer = async {
            let mut answers = client.lease_keep_alive(request).await?.into_inner();
            answers.message().await
        };
        let limit = (self.duration / 3).min(left);
        let answer = candidate.limit(limit, answer).await?;
        let answer = answer.ok_or_else(|| candidate.ended("was not renewed"))?;
        Ok(seconds(answer.ttl))
    }

    /// Ends the lease, so that another candidate need not wait for its end.
    async fn revoke(&self, candidate: &Candidate) {
        let mut client = self.client.clone();
        let revoked = client.lease_revoke(LeaseRevokeRequest { id: self.id });
        if let Err(error) = candidate.limit(Duration::from_secs(1), revoked).await {
            tracing::debug!(%error, "the lease was not revoked");
        }
    }
}

impl Leader<'_> {
    /// Renews the lease until it is lost, and returns the reason, or until `shutdown`. The
    /// leadership has ended then, so another candidate may be elected at once.
    pub(crate) async fn hold(mut self, shutdown: &CancellationToken) -> Option<Error> {
        let leadership = self.leadership.clone();
        let keep = self.lease.keep(self.candidate, |until| leadership.extend(until));
        let kept = shutdown.run_until_cancelled(keep).await;
        self.leadership.end();
        self.lease.revoke(self.candidate).await;
        kept.map(|Err(error)| error)
    }
}

fn seconds(ttl: i64) -> Duration {
    Duration::from_secs(ttl.clamp(0, 1 << 20) as u64)
}

/// A random pause.
fn pause() -> Duration {
    // Without random numbers the candidates only try at the same time.
    let random = identity::random().unwrap_or_default();
    PAUSE + PAUSE.mul_f64((random % 1024) as f64 / 1024.0)
}
