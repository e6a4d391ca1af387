//! New values of a tensor that come with a step: the content of a buffer (such as batch-norm
//! statistics), or a parameter that the program has written to.

use zeroshard_proto::{DType, Error, Result, geometry::SliceContributors, optimizer::StateShape};

use super::{Inner, Slice, received::Received, versioned::Versioned};
use crate::{attempt::Attempt, backend::Backend, shard::round::Chunk};

/// The arrived part of the new values.
pub(super) struct Replacement<B: Backend> {
    values: B::Buffer,
    received: Received,
}

impl<B: Backend> Slice<B> {
    /// Stores a chunk of the values that replace the slice's values when the open step is decided,
    /// from a rank that uploads a part of them. Returns the number of new elements. `current` is
    /// the same as for [`Self::upload`].
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
        self.enter(backend, &mut inner, attempt)?;
        let replacement = match &mut inner.replacement {
            Some(replacement) => replacement,
            none => {
                let numel = self.spec.numel;
                let values = backend.allocate(self.master_dtype(), numel).map_err(|_| {
                    Error::OutOfMemory {
                        what: "the new values of a slice".to_owned(),
                        bytes: (numel * self.master_dtype().size()) as u64,
                    }
                })?;
                none.insert(Replacement { values, received: Received::new(&self.contributors) })
            }
        };
        let Replacement { values, received } = replacement;
        Ok(received.store(backend, &self.contributors, values, StateShape::Elements, chunk))
    }

    /// The dtype in which the slice's values are kept.
    pub(super) fn master_dtype(&self) -> DType {
        if self.group.is_some() { DType::F32 } else { self.dtype }
    }
}

impl<B: Backend> Inner<B> {
    /// Takes over the new values, if they are complete. Readers of the old values hold a reference
    /// to them. Returns whether there were new values.
    pub(super) fn take_replacement(&mut self, contributors: &[SliceContributors]) -> bool {
        let complete =
            |replacement: &Replacement<B>| replacement.received.is_complete(contributors);
        match self.replacement.take().filter(complete) {
            Some(replacement) => {
                self.master = Versioned::new(replacement.values);
                true
            }
            None => false,
        }
    }
}
