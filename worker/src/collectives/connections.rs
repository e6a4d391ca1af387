//! The gRPC connections between workers.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::try_join_all;
use futures_util::{TryStreamExt, stream};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::{Server, server::TcpIncoming};
use tonic::{Request, Status, Streaming};
use zeroshard_model::Error as ClusterError;
use zeroshard_net::{
    Token,
    transport::{
        self, Connection, Credentials,
        tls::{Acceptor, Tls},
    },
};
use zeroshard_proto::{
    pb,
    status::{from_status, to_status},
};

use super::error::{Error, Result};
use super::gate::Gate;
use super::mailbox::{Channel, Mailbox};
use super::operation::Post;
use super::peers::Peers;
use super::service::{Failure, Identity, Service};

/// The maximum payload of one part of a message, in bytes.
const PART_BYTES: usize = 1 << 20;
/// The time that a worker that leaves or has failed waits for its peers.
pub(super) const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);
/// The pause between two tries to connect to a peer.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

type Client = pb::worker_service_client::WorkerServiceClient<Connection>;

/// Settings of the connections among workers.
#[derive(Debug, Clone)]
pub struct Options {
    /// The address to listen on. Port 0 selects a free port.
    pub listen: SocketAddr,
    /// The time to wait for the connection to a peer, and for each message of a peer.
    pub deadline: Duration,
    /// The token of the cluster. Calls without it are refused.
    pub token: Token,
    /// The TLS configuration of all connections. A peer whose certificate has the same role needs
    /// no token.
    pub tls: Option<Tls>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            deadline: Duration::from_secs(60),
            token: Token::default(),
            tls: None,
        }
    }
}

/// A worker that listens for its peers and is not yet connected to them.
#[derive(Debug)]
pub struct Listening {
    runtime: Handle,
    options: Options,
    credentials: Credentials,
    address: SocketAddr,
    mailbox: Arc<Mailbox>,
    identity: watch::Sender<Option<Identity>>,
    failure: watch::Sender<Failure>,
    attached: watch::Sender<BTreeSet<u32>>,
    leaving: CancellationToken,
    /// The server, and the tasks that receive the state of the peers.
    tasks: TaskTracker,
}

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
    /// The number of [`Peers`] with these connections.
    communicators: u32,
    /// The number of operations called so far on each channel.
    called: HashMap<Channel, u64>,
    /// The first failure, which all later operations return.
    failure: Option<Error>,
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

    /// Connects as rank `rank` of `world` ranks to the others of `ranks`, and waits until all of
    /// them have connected to this worker. `address` returns the `host:port` of a rank, and is
    /// called again until the rank has been reached, since a rank that has ended may still be known
    /// at its old address.
    ///
    /// # Errors
    /// Those of `address`, and an error for a peer that cannot be reached before the deadline, or
    /// that has another rank.
    pub fn connect(
        self,
        rank: u32,
        world: u32,
        ranks: Range<u32>,
        address: impl AsyncFn(u32) -> Result<String, ClusterError>,
    ) -> Result<Peers> {
        if !ranks.contains(&rank) || ranks.end > world {
            let expected = format!("one of ranks {ranks:?} of {world}");
            return Err(Error::invalid("rank", rank, expected));
        }
        self.identity.send_replace(Some(Identity { rank, world }));
        let others = || ranks.clone().filter(|&peer| peer != rank);
        let dialled = others().map(async |to| {
            Ok::<_, Error>((to, self.dial(rank, to, world, async || address(to).await).await?))
        });
        let clients = self.runtime.block_on(async {
            let clients = try_join_all(dialled).await?;
            // Otherwise this worker could leave before a peer has connected to it.
            self.attached(rank, others()).await?;
            Ok::<_, Error>(clients.into_iter().collect())
        })?;
        let (sending, state) = (Arc::default(), Mutex::default());
        let connections = Connections { inner: self, rank, world, clients, sending, state };
        Ok(Peers::new(Arc::new(connections)))
    }

    /// Waits until these peers have connected to this worker.
    async fn attached(&self, rank: u32, peers: impl Iterator<Item = u32> + Clone) -> Result<()> {
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
    async fn dial(
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

/// Waits until all messages have been received or have failed.
async fn sent(sending: &watch::Sender<usize>) {
    // The wait cannot fail, because `sending` keeps the channel open.
    drop(sending.subscribe().wait_for(|&count| count == 0).await);
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

impl Connections {
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

impl Drop for Listening {
    fn drop(&mut self) {
        // Stops the server, unless `leave` has already stopped it.
        self.leaving.cancel();
    }
}
