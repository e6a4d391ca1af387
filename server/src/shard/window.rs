//! A window: memory that a worker's process on this host shares with the server, for one job.
//!
//! The worker reads published parameters where they are. A *hold* keeps them from being
//! overwritten. It lasts until the worker ends it, or until its socket is closed: the kernel does
//! not do this before the last process that can read the memory has ended, however it ends. The
//! worker writes what it pushes into its outbox, which only the server reads.

use std::{
    collections::HashMap,
    io,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard},
};

use bytes::Bytes;
use zeroshard_kernels::Backend;
use zeroshard_model::{Error, Result};
use zeroshard_net::numbers::{NUMBER, Numbers};
use zeroshard_proto::frame::Reference;
use zeroshard_shard::{budget::Space, tier::Array};
use zeroshard_shm::{Arena, Segment};

use super::{lasting::LastingHold, pins::Pin};

/// The most lasting holds per slice that a process may have: for the last two versions, and for
/// calls that it repeats.
const HOLDS_PER_SLICE: usize = 4;

pub(crate) struct Window<B: Backend> {
    /// The job, and the rank whose lease opened the window; `None`: a reader.
    pub(super) job_id: u64,
    pub(super) rank: Option<u32>,
    parameters: Arc<Arena>,
    outbox: Arc<Segment>,
    /// The outbox's part of the budget.
    _space: Space,
    socket: Numbers,
    holds: Mutex<Holds<B>>,
}

struct Holds<B: Backend> {
    /// With this number of holds, no further one lasts.
    limit: usize,
    last: u64,
    /// The arrays that are being read, and what they are held with.
    arrays: HashMap<u64, (Array<B>, Keep<B>)>,
}

/// What an array is held with.
pub(super) enum Keep<B: Backend> {
    /// A pin, which is part of the budget for pinned versions as long as it is held.
    Pinned(#[expect(dead_code, reason = "it is dropped with the hold")] Arc<Pin<B>>),
    /// A part of the budget for all pulls.
    Budget(#[expect(dead_code, reason = "it is dropped with the hold")] Space),
    /// Its slice's versions take turns.
    Lasting(#[expect(dead_code, reason = "it is dropped with the hold")] LastingHold),
}

impl<B: Backend> Keep<B> {
    /// Returns whether the process can hold the array until it has the next version.
    pub(super) fn lasts(&self) -> bool {
        matches!(self, Self::Lasting(_))
    }
}

/// Who has a window.
pub(super) fn name(rank: Option<u32>) -> String {
    rank.map_or_else(|| "a reader".to_owned(), |rank| format!("rank {rank}"))
}

/// A part of an outbox, as the owner of [`Bytes`].
struct Sent {
    outbox: Arc<Segment>,
    range: Range<usize>,
}

impl AsRef<[u8]> for Sent {
    fn as_ref(&self) -> &[u8] {
        self.outbox.bytes(self.range.clone())
    }
}

impl<B: Backend> Drop for Window<B> {
    /// If arrays are left, the server stops while processes read them. Dropping them would zero
    /// their memory. The system frees it when the last process has unmapped it.
    fn drop(&mut self) {
        std::mem::forget(std::mem::take(&mut self.holds().arrays));
    }
}

impl<B: Backend> Window<B> {
    /// Creates a window with an outbox of `bytes` bytes, and allocates its memory. `slices`: the
    /// number of slices of the job.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(super) fn new(
        (job_id, rank): (u64, Option<u32>),
        slices: usize,
        parameters: Arc<Arena>,
        bytes: usize,
        space: Space,
        socket: Numbers,
    ) -> Result<Self> {
        let outbox = Segment::create("zeroshard outbox", bytes);
        let populated = outbox.and_then(|outbox| outbox.populate(0..bytes).map(|()| outbox));
        let outbox = populated.map_err(|cause| Error::OutOfMemory {
            what: format!("the outbox of {}: {cause}", name(rank)),
            bytes: bytes as u64,
        })?;
        Ok(Self {
            job_id,
            rank,
            parameters,
            outbox: Arc::new(outbox),
            _space: space,
            socket,
            holds: Mutex::new(Holds {
                limit: rank.map_or(0, |_| HOLDS_PER_SLICE * slices),
                last: 0,
                arrays: HashMap::new(),
            }),
        })
    }

    /// Sends the descriptors of the window, which calls can use from now on.
    ///
    /// # Errors
    /// Those of the socket.
    pub(super) async fn begin(&self) -> io::Result<()> {
        let files = [self.parameters.file(), self.outbox.file()];
        let stream = self.socket.socket();
        let send = || zeroshard_shm::descriptors::send(stream, &[0; NUMBER], &files);
        stream.async_io(tokio::io::Interest::WRITABLE, send).await
    }

    /// Follows the socket until it is closed.
    ///
    /// # Errors
    /// Those of the socket.
    pub(super) async fn run(&self) -> io::Result<()> {
        self.socket.run(|hold| self.end_hold(hold)).await
    }

    /// Returns whether the process maps this memory of a job. A job that has returned to a
    /// checkpoint has other memory than before, and windows of the earlier one may still be open.
    pub(super) fn shows(&self, parameters: Option<&Arc<Arena>>) -> bool {
        parameters.is_some_and(|parameters| Arc::ptr_eq(parameters, &self.parameters))
    }

    /// Returns whether a further hold may last.
    pub(super) fn has_room(&self) -> bool {
        let holds = self.holds();
        holds.arrays.len() < holds.limit
    }

    /// Keeps `array`, which has these bytes of the window's parameters, until the worker ends the
    /// hold.
    pub(super) fn hold(&self, array: Array<B>, bytes: Range<usize>, keep: Keep<B>) -> Reference {
        let mut holds = self.holds();
        holds.last += 1;
        let (hold, lasts) = (holds.last, keep.lasts());
        holds.arrays.insert(hold, (array, keep));
        Reference { at: bytes.start as u64, bytes: bytes.len() as u64, hold, lasts }
    }

    /// The worker has read what a hold keeps.
    fn end_hold(&self, hold: u64) {
        let ended = self.holds().arrays.remove(&hold);
        // Not under the lock: it may be the last reference to a large array.
        drop(ended);
    }

    /// No process can read the memory any more.
    pub(super) fn end(&self) {
        let ended = std::mem::take(&mut self.holds().arrays);
        drop(ended);
    }

    /// Elements that the worker has put into its outbox.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they are outside of it.
    pub(super) fn sent(&self, reference: Reference) -> Result<Bytes> {
        let Reference { at, bytes, .. } = reference;
        match at.checked_add(bytes).filter(|&end| end <= self.outbox.len() as u64) {
            Some(end) => {
                let range = at as usize..end as usize;
                Ok(Bytes::from_owner(Sent { outbox: self.outbox.clone(), range }))
            }
            None => Err(Error::invalid(
                format!("place of elements in the outbox of {}", name(self.rank)),
                format!("{bytes} bytes from byte {at}"),
                format!("within its {} bytes", self.outbox.len()),
            )),
        }
    }

    /// Tells the worker that what it has sent with this number was read.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the socket is closed, or the worker does not read it.
    pub(super) fn tell_read(&self, number: u64) -> Result<()> {
        match self.socket.send(number) {
            true => Ok(()),
            false => Err(Error::Unavailable {
                peer: format!("the window of {}", name(self.rank)),
                cause: "its process does not read its socket".to_owned(),
            }),
        }
    }

    fn holds(&self) -> MutexGuard<'_, Holds<B>> {
        self.holds.lock().expect("no holder of the lock panics")
    }
}
