//! The network on which connections are opened: that of the system, or a simulated one in tests.

use std::{future::Future, io, pin::Pin, sync::OnceLock};

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::transport::{Channel, Endpoint, Error};

/// A connection of a simulated network.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A future of a connection of a simulated network.
pub type Connecting = Pin<Box<dyn Future<Output = io::Result<Box<dyn Stream>>> + Send>>;

static SIMULATED: OnceLock<fn(String) -> Connecting> = OnceLock::new();

/// From now on all connections of this process are opened by `connect`, which gets `host:port`.
/// For tests that run clusters on a simulated network.
pub fn simulate(connect: fn(String) -> Connecting) {
    SIMULATED.get_or_init(|| connect);
}

/// The function that opens connections, if the network is simulated.
pub fn simulated() -> Option<fn(String) -> Connecting> {
    SIMULATED.get().copied()
}

/// A channel that opens a connection before the first call, and again after it has broken.
pub fn connect_lazy(endpoint: &Endpoint) -> Channel {
    match simulated() {
        None => endpoint.connect_lazy(),
        Some(connect) => endpoint.connect_with_connector_lazy(connector(endpoint, connect)),
    }
}

/// Opens a connection.
///
/// # Errors
/// Those of the transport.
pub async fn connect(endpoint: &Endpoint) -> Result<Channel, Error> {
    match simulated() {
        None => endpoint.connect().await,
        Some(connect) => endpoint.connect_with_connector(connector(endpoint, connect)).await,
    }
}

fn connector(
    endpoint: &Endpoint,
    connect: fn(String) -> Connecting,
) -> impl tower::Service<
    http::Uri,
    Response = TokioIo<Box<dyn Stream>>,
    Error = io::Error,
    Future = impl Future<Output = io::Result<TokioIo<Box<dyn Stream>>>> + Send,
> + Send
+ 'static {
    let authority = endpoint.uri().authority().map(|authority| authority.as_str().to_owned());
    let address = authority.unwrap_or_default();
    tower::service_fn(move |_| {
        let connecting = connect(address.clone());
        async move { connecting.await.map(TokioIo::new) }
    })
}
