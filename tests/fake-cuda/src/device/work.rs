//! What the operations of streams do.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use crate::{communicator::Message, memory::pinned::Pending, order::Clock, run::Launch};

/// What an operation does.
#[derive(Debug)]
pub(crate) enum Work {
    Allocate(u64),
    Free(u64),
    /// Fills memory with a pattern.
    Set {
        to: u64,
        pattern: Vec<u8>,
        count: usize,
    },
    Upload {
        to: u64,
        from: Pending,
        size: usize,
    },
    Download {
        to: Pending,
        from: u64,
        size: usize,
    },
    Copy {
        to: u64,
        from: u64,
        size: usize,
    },
    Launch(Launch),
    Record(Arc<Mark>),
    Wait(Arc<Mark>),
    /// Sends a message to another device.
    Send {
        from: u64,
        size: usize,
        message: Message,
    },
    /// Waits for a message of another device.
    Receive {
        to: u64,
        size: usize,
        message: Message,
    },
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Work::Allocate(_) => write!(f, "an allocation"),
            Work::Free(_) => write!(f, "a free"),
            Work::Set { .. } => write!(f, "a memset"),
            Work::Upload { .. } => write!(f, "a copy from the host"),
            Work::Download { .. } => write!(f, "a copy to the host"),
            Work::Copy { .. } => write!(f, "a copy on the device"),
            Work::Launch(launch) => write!(f, "kernel {}", launch.kernel.name),
            Work::Record(_) => write!(f, "a record of an event"),
            Work::Wait(_) => write!(f, "a wait for an event"),
            Work::Send { .. } => write!(f, "a send"),
            Work::Receive { .. } => write!(f, "a receive"),
        }
    }
}

/// A place in a stream, which an event has recorded.
#[derive(Debug)]
pub(crate) struct Mark {
    pub(super) clock: Clock,
    pub(super) has_come: AtomicBool,
    /// The time of the device when it has come, in nanoseconds.
    pub(super) time: AtomicU64,
}

impl Mark {
    /// Returns whether everything before it is complete.
    pub(crate) fn has_come(&self) -> bool {
        self.has_come.load(Ordering::Relaxed)
    }

    pub(super) fn come(&self, time: u64) {
        self.time.store(time, Ordering::Relaxed);
        self.has_come.store(true, Ordering::Relaxed);
    }
}
