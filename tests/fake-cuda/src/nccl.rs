//! A fake NCCL: the functions of `libnccl.so` that workers call, between devices of this driver.
//!
//! Messages are files in a directory that the unique id names, so that ranks may be threads of one
//! process or processes. As with NCCL, the calls of a communicator that does not block return
//! before they are complete, a group's operations wait in a stream, and a receive whose message
//! does not come waits until the communicator is aborted. Two ranks on one device are refused.
//! Sizes that differ and operations outside of a group are faults.
//!
//! With `FAKE_NCCL_FAIL=FUNCTION:AFTER:CODE`, the first AFTER calls of FUNCTION in this process
//! succeed, and the next one fails with CODE.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    ffi::{c_char, c_int, c_void},
    fs, mem,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use crate::{
    communicator::{Communicator, Message},
    device::Work,
    driver::{current, with_device},
};

/// A result of NCCL.
type Code = c_int;

const SUCCESS: Code = 0;
const UNHANDLED_CUDA_ERROR: Code = 1;
const INVALID_ARGUMENT: Code = 4;
const INVALID_USAGE: Code = 5;
const IN_PROGRESS: Code = 7;
const VERSION: c_int = 23_004;
/// The sizes of the data types, by number.
const SIZES: [usize; 10] = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2];
/// So often a call is still in progress when it is asked for.
const DELAYS: u64 = 3;

static COMMUNICATORS: Mutex<BTreeMap<usize, Arc<Communicator>>> = Mutex::new(BTreeMap::new());
static NEXT: AtomicU64 = AtomicU64::new(1);
static CALLS: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

/// An operation with its communicator and its stream.
type Operation = (Arc<Communicator>, u64, Work);

