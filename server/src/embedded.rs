//! A whole cluster inside this process: for programs without another cluster, for a rank that hosts
//! the cluster of all ranks, and for tests. It runs the same code as the binary and listens on
//! ports that the system chooses.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use zeroshard_coordinator::cluster::context::JobLimits;
use zeroshard_model::limits::{MAX_CONNECTIONS, MAX_JOBS};
use zeroshard_net::{Token, token::Bearer};

use crate::{
    config::{self, Address, Common, Listen, Resources, Size},
    coordinator::leadership::Leadership,
    failure::Failure,
    roles::{self, Site},
    serve::Error,
    shutdown::Shutdown,
};

/// The options of an embedded cluster.
#[derive(Debug, Clone)]
pub struct Options {
    /// The number of shard servers.
    pub shards: usize,
    /// The address of this machine on which all parts listen, and which other processes dial. With
    /// an address other than loopback, other machines can connect.
    pub host: IpAddr,
    /// Limits, HTTP/2 settings and the token; if it is empty, the cluster gets a random one. The
    /// logging settings are ignored.
    pub common: Common,
    /// The budget of each shard server for early gradients, in bytes.
    pub parked_bytes: u64,
}

impl Options {
    /// Options for `shards` servers with default settings, on loopback, with a random token.
    pub fn new(shards: usize) -> Self {
        Self {
            shards,
            host: Ipv4Addr::LOCALHOST.into(),
            common: Common::default(),
            parked_bytes: Resources::default().parked_bytes,
        }
    }
}

/// A running cluster. If one of its tasks panics, the whole cluster has failed: all later calls
/// receive [`Unavailable`](zeroshard_model::Error::Unavailable). If it is dropped without
/// [`Self::shutdown`], it stops without waiting.
#[derive(Debug)]
pub struct Cluster {
    address: Address,
    token: Token,
    shutdown: CancellationToken,
    failure: Failure,
    tasks: JoinSet<Result<(), Error>>,
}

impl Cluster {
    /// Starts a coordinator and the shard servers on the current tokio runtime, and returns when
    /// all of them are connected.
    ///
    /// # Errors
    /// [`Error`] of the first part that cannot start; [`Error::Invalid`] for a host that other
    /// processes cannot dial, such as 0.0.0.0, and for a token that no call can carry.
    pub async fn start(options: Options) -> Result<Self, Error> {
        let Options { shards, host, mut common, parked_bytes } = options;
        if host.is_unspecified() {
            let expected =
                "an address of this machine that other machines can dial, such as 10.0.0.5";
            return Err(zeroshard_model::Error::invalid("host", host, expected).into());
        }
        if common.token.reveal().is_none() {
            common.token = Token::random()?;
        }
        Bearer::new(&common.token)?;
        let listen = Listen(SocketAddr::new(host, 0));
        let shutdown = CancellationToken::new();
        let stop = shutdown.clone().drop_guard();
        let site = Site::bind(listen, &common, MAX_CONNECTIONS).await?;
        let address = Address::from(site.address);
        let failure = site.context.failure.clone();
        let jobs = JobLimits { timeout: None, number: MAX_JOBS };
        let order = Shutdown::at_once(shutdown.clone());
        let parts = roles::coordinator(&site, Leadership::alone()?, jobs, &order);
        let mut tasks = JoinSet::new();
        tasks.spawn(site.run(parts, order.clone()));
        let memory = crate::memory::available().map(|all| Size(all / shards.max(1) as u64));
        let mut healths = Vec::with_capacity(shards);
        for _ in 0..shards {
            let mut site = Site::bind(listen, &common, MAX_CONNECTIONS).await?;
            site.context.failure = failure.clone();
            let resources = Resources { memory, parked_bytes, ..Resources::default() };
            let config = config::Shard { resources, ..config::Shard::default() };
            let parts = roles::shard(&config, address.clone().into(), &site, &order)?;
            healths.push(site.context.health.clone());
            tasks.spawn(site.run(parts, order.clone()));
        }
        for health in healths {
            tokio::select! {
                () = health.until_ready() => {}
                () = failure.failed() => {
                    return Err(Error::Panicked(failure.cause().unwrap_or_default().to_owned()));
                }
                Some(ended) = tasks.join_next() => return Err(ended_early(ended)),
            }
        }
        stop.disarm();
        Ok(Self { address, token: common.token, shutdown, failure, tasks })
    }

    /// `host:port` of the coordinator.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// The token that calls to the cluster carry.
    pub fn token(&self) -> &Token {
        &self.token
    }

