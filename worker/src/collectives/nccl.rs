//! Messages from GPU to GPU over NCCL.
//!
//! Before a rank sends a message over NCCL, it announces it to the receiver over gRPC, so both call
//! NCCL only if they have called the same operation. While a rank waits for NCCL, it learns over
//! gRPC that a peer is lost, and aborts the communicator (`ncclCommAbort`). The communicator does
//! not block: its calls return at once, and their status is polled until they are complete.
#![allow(unsafe_code)]

use std::{
    ffi::c_int,
    fmt, ptr,
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use bytes::Bytes;
use cudarc::nccl::{
    result::{self, NcclError, NcclStatus},
    sys,
};
use zeroshard_kernels::{Failure, Lane};

use super::error::Error;

/// All functions of NCCL that are called. cudarc panics when one is missing.
const FUNCTIONS: [&str; 10] = [
    "ncclGetUniqueId",
    "ncclCommInitRankConfig",
    "ncclCommGetAsyncError",
    "ncclCommFinalize",
    "ncclCommDestroy",
    "ncclCommAbort",
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclSend",
    "ncclRecv",
];
/// The bytes of a unique id.
const ID_BYTES: usize = 128;
/// A unique id in f32 elements, as ranks exchange it.
pub(super) const ID_ELEMENTS: usize = ID_BYTES / size_of::<f32>();
/// The time limit for `ncclCommFinalize`.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// The time between two polls of a status, after the first ones.
const PAUSE: Duration = Duration::from_micros(50);

/// Why a call did not succeed.
#[derive(Debug)]
pub(super) enum Stopped {
    /// What it waited for will not come.
    Peer(Error),
    /// NCCL or the GPU has failed.
    Failed(String),
}

impl Stopped {
    /// The error of an operation.
    pub(super) fn into_error(self, failed: impl FnOnce(String) -> Error) -> Error {
        match self {
            Self::Peer(error) => error,
            Self::Failed(cause) => failed(cause),
        }
    }
}

type Result<T, E = Stopped> = std::result::Result<T, E>;

impl From<Failure> for Stopped {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure.to_string())
    }
}

/// The status of a call.
fn checked(call: &str, done: std::result::Result<NcclStatus, NcclError>) -> Result<NcclStatus> {
    done.map_err(|NcclError(code)| Stopped::Failed(format!("{call} failed: {code:?}")))
}

/// A function that fails when it is useless to wait any longer.
pub(super) type Wait<'a> = &'a dyn Fn() -> std::result::Result<(), Error>;

/// Waits until the next poll: only for a moment during the first ones.
fn pause(asked: &mut u32, wait: Wait<'_>) -> Result<()> {
    wait().map_err(Stopped::Peer)?;
    *asked += 1;
    if *asked < 100 {
        thread::yield_now()
    } else {
        thread::sleep(PAUSE)
    }
    Ok(())
}

/// Opens a GPU for messages over NCCL.
///
/// # Errors
/// A text that says what is missing.
pub(super) fn open(device: usize) -> std::result::Result<Lane, String> {
    // SAFETY: the initialisers of the library run.
    if !unsafe { sys::is_culib_present() } {
        return Err("libnccl.so was not found".to_owned());
    }
    // SAFETY: as above.
    let library = unsafe { sys::culib() };
    for name in FUNCTIONS {
        // SAFETY: the symbol is only looked up.
        if unsafe { library.get::<*const ()>(name.as_bytes()) }.is_err() {
            return Err(format!("NCCL has no function {name}; it must be 2.22 or later"));
        }
    }
    Lane::open(device).map_err(|failure| failure.to_string())
}

/// A new unique id.
///
/// # Errors
/// That of NCCL.
pub(super) fn new_id() -> std::result::Result<Vec<f32>, String> {
    let id = result::get_uniqueid();
    let id = id.map_err(|NcclError(code)| format!("ncclGetUniqueId failed: {code:?}"))?;
    let bytes = id.internal.map(|byte| byte as u8);
    Ok(bytes.as_chunks().0.iter().copied().map(f32::from_ne_bytes).collect())
}

