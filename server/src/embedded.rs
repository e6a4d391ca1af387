//! A whole cluster inside this process: for programs that have no other, and for tests. The code is that of
//! the binary; it listens on loopback, on ports that the system chooses.

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::{
    config::{self, Address, Common, Listen},
    roles::{self, Site},
    serve::Error,
};

/// What an embedded cluster has.
#[derive(Debug, Clone)]
pub struct Options {
    /// Number of shard servers.
    pub shards: usize,
    /// Limits and HTTP/2 settings; logging is the caller's.
    pub common: Common,
    /// Budget of each shard server for early gradients, in bytes.
    pub parked_bytes: u64,
}

impl Options {
    /// `shards` servers with the default settings.
    pub fn new(shards: usize) -> Self {
        Self { shards, common: Common::default(), parked_bytes: config::Shard::default().parked_bytes }
    }
}

/// A running cluster. Dropped without [`Self::shutdown`] it stops too, without waiting.
#[derive(Debug)]
pub struct Cluster {
    address: Address,
    shutdown: CancellationToken,
    tasks: JoinSet<Result<(), Error>>,
}

impl Cluster {
    /// Starts a coordinator and the shard servers on the current tokio runtime, and returns when all of
    /// them are connected.
    ///
    /// # Errors
    /// [`Error`] of the first part that cannot start.
    pub async fn start(options: Options) -> Result<Self, Error> {
        let Options { shards, common, parked_bytes } = options;
        let shutdown = CancellationToken::new();
        let stop = shutdown.clone().drop_guard();
        let site = Site::bind(Listen::loopback(0), &common).await?;
        let address = Address::from(site.address);
        let parts = roles::coordinator(&site.context, &shutdown);
        let mut tasks = JoinSet::new();
        tasks.spawn(site.run(parts, shutdown.clone()));
        let mut healths = Vec::with_capacity(shards);
        for _ in 0..shards {
            let site = Site::bind(Listen::loopback(0), &common).await?;
            let config = config::Shard { parked_bytes, ..config::Shard::default() };
            let parts = roles::shard(&config, address.clone(), &site, &shutdown);
            healths.push(site.context.health.clone());
            tasks.spawn(site.run(parts, shutdown.clone()));
        }
        for health in healths {
            tokio::select! {
                () = health.until_ready() => {}
                Some(ended) = tasks.join_next() => return Err(ended_early(ended)),
            }
        }
        stop.disarm();
        Ok(Self { address, shutdown, tasks })
    }

    /// `host:port` of the coordinator.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Stops all servers; open calls have the drain time to finish.
    ///
    /// # Errors
    /// What a server ended with.
    pub async fn shutdown(mut self) -> Result<(), Error> {
        self.shutdown.cancel();
        while let Some(ended) = self.tasks.join_next().await {
            ended.map_err(|error| Error::Ended(error.to_string()))??;
        }
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.shutdown.cancel();
        // A JoinSet aborts its tasks when dropped; these end by the token, with their goodbyes said.
        self.tasks.detach_all();
    }
}

fn ended_early(ended: Result<Result<(), Error>, tokio::task::JoinError>) -> Error {
    match ended {
        Ok(Ok(())) => Error::Ended("before the cluster was up".to_owned()),
        Ok(Err(error)) => error,
        Err(error) => Error::Ended(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use zeroshard_proto::pb::{self, coordinator_client::CoordinatorClient};

    use super::*;

    #[tokio::test]
    async fn a_cluster_starts_answers_and_stops() {
        let cluster = Cluster::start(Options::new(0)).await.unwrap();
        let mut client = CoordinatorClient::connect(format!("http://{}", cluster.address())).await.unwrap();
        let status = client.status(pb::StatusRequest {}).await.unwrap().into_inner();
        assert_eq!(status, pb::StatusResponse::default());
        cluster.shutdown().await.unwrap();
    }
}