    /// Stops all servers. Open calls may finish within the drain time.
    ///
    /// # Errors
    /// The error of a server; [`Error::Panicked`] if a task has panicked, now or earlier.
    pub async fn shutdown(mut self) -> Result<(), Error> {
        self.shutdown.cancel();
        while let Some(ended) = self.tasks.join_next().await {
            self.failure.joined("a server", ended)??;
        }
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.shutdown.cancel();
        // A JoinSet aborts its tasks when it is dropped. These tasks end through the token instead,
        // after closing their streams.
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
    use std::{
        convert::Infallible,
        future::Ready,
        task::{Context, Poll},
        time::Duration,
    };

    use zeroshard_model::Error as ClusterError;
    use zeroshard_net::{
        Token,
        transport::{Connection, Credentials, endpoint},
    };
    use zeroshard_proto::pb::{
        self, coordinator_service_client::CoordinatorServiceClient,
        shard_service_client::ShardServiceClient,
    };

    use tonic::body::Body;
    use zeroshard_proto::status::from_status;

    use super::*;
    use crate::roles::Parts;

    async fn status(address: &str, token: &str) -> Result<pb::StatusResponse, ClusterError> {
        let credentials = Credentials::new(&Token::from(token.to_owned()), None)?;
        let connection = Connection::lazy(address, &credentials)?;
        let answer =
            CoordinatorServiceClient::new(connection).status(pb::StatusRequest::default()).await;
        answer
            .map(tonic::Response::into_inner)
            .map_err(|status| from_status(&status, "coordinator"))
    }

    #[tokio::test]
    async fn a_cluster_starts_answers_and_stops() {
        let cluster = Cluster::start(Options::new(0)).await.unwrap();
        let token = cluster.token().reveal().expect("a random token").to_owned();
        let answer = status(&cluster.address(), &token).await.unwrap();
        assert!(answer.servers.is_empty() && answer.jobs.is_empty(), "{answer:?}");
        let refused = status(&cluster.address(), "").await;
        assert!(matches!(refused, Err(ClusterError::Unauthenticated { .. })), "{refused:?}");
        cluster.shutdown().await.unwrap();
    }

    #[tokio::test]
    async fn all_parts_listen_on_the_host_and_require_the_token() {
        let host = IpAddr::from([127, 0, 0, 2]);
        let common = Common { token: "s3cret".to_owned().into(), ..Common::default() };
        let cluster = Cluster::start(Options { host, common, ..Options::new(2) }).await.unwrap();
        assert!(cluster.address().starts_with("127.0.0.2:"));
        let refused = status(&cluster.address(), "wrong").await;
        assert!(matches!(refused, Err(ClusterError::Unauthenticated { .. })), "{refused:?}");
        let servers = status(&cluster.address(), "s3cret").await.unwrap().servers;
        assert_eq!(servers.len(), 2);
        assert!(
            servers.iter().all(|status| status
                .server
                .as_ref()
                .unwrap()
                .address
                .starts_with("127.0.0.2:")),
            "{servers:?}"
        );
        cluster.shutdown().await.unwrap();
    }

    /// A service whose calls panic.
    #[derive(Clone)]
    struct Panics;

    impl tonic::server::NamedService for Panics {
        const NAME: &'static str = "zeroshard.v1.ShardService";
    }

    impl tower::Service<http::Request<Body>> for Panics {
        type Response = http::Response<Body>;
        type Error = Infallible;
        type Future = Ready<Result<http::Response<Body>, Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: http::Request<Body>) -> Self::Future {
            panic!("the slice is torn")
        }
    }

    /// Starts a cluster with an additional server that has these parts, and returns the server's
    /// address.
    async fn with_server(parts: Parts) -> (Cluster, String) {
        let mut cluster = Cluster::start(Options::new(1)).await.unwrap();
        let listen = Listen(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0));
        let mut site = Site::bind(listen, &Common::default(), MAX_CONNECTIONS).await.unwrap();
        site.context.failure = cluster.failure.clone();
        let address = Address::from(site.address).to_string();
        let shutdown = Shutdown::at_once(cluster.shutdown.clone());
        cluster.tasks.spawn(site.run(parts, shutdown));
        (cluster, address)
    }

    fn assert_names_the_panic(refused: Result<impl std::fmt::Debug, ClusterError>) {
        match refused {
            Err(ClusterError::Unavailable { cause, .. }) => {
                assert!(cause.contains("the slice is torn"), "{cause}")
            }
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_panic_of_a_call_fails_the_whole_cluster_and_is_reported_at_shutdown() {
        let shutdown = CancellationToken::new();
        let background = Box::pin(async move {
            shutdown.cancelled().await;
            Ok(())
        });
        let parts = Parts { routes: tonic::service::Routes::new(Panics), background };
        let (cluster, address) = with_server(parts).await;
        let token = cluster.token().reveal().unwrap().to_owned();
        assert!(status(&cluster.address(), &token).await.is_ok());
        let channel = endpoint(&address).unwrap().connect().await.unwrap();
        let answer = ShardServiceClient::new(channel).steps(pb::StepsRequest::default()).await;
        assert_names_the_panic(answer.map_err(|status| from_status(&status, "shard")));
        assert_names_the_panic(status(&cluster.address(), &token).await);
        let ended = cluster.shutdown().await;
        assert!(
            matches!(&ended, Err(Error::Panicked(cause)) if cause.contains("the slice is torn")),
            "{ended:?}"
        );
    }

    #[tokio::test]
    async fn a_panic_of_a_background_task_fails_the_whole_cluster() {
        let background = Box::pin(async { panic!("the slice is torn") });
        let (cluster, _) =
            with_server(Parts { routes: tonic::service::Routes::default(), background }).await;
        tokio::time::timeout(Duration::from_secs(30), cluster.failure.failed()).await.unwrap();
        assert_names_the_panic(status(&cluster.address(), cluster.token().reveal().unwrap()).await);
        let ended = cluster.shutdown().await;
        assert!(
            matches!(&ended, Err(Error::Panicked(cause)) if cause.contains("the slice is torn")),
            "{ended:?}"
        );
    }

    #[tokio::test]
    async fn a_host_that_cannot_be_dialled_is_refused() {
        let host = Ipv4Addr::UNSPECIFIED.into();
        let refused = Cluster::start(Options { host, ..Options::new(0) }).await;
        assert!(
            matches!(refused, Err(Error::Invalid(ClusterError::Invalid { .. }))),
            "{refused:?}"
        );
    }

    #[tokio::test]
    async fn a_token_that_no_call_can_carry_ends_the_start() {
        let common = Common { token: "two words".to_owned().into(), ..Common::default() };
        let refused = Cluster::start(Options { common, ..Options::new(0) }).await;
        assert!(
            matches!(refused, Err(Error::Invalid(ClusterError::Invalid { .. }))),
            "{refused:?}"
        );
    }
}
