//! Calls of operators: cordon and drain servers, evict ranks. They need a token of the role admin.

use zeroshard_proto::{Error, Result, Server, pb};

use crate::Cluster;

/// What is left on a server that is being drained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drained {
    /// The server.
    pub server: Server,
    /// The jobs that have slices on the server, by name.
    pub stays: Vec<Stays>,
    /// The number of slices of all jobs with fewer replicas than the jobs ask for.
    pub degraded_slices: u64,
}

/// A job that has slices on a server that is being drained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stays {
    /// The name of the job.
    pub job: String,
    /// Why its slices were not moved.
    pub reason: String,
    /// Whether they can be moved without anybody's help when the call is repeated later.
    pub transient: bool,
}

impl Cluster {
    /// Gives a server no new slices, or gives it slices again. `server` is its address, or its id
    /// in decimal or hexadecimal digits.
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

    /// Gives a server no new slices, and moves its slices to other servers as far as that is
    /// possible at once. The call is repeated until no job is left on the server. `restore`: jobs
    /// without replicas return to their last checkpoint, if their policy is to do so after a loss.
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

    /// Ends the lease of a rank whose worker hangs, as if the worker had been lost. Returns the
    /// epoch that has begun.
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
    let absent = || Error::invalid("server of an answer", "absent", "present");
    Ok(server.ok_or_else(absent)?.into())
}
