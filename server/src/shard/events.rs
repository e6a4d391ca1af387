//! What this server says to the coordinator, in order and within bounds.

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use zeroshard_proto::pb::serve_request::Event;

/// Events that may wait to be sent: a few for each step of each job.
const MAX_EVENTS: usize = 1 << 14;

/// The way to the coordinator. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Events {
    queue: mpsc::Sender<Event>,
    overflow: CancellationToken,
}

impl Events {
    /// The way, and its end.
    pub(crate) fn channel() -> (Self, mpsc::Receiver<Event>) {
        let (queue, events) = mpsc::channel(MAX_EVENTS);
        (Self { queue, overflow: CancellationToken::new() }, events)
    }

    /// Says something that must not be lost. A coordinator that does not read is given up: see
    /// [`Self::overflowed`].
    pub(crate) fn tell(&self, event: Event) {
        // Once the stream has ended nobody listens; that is seen where commands are read.
        if let Err(mpsc::error::TrySendError::Full(_)) = self.queue.try_send(event) {
            self.overflow.cancel();
        }
    }

    /// Says something that is of no interest later, if nothing else waits to be sent.
    pub(crate) fn tell_if_idle(&self, event: impl FnOnce() -> Event) {
        if self.queue.capacity() == MAX_EVENTS {
            self.tell(event());
        }
    }

    /// Returns when an event could not be told.
    pub(crate) async fn overflowed(&self) {
        self.overflow.cancelled().await;
    }
}
