//! The beginning of a slice: its parameters, and where a run goes on its optimizer state.

use zeroshard_proto::{Error, Result};

use super::{Inner, Slice, exclusive};
use crate::{backend::Backend, optim, shard::round::Piece};

/// What an upload is of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Upload {
    /// The state tensor at this position; `None`: the parameters.
    pub(crate) state: Option<usize>,
    /// Steps that count as applied; 0: nothing is said.
    pub(crate) applied: u64,
}

impl<B: Backend> Slice<B> {
    /// Stores a piece of what a job begins with. Returns how many elements were new, and whether that made the slice
    /// complete. `current` says, under the slice's lock, whether the caller's epoch still holds.
    ///
    /// # Errors
    /// Those of `current`; [`Error::Invalid`] for state that comes after the parameters.
    pub(crate) fn upload(
        &self,
        backend: &B,
        upload: Upload,
        piece: &Piece,
        current: impl FnOnce() -> Result<()>,
    ) -> Result<(u64, bool)> {
        let mut inner = self.lock();
        current()?;
        let inner = &mut *inner;
        inner.reset_state(backend, self.initial_state)?;
        let initialised = self.version().is_some();
        let (buffer, uploaded) = match upload.state {
            None => (&mut inner.master, &mut inner.uploaded),
            Some(position) => (&mut inner.state[position], &mut inner.uploaded_state[position]),
        };
        let mut new = 0;
        for (range, _) in uploaded.split(piece.range()).into_iter().filter(|(_, known)| !known) {
            if initialised {
                return Err(Error::invalid(
                    "optimizer state",
                    "uploaded after the slice's parameters were complete",
                    "uploaded before them",
                ));
            }
            let part = piece.part(range.clone());
            backend.store(exclusive(backend, buffer)?, part.offset, &part.bytes, part.dtype);
            new += range.len() as u64;
            uploaded.insert(range);
        }
        if !initialised && upload.applied != 0 && self.group.is_some() {
            inner.applied = upload.applied;
        }
        if upload.state.is_some() || new == 0 || !inner.uploaded.is_all(self.spec.numel) {
            return Ok((new, false));
        }
        inner.publish(backend)?;
        self.enter(0);
        Ok((new, true))
    }
}

impl<B: Backend> Inner<B> {
    /// Forgets what was uploaded. Optimizer state is made again when the upload begins anew, where that can fail.
    pub(super) fn forget_upload(&mut self) {
        self.uploaded.clear();
        self.stale_state = self.uploaded_state.iter().any(|uploaded| uploaded.pieces() > 0);
        self.applied = 0;
    }

    fn reset_state(&mut self, backend: &B, value: f32) -> Result<()> {
        if self.stale_state {
            for (state, uploaded) in self.state.iter_mut().zip(&mut self.uploaded_state) {
                optim::fill(backend, exclusive(backend, state)?, value);
                uploaded.clear();
            }
            self.stale_state = false;
        }
        Ok(())
    }

    fn publish(&mut self, backend: &B) -> Result<()> {
        if let Some(published) = &mut self.published {
            backend.copy(&self.master, exclusive(backend, published)?);
        }
        Ok(())
    }
}
