//! The next content of a buffer (such as batch-norm statistics): bits that move with a step,
//! without arithmetic.

use zeroshard_proto::{Error, Result, geometry::SliceContributors};

use super::{Inner, Slice, received::Received, versioned::Versioned};
use crate::{attempt::Attempt, backend::Backend, shard::round::Chunk};

/// The arrived part of a buffer's next content.
pub(super) struct Next<B: Backend> {
    content: B::Buffer,
    received: Received,
}

impl<B: Backend> Slice<B> {
    /// Stores a chunk of the buffer's content from the next version on, from a rank that uploads a
    /// part of it. Returns the number of new elements. `current` is the same as for
    /// [`Self::upload`].
    ///
    /// # Errors
    /// Those of `current`; [`Error::OutOfMemory`].
    pub(crate) fn replace(
        &self,
        backend: &B,
        attempt: Attempt,
        chunk: &Chunk,
        current: impl FnOnce() -> Result<()>,
    ) -> Result<u64> {
        let mut inner = self.lock();
        current()?;
        self.enter(backend, &mut inner, attempt);
        let next = match &mut inner.next {
            Some(next) => next,
            none => {
                let numel = self.spec.numel;
                let content =
                    backend.allocate(self.dtype, numel).map_err(|_| Error::OutOfMemory {
                        what: "the next content of a buffer".to_owned(),
                        bytes: (numel * self.dtype.size()) as u64,
                    })?;
                none.insert(Next { content, received: Received::new(&self.contributors) })
            }
        };
        Ok(next.received.store(backend, &self.contributors, &mut next.content, chunk))
    }
}

impl<B: Backend> Inner<B> {
    /// Replaces the content by the next one, if it is complete. Readers of the old content hold a
    /// reference to it.
    pub(super) fn turn_over(&mut self, contributors: &[SliceContributors]) {
        if let Some(next) = self.next.take()
            && next.received.is_complete(contributors)
        {
            self.master = Versioned::new(next.content);
        }
    }
}
