//! Accepted connections: their number is limited, and the server can close them at any time.
//!
//! HTTP/2 cannot reset a stream whose body is not polled. A peer that reads nothing therefore keeps
//! the memory of the body occupied for as long as its connection lives.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Sleep,
};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;
use zeroshard_net::transport::tls::{PeerSecurity, Security};

use zeroshard_shard::budget::{Budget, Space};

/// The time in which a peer must begin to speak HTTP/2.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);

/// The number of bytes with which every client begins (RFC 9113, section 3.4).
const PREFACE: usize = 24;

/// The number of connections beyond the limit whose calls are answered with an error. Further ones
/// are closed at once.
const REFUSED: u64 = 64;

/// The time after which a connection beyond the limit is closed.
const REFUSED_LIMIT: Duration = Duration::from_secs(1);

/// Counts the connections to a server.
#[derive(Debug)]
pub(crate) struct Connections {
    open: Arc<Budget>,
    refused: Arc<Budget>,
}

impl Connections {
    /// At most `limit` connections.
    pub(crate) fn new(limit: usize) -> Self {
        Self { open: Budget::new(limit as u64), refused: Budget::new(REFUSED) }
    }

    /// Accepts a connection from `address`. Returns `None` if the number of connections is far
    /// above the limit.
    pub(crate) fn accept<Io>(
        &self,
        io: Io,
        address: Option<SocketAddr>,
        security: PeerSecurity,
    ) -> Option<Connection<Io>> {
        let (space, refused) = match self.open.take(1) {
            Some(space) => (space, None),
            None => (self.refused.take(1)?, Some(self.open.limit())),
        };
        let peer = Peer { hangup: CancellationToken::new(), address, refused, security };
        Some(Connection::new(io, space, peer))
    }
}

/// The connection on which a request arrived. It is an extension of every request.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    hangup: CancellationToken,
    address: Option<SocketAddr>,
    refused: Option<u64>,
    security: PeerSecurity,
}

impl Peer {
    /// Closes the connection, with all calls on it.
    pub(crate) fn hang_up(&self) {
        self.hangup.cancel();
    }

    /// The encryption of the connection, and the role of the other side.
    pub(crate) fn security(&self) -> Security {
        self.security.get()
    }

    /// The address of the peer, if it has one.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// The limit on the number of connections, if the connection exceeds it.
    pub(crate) fn refused(&self) -> Option<u64> {
        self.refused
    }
}

/// A connection that can be closed through its [`Peer`].
#[derive(Debug)]
pub(crate) struct Connection<Io> {
    io: Io,
    peer: Peer,
    ended: Pin<Box<WaitForCancellationFutureOwned>>,
    /// The time until which the peer must have sent [`PREFACE`] bytes or, if the connection is
    /// refused, at which it is closed.
    limit: Option<Pin<Box<Sleep>>>,
    received: usize,
    _space: Space,
}

impl<Io> Connection<Io> {
    fn new(io: Io, space: Space, peer: Peer) -> Self {
        let limit = if peer.refused.is_some() { REFUSED_LIMIT } else { HANDSHAKE_LIMIT };
        Self {
            io,
            ended: Box::pin(peer.hangup.clone().cancelled_owned()),
            peer,
            limit: Some(Box::pin(tokio::time::sleep(limit))),
            received: 0,
            _space: space,
        }
    }

    /// Returns an error after the hang-up; before it, registers the task to be woken.
    fn poll_ended(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.limit.as_mut().is_some_and(|limit| limit.as_mut().poll(cx).is_ready()) {
            self.limit = None;
            self.peer.hang_up();
        }
        match self.ended.as_mut().poll(cx) {
            Poll::Pending => Ok(()),
            Poll::Ready(()) => {
                Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the server hung up"))
            }
        }
    }
}

impl<Io> Connected for Connection<Io> {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl<Io: AsyncRead + Unpin> AsyncRead for Connection<Io> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll_ended(cx)?;
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.io).poll_read(cx, buffer);
        if self.received < PREFACE {
            self.received += buffer.filled().len() - before;
            if self.received >= PREFACE && self.peer.refused.is_none() {
                self.limit = None;
            }
        }
        read
    }
}

impl<Io: AsyncWrite + Unpin> AsyncWrite for Connection<Io> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_ended(cx)?;
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_ended(cx)?;
        Pin::new(&mut self.io).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_ended(cx)?;
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    // promise: isolation
    #[tokio::test]
    async fn connections_beyond_the_limit_are_refused_then_closed_and_places_become_free() {
        let connections = Connections::new(1);
        let accept = || connections.accept(duplex(4).0, None, PeerSecurity::default());
        let first = accept().unwrap();
        assert_eq!(first.connect_info().refused(), None);
        let refused: Vec<_> = (0..REFUSED).map(|_| accept().unwrap()).collect();
        assert!(refused.iter().all(|connection| connection.connect_info().refused() == Some(1)));
        assert!(accept().is_none());
        drop((first, refused));
        assert_eq!(accept().unwrap().connect_info().refused(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_sends_no_preface_is_hung_up_on_and_a_refused_one_soon() {
        let connections = Connections::new(1);
        let aborted = async |sent: usize| {
            let (mut peer, io) = duplex(100);
            let mut connection = connections.accept(io, None, PeerSecurity::default()).unwrap();
            peer.write_all(&vec![1; sent]).await.unwrap();
            let began = tokio::time::Instant::now();
            let read = async {
                loop {
                    connection.read_u8().await?;
                }
            };
            let ended: io::Result<()> = tokio::select! {
                ended = read => ended,
                () = tokio::time::sleep(HANDSHAKE_LIMIT * 10) => return None,
            };
            assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
            Some(began.elapsed())
        };
        let about = |limit: Duration| limit..limit + Duration::from_millis(100);
        assert!(about(HANDSHAKE_LIMIT).contains(&aborted(PREFACE - 1).await.unwrap()));
        assert_eq!(aborted(PREFACE).await, None);
        let _first = connections.accept(duplex(4).0, None, PeerSecurity::default()).unwrap();
        assert!(about(REFUSED_LIMIT).contains(&aborted(PREFACE).await.unwrap()));
    }

    #[tokio::test]
    async fn a_hangup_wakes_readers_and_writers() {
        let (mut peer, io) = duplex(4);
        let connections = Connections::new(2);
        let mut connection = connections.accept(io, None, PeerSecurity::default()).unwrap();
        connection.write_all(b"1").await.unwrap();
        assert_eq!(peer.read_u8().await.unwrap(), b'1');
        let hangup = connection.connect_info();
        let hang_up = async {
            tokio::task::yield_now().await;
            hangup.hang_up();
        };
        // More than the peer reads.
        let (written, ()) = tokio::join!(connection.write_all(&[0; 100]), hang_up);
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
        assert_eq!(
            connection.read_u8().await.unwrap_err().kind(),
            io::ErrorKind::ConnectionAborted
        );

        let mut connection =
            connections.accept(duplex(4).0, None, PeerSecurity::default()).unwrap();
        let hangup = connection.connect_info();
        let (_peer, io) = duplex(4);
        connection.io = io;
        let hang_up = async {
            tokio::task::yield_now().await;
            hangup.hang_up();
        };
        let (read, ()) = tokio::join!(connection.read_u8(), hang_up);
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    }
}
