//! How both ends set up HTTP/2, and how to dial a server.

use std::{
    task::{Context, Poll},
    time::Duration,
};

use http::{Request, Response};
use tonic::{
    body::Body,
    transport::{Channel, Endpoint, channel::ResponseFuture},
};
use tower::Service;

use crate::{
    Error, Result, deadline,
    token::{Bearer, Token},
};

/// Largest HTTP/2 frame that a receiver takes: the biggest knob of the data plane, since the
/// default of 16 KiB costs a third of the throughput.
pub const FRAME_BYTES: u32 = 1 << 20;
/// Flow-control window of a stream and of a connection: what may be on its way, or wait at a
/// receiver that is busy. More is not faster (what waits leaves the cache), and is memory that the
/// receiver must have.
pub const WINDOW_BYTES: u32 = 4 << 20;
/// How long opening a connection may take.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// An idle connection is probed this often: without it a silent partition is never noticed.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// A probe that is not answered for so long ends the connection.
pub const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// Largest message of the control plane: a manifest of some 100,000 tensors.
pub const MAX_CONTROL_MESSAGE: usize = 64 << 20;

/// How to dial `address`, `host:port` or a URI.
///
/// # Errors
/// [`Error::Invalid`] if it is neither.
pub fn endpoint(address: &str) -> Result<Endpoint> {
    let uri =
        if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
    let invalid =
        || Error::invalid("address", format!("{address:?}"), "host:port, such as 127.0.0.1:7400");
    let parsed: http::Uri = uri.parse().map_err(|_| invalid())?;
    if parsed.port_u16().is_none() || parsed.host().is_none_or(str::is_empty) {
        return Err(invalid());
    }
    Ok(Endpoint::from(parsed)
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .http2_max_header_list_size(64 << 10)
        .max_frame_size(FRAME_BYTES))
}

/// A channel whose calls carry the cluster's token, generated code's as well as others'. Cheap to
/// clone.
#[derive(Debug, Clone)]
pub struct Connection {
    channel: Channel,
    bearer: Option<Bearer>,
    timeout: Option<Duration>,
}

impl Connection {
    /// `channel` for a cluster with `token`; an empty token is not sent.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a token that no header can carry.
    pub fn new(channel: Channel, token: &Token) -> Result<Self> {
        Ok(Self { channel, bearer: Bearer::new(token)?, timeout: None })
    }

    /// The same channel for calls that may take `timeout`, which they carry as `grpc-timeout`.
    #[must_use]
    pub fn within(&self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self.clone() }
    }
}

impl Service<Request<Body>> for Connection {
    type Response = Response<Body>;
    type Error = tonic::transport::Error;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.channel.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> ResponseFuture {
        if let Some(bearer) = &self.bearer {
            bearer.write(request.headers_mut());
        }
        if let Some(timeout) = self.timeout {
            deadline::write(request.headers_mut(), timeout);
        }
        self.channel.call(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_needs_host_and_port() {
        for good in ["127.0.0.1:7400", "localhost:1", "http://shard-0.shards:7401", "[::1]:7400"] {
            assert!(endpoint(good).is_ok(), "{good}");
        }
        for bad in ["", "127.0.0.1", ":7400", "host:port", "a b:1"] {
            assert!(matches!(endpoint(bad), Err(Error::Invalid { .. })), "{bad}");
        }
    }
}
