//! A version of a slice that a checkpoint holds while training continues, and the content of a
//! slice that is read from a checkpoint.

use std::sync::Arc;

use bytes::Bytes;
use zeroshard_checkpoint::Part;
use zeroshard_proto::{AppliedSteps, DType, Error, Result};

use super::{Inner, Reduced, Slice};
use crate::{attempt::Attempt, backend::Backend};

/// One version of a slice.
pub(crate) struct HeldSlice<B: Backend> {
    master: Arc<B::Buffer>,
    state: Vec<Arc<B::Buffer>>,
    pub(crate) applied: AppliedSteps,
    /// Whether the next step waits until the slice is written: its gradient is complete, and there
    /// is no memory for a second version.
    pub(crate) is_urgent: bool,
}

impl<B: Backend> HeldSlice<B> {
    /// A part of the slice as little-endian bytes, which share its memory.
    pub(crate) fn part(&self, backend: &B, part: Part) -> Bytes {
        let buffer = match part {
            Part::Values => &self.master,
            Part::State(position) => &self.state[position],
        };
        backend.read(buffer, 0..backend.numel(buffer), backend.dtype(buffer))
    }
}

impl<B: Backend> Slice<B> {
    /// Holds `version` for a checkpoint until [`Self::end_save`]. Meanwhile a gradient that is
    /// complete is not reported unless there is memory for a second version.
    ///
    /// # Errors
    /// [`Error::VersionGone`] if the slice is at another version.
    pub(crate) fn hold(&self, backend: &B, job: &str, version: u64) -> Result<HeldSlice<B>> {
        let mut inner = self.lock();
        self.check_version(job, version)?;
        inner.is_saved = true;
        let held = HeldSlice {
            master: inner.master.current().clone(),
            state: inner.state.iter().map(|state| state.current().clone()).collect(),
            applied: inner.applied,
            is_urgent: false,
        };
        let is_reported = inner.open.as_ref().is_some_and(|open| open.is_reported);
        let is_urgent = is_reported && inner.reserve(backend).is_err();
        Ok(HeldSlice { is_urgent, ..held })
    }

    /// Whether a complete gradient is not reported because a checkpoint holds the slice.
    pub(crate) fn waits_for_save(&self) -> bool {
        let inner = self.lock();
        let is_complete =
            inner.open.as_ref().is_some_and(|open| open.round.is_complete() && !open.is_reported);
        inner.is_saved && is_complete
    }

    /// Ends the hold of a checkpoint, whose references are gone. Returns the properties of a
    /// gradient that was not reported because of it, and its attempt.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if other readers hold the version; the call can be repeated.
    pub(crate) fn end_save(&self, backend: &B) -> Result<Option<(Attempt, Reduced)>> {
        let mut inner = self.lock();
        inner.is_saved = false;
        let reduced = match inner.reduced(backend, self.role()) {
            Ok(reduced) => reduced,
            Err(error) => {
                inner.is_saved = true;
                return Err(error);
            }
        };
        Ok(reduced.map(|reduced| (inner.attempt, reduced)))
    }

    /// Stores bytes from a checkpoint: those of a part from byte `at` on.
    ///
    /// # Errors
    /// [`Error::CheckpointDamaged`] if the part is smaller; [`Error::OutOfMemory`] if the slice has
    /// readers, which is impossible before it is published.
    pub(crate) fn restore(&self, backend: &B, part: Part, at: usize, bytes: &[u8]) -> Result<()> {
        let mut inner = self.lock();
        let (buffer, dtype) = match part {
            Part::Values => (Some(&mut inner.master), self.master_dtype()),
            Part::State(position) => (inner.state.get_mut(position), DType::F32),
        };
        let damaged = || Error::CheckpointDamaged {
            file: "a slice".to_owned(),
            cause: format!("{part:?} has more bytes than the job needs"),
        };
        let buffer = buffer.ok_or_else(damaged)?.write(backend)?;
        let elements = at / dtype.size()..(at + bytes.len()) / dtype.size();
        if elements.end > backend.numel(buffer) {
            return Err(damaged());
        }
        backend.store(buffer, elements, bytes, dtype);
        Ok(())
    }
}

impl<B: Backend> Inner<B> {
    /// Reserves the memory for a second version of all parts that are being read.
    pub(super) fn reserve(&mut self, backend: &B) -> Result<()> {
        self.buffers().try_for_each(|buffer| buffer.reserve(backend))
    }
}
