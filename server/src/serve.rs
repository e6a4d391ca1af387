//! Serves a role: the caller binds the listener, this module serves on it, and a token stops it.
//!
//! A role consists of a listener, [`Routes`] and a background future. This module has the parts
//! that all roles share: HTTP/2 settings, health, reflection, request metrics, and a shutdown that
//! does not hang.

use std::{io, net::SocketAddr, sync::Arc};

use axum::middleware::{from_fn, from_fn_with_state};
use futures_util::{TryStreamExt, future::ready};
use tokio::net::TcpListener;
use tonic::{
    service::Routes,
    transport::{
        Server,
        server::{Connected, TcpIncoming},
    },
};
use zeroshard_net::transport::{
    Credentials,
    tls::{Acceptor, Tls},
};
use zeroshard_proto::pb;

use crate::{
    access::Accepted,
    config::{Common, Listen},
    connection::Connections,
    failure::Failure,
    health::Health,
    layers::{
        audit, panic,
        request_limits::{self, RequestLimits},
        request_metrics,
        token::check_token,
    },
    memory,
    metrics::Metrics,
    shutdown::Shutdown,
};

/// The errors that prevent or end serving.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address cannot be listened on.
    #[error(
        "cannot listen on {listen}: {cause}; choose another address or port (0: any free port)"
    )]
    Bind {
        /// The address.
        listen: SocketAddr,
        /// The error of the system.
        cause: io::Error,
    },
    /// The transport failed.
    #[error("the gRPC server failed: {0}")]
    Transport(#[from] tonic::transport::Error),
    /// The admin server failed.
    #[error("the admin HTTP server failed: {0}")]
    Admin(io::Error),
    /// An invalid setting that only a program can pass, because flags and files are checked
    /// earlier.
    #[error(transparent)]
    Invalid(#[from] zeroshard_model::Error),
    /// A shard server has no coordinator address.
    #[error("a shard server needs the address of its coordinator; set --coordinator HOST:PORT")]
    NoCoordinator,
    /// A coordinator without an election has a successor.
    #[error(
        "another coordinator leads the shard servers of this one, which therefore exits; stop one of \
         them, or give both --election, so that one is the standby of the other"
    )]
    Replaced,
    /// A part of the process ended unexpectedly.
    #[error("a server ended unexpectedly: {0}")]
    Ended(String),
    /// A task panicked, and all servers of the process stopped.
    #[error("a server failed: {0}; this is a bug, please report it with this message")]
    Panicked(String),
    /// The reflection service refused the descriptors.
    #[error("cannot start the reflection service: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// Binds `listen`.
///
/// # Errors
/// [`Error::Bind`].
pub async fn bind(listen: Listen) -> Result<(TcpListener, SocketAddr), Error> {
    let wrap = |cause| Error::Bind { listen: listen.0, cause };
    let listener = TcpListener::bind(listen.0).await.map_err(wrap)?;
    let address = listener.local_addr().map_err(wrap)?;
    Ok((listener, address))
}

/// The maximum size of a request for reflection.
const MAX_REFLECTION: usize = 1024;

/// The context of serving, in addition to the role's own services.
#[derive(Clone, Debug)]
pub struct Context {
    /// Limits and HTTP/2 settings.
    pub common: Common,
    /// The credentials that calls may carry.
    pub(crate) accepted: Accepted,
    /// Accepts connections with TLS, if the server has a certificate.
    pub(crate) acceptor: Acceptor,
    /// The credentials for calls to other servers.
    pub(crate) credentials: Credentials,
    /// The maximum number of connections.
    pub max_connections: usize,
    /// The metrics of requests.
    pub metrics: Arc<Metrics>,
    /// The state that probes report.
    pub health: Health,
    /// Whether a task has panicked, shared by all servers of a process.
    pub failure: Failure,
}

impl Context {
    /// The context of a process that is not ready yet.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a token that is not valid in an HTTP header, and for an invalid file
    /// of tokens, certificates or keys.
    pub async fn new(
        common: Common,
        max_connections: usize,
        failure: Failure,
    ) -> Result<Self, Error> {
        let tls = common.tls_files()?.map(Tls::open).transpose()?;
        Ok(Self {
            accepted: Accepted::new(&common)?,
            acceptor: Acceptor::new(tls.clone())?,
            credentials: Credentials::new(&common.token, tls)?,
            common,
            max_connections,
            metrics: Metrics::new(),
            health: Health::new().await,
            failure,
        })
    }
}

/// Serves `routes`, health and reflection on `listener` until `shutdown`. Open calls then have the
/// rest of `drain_seconds` to finish. The role must end its unbounded streams at the same time.
///
/// # Errors
/// Those of the transport.
pub async fn serve(
    listener: TcpListener,
    routes: Routes,
    context: &Context,
    shutdown: Shutdown,
) -> Result<(), Error> {
    let Context { common, accepted, acceptor, max_connections, .. } = context;
    let Context { metrics, health, failure, .. } = context;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(pb::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?
        // The errors of the reflection service repeat the request.
        .max_decoding_message_size(MAX_REFLECTION);
    let routes = routes
        .add_service(health.service())
        .add_service(reflection)
        .into_axum_router()
        .layer(from_fn_with_state(RequestLimits::new(memory::available()), request_limits::limit))
        .layer(from_fn(audit::record))
        .layer(from_fn_with_state(accepted.clone(), check_token))
        .layer(from_fn_with_state(failure.clone(), panic::catch))
        // The last layer is the outermost one, so that refused calls are counted.
        .layer(from_fn_with_state(metrics.clone(), request_metrics::count));
    let (interval, timeout) = common.keepalive();
    let (connections, acceptor) = (Connections::new(*max_connections), acceptor.clone());
    let incoming = TcpIncoming::from(listener)
        // A commit is a small message for which a worker waits.
        .with_nodelay(Some(true))
        .with_keepalive(Some(interval))
        .try_filter_map(move |io| {
            let address = io.peer_addr().ok();
            let io = acceptor.accept(io);
            let security = io.connect_info();
            ready(Ok(connections.accept(io, address, security)))
        });
    let server = Server::builder()
        .max_frame_size(common.frame_bytes)
        .initial_stream_window_size(common.window_bytes)
        .initial_connection_window_size(common.window_bytes)
        .max_concurrent_streams(common.max_concurrent_streams)
        .http2_keepalive_interval(Some(interval))
        .http2_keepalive_timeout(Some(timeout))
        .add_routes(Routes::from(routes).prepare())
        .serve_with_incoming_shutdown(incoming, shutdown.stop().cancelled());
    let drained = async {
        shutdown.asked().await;
        tokio::time::sleep(common.drain()).await;
    };
    tokio::select! {
        result = server => Ok(result?),
        () = drained => {
            let seconds = common.drain_seconds;
            tracing::warn!(seconds, "calls were still open after the drain time; dropping them");
            Ok(())
        }
    }
}
