//! The windows of a server: how they are opened, and the socket over which descriptors, the ends of
//! holds and acknowledgements go.
//!
//! A worker asks for a window with a gRPC call, which has its credentials and its lease. It then
//! proves with a random number that the socket is its own, and that it is on the same host. The
//! socket has a name and no file, so that nothing remains when a process is killed.

use std::{
    collections::HashMap,
    convert::Infallible,
    io,
    os::{linux::net::SocketAddrExt, unix::net},
    sync::{Arc, Mutex, MutexGuard, RwLock},
    time::Duration,
};

use tokio::{
    net::{UnixListener, UnixStream},
    time::timeout,
};
use zeroshard_kernels::Backend;
use zeroshard_model::{Error, Result};
use zeroshard_net::{numbers::Numbers, transport::network};
use zeroshard_proto::pb;
use zeroshard_shard::budget::{Budget, Space};

use super::{
    job::Job,
    window::{Window, name},
};
use crate::{identity, metrics};

/// How long a window waits for its socket, and a socket for its first message.
const CONNECT: Duration = Duration::from_secs(5);
/// The largest outbox. It is small, so that what a worker writes is still in the cache when the
/// server reads it.
const MAX_OUTBOX: usize = 32 << 20;
/// The unit of outboxes, and the smallest one of a rank.
const OUTBOX_UNIT: usize = 1 << 20;
/// The outbox of a reader, which sends nothing.
const NO_OUTBOX: usize = zeroshard_shm::PAGE;
/// The most windows that wait for their socket, and that one server has.
const MAX_WAITING: usize = 1024;
const MAX_WINDOWS: usize = 4096;

/// All windows of one server.
pub(crate) struct Windows<B: Backend> {
    /// The name of the socket; why there is none.
    socket: Result<String, String>,
    listener: Mutex<Option<net::UnixListener>>,
    /// The budget for outboxes.
    budget: Arc<Budget>,
    /// The sockets that have not named their window.
    unnamed: Arc<Budget>,
    /// The windows whose process has not connected, by number.
    waiting: Mutex<HashMap<u64, Waiting<B>>>,
    open: RwLock<HashMap<u64, Arc<Window<B>>>>,
    /// Why the last rank of a job that asked for a window did not get one, by the id of the job.
    refusals: Mutex<HashMap<u64, String>>,
    metrics: metrics::Shard,
}

/// Why a rank does not get a window, as a metric shows it.
#[derive(Debug, Clone, Copy)]
enum Reason {
    /// The system has no such memory or socket.
    Unsupported,
    /// The budget for outboxes is exhausted.
    Memory,
    /// There are too many windows.
    Limit,
    /// The process did not connect in time.
    NotConnected,
}

struct Waiting<B: Backend> {
    secret: u64,
    job: Arc<Job<B>>,
    rank: Option<u32>,
    outbox: usize,
    until: tokio::time::Instant,
}

impl<B: Backend> Windows<B> {
    /// Opens the socket. A system without such sockets has no windows.
    pub(super) fn new(limit: u64, metrics: metrics::Shard) -> Self {
        let opened = listen();
        if let Err(cause) = &opened {
            tracing::warn!(%cause, "workers on this host cannot share memory with this server");
        }
        let (socket, listener) = match opened {
            Ok((name, listener)) => (Ok(name), Some(listener)),
            Err(cause) => (Err(cause.to_string()), None),
        };
        Self {
            socket,
            listener: Mutex::new(listener),
            budget: Budget::new(limit),
            unnamed: Budget::new(MAX_WAITING as u64),
            waiting: Mutex::default(),
            open: RwLock::default(),
            refusals: Mutex::default(),
            metrics,
        }
    }