/// The connection of a rank to others over NCCL.
pub(super) struct Nccl {
    state: Mutex<State>,
    /// The ranks, by their numbers in the communicator.
    ranks: Vec<u32>,
}

struct State {
    // Dropped in this order.
    communicator: Communicator,
    lane: Lane,
}

/// A communicator, which is destroyed when it is dropped.
struct Communicator(sys::ncclComm_t);

// SAFETY: any thread may use a communicator; it is used by one at a time.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Waits until a call is complete.
    fn settle(&self, mut status: NcclStatus, wait: Wait<'_>) -> Result<()> {
        let mut asked = 0;
        while status == NcclStatus::InProgress {
            pause(&mut asked, wait)?;
            status = self.status()?;
        }
        Ok(())
    }

    /// The status of what was called before.
    fn status(&self) -> Result<NcclStatus> {
        let mut status = sys::ncclResult_t::ncclSuccess;
        // SAFETY: the communicator exists.
        let asked = unsafe { sys::ncclCommGetAsyncError(self.0, &mut status) };
        checked("ncclCommGetAsyncError", asked.result())?;
        checked("an operation of NCCL", status.result())
    }

    /// Aborts all operations, and destroys the communicator.
    fn abort(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the communicator exists, and is not used afterwards.
            let _ = unsafe { result::comm_abort(self.0) };
            self.0 = ptr::null_mut();
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.0.is_null() {
            return;
        }
        let end = Instant::now() + END_TIMEOUT;
        let late = || Error::refused("the communicator did not end in time");
        let in_time = || if Instant::now() < end { Ok(()) } else { Err(late()) };
        // SAFETY: the communicator exists.
        let finalized = checked("ncclCommFinalize", unsafe { result::comm_finalize(self.0) });
        match finalized.and_then(|status| self.settle(status, &in_time)) {
            // SAFETY: the communicator exists, and is not used afterwards.
            Ok(()) => _ = unsafe { result::comm_destroy(self.0) },
            Err(_) => self.abort(),
        }
    }
}

impl Nccl {
    /// Connects to all `ranks`, among which this rank is number `me`. All of them must call this
    /// function with the same `id`.
    pub(super) fn connect(
        lane: Lane,
        ranks: &[u32],
        me: usize,
        id: &[f32],
        wait: Wait<'_>,
    ) -> Result<Self> {
        const UNDEFINED: c_int = c_int::MIN;
        lane.bind()?;
        let bytes: Vec<u8> = id.iter().copied().flat_map(f32::to_ne_bytes).collect();
        let bytes = <[u8; ID_BYTES]>::try_from(bytes);
        let bytes = bytes.expect("the size of the id was checked when it was gathered");
        let id = sys::ncclUniqueId { internal: bytes.map(|byte| byte as _) };
        // `NCCL_CONFIG_INITIALIZER` of NCCL 2.30, for a communicator that does not block. Earlier
        // versions read the fields that they know.
        let mut config = sys::ncclConfig_t {
            size: size_of::<sys::ncclConfig_t>(),
            magic: 0xcafe_beef,
            version: 23_000,
            blocking: 0,
            cgaClusterSize: UNDEFINED,
            minCTAs: UNDEFINED,
            maxCTAs: UNDEFINED,
            netName: ptr::null(),
            splitShare: UNDEFINED,
            trafficClass: UNDEFINED,
            commName: ptr::null(),
            collnetEnable: UNDEFINED,
            CTAPolicy: UNDEFINED,
            shrinkShare: UNDEFINED,
            nvlsCTAs: UNDEFINED,
            nChannelsPerNetPeer: UNDEFINED,
            nvlinkCentricSched: UNDEFINED,
            graphUsageMode: UNDEFINED,
            numRmaCtx: UNDEFINED,
            maxP2pPeers: UNDEFINED,
        };
        let mut communicator = Communicator(ptr::null_mut());
        let count = ranks.len() as c_int;
        // SAFETY: the pointers are valid during the call.
        let made = unsafe {
            result::comm_init_rank_config(&mut communicator.0, count, id, me as c_int, &mut config)
        };
        let made = checked("ncclCommInitRankConfig", made);
        let connected = made.and_then(|status| communicator.settle(status, wait));
        if let Err(stopped) = connected {
            communicator.abort();
            return Err(stopped);
        }
        Ok(Self { state: Mutex::new(State { communicator, lane }), ranks: ranks.to_vec() })
    }

