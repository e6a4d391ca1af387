//! The gRPC connections of a worker to its peers.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use tokio::sync::watch;
use zeroshard_model::Error as ClusterError;
use zeroshard_proto::pb;

use super::error::{Error, Result};
use super::listening::{Client, Listening};
use super::mailbox::{Channel, Mailbox};
use super::operation::Post;
use super::options::LEAVE_TIMEOUT;

/// The maximum payload of one part of a message, in bytes.
const PART_BYTES: usize = 1 << 20;

/// The connections of a worker to other workers of a job.
pub(super) struct Connections {
    inner: Listening,
    pub(super) rank: u32,
    /// The number of ranks of the job.
    pub(super) world: u32,
    /// The clients by rank, without this rank.
    pub(super) clients: BTreeMap<u32, Client>,
    /// The number of messages that are being sent.
    sending: Arc<watch::Sender<usize>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The number of [`super::Peers`] with these connections.
    communicators: u32,
    /// The number of operations called so far on each channel.
    called: HashMap<Channel, u64>,
    /// The first failure, which all later operations return.
    failure: Option<Error>,
}

/// Waits until all messages have been received or have failed.
async fn sent(sending: &watch::Sender<usize>) {
    // The wait cannot fail, because `sending` keeps the channel open.
    drop(sending.subscribe().wait_for(|&count| count == 0).await);
}

impl Connections {
    /// The connections of rank `rank` of `world` ranks, with the clients of its peers.
    pub(super) fn new(
        inner: Listening,
        rank: u32,
        world: u32,
        clients: BTreeMap<u32, Client>,
    ) -> Self {
        Self { inner, rank, world, clients, sending: Arc::default(), state: Mutex::default() }
    }

    /// The messages of the peers.
    pub(super) fn mailbox(&self) -> &Mailbox {
        &self.inner.mailbox
    }

    /// The time to wait for each message.
    pub(super) fn deadline(&self) -> Duration {
        self.inner.options.deadline
    }

    /// Waits until the peers have received all messages, then leaves. Operations fail afterwards.
    ///
    /// # Errors
    /// [`ClusterError::Timeout`] if a peer does not receive its messages.
    pub(super) fn leave(&self) -> Result<()> {
        let Listening { runtime, options, leaving, tasks, .. } = &self.inner;
        tasks.close();
        let flushed = runtime.block_on(async {
            let flushed = tokio::time::timeout(options.deadline, sent(&self.sending)).await;
            leaving.cancel();
            // Lets running answers finish, but does not wait for a peer that keeps its connection
            // open.
            drop(tokio::time::timeout(LEAVE_TIMEOUT, tasks.wait()).await);
            flushed
        });
        flushed.map_err(|_| {
            let waiting_for = format!("the peers of rank {} to receive its messages", self.rank);
            ClusterError::Timeout { waiting_for, waited_ms: options.deadline.as_millis() as u64 }
                .into()
        })
    }

    /// The number of the next communicator.
    pub(super) fn next_communicator(&self) -> u32 {
        let mut state = self.lock();
        state.communicators += 1;
        state.communicators - 1
    }

    /// The sequence number of the next operation on a channel.
    ///
    /// # Errors
    /// The first failure of an operation.
    pub(super) fn begin(&self, channel: &Channel) -> Result<u64> {
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let called = state.called.entry(channel.clone()).or_default();
        *called += 1;
        Ok(*called - 1)
    }

    /// Records that an operation has failed, and reports it to the peers. All later operations
    /// fail.
    pub(super) fn fail(&self, error: &Error) {
        let mut state = self.lock();
        if state.failure.is_none() {
            state.failure = Some(error.clone());
            drop(state);
            self.report_failure(error.to_string());
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent after a panic, because each change is a single assignment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports a failure to the peers. The messages before it are sent first, because a peer can
    /// report a disagreement more precisely if it has them.
    fn report_failure(&self, cause: String) {
        let (sending, failure) = (self.sending.clone(), self.inner.failure.clone());
        self.inner.runtime.spawn(async move {
            drop(tokio::time::timeout(LEAVE_TIMEOUT, sent(&sending)).await);
            failure.send_replace(Some(cause));
        });
    }
}

impl Post for Connections {
    fn post(&self, to: u32, header: pb::DeliverHeader, data: Bytes) {
        let Some(mut client) = self.clients.get(&to).cloned() else { return };
        let (mailbox, deadline) = (self.inner.mailbox.clone(), self.inner.options.deadline);
        let sending = self.sending.clone();
        sending.send_modify(|count| *count += 1);
        let mut header = Some(header);
        let parts = std::iter::successors(Some((Bytes::new(), data)), |(_, rest)| {
            let mut rest = rest.clone();
            (!rest.is_empty()).then(|| (rest.split_to(PART_BYTES.min(rest.len())), rest))
        });
        let parts =
            parts.map(move |(payload, _)| pb::DeliverRequest { header: header.take(), payload });
        let send = async move {
            match tokio::time::timeout(deadline, client.deliver(stream::iter(parts))).await {
                Ok(Ok(_)) => {}
                Ok(Err(status)) => {
                    mailbox.lose(to, format!("a message to it failed: {}", status.message()))
                }
                Err(_) => {
                    let cause = format!("it received no message for {} ms", deadline.as_millis());
                    mailbox.lose(to, cause)
                }
            }
            sending.send_modify(|count| *count -= 1);
        };
        self.inner.runtime.spawn(send);
    }
}
