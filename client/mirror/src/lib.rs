//! A mirror: follows a job, and serves its readers, so that the shard servers send each version
//! once.
//!
//! The mirror has one copy of the values, and the changes of the last versions. A reader compares
//! what it gets from here with hashes from the shard servers, so a mirror can delay a reader, but
//! cannot give it wrong values. The mirror keeps no secrets: it asks the coordinator whether a
//! reader's token may read the job.

mod accepted;
mod access;
mod admin;
mod metrics;
mod service;
mod store;

use std::{net::SocketAddr, sync::Arc};

use futures_util::TryStreamExt;
use tokio::net::TcpListener;
use tonic::transport::{Server, server::TcpIncoming};
use zeroshard_client::{Cluster, Follow, Options};
use zeroshard_model::{Error, Result};
use zeroshard_net::transport::tls::Acceptor;
use zeroshard_proto::pb::mirror_service_server::MirrorServiceServer;

use access::Access;
use metrics::Metrics;
use service::Service;
pub use store::Mirrored;
use store::Store;

/// The largest request: all slices of a large job.
const MAX_REQUEST: usize = 16 << 20;

/// The maximum number of calls at a time on one connection.
const MAX_CALLS: u32 = 64;

/// How to mirror a job.
#[derive(Debug, Clone)]
pub struct Mirror {
    /// The name of the job.
    pub job: String,
    /// The tensors and the dtype of all readers.
    pub follow: Follow,
    /// The maximum size of the changes that are kept, in bytes.
    pub history_bytes: u64,
    /// The addresses of the coordinators, at which readers' tokens are checked.
    pub address: String,
    /// The options of connections. Readers of a cluster with TLS connect with TLS, too.
    pub options: Options,
}

impl Mirror {
    /// Follows the job and serves readers until an error. Calls `received` for each version.
    ///
    /// # Errors
    /// Those of [`Cluster::follow`] and [`zeroshard_client::Follower::next`];
    /// [`Error::OutOfMemory`] and [`Error::Unavailable`] if the mirror cannot have a full copy;
    /// [`Error::Refused`] if the cluster has TLS and the mirror no certificate.
    pub async fn run(
        &self,
        listeners: Listeners,
        mut received: impl FnMut(Mirrored),
    ) -> Result<()> {
        let cluster = Cluster::connect(&self.address, self.options.clone()).await?;
        let follower = cluster.follow(&self.job, self.follow.clone()).await?;
        let (store, metrics) = (Arc::new(Store::new(self.history_bytes)), Metrics::new(&self.job));
        let access = Access::new(&self.address, &self.job, self.options.clone());
        let acceptor = Acceptor::new(self.options.tls.clone())?;
        let service = Service::new(store.clone(), access.clone(), metrics.clone());
        let admin = async {
            let Some(listener) = listeners.admin else { return std::future::pending().await };
            let shown = (store.clone(), metrics.clone());
            admin::serve(listener, acceptor.clone(), access, shown).await
        };
        let count = |version: Mirrored| {
            metrics.received(&version);
            received(version);
        };
        tokio::select! {
            ended = serve(listeners.readers, acceptor.clone(), service) => ended,
            ended = admin => ended,
            ended = store.follow(follower, count) => ended,
            () = admin::watch_lag(&cluster, &self.job, &store, &metrics) => Ok(()),
        }
    }
}

/// Where a mirror listens.
#[derive(Debug)]
pub struct Listeners {
    /// For readers.
    pub readers: TcpListener,
    /// For metrics and probes.
    pub admin: Option<TcpListener>,
}

/// Serves readers until an error.
async fn serve(listener: TcpListener, acceptor: Acceptor, service: Service) -> Result<()> {
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let incoming = incoming.map_ok(move |io| acceptor.accept(io));
    let service = MirrorServiceServer::new(service).max_decoding_message_size(MAX_REQUEST);
    let served = Server::builder()
        .max_concurrent_streams(MAX_CALLS)
        .add_service(service)
        .serve_with_incoming(incoming)
        .await;
    let cause = served.err().map_or_else(|| "it ended".to_owned(), |error| error.to_string());
    Err(Error::Internal { cause: format!("the server of the mirror failed: {cause}") })
}

/// Listens at an address.
///
/// # Errors
/// [`Error::Invalid`] if the address cannot be listened on.
pub async fn listen(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|cause| {
        Error::invalid("address of the mirror", format!("{address} ({cause})"), "a free address")
    })
}
