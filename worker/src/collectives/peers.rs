//! Collectives over gRPC connections between workers.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::try_join_all;
use futures_util::stream;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::{Server, server::TcpIncoming};
use tonic::{Request, Status, Streaming};
use zeroshard_proto::Reduction;
use zeroshard_proto::token::Bearer;
use zeroshard_proto::transport::{self, Connection};
use zeroshard_proto::{Error as ClusterError, Token, pb};

use super::Collectives;
use super::algorithms;
use super::error::{Error, Result};
use super::mailbox::{Channel, Mailbox};
use super::nccl::{self, Nccl};
use super::operation::{Numbers, Operation, Post};
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
}

impl Default for Options {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            deadline: Duration::from_secs(60),
            token: Token::default(),
        }
    }
}

/// A worker that listens for its peers and is not yet connected to them.
#[derive(Debug)]
pub struct Listening {
    runtime: Handle,
    options: Options,
    address: SocketAddr,
    mailbox: Arc<Mailbox>,
    identity: watch::Sender<Option<Identity>>,
    failure: watch::Sender<Failure>,
    attached: watch::Sender<BTreeSet<u32>>,
    leaving: CancellationToken,
    /// The server, and the tasks that receive the state of the peers.
    tasks: TaskTracker,
}

/// The connections of a worker to other workers of a job. Implements [`Collectives`] over gRPC.
///
/// If a `Peers` is dropped without [`Peers::leave`], the other workers regard this one as lost.
pub struct Peers {
    inner: Listening,
    rank: u32,
    /// The number of ranks of the job.
    world: u32,
    /// The clients by rank, without this rank.
    clients: BTreeMap<u32, Client>,
    /// The number of messages that are being sent.
    sending: Arc<watch::Sender<usize>>,
    state: Mutex<State>,
    /// The connections for large messages, if there are any.
    nccl: OnceLock<Nccl>,
}

#[derive(Debug, Default)]
struct State {
    /// The number of operations called so far on each channel.
    called: HashMap<Channel, u64>,
    /// The first failure, which all later operations return.
    failure: Option<Error>,
}

