//! The memory that steps use because a checkpoint holds the earlier version of slices.
//!
//! It belongs to a budget of the server. A slice takes the bytes of a second copy before it reports
//! a complete gradient, so that the step cannot fail, and returns them when nothing refers to the
//! version that the checkpoint holds.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard},
};

use bytes::Bytes;
use tokio::sync::watch;
use zeroshard_model::{Error, Result};

use crate::budget::{Budget, Space};

/// The common part of the slices of a save.
#[derive(Debug)]
pub struct Holds {
    /// The budget of the server for second copies.
    budget: Arc<Budget>,
    /// The version that is saved.
    version: u64,
    /// The slices for which a step waits, with the reason.
    pub waiting: watch::Sender<BTreeMap<u32, Error>>,
    /// The slices of which nothing refers to the saved version, until [`super::Slice::end_save`].
    pub released: watch::Sender<BTreeSet<u32>>,
}

impl Holds {
    pub fn new(budget: Arc<Budget>, version: u64) -> Arc<Self> {
        Arc::new(Self {
            budget,
            version,
            waiting: Default::default(),
            released: Default::default(),
        })
    }

    /// A step waits until the slice is written.
    pub(super) fn wait(&self, slice: u32, reason: Error) {
        self.waiting.send_modify(|slices| _ = slices.insert(slice, reason));
    }

    /// Forgets a slice whose hold has ended.
    pub fn forget(&self, slice: u32) {
        self.waiting.send_if_modified(|slices| slices.remove(&slice).is_some());
        self.released.send_if_modified(|slices| slices.remove(&slice));
    }
}

/// The memory of one slice. Everything that refers to the saved version also refers to this.
#[derive(Debug)]
pub(super) struct Hold {
    save: Arc<Holds>,
    slice: u32,
    /// The size of a second copy.
    bytes: u64,
    space: Mutex<Option<Space>>,
}

impl Hold {
    pub(super) fn new(save: &Arc<Holds>, slice: u32, bytes: u64) -> Arc<Self> {
        Arc::new(Self { save: save.clone(), slice, bytes, space: Mutex::default() })
    }

    /// Takes the bytes of a second copy from the budget, if that has not been done yet.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the budget has no room.
    pub(super) fn reserve(&self) -> Result<()> {
        let mut space = self.space();
        if space.is_none() {
            *space = Some(self.save.budget.take(self.bytes).ok_or_else(|| self.exhausted())?);
        }
        Ok(())
    }

    /// Returns whether it belongs to the save with these holds.
    pub(super) fn is_of(&self, holds: &Arc<Holds>) -> bool {
        Arc::ptr_eq(&self.save, holds)
    }

    /// Returns the bytes, because no second copy was made.
    pub(super) fn free(&self) {
        *self.space() = None;
    }

    fn exhausted(&self) -> Error {
        let (Self { slice, bytes, .. }, Holds { budget, version, .. }) = (self, &*self.save);
        Error::OutOfMemory {
            what: format!(
                "a second copy of slice {slice}, of which version {version} is being saved: these \
                 copies may have {} bytes on this server (--snapshot-bytes), and have {}",
                budget.limit(),
                budget.used()
            ),
            bytes: *bytes,
        }
    }

    fn space(&self) -> MutexGuard<'_, Option<Space>> {
        self.space.lock().expect("no holder of the lock panics")
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.free();
        self.save.released.send_modify(|slices| _ = slices.insert(self.slice));
    }
}

/// Bytes of a saved version.
pub(super) struct HeldBytes {
    pub(super) bytes: Bytes,
    pub(super) _hold: Arc<Hold>,
}

impl AsRef<[u8]> for HeldBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}
