//! A communicator of NCCL and its messages, which are files in its directory.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use crate::fault::{Fault, Kind};

/// A communicator.
#[derive(Debug)]
pub(crate) struct Communicator {
    pub(crate) directory: PathBuf,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) device: usize,
    /// The number of messages to and from each rank.
    pub(crate) sent: Mutex<BTreeMap<usize, u64>>,
    pub(crate) received: Mutex<BTreeMap<usize, u64>>,
    /// How often the state is still to be in progress.
    pub(crate) delays: AtomicU64,
    pub(crate) is_aborted: AtomicBool,
}

/// A message: a file at the path where the receiver looks for it.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) communicator: Arc<Communicator>,
    pub(crate) path: PathBuf,
}

impl Message {
    /// Returns whether a receive can run.
    pub(crate) fn is_ready(&self) -> bool {
        self.communicator.is_aborted.load(Ordering::Relaxed) || self.path.exists()
    }

    /// Makes it visible to the receiver.
    pub(crate) fn write(&self, bytes: &[u8]) {
        let part = self.path.with_extension("part");
        let written = fs::write(&part, bytes).and_then(|()| fs::rename(&part, &self.path));
        written.expect("the directory of the communicator exists");
    }

    /// The message; `None` if the communicator was aborted before it came.
    pub(crate) fn read(&self, size: usize) -> Result<Option<Vec<u8>>, Fault> {
        let Ok(bytes) = fs::read(&self.path) else { return Ok(None) };
        let _ = fs::remove_file(&self.path);
        if bytes.len() == size {
            return Ok(Some(bytes));
        }
        let what = format!("a receive of {size} bytes gets a message of {}", bytes.len());
        Err(Fault { kind: Kind::OutOfBounds, what })
    }
}
