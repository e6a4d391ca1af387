//! The network on which connections are opened: that of the system, or a simulated one in tests.

use std::{future::Future, io, pin::Pin, sync::OnceLock};

use tokio::io::{AsyncRead, AsyncWrite};

/// A byte stream between two processes, on a real or a simulated network.
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
