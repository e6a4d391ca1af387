//! Keeps the contributions to a slice as they arrive, so that the step can be applied again
//! elsewhere.
//!
//! It copies each part of a contribution when it is counted, before it is added. INVARIANT: what it
//! keeps is in the accumulator or parked, once.

use std::{mem, sync::Arc};

use bytes::Bytes;
use zeroshard_model::{Error, Result};

use super::{Chunk, Round, turns::PARKED_OVERHEAD};
use crate::budget::{Budget, Space};

/// All contributions to a slice in one attempt.
#[derive(Debug)]
pub struct Recorded {
    /// Disjoint parts of the contributions, in the order in which they arrived.
    pub chunks: Vec<Chunk>,
    /// Their part of the budget.
    pub space: Vec<Space>,
}

/// Keeps the contributions of the current attempt.
#[derive(Debug)]
pub(super) struct Recorder {
    budget: Arc<Budget>,
    /// `true` if it was there when the attempt began.
    is_whole: bool,
    recorded: Recorded,
    /// The bytes that did not fit into the budget; 0: everything did.
    lacking: u64,
}

impl Recorder {
    fn new(budget: Arc<Budget>) -> Self {
        let recorded = Recorded { chunks: Vec::new(), space: Vec::new() };
        Self { budget, is_whole: false, recorded, lacking: 0 }
    }

    /// Another attempt begins.
    pub(super) fn restart(&mut self) {
        *self = Self { is_whole: true, ..Self::new(self.budget.clone()) };
    }

    /// Keeps a copy, because a part of a network buffer would keep the whole buffer alive. If the
    /// budget has no room, it drops the attempt's contributions: training must not wait for it.
    pub(super) fn record(&mut self, chunk: &Chunk) {
        let bytes = chunk.bytes.len() as u64 + PARKED_OVERHEAD;
        let space = if self.lacking == 0 { self.budget.take(bytes) } else { None };
        let Some(space) = space else {
            self.lacking += bytes;
            self.recorded.chunks = Vec::new();
            self.recorded.space = Vec::new();
            return;
        };
        let bytes = Bytes::copy_from_slice(&chunk.bytes);
        self.recorded.chunks.push(Chunk { bytes, ..*chunk });
        self.recorded.space.push(space);
    }
}

impl Round {
    /// Keeps the contributions of the attempts that begin from now on, within a budget.
    pub fn begin_recording(&mut self, budget: &Arc<Budget>) {
        self.recorder = Some(Recorder::new(budget.clone()));
    }

    /// Drops what was kept, and keeps nothing more.
    pub fn end_recording(&mut self) {
        self.recorder = None;
    }

    /// Takes the contributions to this attempt.
    ///
    /// # Errors
    /// [`Error::Refused`] if the recording began after the attempt, [`Error::OutOfMemory`] if the
    /// budget had no room.
    pub fn take_recorded(&mut self) -> Result<Recorded> {
        let slice = self.slice;
        let recorder = self.recorder.as_mut().filter(|recorder| recorder.is_whole);
        let recorder = recorder.ok_or_else(|| {
            Error::refused(format!(
                "slice {slice} was not recorded from the beginning of the step, because it moved \
                 to another server; capture another step"
            ))
        })?;
        if recorder.lacking > 0 {
            return Err(exhausted(&recorder.budget, recorder.lacking));
        }
        let empty = Recorded { chunks: Vec::new(), space: Vec::new() };
        Ok(mem::replace(&mut recorder.recorded, empty))
    }
}

/// The error of a capture that does not fit into its budget.
pub(crate) fn exhausted(budget: &Budget, bytes: u64) -> Error {
    let (limit, used) = (budget.limit(), budget.used());
    let what = format!(
        "a captured step: captures and pins of this server may hold {limit} bytes (--pinned-bytes), \
         and hold {used}; capture fewer tensors, or restart the server with a larger budget"
    );
    Error::OutOfMemory { what, bytes }
}
