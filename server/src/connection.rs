//! Accepted connections that the server can close at any time.
//!
//! HTTP/2 cannot reset a stream whose body is not polled. A peer that reads nothing therefore keeps
//! the memory of the body occupied for as long as its connection lives.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

/// Closes the connection on which a request arrived. It is an extension of every request.
#[derive(Debug, Clone)]
pub(crate) struct Hangup(CancellationToken);

impl Hangup {
    /// Closes the connection, with all calls on it.
    pub(crate) fn now(&self) {
        self.0.cancel();
    }
}

/// A connection that can be closed through its [`Hangup`].
#[derive(Debug)]
pub(crate) struct Connection<Io> {
    io: Io,
    token: CancellationToken,
    ended: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl<Io> Connection<Io> {
    pub(crate) fn new(io: Io) -> Self {
        let token = CancellationToken::new();
        Self { io, ended: Box::pin(token.clone().cancelled_owned()), token }
    }

    /// Returns an error after the hang-up; before it, registers the task to be woken.
    fn poll_ended(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self.ended.as_mut().poll(cx) {
            Poll::Pending => Ok(()),
            Poll::Ready(()) => {
                Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the server hung up"))
            }
        }
    }
}

impl<Io> Connected for Connection<Io> {
    type ConnectInfo = Hangup;

    fn connect_info(&self) -> Hangup {
        Hangup(self.token.clone())
    }
}

impl<Io: AsyncRead + Unpin> AsyncRead for Connection<Io> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll_ended(cx)?;
        Pin::new(&mut self.io).poll_read(cx, buffer)
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

    #[tokio::test]
    async fn a_hangup_wakes_readers_and_writers() {
        let (mut peer, io) = duplex(4);
        let mut connection = Connection::new(io);
        connection.write_all(b"1").await.unwrap();
        assert_eq!(peer.read_u8().await.unwrap(), b'1');
        let hangup = connection.connect_info();
        let hang_up = async {
            tokio::task::yield_now().await;
            hangup.now();
        };
        // More than the peer reads.
        let (written, ()) = tokio::join!(connection.write_all(&[0; 100]), hang_up);
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
        assert_eq!(
            connection.read_u8().await.unwrap_err().kind(),
            io::ErrorKind::ConnectionAborted
        );

        let mut connection = Connection::new(duplex(4).0);
        let hangup = connection.connect_info();
        let (_peer, io) = duplex(4);
        connection.io = io;
        let hang_up = async {
            tokio::task::yield_now().await;
            hangup.now();
        };
        let (read, ()) = tokio::join!(connection.read_u8(), hang_up);
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    }
}