    /// Sends a message to each rank in `sent`, and receives one from each rank in `taken`, which
    /// also has the numbers of elements. The peers must make the matching calls. After an error the
    /// connection is closed.
    pub(super) fn exchange(
        &self,
        sent: &[(u32, Bytes)],
        taken: &[(u32, usize)],
        wait: Wait<'_>,
    ) -> Result<Vec<Vec<f32>>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let exchanged = self.try_exchange(&mut state, sent, taken, wait);
        if exchanged.is_err() {
            state.communicator.abort();
        }
        exchanged
    }

    fn try_exchange(
        &self,
        State { communicator, lane }: &mut State,
        sent: &[(u32, Bytes)],
        taken: &[(u32, usize)],
        wait: Wait<'_>,
    ) -> Result<Vec<Vec<f32>>> {
        if communicator.0.is_null() {
            return Err(Stopped::Failed("the connection over NCCL is closed".to_owned()));
        }
        lane.bind()?;
        let messages: Vec<&[u8]> = sent.iter().map(|(_, message)| message.as_ref()).collect();
        let from = lane.send(&messages)?;
        let sizes: Vec<usize> =
            taken.iter().map(|(_, elements)| elements * size_of::<f32>()).collect();
        let to = lane.receive(&sizes)?;
        checked("ncclGroupStart", result::group_start())?;
        let queued = self.queue(communicator, lane, (sent, &from), (taken, &to));
        // The group is open in this thread, and must be closed after an error as well.
        let ended = checked("ncclGroupEnd", result::group_end());
        queued?;
        // What is queued afterwards comes after the messages.
        communicator.settle(ended?, wait)?;
        lane.arrive()?;
        let mut asked = 0;
        while !lane.is_done()? {
            communicator.status()?;
            pause(&mut asked, wait)?;
        }
        Ok(lane.take())
    }

    /// Adds messages to the open group, with their addresses.
    fn queue(
        &self,
        communicator: &Communicator,
        lane: &Lane,
        (sent, from): (&[(u32, Bytes)], &[u64]),
        (taken, to): (&[(u32, usize)], &[u64]),
    ) -> Result<()> {
        let (stream, float) = (lane.stream().cast(), sys::ncclDataType_t::ncclFloat32);
        for ((rank, message), &address) in sent.iter().zip(from) {
            let (count, peer) = (message.len() / size_of::<f32>(), self.number(*rank));
            // SAFETY: the lane has the message at this address until it is done.
            let queued = unsafe {
                result::send(address as *const _, count, float, peer, communicator.0, stream)
            };
            checked("ncclSend", queued)?;
        }
        for ((rank, count), &address) in taken.iter().zip(to) {
            let peer = self.number(*rank);
            // SAFETY: the lane has memory for the message at this address until it is done.
            let queued = unsafe {
                result::recv(address as *mut _, *count, float, peer, communicator.0, stream)
            };
            checked("ncclRecv", queued)?;
        }
        Ok(())
    }

    /// The number of a rank in the communicator.
    fn number(&self, rank: u32) -> c_int {
        let position = self.ranks.iter().position(|&other| other == rank);
        position.expect("the group consists of connected ranks") as c_int
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl({:?})", self.ranks)
    }
}