thread_local! {
    /// The operations of the open group.
    static GROUP: RefCell<Option<Vec<Operation>>> = const { RefCell::new(None) };
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn found(handle: usize) -> Option<Arc<Communicator>> {
    locked(&COMMUNICATORS).get(&handle).cloned()
}

/// Fails if `FAKE_NCCL_FAIL` asks for it.
fn enter(function: &'static str) -> Result<(), Code> {
    let mut calls = locked(&CALLS);
    let count = calls.entry(function).or_default();
    *count += 1;
    let Ok(text) = std::env::var("FAKE_NCCL_FAIL") else { return Ok(()) };
    let parts: Vec<_> = text.split(':').collect();
    match parts[..] {
        [of, after, code] if of == function && after.parse() == Ok(*count - 1) => {
            Err(code.parse().unwrap_or(UNHANDLED_CUDA_ERROR))
        }
        _ => Ok(()),
    }
}

fn code(done: Result<(), Code>) -> Code {
    done.err().unwrap_or(SUCCESS)
}

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId([u8; 128]);

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> Code {
    // SAFETY: NCCL demands a pointer to the result.
    unsafe { version.write(VERSION) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclGetErrorString(code: Code) -> *const c_char {
    match code {
        SUCCESS => c"no error",
        UNHANDLED_CUDA_ERROR => c"unhandled cuda error",
        2 => c"unhandled system error",
        3 => c"internal error",
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        6 => c"remote process exited or there was a network error",
        IN_PROGRESS => c"NCCL operation in progress",
        _ => c"unknown result code",
    }
    .as_ptr()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> Code {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("fake-nccl-{}-{number}", std::process::id());
    let mut bytes = [0; 128];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: as above.
    unsafe { id.write(UniqueId(bytes)) };
    code(enter("ncclGetUniqueId"))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclCommInitRankConfig(
    communicator: *mut usize,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    _config: *mut c_void,
) -> Code {
    if let Err(code) = enter("ncclCommInitRankConfig") {
        return code;
    }
    let Some(device) = current() else { return INVALID_USAGE };
    let name = String::from_utf8_lossy(&id.0).trim_end_matches('\0').to_owned();
    let directory = std::env::temp_dir().join(name);
    let joined = fs::create_dir_all(&directory)
        .and_then(|()| fs::write(directory.join(format!("rank-{rank}")), device.to_string()));
    if joined.is_err() {
        return 2;
    }
    let made = Communicator {
        directory,
        rank: rank as usize,
        ranks: ranks as usize,
        device,
        sent: Mutex::default(),
        received: Mutex::default(),
        delays: AtomicU64::new(DELAYS),
        is_aborted: AtomicBool::new(false),
    };
    let handle = NEXT.fetch_add(1, Ordering::Relaxed) as usize;
    locked(&COMMUNICATORS).insert(handle, Arc::new(made));
    // SAFETY: as above.
    unsafe { communicator.write(handle) };
    IN_PROGRESS
}

/// The device of each rank that has joined.
fn devices(directory: &Path, ranks: usize) -> Vec<Option<usize>> {
    let file = |rank| directory.join(format!("rank-{rank}"));
    (0..ranks).map(|rank| fs::read_to_string(file(rank)).ok()?.parse().ok()).collect()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclCommGetAsyncError(handle: usize, state: *mut Code) -> Code {
    if let Err(code) = enter("ncclCommGetAsyncError") {
        return code;
    }
    let Some(of) = found(handle) else { return INVALID_ARGUMENT };
    let devices = devices(&of.directory, of.ranks);
    let is_shared = |(rank, device): (usize, &Option<usize>)| {
        device.is_some() && devices[..rank].contains(device)
    };
    let later = |delays: u64| delays.checked_sub(1);
    let now = if devices.iter().enumerate().any(is_shared) {
        INVALID_USAGE
    } else if devices.contains(&None)
        || of.delays.fetch_update(Ordering::Relaxed, Ordering::Relaxed, later).is_ok()
    {
        IN_PROGRESS
    } else {
        SUCCESS
    };
    // SAFETY: as above.
    unsafe { state.write(now) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclGroupStart() -> Code {
    GROUP.with_borrow_mut(|group| *group = Some(Vec::new()));
    code(enter("ncclGroupStart"))
}

/// Queues the operations. Sends come first: the operations of a group do not wait for each other.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclGroupEnd() -> Code {
    let Some(mut group) = GROUP.take() else { return INVALID_USAGE };
    if let Err(code) = enter("ncclGroupEnd") {
        return code;
    }
    group.sort_by_key(|(.., work)| matches!(work, Work::Receive { .. }));
    for (of, stream, work) in group {
        of.delays.store(DELAYS, Ordering::Relaxed);
        if with_device(of.device, |device| device.enqueue(stream, work)) != Some(Ok(())) {
            return UNHANDLED_CUDA_ERROR;
        }
    }
    IN_PROGRESS
}

/// Adds an operation to the open group.
fn add(
    function: &'static str,
    (handle, peer, stream): (usize, c_int, u64),
    (count, data_type): (usize, c_int),
    work: impl FnOnce(Message, usize) -> Work,
    is_send: bool,
) -> Result<(), Code> {
    enter(function)?;
    let of = found(handle).ok_or(INVALID_ARGUMENT)?;
    let peer = usize::try_from(peer).map_err(|_| INVALID_ARGUMENT)?;
    let element = SIZES.get(data_type as usize).ok_or(INVALID_ARGUMENT)?;
    if peer >= of.ranks || current() != Some(of.device) {
        return Err(INVALID_ARGUMENT);
    }
    let (counts, from, to) =
        if is_send { (&of.sent, of.rank, peer) } else { (&of.received, peer, of.rank) };
    let number = {
        let mut counts = locked(counts);
        let count = counts.entry(peer).or_default();
        mem::replace(count, *count + 1)
    };
    let path = of.directory.join(format!("{from}-{to}-{number}"));
    let work = work(Message { communicator: of.clone(), path }, count * element);
    GROUP.with_borrow_mut(|group| match group {
        Some(group) => {
            group.push((of, stream, work));
            Ok(())
        }
        None => Err(INVALID_USAGE),
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclSend(
    from: u64,
    count: usize,
    data_type: c_int,
    peer: c_int,
    handle: usize,
    stream: u64,
) -> Code {
    let work = |message, size| Work::Send { from, size, message };
    code(add("ncclSend", (handle, peer, stream), (count, data_type), work, true))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclRecv(
    to: u64,
    count: usize,
    data_type: c_int,
    peer: c_int,
    handle: usize,
    stream: u64,
) -> Code {
    let work = |message, size| Work::Receive { to, size, message };
    code(add("ncclRecv", (handle, peer, stream), (count, data_type), work, false))
}

/// Ends a communicator. Receives that wait are given up.
fn end(handle: usize) -> Code {
    let Some(of) = locked(&COMMUNICATORS).remove(&handle) else { return INVALID_ARGUMENT };
    of.is_aborted.store(true, Ordering::Relaxed);
    SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclCommAbort(handle: usize) -> Code {
    end(handle)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclCommFinalize(handle: usize) -> Code {
    match found(handle) {
        Some(_) => code(enter("ncclCommFinalize")),
        None => INVALID_ARGUMENT,
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclCommDestroy(handle: usize) -> Code {
    end(handle)
}
