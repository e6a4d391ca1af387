//! Detects response streams that the client does not read.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use futures_util::Stream;

/// The shortest and longest interval between two checks of all streams.
const CHECKS: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// The open response streams of a server.
#[derive(Default)]
pub(crate) struct Readers(Mutex<Vec<Weak<Turn>>>);

/// The time since which the client has not polled the stream.
struct Turn {
    began: Instant,
    /// Milliseconds after `began`, plus 1; 0 while the stream itself is not ready.
    since: AtomicU64,
    stalled: Box<dyn Fn() + Send + Sync>,
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

impl Readers {
    /// Watches `stream` until it is dropped: `stalled` is called once when the stream was ready but
    /// has not been polled for the limit of [`Self::run`]. The cost is a timestamp for each item.
    pub(super) fn watch<S: Stream>(
        &self,
        stream: S,
        stalled: impl Fn() + Send + Sync + 'static,
    ) -> Watched<S> {
        let (began, since) = (Instant::now(), AtomicU64::new(1));
        let turn = Arc::new(Turn { began, since, stalled: Box::new(stalled) });
        self.lock().push(Arc::downgrade(&turn));
        Watched { stream: Box::pin(stream), turn }
    }

    /// Checks all streams at short intervals. One task for all streams is cheaper than a task for
    /// each: starting it took a tenth of the time of a small pull.
    pub(super) async fn run(&self, limit: Duration) -> std::convert::Infallible {
        loop {
            tokio::time::sleep((limit / 8).clamp(CHECKS.0, CHECKS.1)).await;
            let mut stalled = Vec::new();
            self.lock().retain(|turn| match turn.upgrade() {
                Some(turn) if turn.idle() < limit => true,
                Some(turn) => {
                    stalled.push(turn);
                    false
                }
                None => false,
            });
            stalled.iter().for_each(|turn| (turn.stalled)());
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Weak<Turn>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A stream that is watched until it is dropped.
pub(super) struct Watched<S> {
    stream: Pin<Box<S>>,
    turn: Arc<Turn>,
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

#[cfg(test)]
mod tests {
    use futures_util::{StreamExt, future, stream};
    use tokio::sync::mpsc;

    use super::*;

    const SHORT: Duration = Duration::from_millis(20);

    fn watched<S: Stream>(readers: &Readers, stream: S) -> (Watched<S>, mpsc::Receiver<()>) {
        let (tell, told) = mpsc::channel(4);
        (readers.watch(stream, move || tell.try_send(()).unwrap()), told)
    }

    #[tokio::test]
    async fn a_stream_that_is_not_polled_is_reported_once() {
        let readers = Readers::default();
        let test = async {
            let (_never_polled, mut told) = watched(&readers, stream::empty::<()>());
            told.recv().await.unwrap();
            let (mut stream, mut later) = watched(&readers, stream::repeat(1));
            assert_eq!(stream.next().await, Some(1));
            later.recv().await.unwrap();
            assert!(told.try_recv().is_err(), "again");
        };
        tokio::select! { _ = readers.run(SHORT) => {}, () = test => {} }
    }

    #[tokio::test]
    async fn a_stream_that_is_not_ready_or_was_dropped_is_not_reported() {
        let readers = Readers::default();
        let (mut stream, mut told) = watched(&readers, stream::pending::<()>());
        let waits = future::join(stream.next(), readers.run(SHORT));
        assert!(tokio::time::timeout(5 * SHORT, waits).await.is_err());
        assert_eq!(told.try_recv(), Err(mpsc::error::TryRecvError::Empty));
        drop(stream);
        assert!(told.recv().await.is_none(), "the watch ends with the stream");
        assert!(tokio::time::timeout(2 * SHORT, readers.run(SHORT)).await.is_err());
        assert!(readers.lock().is_empty(), "the stream is forgotten");
    }
}
