//! Takes over the initial content of a slice, which the server copies from the predecessor of the
//! job.

use zeroshard_kernels::Backend;
use zeroshard_model::{AppliedSteps, Attempt, DType, Elements, Error, Result};

use super::{Slice, factors, forked::Forked};
use crate::state_selector::StateSelector;

impl<B: Backend> Slice<B> {
    /// Stores f32 `bytes` from element `offset` of the slice on in the master weights or a state
    /// tensor.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the slice has readers, which is impossible before version 0.
    pub fn fill(&self, part: StateSelector, offset: usize, bytes: &[u8]) -> Result<()> {
        let mut inner = self.lock();
        let elements = offset..offset + bytes.len() / DType::F32.size();
        let buffer = match part {
            StateSelector::State(position) if inner.is_coded(position) => {
                return inner.stage(&self.backend, position, elements, bytes);
            }
            StateSelector::State(position) => &mut inner.state[position],
            _ => &mut inner.master,
        };
        let elements = Elements::from(elements);
        let values = (bytes, DType::F32);
        let buffer = &mut buffer.write(&self.backend)?;
        factors::store(&*self.backend, self.shape_of(part), buffer, &elements, values)?;
        Ok(())
    }

    /// Sets the steps applied to the slice, and those that have counted for its averages.
    pub fn set_applied(&self, applied: AppliedSteps) {
        let averaged = if self.averages.parts() > 0 { applied.averaged } else { 0 };
        self.lock().applied = AppliedSteps { averaged, ..applied };
    }

    /// Notes that the whole slice has been copied, and whether its optimizer state was.
    pub fn end_fork(&self, state: bool) {
        let mut inner = self.lock();
        let applied = inner.applied;
        inner.forked = Some(Forked { state, applied });
    }

    /// Notes that `rank` keeps the copied content and uploads nothing of the slice. If `applied`
    /// has steps, they are those applied to the slice. Returns whether the slice is complete
    /// now. `current` checks, under the lock of the slice, that `attempt` is the open one.
    ///
    /// # Errors
    /// Those of `current`; [`Error::Invalid`] if the slice was not copied, or if the rank has
    /// uploaded a part of it, in this epoch or in an earlier one.
    pub fn keep(
        &self,
        attempt: Attempt,
        rank: u32,
        applied: AppliedSteps,
        current: impl FnOnce() -> Result<()>,
    ) -> Result<bool> {
        let mut inner = self.lock();
        current()?;
        if self.version().is_none() {
            self.enter(&mut inner, attempt)?;
        }
        let inner = &mut *inner;
        if self.version().is_some() || inner.uploaded.is_complete(&self.contributors) {
            return Ok(false);
        }
        if inner.forked.is_none() {
            return Err(Error::refused(format!(
                "rank {rank} left out initial parameters, and the job's predecessor has no such \
                 tensor of this shape; upload them"
            )));
        }
        if self.group.is_some() {
            inner.count_applied(applied, rank)?;
        }
        if !inner.uploaded.keep(&self.contributors, rank) {
            return Err(Error::refused(format!(
                "rank {rank} left out initial parameters after it had uploaded some of them"
            )));
        }
        Ok(inner.uploaded.is_complete(&self.contributors))
    }
}
