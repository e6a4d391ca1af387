//! Reports of servers that this worker cannot reach, although the coordinator may.
//!
//! A transfer may take long for good reasons: a server waits for other ranks, for memory or for a
//! version. So a server counts as unreachable only if it does not answer a probe on a connection of
//! its own.

use std::{convert::Infallible, time::Duration};

use http_body_util::Full;
use tokio::time::{sleep, timeout};
use zeroshard_model::{Error, Server};
use zeroshard_proto::{frame::encode_message, pb};

use super::{Job, Member, membership::Membership};
use crate::{Cluster, call::unary};

/// How long a transfer lasts before its server is probed.
const PATIENCE: Duration = Duration::from_secs(3);
/// The pause between two probes.
const PAUSE: Duration = Duration::from_secs(1);
/// How long a server or the coordinator may take to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

impl Job {
    /// Runs `work`, a transfer from or to `server`. Tells the coordinator while the server cannot
    /// be reached, so that a job with replicas can continue without it.
    pub(super) async fn reaching<T>(&self, server: Server, work: impl Future<Output = T>) -> T {
        tokio::select! {
            biased;
            done = work => done,
            never = self.watch(server) => match never {},
        }
    }

    async fn watch(&self, server: Server) -> Infallible {
        sleep(PATIENCE).await;
        loop {
            if let Some(cause) = self.probe(&server).await {
                self.report(server.clone(), cause).await;
            }
            sleep(PAUSE).await;
        }
    }

    /// Why the server cannot be reached; `None` if it answers, no matter what.
    async fn probe(&self, server: &Server) -> Option<String> {
        let connection = match self.0.cluster.shards.separate(server) {
            Ok(connection) => connection.within(ANSWER_LIMIT),
            Err(error) => return Some(error.to_string()),
        };
        let request = Full::new(encode_message(&()));
        let path = "/grpc.health.v1.Health/Check";
        let answer = unary::<_, ()>(&connection, path, request, &server.address);
        match timeout(ANSWER_LIMIT, answer).await {
            Err(_) => Some(format!("no answer within {ANSWER_LIMIT:?}")),
            Ok(Err(Error::Unavailable { cause, .. })) => Some(cause),
            Ok(Err(error @ (Error::Tls { .. } | Error::Timeout { .. }))) => Some(error.to_string()),
            Ok(_) => None,
        }
    }

    /// Reports the server. A coordinator that does not answer has other troubles, which its stream
    /// of memberships shows.
    async fn report(&self, server: Server, cause: String) {
        let Member { cluster, spec, id, rank, .. } = &*self.0;
        let Membership { lease, epoch, .. } = *self.0.membership.borrow();
        let (job, rank) = (spec.name.clone(), *rank);
        tracing::warn!(job, rank, server = server.address, cause, "the server cannot be reached");
        let turn = pb::Turn { job, job_id: *id, lease, epoch, rank, ..Default::default() };
        let request =
            pb::ReportLinkRequest { turn: Some(turn), server: Some(server.into()), cause };
        let mut client = Cluster::client(cluster.connection.within(ANSWER_LIMIT));
        let _ = timeout(ANSWER_LIMIT, client.report_link(request)).await;
    }
}
