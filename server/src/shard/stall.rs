//! Detects response streams that the client does not read.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use futures_util::Stream;
use tokio::task::AbortHandle;

/// The time since which the client has not polled the stream.
struct Turn {
    began: Instant,
    /// Milliseconds after `began`, plus 1; 0 while the stream itself is not ready.
    since: AtomicU64,
}

impl Turn {
    fn of_client(&self) {
        self.since.store(1 + self.began.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    fn of_stream(&self) {
        self.since.store(0, Ordering::Relaxed);
    }

    /// The time for which the client has not read.
    fn idle(&self) -> Duration {
        match self.since.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            since => self.began.elapsed().saturating_sub(Duration::from_millis(since - 1)),
        }
    }
}

/// A stream that is watched until it is dropped.
pub(super) struct Watched<S> {
    stream: Pin<Box<S>>,
    turn: Arc<Turn>,
    watch: AbortHandle,
}

/// Calls `stalled` when `stream` was ready but has not been polled for `limit`. The cost is a
/// timestamp for each item, and one task that sleeps.
pub(super) fn watch<S: Stream>(
    stream: S,
    limit: Duration,
    stalled: impl FnOnce() + Send + 'static,
) -> Watched<S> {
    let turn = Arc::new(Turn { began: Instant::now(), since: AtomicU64::new(1) });
    let watched = turn.clone();
    let watch = tokio::spawn(async move {
        loop {
            let left = limit.saturating_sub(watched.idle());
            if left.is_zero() {
                return stalled();
            }
            tokio::time::sleep(left).await;
        }
    });
    Watched { stream: Box::pin(stream), turn, watch: watch.abort_handle() }
}

impl<S: Stream> Stream for Watched<S> {
    type Item = S::Item;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<S::Item>> {
        let polled = self.stream.as_mut().poll_next(cx);
        match polled {
            Poll::Ready(_) => self.turn.of_client(),
            Poll::Pending => self.turn.of_stream(),
        }
        polled
    }
}

impl<S> Drop for Watched<S> {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{StreamExt, future, stream};
    use tokio::sync::oneshot;

    use super::*;

    const SHORT: Duration = Duration::from_millis(20);

    fn watched<S: Stream>(stream: S) -> (Watched<S>, oneshot::Receiver<()>) {
        let (tell, told) = oneshot::channel();
        (watch(stream, SHORT, move || _ = tell.send(())), told)
    }

    #[tokio::test]
    async fn a_stream_that_is_not_polled_is_reported() {
        let (_never_polled, told) = watched(stream::empty::<()>());
        told.await.unwrap();
        let (mut stream, told) = watched(stream::repeat(1));
        assert_eq!(stream.next().await, Some(1));
        told.await.unwrap();
    }

    #[tokio::test]
    async fn a_stream_that_is_not_ready_or_was_dropped_is_not_reported() {
        let (mut stream, mut told) = watched(stream::pending::<()>());
        let waited =
            tokio::time::timeout(5 * SHORT, future::join(stream.next(), future::pending::<()>()))
                .await;
        assert!(waited.is_err() && told.try_recv() == Err(oneshot::error::TryRecvError::Empty));
        drop(stream);
        assert!(told.await.is_err(), "the watch ends with the stream");
    }
}
