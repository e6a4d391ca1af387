//! The windows of a rank or of a reader: one for each server on this host.

use std::{
    collections::HashMap,
    fmt,
    str::FromStr,
    sync::{Arc, Mutex, Weak},
    time::{Duration, Instant},
};

use tokio_util::sync::CancellationToken;
use zeroshard_model::{Error, Result, Server};
use zeroshard_proto::{pb, pb::shard_service_client::ShardServiceClient, status::from_status};

use crate::{Options, shards::Shard, window::Window};

/// How long a server may take to open a window.
const LIMIT: Duration = Duration::from_secs(5);
/// After a window could not be opened, the next try comes after this time.
const PAUSE: Duration = Duration::from_secs(60);

/// How parameters and gradients reach servers. It does not change any result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Transport {
    /// Shared memory with servers on this host, and gRPC with all others.
    #[default]
    Auto,
    /// gRPC with all servers.
    Grpc,
    /// Shared memory; an error if it cannot be used with a server.
    Shm,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Grpc => "grpc",
            Self::Shm => "shm",
        })
    }
}

impl FromStr for Transport {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "auto" => Ok(Self::Auto),
            "grpc" => Ok(Self::Grpc),
            "shm" => Ok(Self::Shm),
            other => Err(Error::invalid("transport", other, "auto, grpc or shm")),
        }
    }
}

impl Transport {
    /// The value of `ZEROSHARD_TRANSPORT`, if it is set.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub(crate) fn of_environment() -> Result<Self> {
        match std::env::var("ZEROSHARD_TRANSPORT") {
            Ok(name) if !name.is_empty() => name.parse(),
            _ => Ok(Self::default()),
        }
    }
}

/// The job to which a window belongs, and who opens it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Of<'a> {
    pub(crate) job: &'a str,
    pub(crate) job_id: u64,
    pub(crate) holder: Holder,
}

/// Who opens a window.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Holder {
    /// A rank, with its lease.
    Rank { rank: u32, lease: u64 },
    /// A reader, with the number of its pin on the server.
    Reader { pin: u64 },
}

/// One call at a time finds out what is known about a server.
type Shared = Arc<tokio::sync::Mutex<Slot>>;

/// The windows, by id and incarnation of the server.
#[derive(Debug)]
pub(crate) struct Windows {
    transport: Transport,
    /// The largest message of a push, in bytes.
    chunk: usize,
    slots: Mutex<HashMap<(u64, u64), Shared>>,
}

/// What is known about a server.
#[derive(Debug, Default)]
enum Slot {
    #[default]
    Unknown,
    Open(Arc<Window>),
    /// There can be no window, and why; when it was tried.
    Refused(Error, Instant),
}

impl Windows {
    /// Without windows yet. `options`: those of the connection.
    pub(crate) fn new(options: &Options) -> Self {
        let transport = options.transport.unwrap_or_default();
        Self { transport, chunk: options.chunk_bytes, slots: Mutex::default() }
    }

    /// The window of a server, which is opened on first use; `None` if there is none, or it is not
    /// to be used.
    ///
    /// # Errors
    /// With [`Transport::Shm`]: why there is none.
    pub(crate) async fn get(
        &self,
        server: &Server,
        shard: &Shard,
        of: Of<'_>,
    ) -> Result<Option<Arc<Window>>> {
        if self.transport == Transport::Grpc {
            return Ok(None);
        }
        let slot = {
            let mut slots = self.slots.lock().expect("no holder of the lock panics");
            slots.entry((server.id, server.incarnation)).or_default().clone()
        };
        let shared = slot;
        let mut slot = shared.lock().await;
        let is_due = match &*slot {
            Slot::Unknown => true,
            Slot::Open(window) => window.ended().is_cancelled(),
            Slot::Refused(_, at) => at.elapsed() > PAUSE,
        };
        if is_due {
            *slot = match open(shard, of, self.chunk).await {
                Ok(window) => {
                    tokio::spawn(forget_ended(window.ended().clone(), Arc::downgrade(&shared)));
                    Slot::Open(Arc::new(window))
                }
                // The call that needs the window has the same error, and handles it.
                Err(error) if is_of_job(&error) => return Ok(None),
                Err(error) => {
                    tracing::info!(server = shard.peer, %error, "no shared memory; using gRPC");
                    Slot::Refused(error, Instant::now())
                }
            };
        }
        match &*slot {
            Slot::Open(window) => Ok(Some(window.clone())),
            Slot::Refused(error, _) if self.transport == Transport::Shm => Err(error.clone()),
            Slot::Refused(..) | Slot::Unknown => Ok(None),
        }
    }

    /// Gives memory of the outboxes that nothing uses back to the system: an upload fills more of
    /// them than steps do.
    pub(crate) fn release_unused(&self) {
        for slot in self.slots.lock().expect("no holder of the lock panics").values() {
            if let Ok(slot) = slot.try_lock()
                && let Slot::Open(window) = &*slot
            {
                window.release_unused();
            }
        }
    }
}

/// Drops a window that has ended: the memory of a server that was killed exists as long as this
/// process maps it, and the server may not be used again.
async fn forget_ended(ended: CancellationToken, slot: Weak<tokio::sync::Mutex<Slot>>) {
    ended.cancelled().await;
    let Some(slot) = slot.upgrade() else { return };
    let mut slot = slot.lock().await;
    if matches!(&*slot, Slot::Open(window) if window.ended().is_cancelled()) {
        *slot = Slot::Unknown;
    }
}

/// Returns whether a server cannot open a window because of the state of the job or of the lease.
fn is_of_job(error: &Error) -> bool {
    matches!(
        error,
        Error::LeaseLost { .. }
            | Error::StaleEpoch { .. }
            | Error::UnknownJob { .. }
            | Error::JobReplaced { .. }
            | Error::JobFailed { .. }
    )
}

/// # Errors
/// [`Error::Unavailable`] with the cause: the server is on another host, for example.
async fn open(shard: &Shard, of: Of<'_>, chunk: usize) -> Result<Window> {
    let Of { job, job_id, holder } = of;
    let of_job = pb::OpenWindowRequest { job: job.to_owned(), job_id, ..Default::default() };
    let request = match holder {
        Holder::Rank { rank, lease } => pb::OpenWindowRequest { rank, lease, ..of_job },
        Holder::Reader { pin } => pb::OpenWindowRequest { pin, ..of_job },
    };
    let opening = async {
        let mut service = ShardServiceClient::new(shard.pull.within(LIMIT));
        let opened = service.open_window(request).await;
        let opened = opened.map_err(|status| from_status(&status, &shard.peer))?.into_inner();
        let connected = Window::connect(&opened, chunk).await;
        connected.map_err(|cause| Error::Unavailable {
            peer: format!("the shared memory of {}", shard.peer),
            cause: format!("{cause}; it may be on another host"),
        })
    };
    match tokio::time::timeout(LIMIT, opening).await {
        Ok(opened) => opened,
        Err(_) => Err(Error::Timeout {
            waiting_for: format!("shared memory with {}", shard.peer),
            waited_ms: LIMIT.as_millis() as u64,
        }),
    }
}