    /// Prepares a window for a rank of a job, whose lease was checked, or for a reader, whose pin
    /// was.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if there cannot be one, with the cause.
    pub(super) fn prepare(
        &self,
        job: &Arc<Job<B>>,
        rank: Option<u32>,
    ) -> Result<pb::OpenWindowResponse> {
        let no_window = |reason, cause: String| {
            self.refuse((job.id, rank), reason, cause.clone());
            Error::Unavailable { peer: "the shared memory of this server".to_owned(), cause }
        };
        let unsupported = |cause: String| no_window(Reason::Unsupported, cause);
        let socket = self.socket.clone().map_err(unsupported)?;
        let none = "the system has none, or limits the addresses of the server (ulimit -v)";
        let parameters = job.arena().ok_or_else(|| unsupported(none.to_owned()))?;
        let (window, secret) = (identity::random()?, identity::random()?);
        let outbox = rank.map_or(NO_OUTBOX, |_| outbox_of(job));
        let response = pb::OpenWindowResponse {
            socket,
            window,
            secret,
            parameter_bytes: parameters.len() as u64,
            outbox_bytes: outbox as u64,
        };
        if !self.budget.has(outbox as u64) {
            let what = format!(
                "the outbox of {}: outboxes of this server may have {} bytes, a part of --memory, \
                 and have {}",
                name(rank),
                self.budget.limit(),
                self.budget.used()
            );
            let error = Error::OutOfMemory { what, bytes: outbox as u64 };
            self.refuse((job.id, rank), Reason::Memory, error.to_string());
            return Err(error);
        }
        let now = tokio::time::Instant::now();
        let until = now + CONNECT;
        self.end_waiting();
        let mut waiting = self.waiting();
        if waiting.len() >= MAX_WAITING || self.len() >= MAX_WINDOWS {
            let cause = format!("it has {MAX_WINDOWS} windows, or too many wait");
            return Err(no_window(Reason::Limit, cause));
        }
        waiting.insert(window, Waiting { secret, job: job.clone(), rank, outbox, until });
        Ok(response)
    }

    /// The window with this number, if `job` has one.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if it has ended: its process opens another one.
    pub(super) fn get(&self, job: u64, number: u64) -> Result<Option<Arc<Window<B>>>> {
        if number == 0 {
            return Ok(None);
        }
        let open = self.open.read().expect("no holder of the lock panics");
        match open.get(&number).filter(|window| window.job_id == job) {
            Some(window) => Ok(Some(window.clone())),
            None => Err(Error::Unavailable {
                peer: "the shared memory of this server".to_owned(),
                cause: "the window has ended".to_owned(),
            }),
        }
    }

    /// The number of ranks of each job that have windows, by its id, and why the last rank that
    /// asked for one has none.
    pub(super) fn by_job(&self) -> HashMap<u64, (u32, Option<String>)> {
        self.end_waiting();
        let mut jobs = HashMap::<_, (u32, _)>::new();
        for window in self.open.read().expect("no holder of the lock panics").values() {
            jobs.entry(window.job_id).or_default().0 += u32::from(window.rank.is_some());
        }
        for (&job, cause) in self.refusals().iter() {
            jobs.entry(job).or_default().1 = Some(cause.clone());
        }
        jobs
    }

    /// Forgets a job that was closed.
    pub(super) fn forget(&self, job: u64) {
        self.waiting().retain(|_, of| of.job.id != job);
        self.refusals().remove(&job);
    }

    /// Ends the time of windows whose process has not connected.
    fn end_waiting(&self) {
        let now = tokio::time::Instant::now();
        let late: Vec<_> = self.waiting().extract_if(|_, of| of.until <= now).collect();
        for (_, Waiting { job, rank, .. }) in late {
            let cause = format!(
                "the process of {} has not connected to the server's socket: it is on another \
                 host, or in another network namespace",
                name(rank)
            );
            self.refuse((job.id, rank), Reason::NotConnected, cause);
        }
    }

    /// Remembers why a rank of a job has no window, and counts readers that have none.
    fn refuse(&self, (job, rank): (u64, Option<u32>), reason: Reason, cause: String) {
        self.metrics.window_refused(match reason {
            Reason::Unsupported => "unsupported",
            Reason::Memory => "memory",
            Reason::Limit => "limit",
            Reason::NotConnected => "not_connected",
        });
        if rank.is_some() {
            self.refusals().insert(job, cause);
        }
    }

