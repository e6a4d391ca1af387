//! The HTTP/2 settings of both ends, and connections to servers.

mod addresses;
pub mod network;
mod silence;
pub mod tls;

use std::{
    task::{Context, Poll},
    time::Duration,
};

use http::{HeaderValue, Request, Response};
use tonic::{
    body::Body,
    transport::{Channel, Endpoint, channel::ResponseFuture},
};
use tower::Service;
use zeroshard_model::{Error, Result};

use crate::{
    deadline,
    token::{Bearer, Token},
    trace::{Span, TRACE_PARENT},
};
use tls::Tls;

pub use addresses::Addresses;

/// The largest HTTP/2 frame that a receiver accepts. It has the largest effect of all settings of
/// the data plane: the default of 16 KiB costs a third of the throughput.
pub const FRAME_BYTES: u32 = 1 << 20;
/// The flow-control window of a stream and of a connection: the data in flight, or waiting at a
/// busy receiver. A larger window is not faster, because waiting data leaves the cache, and it
/// needs more memory at the receiver.
pub const WINDOW_BYTES: u32 = 4 << 20;
/// The time limit for opening a connection.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The interval of the probes on an idle connection. Without probes a silent network partition is
/// never noticed.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// A connection is closed if a probe is not answered within this time.
pub const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// The largest message of the control plane: a manifest of about 100,000 tensors.
pub const MAX_CONTROL_MESSAGE: usize = 64 << 20;

/// The endpoint of `address`, which is `host:port` or a URI.
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

/// The token and the TLS configuration with which a process connects to servers. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Credentials {
    bearer: Option<Bearer>,
    tls: Option<Tls>,
}

impl Credentials {
    /// Creates credentials from a token and a TLS configuration. An empty token is not sent;
    /// without `tls`, connections are not encrypted.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a token that is not valid in an HTTP header.
    pub fn new(token: &Token, tls: Option<Tls>) -> Result<Self> {
        Ok(Self { bearer: Bearer::new(token)?, tls })
    }

    fn tls(&self) -> Option<&Tls> {
        self.tls.as_ref()
    }

    /// Creates a connection that uses `channel`.
    fn connection(&self, channel: Channel) -> Connection {
        Connection { channel, bearer: self.bearer.clone(), timeout: None, span: None }
    }
}

/// A channel whose calls carry the token of the cluster. It works for generated and other clients,
/// and is cheap to clone.
#[derive(Debug, Clone)]
pub struct Connection {
    channel: Channel,
    bearer: Option<Bearer>,
    timeout: Option<Duration>,
    /// The header that names the span of the calls.
    span: Option<HeaderValue>,
}

impl Connection {
    /// A connection to `address` (`host:port`). It is opened before the first call, and opened
    /// again after it has broken.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an invalid address.
    pub fn lazy(address: &str, credentials: &Credentials) -> Result<Self> {
        Ok(Addresses::parse(address)?.connect_lazy(credentials))
    }

    /// The same channel for calls with the time limit `timeout`, which they carry as
    /// `grpc-timeout`.
    #[must_use]
    pub fn within(&self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self.clone() }
    }

    /// The same channel for calls whose spans at the server are children of `span`.
    #[must_use]
    pub fn in_span(self, span: &Span) -> Self {
        Self { span: span.header(), ..self }
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
        if let Some(span) = &self.span {
            request.headers_mut().insert(TRACE_PARENT, span.clone());
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
