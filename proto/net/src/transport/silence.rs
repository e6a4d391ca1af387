//! A connection to one of several addresses, of which one answers at a time.

use std::{
    future::Future,
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::ready;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};

use super::network::Stream;

/// A server probes a connection more often than this, unless `--keepalive-seconds` is above 13.
const SILENCE: Duration = Duration::from_secs(4);

/// A search for another address that answers. Returns that address.
type Search = Pin<Box<dyn Future<Output = String> + Send>>;

/// A stream that fails when nothing arrives for [`SILENCE`] and another address answers. A machine
/// that loses power closes no connections, and HTTP/2's keepalive takes half a minute to notice.
pub(super) struct Watched<S> {
    stream: Box<dyn Stream>,
    /// Begins a search.
    search: S,
    silence: Pin<Box<Sleep>>,
    /// The search during a silence.
    searching: Option<Search>,
}

impl<S: Fn() -> Search> Watched<S> {
    pub(super) fn new(stream: Box<dyn Stream>, search: S) -> Self {
        Self { stream, search, silence: Box::pin(sleep(SILENCE)), searching: None }
    }

    /// The stream is not silent: it is silent again after [`SILENCE`].
    fn restart(&mut self) {
        self.searching = None;
        self.silence.as_mut().reset(Instant::now() + SILENCE);
    }

    /// Completes when another address has answered during a silence.
    fn poll_other(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let searching = match &mut self.searching {
            Some(searching) => searching,
            None => {
                ready!(self.silence.as_mut().poll(cx));
                self.searching.insert((self.search)())
            }
        };
        let other = ready!(searching.as_mut().poll(cx));
        // The transport may read again after the error.
        self.restart();
        let cause = format!("nothing came for {SILENCE:?}, and {other} answers instead");
        Poll::Ready(io::Error::new(io::ErrorKind::TimedOut, cause))
    }
}

impl<S: Fn() -> Search + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if read.is_ready() {
            self.restart();
            return read;
        }
        self.poll_other(cx).map(Err)
    }
}

impl<S: Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