    fn refusals(&self) -> MutexGuard<'_, HashMap<u64, String>> {
        self.refusals.lock().expect("no holder of the lock panics")
    }

    /// The number of windows.
    pub(super) fn len(&self) -> usize {
        self.open.read().expect("no holder of the lock panics").len()
    }

    /// Accepts the processes of windows, forever.
    pub(super) async fn run(self: &Arc<Self>) -> Infallible {
        let listener = self.listener.lock().expect("no holder of the lock panics").take();
        let Some(Ok(listener)) = listener.map(UnixListener::from_std) else {
            return std::future::pending().await;
        };
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    // Any process of the host can connect; a further one sees a closed socket.
                    let Some(place) = self.unnamed.take(1) else { continue };
                    let windows = self.clone();
                    tokio::spawn(async move { windows.serve(stream, place).await });
                }
                // Too many open files, for example.
                Err(error) => {
                    tracing::warn!(%error, "a process could not connect to its window");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    /// Opens the window of a process, and follows its socket until it is closed.
    async fn serve(&self, stream: UnixStream, place: Space) {
        let Ok(Ok((number, window))) = timeout(CONNECT, self.accept(Numbers::new(stream))).await
        else {
            return; // The process sees that its socket is closed.
        };
        drop(place);
        // The process may use the window as soon as it has the descriptors.
        self.opened(number, &window);
        let ended = match window.begin().await {
            Ok(()) => window.run().await,
            failed => failed,
        };
        tracing::debug!(of = name(window.rank), ?ended, "a window has ended");
        self.open.write().expect("no holder of the lock panics").remove(&number);
        self.metrics.show_windows(self.len());
        window.end();
    }

    fn opened(&self, number: u64, window: &Arc<Window<B>>) {
        if window.rank.is_some() {
            self.refusals().remove(&window.job_id);
        }
        self.open.write().expect("no holder of the lock panics").insert(number, window.clone());
        self.metrics.show_windows(self.len());
    }

    /// Reads the number of a window and its secret, and creates the window.
    async fn accept(&self, socket: Numbers) -> io::Result<(u64, Arc<Window<B>>)> {
        let [number, secret] = socket.pair().await?;
        let refused = || io::Error::from(io::ErrorKind::PermissionDenied);
        let Waiting { job, rank, outbox, .. } = {
            let mut waiting = self.waiting();
            match waiting.get(&number) {
                Some(of) if of.secret == secret => waiting.remove(&number),
                _ => None,
            }
        }
        .ok_or_else(refused)?;
        let space = self.budget.take(outbox as u64).ok_or(io::ErrorKind::OutOfMemory)?;
        let parameters = job.arena().ok_or_else(refused)?.clone();
        // The system takes some milliseconds to provide the memory.
        let (of, slices) = ((job.id, rank), job.spec.manifest.slices().len());
        let create = move || Window::new(of, slices, parameters, outbox, space, socket);
        let window = tokio::task::spawn_blocking(create).await?;
        Ok((number, Arc::new(window.map_err(io::Error::other)?)))
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<u64, Waiting<B>>> {
        self.waiting.lock().expect("no holder of the lock panics")
    }
}

/// A socket with a random name, in the namespace of names without files.
fn listen() -> io::Result<(String, net::UnixListener)> {
    if network::simulated().is_some() {
        return Err(io::Error::other("the network is simulated"));
    }
    let number = identity::random().map_err(io::Error::other)?;
    let name = format!("zeroshard-{number:016x}");
    let listener = net::UnixListener::bind_addr(&net::SocketAddr::from_abstract_name(&name)?)?;
    listener.set_nonblocking(true)?;
    Ok((name, listener))
}

/// The size of an outbox for a rank of a job: what the rank pushes in a step, and at most
/// [`MAX_OUTBOX`].
fn outbox_of<B: Backend>(job: &Job<B>) -> usize {
    let trained = job.primary_slices().filter(|(_, slice)| slice.group.is_some());
    let bytes: usize = trained.map(|(_, slice)| slice.spec.numel * size_of::<f32>()).sum();
    bytes.clamp(OUTBOX_UNIT, MAX_OUTBOX).next_multiple_of(OUTBOX_UNIT)
}
