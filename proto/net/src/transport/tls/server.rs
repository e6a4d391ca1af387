//! TLS on the side that accepts the connection.

use std::{
    fmt,
    future::Future,
    io,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll, ready},
};

use percent_encoding::percent_decode_str;
use rustls::{ServerConfig, pki_types::CertificateDer};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::{Accept, TlsAcceptor};
use tonic::transport::server::Connected;
use zeroshard_model::{Error, Result};

use super::{super::network::Stream, Tls};
use zeroshard_model::Role;

/// The scheme of the URI that contains the role of a certificate, such as `zeroshard:job:demo`.
const SCHEME: &str = "zeroshard:";
/// The first byte of a TLS connection: the record type of a handshake (RFC 8446, section 5.1).
const HANDSHAKE: u8 = 22;

/// The encryption of a connection, and the role of its other side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Security {
    /// The connection is not encrypted.
    Plain,
    /// The connection is encrypted.
    Encrypted {
        /// The role in the certificate of the other side; `None` if it has no certificate, or a
        /// certificate without a role.
        role: Option<Role>,
    },
}

/// The [`Security`] of a connection. It is known by the time the first call arrives.
#[derive(Debug, Clone, Default)]
pub struct PeerSecurity(Arc<OnceLock<Security>>);

impl PeerSecurity {
    /// The security of the connection; [`Security::Plain`] if no data has arrived yet.
    pub fn get(&self) -> Security {
        self.0.get().cloned().unwrap_or(Security::Plain)
    }
}

/// Accepts connections with or without TLS.
#[derive(Debug, Clone)]
pub struct Acceptor {
    tls: Option<Tls>,
    is_admin: bool,
}

impl Acceptor {
    /// Creates an acceptor for connections with TLS, or without TLS if `tls` is `None`. With TLS,
    /// connections without encryption are accepted too and marked as [`Security::Plain`], so that
    /// the server can refuse their calls with a message.
    ///
    /// # Errors
    /// [`Error::Refused`] if `tls` has no certificate.
    pub fn new(tls: Option<Tls>) -> Result<Self> {
        if tls.as_ref().is_some_and(|tls| tls.server_config().is_none()) {
            return Err(Error::refused(
                "a server with --tls-ca needs --tls-cert, the file of its certificate in PEM format",
            ));
        }
        Ok(Self { tls, is_admin: false })
    }

    /// The acceptor for connections with HTTP/1.1.
    #[must_use]
    pub fn for_admin(self) -> Self {
        Self { is_admin: true, ..self }
    }

    /// The time at which the certificate expires, in seconds since 1970; `None` without TLS.
    pub fn expiry(&self) -> Option<i64> {
        self.tls.as_ref()?.expiry()
    }

    /// Accepts a connection. The handshake takes place at the first read.
    pub fn accept(&self, stream: TcpStream) -> ServerStream {
        let security = PeerSecurity::default();
        let config = self.tls.as_ref().and_then(|tls| match self.is_admin {
            true => tls.configs.get().admin.clone(),
            false => tls.server_config(),
        });
        let state = match config {
            None => State::Open(Box::new(stream)),
            Some(config) => State::New(stream, config),
        };
        ServerStream { state, security }
    }
}

/// An accepted connection.
pub struct ServerStream {
    state: State,
    security: PeerSecurity,
}

enum State {
    /// Nothing has arrived yet.
    New(TcpStream, Arc<ServerConfig>),
    Handshake(Box<Accept<TcpStream>>),
    Open(Box<dyn Stream>),
    /// The handshake has failed.
    Failed,
}

impl ServerStream {
    /// Completes the handshake, and returns the stream.
    fn poll_open(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Pin<&mut dyn Stream>>> {
        while !matches!(self.state, State::Open(_)) {
            match &mut self.state {
                State::New(stream, _) => {
                    let mut first = [0];
                    ready!(stream.poll_peek(cx, &mut ReadBuf::new(&mut first)))?;
                    let State::New(stream, config) = self.take() else { continue };
                    self.state = match first {
                        [HANDSHAKE] => {
                            State::Handshake(Box::new(TlsAcceptor::from(config).accept(stream)))
                        }
                        _ => State::Open(Box::new(stream)),
                    };
                }
                State::Handshake(accept) => {
                    let accepted = ready!(Pin::new(accept).poll(cx));
                    self.state = State::Failed;
                    let stream = accepted.inspect_err(|error| {
                        tracing::debug!(%error, "a TLS handshake failed");
                    })?;
                    let certificates = stream.get_ref().1.peer_certificates();
                    let role = certificates.and_then(|chain| role_of(chain.first()?));
                    self.security.0.get_or_init(|| Security::Encrypted { role });
                    self.state = State::Open(Box::new(stream));
                }
                State::Open(_) | State::Failed => break,
            }
        }
        Poll::Ready(self.open().ok_or_else(|| io::ErrorKind::ConnectionAborted.into()))
    }

    fn open(&mut self) -> Option<Pin<&mut dyn Stream>> {
        match &mut self.state {
            State::Open(stream) => Some(Pin::new(stream.as_mut())),
            _ => None,
        }
    }

    fn take(&mut self) -> State {
        std::mem::replace(&mut self.state, State::Failed)
    }
}

/// The role in a verified certificate. The certificate must have exactly one URI with the scheme
/// `zeroshard`.
pub(super) fn role_of(certificate: &CertificateDer<'_>) -> Option<Role> {
    let certificate = webpki::EndEntityCert::try_from(certificate).ok()?;
    let mut roles = certificate.valid_uri_names().filter_map(|uri| uri.strip_prefix(SCHEME));
    let role = percent_decode_str(roles.next()?).decode_utf8().ok()?.parse().ok()?;
    roles.next().is_none().then_some(role)
}

impl Connected for ServerStream {
    type ConnectInfo = PeerSecurity;

    fn connect_info(&self) -> PeerSecurity {
        self.security.clone()
    }
}

impl AsyncRead for ServerStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.poll_open(cx))?.poll_read(cx, buffer)
    }
}

impl AsyncWrite for ServerStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_open(cx))?.poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_open(cx))?.poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    // A connection that is not open has no data to flush.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.open().map_or(Poll::Ready(Ok(())), |stream| stream.poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.open().map_or(Poll::Ready(Ok(())), |stream| stream.poll_shutdown(cx))
    }
}

impl fmt::Debug for ServerStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerStream").field("security", &self.security).finish_non_exhaustive()
    }
}
