//! Serves a role: bind outside, serve inside, stop by a token.
//!
//! A role is a listener, [`Routes`] and a background future. What all roles have in common is here:
//! HTTP/2 settings, health, reflection, request metrics, and an end that does not hang.

use std::{io, net::SocketAddr, sync::Arc};

use futures_util::TryStreamExt;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::{
    service::Routes,
    transport::{Server, server::TcpIncoming},
};
use zeroshard_proto::pb;

use crate::{
    config::{Common, Listen},
    connection::Connection,
    failure::Failure,
    health::Health,
    layers::{panic::PanicLayer, request_metrics::RequestMetricsLayer, token::TokenLayer},
    metrics::Metrics,
};

/// Why a server cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address cannot be listened on.
    #[error(
        "cannot listen on {listen}: {cause}; choose another address or port (0: any free port)"
    )]
    Bind {
        /// Where.
        listen: SocketAddr,
        /// What the system said.
        cause: io::Error,
    },
    /// The transport ended.
    #[error("the gRPC server failed: {0}")]
    Transport(#[from] tonic::transport::Error),
    /// The admin server ended.
    #[error("the admin HTTP server failed: {0}")]
    Admin(io::Error),
    /// A setting that only a program, not flags and files, can get wrong.
    #[error(transparent)]
    Invalid(#[from] zeroshard_proto::Error),
    /// A shard server has nobody to serve.
    #[error("a shard server needs the address of its coordinator; set --coordinator HOST:PORT")]
    NoCoordinator,
    /// A part of the process ended by itself.
    #[error("a server ended unexpectedly: {0}")]
    Ended(String),
    /// A task panicked, and all servers of the process ended.
    #[error("a server failed: {0}; this is a bug, please report it with this message")]
    Panicked(String),
    /// The reflection service refused our own descriptors.
    #[error("cannot start the reflection service: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// Listens on `listen`.
///
/// # Errors
/// [`Error::Bind`].
pub async fn bind(listen: Listen) -> Result<(TcpListener, SocketAddr), Error> {
    let wrap = |cause| Error::Bind { listen: listen.0, cause };
    let listener = TcpListener::bind(listen.0).await.map_err(wrap)?;
    let address = listener.local_addr().map_err(wrap)?;
    Ok((listener, address))
}

/// What serving needs beside the role's own services.
#[derive(Clone, Debug)]
pub struct Context {
    /// Limits and HTTP/2 settings.
    pub common: Common,
    /// Where requests are counted.
    pub metrics: Arc<Metrics>,
    /// What probes are told.
    pub health: Health,
    /// Whether a task has panicked: shared by all servers of a process.
    pub failure: Failure,
}

/// Serves `routes`, health and reflection on `listener` until `shutdown`; then open calls have
/// `drain_seconds` to finish. The role must end its endless streams by the same token.
///
/// # Errors
/// What the transport says; [`Error::Invalid`] for a token that no call can carry.
pub async fn serve(
    listener: TcpListener,
    routes: Routes,
    context: &Context,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let Context { common, metrics, health, failure } = context;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(pb::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?;
    let routes = routes.add_service(health.service()).add_service(reflection).prepare();
    let incoming = TcpIncoming::from(listener)
        // A commit is a small message that somebody waits for.
        .with_nodelay(Some(true))
        .with_keepalive(Some(common.keepalive()))
        .map_ok(Connection::new);
    let server = Server::builder()
        .max_frame_size(common.frame_bytes)
        .initial_stream_window_size(common.window_bytes)
        .initial_connection_window_size(common.window_bytes)
        .max_concurrent_streams(common.max_concurrent_streams)
        .http2_keepalive_interval(Some(common.keepalive()))
        .http2_keepalive_timeout(Some(common.keepalive()))
        // Refused calls are counted too.
        .layer(RequestMetricsLayer(metrics.clone()))
        .layer(PanicLayer(failure.clone()))
        .layer(TokenLayer::new(&common.token)?)
        .add_routes(routes)
        .serve_with_incoming_shutdown(incoming, shutdown.cancelled());
    let drained = async {
        shutdown.cancelled().await;
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

/// Cancels `shutdown` on SIGTERM or SIGINT.
///
/// # Errors
/// When the process cannot watch for signals.
pub fn stop_on_signals(shutdown: CancellationToken) -> io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        let name = tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        };
        tracing::info!(signal = name, "stopping");
        shutdown.cancel();
    });
    Ok(())
}