impl Peers {
    /// Listens for peers. `runtime` executes the transfers. The methods of the result block, and
    /// must not be called on a thread of `runtime`.
    ///
    /// # Errors
    /// [`ClusterError::Unavailable`] if the address cannot be bound, and an error for a token that
    /// is not valid in a header.
    pub fn bind(runtime: &Handle, options: Options) -> Result<Listening> {
        let bearer = Bearer::new(&options.token)?;
        let unavailable = |cause: std::io::Error| ClusterError::Unavailable {
            peer: format!("listen address {}", options.listen),
            cause: cause.to_string(),
        };
        let listener = runtime.block_on(TcpListener::bind(options.listen)).map_err(unavailable)?;
        let address = listener.local_addr().map_err(unavailable)?;
        let (identity, identified) = watch::channel(None);
        let (failure, failed) = watch::channel(None);
        let listening = Listening {
            runtime: runtime.clone(),
            address,
            mailbox: Arc::default(),
            identity,
            failure,
            attached: watch::Sender::default(),
            leaving: CancellationToken::new(),
            tasks: TaskTracker::new(),
            options,
        };
        let service = Service {
            mailbox: listening.mailbox.clone(),
            identity: identified,
            failure: failed,
            attached: listening.attached.clone(),
            leaving: listening.leaving.clone(),
            timeout: listening.options.deadline,
        };
        let check = move |request: Request<()>| match &bearer {
            Some(bearer) => {
                bearer.check(request.metadata().as_ref()).map(|()| request).map_err(Status::from)
            }
            None => Ok(request),
        };
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
                TcpIncoming::from(listener).with_nodelay(Some(true)),
                listening.leaving.clone().cancelled_owned(),
            );
        // If the server fails, the streams of the peers end, and they regard this worker as lost.
        listening.tasks.spawn_on(async move { drop(server.await) }, runtime);
        Ok(listening)
    }

    /// The rank of this worker.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// The number of ranks of the job.
    pub fn world(&self) -> u32 {
        self.world
    }

    /// Waits until the peers have received all messages, then leaves. Operations fail afterwards.
    ///
    /// # Errors
    /// [`ClusterError::Timeout`] if a peer does not receive its messages.
    pub fn leave(&self) -> Result<()> {
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

    /// Has large messages of collectives go over NCCL, from the GPU with this number to those of
    /// the other ranks. All connected ranks must call this function.
    ///
    /// # Errors
    /// [`Error::Disagreement`] if a rank has no NCCL or cannot use its GPU: its text says why.
    /// [`Error::Nccl`], and [`Error::Lost`] on the other ranks.
    pub fn use_nccl(&self, device: usize) -> Result<()> {
        let mut ranks: Vec<u32> = self.clients.keys().copied().collect();
        ranks.push(self.rank);
        ranks.sort_unstable();
        let opened = nccl::open(device);
        let text = opened.as_ref().map_or_else(String::as_str, |_| "ready");
        self.agree(&ranks, "messages over NCCL", text)?;
        let channel = Channel { group: ranks.clone(), pair: false };
        let connect = |at: &Operation<'_>| {
            let failed = |cause| Error::Nccl { rank: self.rank, operation: at.text.clone(), cause };
            let lane = opened.map_err(failed)?;
            let me = at.me();
            let own = if me == 0 { nccl::new_id().map_err(failed)? } else { Vec::new() };
            let mut sizes = vec![0; ranks.len()];
            sizes[0] = nccl::ID_ELEMENTS;
            let id = algorithms::all_gather(at, &sizes, own)?.concat();
            let others = ranks.iter().copied().filter(|&rank| rank != self.rank).collect();
            let connected = Nccl::connect(lane, &ranks, me, &id, &at.waiting_for(others));
            connected.map_err(|stopped| stopped.into_error(failed))
        };
        let connected = self.operate(channel, "the start of NCCL".to_owned(), connect)?;
        // A second call would make further connections, and drop them.
        let _ = self.nccl.set(connected);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent after a panic, because each change is a single assignment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs an operation on a channel.
    fn operate<T>(
        &self,
        channel: Channel,
        text: String,
        run: impl FnOnce(&Operation<'_>) -> Result<T>,
    ) -> Result<T> {
        let operation = {
            let mut state = self.lock();
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            let called = state.called.entry(channel.clone()).or_default();
            let sequence = *called;
            *called += 1;
            let timeout = self.inner.options.deadline;
            let (mailbox, rank) = (self.inner.mailbox.as_ref(), self.rank);
            let nccl = self.nccl.get();
            Operation { post: self, mailbox, rank, channel, sequence, text, timeout, nccl }
        };
        run(&operation).inspect_err(|error| {
            let mut state = self.lock();
            if state.failure.is_none() {
                state.failure = Some(error.clone());
                drop(state);
                self.report_failure(error.to_string());
            }
        })
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

    /// Runs a collective.
    fn collect<T>(
        &self,
        group: &[u32],
        text: String,
        run: impl FnOnce(&Operation<'_>) -> Result<T>,
    ) -> Result<T> {
        self.check(group)?;
        self.operate(Channel { group: group.to_vec(), pair: false }, text, run)
    }

    fn check(&self, group: &[u32]) -> Result<()> {
        let repeated = (1..group.len()).any(|index| group[..index].contains(&group[index]));
        let connected =
            group.iter().all(|rank| *rank == self.rank || self.clients.contains_key(rank));
        if repeated || !group.contains(&self.rank) || !connected {
            let (own, peers) = (self.rank, self.clients.keys());
            let expected = format!("rank {own}, and some of its peers {peers:?}, each once");
            return Err(Error::invalid("group of ranks", format!("{group:?}"), expected));
        }
        Ok(())
    }

    fn pair(&self, peer: u32, group: [u32; 2]) -> Result<Channel> {
        if !self.clients.contains_key(&peer) {
            let expected = format!("one of {:?}", self.clients.keys());
            return Err(Error::invalid("rank of a peer", peer, expected));
        }
        Ok(Channel { group: group.to_vec(), pair: true })
    }
}

impl Listening {
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
        let (sending, state, nccl) = (Arc::default(), Mutex::default(), OnceLock::new());
        Ok(Peers { inner: self, rank, world, clients, sending, state, nccl })
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
            let endpoint = transport::endpoint(&address)?;
            let mut client =
                Client::new(Connection::new(endpoint.connect_lazy(), &self.options.token)?);
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
                Ok(Err(status)) => ClusterError::from_status(&status, &name),
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

impl Post for Peers {
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

impl Collectives for Peers {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn all_reduce(&self, group: &[u32], reduction: Reduction, data: Vec<f32>) -> Result<Vec<f32>> {
        let text = format!("all_reduce({}) of {} f32", name(reduction), data.len());
        self.collect(group, text, |at| algorithms::all_reduce(at, reduction, data))
    }

    fn all_gather(&self, group: &[u32], sizes: &[usize], data: Vec<f32>) -> Result<Vec<Vec<f32>>> {
        let own =
            group.iter().position(|&rank| rank == self.rank).and_then(|place| sizes.get(place));
        if sizes.len() != group.len() || own != Some(&data.len()) {
            let found = format!(
                "{sizes:?} for ranks {group:?} and {} f32 of rank {}",
                data.len(),
                self.rank
            );
            return Err(Error::invalid(
                "list of sizes of an all_gather",
                found,
                "one size for each rank, including the size of this rank's data",
            ));
        }
        let text = format!("all_gather of {sizes:?} f32");
        self.collect(group, text, |at| algorithms::all_gather(at, sizes, data))
    }

    fn reduce_scatter(
        &self,
        group: &[u32],
        reduction: Reduction,
        parts: Vec<Vec<f32>>,
    ) -> Result<Vec<f32>> {
        let sizes: Vec<usize> = parts.iter().map(Vec::len).collect();
        if sizes.len() != group.len() {
            let found = format!("{} for ranks {group:?}", sizes.len());
            let what = "number of parts of a reduce_scatter";
            return Err(Error::invalid(what, found, "one for each rank"));
        }
        let text = format!("reduce_scatter({}) of {sizes:?} f32", name(reduction));
        self.collect(group, text, |at| algorithms::reduce_scatter(at, reduction, parts))
    }

    fn all_to_all(
        &self,
        group: &[u32],
        sizes: &[usize],
        parts: Vec<Vec<f32>>,
    ) -> Result<Vec<Vec<f32>>> {
        if [parts.len(), sizes.len()] != [group.len(); 2] {
            let found = format!("{} and {} for ranks {group:?}", parts.len(), sizes.len());
            let what = "numbers of parts and of sizes of an all_to_all";
            return Err(Error::invalid(what, found, "one for each rank"));
        }
        // What a rank sends to one of the others is not known to the rest of them.
        self.collect(group, "all_to_all of f32".to_owned(), |at| {
            algorithms::all_to_all(at, sizes, parts)
        })
    }

    fn send(&self, to: u32, data: Vec<f32>) -> Result<()> {
        let channel = self.pair(to, [self.rank, to])?;
        self.operate(channel, format!("send of {} f32", data.len()), |at| {
            at.send(1, 0, Numbers::new(data).into_bytes());
            Ok(())
        })
    }

    fn recv(&self, from: u32, elements: usize) -> Result<Vec<f32>> {
        let channel = self.pair(from, [from, self.rank])?;
        self.operate(channel, format!("send of {elements} f32"), |at| at.take(0, 0, elements))
    }

    fn agree(&self, group: &[u32], about: &str, text: &str) -> Result<()> {
        self.collect(group, format!("{about}: {text}"), |at| {
            algorithms::all_gather(at, &vec![0; group.len()], Vec::new()).map(drop)
        })
    }
}

impl fmt::Debug for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Peers(rank {} of {})", self.rank, self.world)
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        // Stops the server, unless `leave` has already stopped it.
        self.leaving.cancel();
    }
}

fn name(reduction: Reduction) -> &'static str {
    match reduction {
        Reduction::Sum => "sum",
        Reduction::Avg => "avg",
        Reduction::Max => "max",
    }
}
