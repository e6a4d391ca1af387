//! The initial values of a slice: its parameters and, for a resumed run, its optimizer state.

use zeroshard_kernels::{Backend, fill};
use zeroshard_model::{AppliedSteps, Attempt, Error, Result};

use super::{Inner, Role, Slice, received::Received, staged::Staged};
use crate::{round::Chunk, state_selector::StateSelector};

/// The contents of an upload.
#[derive(Debug, Clone, Copy)]
pub struct Upload {
    /// The state tensor at this position; `None`: the parameters.
    pub state: Option<usize>,
    /// The steps that count as applied; none: not specified.
    pub applied: AppliedSteps,
}

impl<B: Backend> Slice<B> {
    /// Stores a chunk of an upload, from a rank that uploads a part of the slice. Returns the
    /// number of new elements, and whether they completed the slice. `current` checks, under the
    /// slice's lock, that `attempt` is the job's open attempt.
    ///
    /// # Errors
    /// Those of `current`; [`Error::Invalid`] for state that arrives after the parameters or was
    /// carried over, and for applied steps that differ from another rank's.
    pub fn upload(
        &self,
        attempt: Attempt,
        upload: Upload,
        chunk: &Chunk,
        current: impl FnOnce() -> Result<()>,
    ) -> Result<(u64, bool)> {
        let mut inner = self.lock();
        current()?;
        if self.version().is_none() {
            self.enter(&mut inner, attempt)?;
        }
        if matches!(self.role(), Role::Empty | Role::Copying) {
            return Ok((0, false)); // it is copied from its primary
        }
        let inner = &mut *inner;
        if upload.state.is_some() && inner.forked.is_some_and(|forked| forked.state) {
            return Err(Error::refused(
                "the slice has the optimizer state of the job's predecessor; to upload other \
                 state, create the job with fresh_state",
            ));
        }
        inner.reset_state(&self.backend, self.initial_state)?;
        let is_complete =
            self.version().is_some() || inner.uploaded.is_complete(&self.contributors);
        if !is_complete && self.group.is_some() {
            inner.count_applied(upload.applied, chunk.rank)?;
        }
        let (buffer, uploaded) = match upload.state {
            None => (&mut inner.master, &mut inner.uploaded),
            Some(position) => (&mut inner.state[position], &mut inner.uploaded_state[position]),
        };
        if uploaded.contains(&self.contributors, chunk) {
            return Ok((0, false));
        }
        if is_complete {
            return Err(Error::refused(
                "the parameters of the slice are complete; upload optimizer state before them",
            ));
        }
        let shape =
            self.shape_of(upload.state.map_or(StateSelector::Parameters, StateSelector::State));
        let mut store = |buffer: &mut B::Buffer| {
            uploaded.store(&*self.backend, &self.contributors, buffer, shape, chunk)
        };
        let new = match upload.state.filter(|&position| position < inner.staged.len()) {
            None => {
                let mut buffer = buffer.write(&self.backend)?;
                store(&mut buffer)?
            }
            Some(position) => {
                let staged = &mut inner.staged[position];
                let new = store(Staged::values(staged, &self.backend, buffer)?)?;
                if inner.uploaded_state[position].is_complete(&self.contributors) {
                    inner.encode_staged(&self.backend, position)?;
                }
                new
            }
        };
        Ok((new, upload.state.is_none() && inner.uploaded.is_complete(&self.contributors)))
    }

    /// The first rank whose parameters are incomplete; `None` after version 0 was published.
    pub fn missing_upload(&self) -> Option<u32> {
        self.lock().uploaded.missing_rank(&self.contributors)
    }
}

impl<B: Backend> Inner<B> {
    /// Drops the uploads. Optimizer state is reinitialised when the next upload begins, where an
    /// error can be returned.
    pub(super) fn forget_upload(&mut self) {
        self.uploaded.clear();
        self.stale_state = !self.uploaded_state.iter().all(Received::is_empty);
        self.applied = self.forked.map_or_else(AppliedSteps::default, |forked| forked.applied);
    }

    /// Several ranks may upload to one slice; the last one must not decide alone.
    pub(super) fn count_applied(&mut self, applied: AppliedSteps, rank: u32) -> Result<()> {
        let known = self.applied;
        let applied = AppliedSteps { averaged: known.averaged, ..applied };
        let is_said = known.count > 0 || self.forked.is_some_and(|forked| forked.state);
        if applied.count == 0 || applied == known {
            return Ok(());
        }
        if is_said {
            return Err(Error::refused(format!(
                "rank {rank} uploads {applied:?}, but an earlier upload to the slice had {known:?}"
            )));
        }
        self.applied = applied;
        Ok(())
    }

    fn reset_state(&mut self, backend: &B, value: f32) -> Result<()> {
        if self.stale_state {
            self.forget_staged();
            for (state, uploaded) in self.state.iter_mut().zip(&mut self.uploaded_state) {
                let mut state = state.write(backend)?;
                fill(backend, &mut state, value)?;
                uploaded.clear();
            }
            self.stale_state = false;
        }
        Ok(())
    }
}
