//! Calls for operators: they cordon and drain servers, and evict ranks. The caller needs the role
//! `admin`.

use zeroshard_model::{Error, Result, Server};
use zeroshard_proto::pb;

use crate::Cluster;

/// The progress of draining a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drained {
    /// The server.
    pub server: Server,
    /// The jobs that still have slices on the server, by name.
    pub stays: Vec<Stays>,
    /// The number of slices, over all jobs, that have fewer replicas than their job requires.
    pub degraded_slices: u64,
}

/// A job that has slices on a server that is being drained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stays {
    /// The name of the job.
    pub job: String,
    /// The reason why its slices were not moved.
    pub reason: String,
    /// `true` if a later call can move them without an action of the operator.
    pub transient: bool,
}

impl Cluster {
    /// Cordons a server, so that it receives no new slices, or uncordons it. `server` is its
    /// address, or its id in decimal or hexadecimal digits.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown server, [`Error::Forbidden`], [`Error::Timeout`].
    pub async fn cordon_server(&self, server: &str, cordoned: bool) -> Result<Server> {
        let request = pb::CordonServerRequest { server: server.to_owned(), cordoned };
        let answer = self.retry("an answer", |mut client| {
            let request = request.clone();
            async move { client.cordon_server(request).await }
        });
        named(answer.await?.server)
    }

    /// Cordons a server, and moves to other servers the slices that can be moved immediately. The
    /// caller repeats the call until no job is left on the server. With `restore`, jobs without
    /// replicas return to their last checkpoint, if their policy does so after the loss of a
    /// server.
    ///
    /// # Errors
    /// Those of [`Self::cordon_server`].
    pub async fn drain_server(&self, server: &str, restore: bool) -> Result<Drained> {
        let request = pb::DrainServerRequest { server: server.to_owned(), restore };
        let answer = self.retry("an answer", |mut client| {
            let request = request.clone();
            async move { client.drain_server(request).await }
        });
        let pb::DrainServerResponse { server, jobs, degraded_slices } = answer.await?;
        let stays = |pb::JobOnServer { job, reason, transient }| Stays { job, reason, transient };
        let stays = jobs.into_iter().map(stays).collect();
        Ok(Drained { server: named(server)?, stays, degraded_slices })
    }

    /// Ends the lease of a rank whose worker hangs, as if the worker had been lost. Returns the new
    /// epoch.
    ///
    /// # Errors
    /// [`Error::UnknownJob`], [`Error::Invalid`] for a rank that no worker holds,
    /// [`Error::Forbidden`], [`Error::Timeout`].
    pub async fn evict_rank(&self, job: &str, rank: u32) -> Result<u64> {
        let request = pb::EvictRankRequest { job: job.to_owned(), rank };
        let answer = self.retry("an answer", |mut client| {
            let request = request.clone();
            async move { client.evict_rank(request).await }
        });
        Ok(answer.await?.epoch)
    }
}

fn named(server: Option<pb::Server>) -> Result<Server> {
    let absent = || Error::refused("the answer has no `server`");
    Ok(server.ok_or_else(absent)?.into())
}
