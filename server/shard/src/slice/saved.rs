//! A version of a slice that a checkpoint holds while training continues, and the content of a
//! slice that is read from a checkpoint.

use std::sync::{Arc, Weak};

use bytes::Bytes;
use zeroshard_kernels::Backend;
use zeroshard_model::checkpoint::Part;
use zeroshard_model::{AppliedSteps, Attempt, DType, Error, Result};

use super::{
    Inner, Reduced, Slice,
    hold::{HeldBytes, Hold, Holds},
    versioned::Versioned,
};
use crate::tier::Array;

/// One version of a slice.
pub struct HeldSlice<B: Backend> {
    backend: Arc<B>,
    master: Array<B>,
    state: Vec<Array<B>>,
    pub applied: AppliedSteps,
    /// Dropped after the buffers.
    hold: Arc<Hold>,
}

impl<B: Backend> HeldSlice<B> {
    /// A part of the slice as little-endian bytes, which share its memory, if it is in memory.
    ///
    /// # Errors
    /// Those of [`Array::read`].
    pub fn part(&self, part: Part) -> Result<Bytes> {
        let buffer = match part {
            Part::Values => &self.master,
            Part::State(position) => &self.state[position],
        };
        let all = 0..buffer.numel(&self.backend);
        let bytes = buffer.read(&self.backend, all, buffer.dtype(&self.backend))?;
        Ok(Bytes::from_owner(HeldBytes { bytes, _hold: self.hold.clone() }))
    }
}

impl<B: Backend> Slice<B> {
    /// Holds `version` for a checkpoint until [`Self::end_save`]. Meanwhile a gradient that is
    /// complete is not reported unless there is memory for a second version. If it has been
    /// reported before, `holds` learns that its step has to wait. `index` is the slice's number.
    ///
    /// # Errors
    /// [`Error::VersionGone`] if the slice is at another version.
    pub fn hold(
        &self,
        job: &str,
        version: u64,
        (index, holds): (u32, &Arc<Holds>),
    ) -> Result<HeldSlice<B>> {
        let mut inner = self.lock();
        self.check_version(job, version)?;
        inner.check()?;
        let master = inner.master.current().clone();
        let state: Vec<_> = inner.state.iter().map(|state| state.current().clone()).collect();
        let bytes = master.bytes(&self.backend)
            + state.iter().map(|state| state.bytes(&self.backend)).sum::<u64>();
        let hold = Hold::new(holds, index, bytes);
        inner.saves += 1;
        inner.hold = Arc::downgrade(&hold);
        inner.last_save = Some((holds.clone(), index));
        if inner.is_reported()
            && let Err(error) = inner.reserve(&self.backend)
        {
            holds.wait(index, error);
        }
        let backend = self.backend.clone();
        Ok(HeldSlice { backend, master, state, applied: inner.applied, hold })
    }

    /// Ends the hold of a checkpoint. If bytes are still being stored, because the checkpoint is
    /// given up, a step needs memory beside them that does not count in the budget. Returns the
    /// properties of a gradient that was not reported because of the checkpoint, and its attempt.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the version is still held, and there is no memory for another; the
    /// call can be repeated.
    pub fn end_save(&self, holds: &Arc<Holds>) -> Result<Option<(Attempt, Reduced)>> {
        let mut inner = self.lock();
        let is_of_save = |hold: Arc<Hold>| hold.is_of(holds);
        if inner.saves == 1 || inner.hold.upgrade().is_some_and(is_of_save) {
            inner.hold = Weak::new();
        }
        inner.saves -= 1;
        let reserved = match inner.is_reported() {
            true => inner.reserve(&self.backend),
            false => Ok(()),
        };
        let reduced = reserved.and_then(|()| inner.reduced(&self.backend, self.role()));
        let reduced = reduced.inspect_err(|_| inner.saves += 1)?;
        if inner.saves == 0 {
            inner.last_save = None;
        }
        inner.buffers().for_each(Versioned::release_unread);
        Ok(reduced.map(|reduced| (inner.attempt, reduced)))
    }

    /// Stores bytes from a checkpoint: those of a part from byte `at` on. Provides the memory for
    /// them. Those of an average are dropped if the job has none.
    ///
    /// # Errors
    /// [`Error::CheckpointDamaged`] if the part is smaller; [`Error::OutOfMemory`] if the slice has
    /// readers, which is impossible before it is published.
    pub fn restore(&self, part: Part, at: usize, bytes: &[u8]) -> Result<()> {
        if self.is_dropped_average(part) {
            return Ok(());
        }
        let mut inner = self.lock();
        let coded = match part {
            Part::Values => None,
            Part::State(position) => Some(position).filter(|&position| inner.is_coded(position)),
        };
        let (buffer, dtype) = match part {
            Part::Values => (Some(&mut inner.master), self.master_dtype()),
            Part::State(position) => (inner.state.get_mut(position), DType::F32),
        };
        let damaged = || Error::CheckpointDamaged {
            file: "a slice".to_owned(),
            cause: format!("{part:?} has more bytes than the job needs"),
        };
        let buffer = buffer.ok_or_else(damaged)?;
        let elements = at / dtype.size()..(at + bytes.len()) / dtype.size();
        if elements.end > buffer.current().numel(&self.backend) {
            return Err(damaged());
        }
        if let Some(position) = coded {
            return inner.stage(&self.backend, position, elements, bytes);
        }
        let mut buffer = buffer.write(&self.backend)?;
        self.backend.populate(&mut buffer, elements.clone());
        self.backend.store(&mut buffer, elements, bytes, dtype)?;
        Ok(())
    }
}

impl<B: Backend> Inner<B> {
    /// Reserves the memory for a second version of all parts that are being read. If a checkpoint
    /// holds this version, the memory counts in the budget for that.
    pub(super) fn reserve(&mut self, backend: &B) -> Result<()> {
        self.hold.upgrade().map_or(Ok(()), |hold| hold.reserve())?;
        self.reserve_versions(backend)
    }

    /// Returns whether the reduced gradient has been reported.
    pub(super) fn is_reported(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.is_reported)
    }
}
