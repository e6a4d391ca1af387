//! Stores the new values of a tensor that come with a step, and takes them over when the step is
//! decided.

use zeroshard_kernels::Backend;
use zeroshard_model::{
    Attempt, DType, Result,
    geometry::{Ranks, SliceContributors},
    optimizer::StateShape,
};

use super::{Inner, Slice, received::Received, replacement::Replacement, versioned::Versioned};
use crate::{round::Chunk, tier::Array};

impl<B: Backend> Slice<B> {
    /// Stores a chunk of the values that replace the slice's values when the open step is decided,
    /// from a rank that replaces a part of them. Returns the number of new elements. `current` is
    /// the same as for [`Self::upload`].
    ///
    /// # Errors
    /// Those of `current`; those of [`Array::another`] and [`Array::write`].
    ///
    /// [`Array::another`]: crate::tier::Array::another
    /// [`Array::write`]: crate::tier::Array::write
    pub fn replace(
        &self,
        attempt: Attempt,
        chunk: &Chunk,
        current: impl FnOnce() -> Result<()>,
    ) -> Result<u64> {
        let mut inner = self.lock();
        current()?;
        self.enter(&mut inner, attempt)?;
        let inner = &mut *inner;
        let replacement = match &mut inner.replacement {
            Some(replacement) => replacement,
            none => {
                let values = inner.master.current().another(&self.backend)?;
                let received = Received::new(&self.contributors, Ranks::replacer);
                none.insert(Replacement { values, received })
            }
        };
        let Replacement { values, received } = replacement;
        let mut values = values.write(&self.backend)?;
        received.store(&*self.backend, &self.contributors, &mut values, StateShape::Elements, chunk)
    }

    /// The dtype in which the slice's values are kept.
    pub(super) fn master_dtype(&self) -> DType {
        if self.group.is_some() { DType::F32 } else { self.dtype }
    }
}

impl<B: Backend> Inner<B> {
    /// Takes over the new values if they are complete, and returns the old ones. Readers of the old
    /// values hold a reference to them.
    pub(super) fn take_replacement(
        &mut self,
        contributors: &[SliceContributors],
    ) -> Option<Array<B>> {
        let complete =
            |replacement: &Replacement<B>| replacement.received.is_complete(contributors);
        let replacement = self.replacement.take().filter(complete)?;
        let new = Versioned::new(replacement.values);
        Some(std::mem::replace(&mut self.master, new).into_current())
    }
}
