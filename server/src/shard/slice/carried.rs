//! What a slice begins with because it was carried over from the job's predecessor.

use zeroshard_proto::{Error, Result};

use super::Slice;
use crate::{
    backend::Backend,
    shard::{attempt::Attempt, part::Part},
};

/// What was carried over. The master weights always are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Carried {
    /// The optimizer state is carried over too.
    pub(super) state: bool,
    pub(super) applied: u64,
}

impl<B: Backend> Slice<B> {
    /// Stores f32 `bytes` from element `offset` on. `part` is not [`Part::Parameters`].
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if somebody reads the slice, which nobody does before version 0.
    pub(crate) fn carry(&self, backend: &B, part: Part, offset: usize, bytes: &[u8]) -> Result<()> {
        let mut inner = self.lock();
        let buffer = match part {
            Part::State(position) => &mut inner.state[position],
            Part::Parameters | Part::Master => &mut inner.master,
        };
        let end = offset + bytes.len() / 4;
        backend.store(buffer.write(backend)?, offset..end, bytes, zeroshard_proto::DType::F32);
        Ok(())
    }

    /// So many steps count as applied.
    pub(crate) fn carry_applied(&self, applied: u64) {
        self.lock().applied = applied;
    }

    /// All of the slice has been carried over; with its optimizer state, or without.
    pub(crate) fn end_carry(&self, state: bool) {
        let mut inner = self.lock();
        let applied = inner.applied;
        inner.carried = Some(Carried { state, applied });
    }

    /// `rank` uploads nothing of the slice: what was carried over stands. Unless it is 0, `applied`
    /// steps count as applied. Returns whether that made the slice complete. `current` says, under
    /// the slice's lock, whether `attempt` is the job's open one.
    ///
    /// # Errors
    /// Those of `current`; [`Error::Invalid`] if nothing was carried over, or the rank has uploaded
    /// some of it, now or before an epoch change.
    pub(crate) fn keep(
        &self,
        backend: &B,
        attempt: Attempt,
        rank: u32,
        applied: u64,
        current: impl FnOnce() -> Result<()>,
    ) -> Result<bool> {
        let mut inner = self.lock();
        current()?;
        if self.version().is_none() {
            self.enter(backend, &mut inner, attempt);
        }
        let inner = &mut *inner;
        if self.version().is_some() || inner.uploaded.is_complete(&self.contributors) {
            return Ok(false);
        }
        if inner.carried.is_none() {
            return Err(Error::invalid(
                "initial parameters",
                format!("left out by rank {rank}"),
                "uploaded: the job's predecessor has no such tensor of this shape",
            ));
        }
        if self.group.is_some() {
            inner.count_applied(applied, rank)?;
        }
        if !inner.uploaded.keep(&self.contributors, rank) {
            return Err(Error::invalid(
                "initial parameters",
                format!("left out by rank {rank}, which has uploaded some of them"),
                "uploaded whole",
            ));
        }
        Ok(inner.uploaded.is_complete(&self.contributors))
    }
}
