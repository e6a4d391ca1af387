//! The gRPC service that a worker offers to its peers.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt, stream};
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use zeroshard_model::Error;
use zeroshard_proto::{pb, status::to_status};

use super::mailbox::{Channel, Key, Mail, Mailbox};

/// The maximum number of elements in a message (4 GiB).
const MAX_ELEMENTS: u64 = 1 << 30;

/// The maximum number of elements (4 MiB) for which memory is allocated before they arrive.
const FIRST_ELEMENTS: usize = 1 << 20;

/// The rank of a worker, and the number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) rank: u32,
    pub(super) world: u32,
}

/// The cause of a worker's failure, if it has failed.
pub(super) type Failure = Option<String>;

/// The implementation of the service.
#[derive(Debug, Clone)]
pub(super) struct Service {
    pub(super) mailbox: Arc<Mailbox>,
    /// `None` until [`super::Listening::connect`] is called.
    pub(super) identity: watch::Receiver<Option<Identity>>,
    pub(super) failure: watch::Receiver<Failure>,
    /// The peers that have connected to this worker.
    pub(super) attached: watch::Sender<BTreeSet<u32>>,
    pub(super) leaving: CancellationToken,
    /// The time to wait for this worker's own rank.
    pub(super) timeout: Duration,
}

impl Service {
    async fn identity(&self) -> Result<Identity, Error> {
        let mut identity = self.identity.clone();
        let known = identity.wait_for(Option::is_some);
        match tokio::time::timeout(self.timeout, known).await {
            Ok(Ok(identity)) => Ok(identity.expect("wait_for returned a value that is Some")),
            Ok(Err(_)) => Err(Error::Unavailable {
                peer: "this worker".to_owned(),
                cause: "it is shutting down".to_owned(),
            }),
            Err(_) => Err(Error::Timeout {
                waiting_for: "this worker to receive its rank".to_owned(),
                waited_ms: self.timeout.as_millis() as u64,
            }),
        }
    }

    async fn receive(
        &self,
        mut parts: Streaming<pb::DeliverRequest>,
    ) -> Result<(Key, Mail), Status> {
        let no_header = || Error::refused("a message did not start with its header");
        let mut part = parts.message().await?.ok_or_else(no_header).map_err(to_status)?;
        let header = part.header.take().ok_or_else(no_header).map_err(to_status)?;
        if header.elements > MAX_ELEMENTS {
            return Err(to_status(Error::invalid(
                "number of elements of a message",
                header.elements,
                format!("at most {MAX_ELEMENTS}"),
            )));
        }
        let elements = header.elements as usize;
        let expected = if header.over_nccl { 0 } else { 4 * elements };
        // The memory grows with the received data, and not with the size in the header.
        let mut data: Vec<f32> = Vec::with_capacity((expected / 4).min(FIRST_ELEMENTS));
        let mut at = 0;
        let wrong = |found: usize| {
            Error::refused(format!(
                "a message has a payload of {found} bytes; according to its header it has {expected}"
            ))
        };
        loop {
            let (payload, end) = (&part.payload, at + part.payload.len());
            if end > expected {
                return Err(to_status(wrong(end)));
            }
            data.resize(end.div_ceil(4), 0.0);
            let bytes: &mut [u8] = bytemuck::must_cast_slice_mut(&mut data);
            bytes[at..end].copy_from_slice(payload);
            at = end;
            match parts.message().await? {
                Some(next) => part = next,
                None => break,
            }
        }
        if at != expected {
            return Err(to_status(wrong(at)));
        }
        let channel =
            Channel { communicator: header.communicator, group: header.group, pair: header.pair };
        let key =
            Key { from: header.from, channel, sequence: header.sequence, round: header.round };
        let data = (!header.over_nccl).then_some(data);
        Ok((key, Mail { operation: header.operation, elements, data }))
    }
}

#[tonic::async_trait]
impl pb::worker_service_server::WorkerService for Service {
    type AttachStream = Pin<Box<dyn Stream<Item = Result<pb::AttachResponse, Status>> + Send>>;

    async fn attach(
        &self,
        request: Request<pb::AttachRequest>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let request = request.into_inner();
        let identity = self.identity().await.map_err(to_status)?;
        if (request.to, request.world) != (identity.rank, identity.world) {
            return Err(to_status(Error::refused(format!(
                "rank {} called rank {} of {} ranks, and this is rank {} of {} ranks",
                request.from, request.to, request.world, identity.rank, identity.world
            ))));
        }
        self.attached.send_modify(|attached| _ = attached.insert(request.from));
        let events = WatchStream::new(self.failure.clone())
            .map(|failure| Ok(pb::AttachResponse { failure }));
        let leaving = self.leaving.clone().cancelled_owned();
        Ok(Response::new(Box::pin(stream::StreamExt::take_until(events, leaving))))
    }

    async fn deliver(
        &self,
        request: Request<Streaming<pb::DeliverRequest>>,
    ) -> Result<Response<pb::DeliverResponse>, Status> {
        let (key, mail) = self.receive(request.into_inner()).await?;
        let from = key.from;
        if !self.mailbox.put(key, mail) {
            let sentence = format!("rank {from} has sent the same message twice");
            return Err(to_status(Error::refused(sentence)));
        }
        Ok(Response::new(pb::DeliverResponse {}))
    }
}
