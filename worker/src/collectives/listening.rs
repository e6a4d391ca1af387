//! A worker that listens for its peers, and how it connects to one of them.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::TryStreamExt;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::{Server, server::TcpIncoming};
use tonic::{Request, Status, Streaming};
use zeroshard_model::Error as ClusterError;
use zeroshard_net::transport::{self, Connection, Credentials, tls::Acceptor};
use zeroshard_proto::{
    pb,
    status::{from_status, to_status},
};

use super::error::Result;
use super::gate::Gate;
use super::mailbox::Mailbox;
use super::options::Options;
use super::service::{Failure, Identity, Service};

/// The pause between two tries to connect to a peer.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// The client of a peer.
pub(super) type Client = pb::worker_service_client::WorkerServiceClient<Connection>;

/// A worker that listens for its peers and is not yet connected to them.
#[derive(Debug)]
pub struct Listening {
    pub(super) runtime: Handle,
    pub(super) options: Options,
    credentials: Credentials,
    address: SocketAddr,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) identity: watch::Sender<Option<Identity>>,
    pub(super) failure: watch::Sender<Failure>,
    attached: watch::Sender<BTreeSet<u32>>,
    pub(super) leaving: CancellationToken,
    /// The server, and the tasks that receive the state of the peers.
    pub(super) tasks: TaskTracker,
}

impl Listening {
    /// Listens for peers. `runtime` executes the transfers. The methods of the result block, and
    /// must not be called on a thread of `runtime`.
    ///
    /// # Errors
    /// [`ClusterError::Unavailable`] if the address cannot be bound, and [`ClusterError::Invalid`]
    /// for a token that is not valid in an HTTP header, or for TLS without a certificate.
    pub fn bind(runtime: &Handle, options: Options) -> Result<Self> {
        let gate = Gate::new(&options)?;
        let acceptor = Acceptor::new(options.tls.clone())?;
        let credentials = Credentials::new(&options.token, options.tls.clone())?;
        let unavailable = |cause: std::io::Error| ClusterError::Unavailable {
            peer: format!("listen address {}", options.listen),
            cause: cause.to_string(),
        };
        let listener = runtime.block_on(TcpListener::bind(options.listen)).map_err(unavailable)?;
        let address = listener.local_addr().map_err(unavailable)?;
        let (identity, identified) = watch::channel(None);
        let (failure, failed) = watch::channel(None);
        let listening = Self {
            runtime: runtime.clone(),
            address,
            mailbox: Arc::default(),
            identity,
            failure,
            attached: watch::Sender::default(),
            leaving: CancellationToken::new(),
            tasks: TaskTracker::new(),
            options,
            credentials,
        };
        let service = Service {
            mailbox: listening.mailbox.clone(),
            identity: identified,
            failure: failed,
            attached: listening.attached.clone(),
            leaving: listening.leaving.clone(),
            timeout: listening.options.deadline,
        };
        let check = move |request: Request<()>| match gate.check(&request) {
            Ok(()) => Ok(request),
            Err(error) => Err(to_status(error)),
        };
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let server = Server::builder()
            .max_frame_size(transport::FRAME_BYTES)
            .initial_stream_window_size(transport::WINDOW_BYTES)
            .initial_connection_window_size(transport::WINDOW_BYTES)
            .http2_keepalive_interval(Some(transport::KEEPALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(transport::KEEPALIVE_TIMEOUT))
            .add_service(pb::worker_service_server::WorkerServiceServer::with_interceptor(
                service, check,
            ))
            .serve_with_incoming_shutdown(
                incoming.map_ok(move |stream| acceptor.accept(stream)),
                listening.leaving.clone().cancelled_owned(),
            );
        // If the server fails, the streams of the peers end, and they regard this worker as lost.
        listening.tasks.spawn_on(async move { drop(server.await) }, runtime);
        Ok(listening)
    }

    /// The address at which this worker listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until these peers have connected to this worker.
    pub(super) async fn attached(
        &self,
        rank: u32,
        peers: impl Iterator<Item = u32> + Clone,
    ) -> Result<()> {
        let mut attached = self.attached.subscribe();
        let all = attached.wait_for(|attached| peers.clone().all(|peer| attached.contains(&peer)));
        if tokio::time::timeout(self.options.deadline, all).await.is_ok() {
            return Ok(());
        }
        let attached = self.attached.borrow();
        let missing: Vec<u32> = peers.filter(|peer| !attached.contains(peer)).collect();
        let waiting_for = format!("ranks {missing:?} to connect to rank {rank}");
        Err(ClusterError::Timeout {
            waiting_for,
            waited_ms: self.options.deadline.as_millis() as u64,
        }
        .into())
    }

    /// Connects to a peer, and starts the task that receives its state.
    pub(super) async fn dial(
        &self,
        from: u32,
        to: u32,
        world: u32,
        address: impl AsyncFn() -> Result<String, ClusterError>,
    ) -> Result<Client> {
        let begin = Instant::now();
        let (client, events) = loop {
            let address = address().await?;
            let mut client = Client::new(Connection::lazy(&address, &self.credentials)?);
            let name = format!("rank {to} at {address}");
            let attached = async {
                let mut events =
                    client.attach(pb::AttachRequest { from, to, world }).await?.into_inner();
                // The peer sends the first event at once.
                events.message().await?;
                Ok::<_, Status>(events)
            };
            let left = self.options.deadline.saturating_sub(begin.elapsed());
            let error = match tokio::time::timeout(left, attached).await {
                Ok(Ok(events)) => break (client, events),
                Ok(Err(status)) => from_status(&status, &name),
                Err(_) => {
                    let waited_ms = self.options.deadline.as_millis() as u64;
                    ClusterError::Timeout {
                        waiting_for: format!("rank {from} to connect to {name}"),
                        waited_ms,
                    }
                }
            };
            // An unavailable peer may not listen yet.
            if !matches!(error, ClusterError::Unavailable { .. })
                || begin.elapsed() >= self.options.deadline
            {
                return Err(error.into());
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        };
        let (mailbox, leaving) = (self.mailbox.clone(), self.leaving.clone());
        self.tasks.spawn(async move {
            leaving.run_until_cancelled(listen(events, &mailbox, to)).await;
        });
        Ok(client)
    }
}

/// Records the state that a peer reports, until the end of its stream.
async fn listen(mut events: Streaming<pb::AttachResponse>, mailbox: &Mailbox, peer: u32) {
    loop {
        match events.message().await {
            Ok(Some(pb::AttachResponse { failure: Some(cause) })) => mailbox.fail(peer, cause),
            Ok(Some(_)) => {}
            Ok(None) => return mailbox.lose(peer, "it has left".to_owned()),
            Err(status) => {
                return mailbox.lose(peer, format!("its connection ended: {}", status.message()));
            }
        }
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        // Stops the server, unless `leave` has already stopped it.
        self.leaving.cancel();
    }
}
