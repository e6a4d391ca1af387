//! An array whose versions readers can hold while a step produces the next one.

use std::{sync::Arc, thread};

use zeroshard_kernels::{Backend, Output};
use zeroshard_model::Result;

use crate::tier::{Array, Next, Writing};

/// The number of elements that are populated before the thread yields.
const POPULATED: usize = 1 << 18;

/// An array that is written in place if there is no reader, and otherwise copied.
pub(super) struct Versioned<B: Backend> {
    current: Array<B>,
    /// An array for the copy, reserved before a step is decided so that the step cannot fail.
    spare: Option<Array<B>>,
    /// `true` if the content is not needed any more: all elements are written before they are read.
    is_blank: bool,
}

impl<B: Backend> Versioned<B> {
    pub(super) fn new(array: Array<B>) -> Self {
        Self { current: array, spare: None, is_blank: false }
    }

    /// The current version, which remains valid for its holders.
    pub(super) fn current(&self) -> &Array<B> {
        &self.current
    }

    /// The current version, of an array that is not needed any more.
    pub(super) fn into_current(self) -> Array<B> {
        self.current
    }

    /// Returns whether memory for another version is reserved.
    pub(super) fn has_spare(&self) -> bool {
        self.spare.is_some()
    }

    /// Ensures that [`Self::write`] succeeds, as long as no reader is added without a reservation.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::OutOfMemory`] if the version is being read and there is no memory
    /// for another; [`zeroshard_model::Error::Storage`].
    pub(super) fn reserve(&mut self, backend: &B) -> Result<()> {
        if self.spare.is_none() && self.current.is_read() {
            self.spare = Some(self.current.another(backend)?);
        }
        Ok(())
    }

    /// Write access to the next version, which starts as a copy of the current one, unless that is
    /// blank.
    ///
    /// # Errors
    /// Those of [`Self::reserve`], unless it has succeeded before, and of [`Array::write`].
    pub(super) fn write(&mut self, backend: &B) -> Result<Writing<'_, B>> {
        let is_blank = std::mem::take(&mut self.is_blank);
        let Next { array, earlier } = self.next(backend)?;
        match earlier {
            Some(earlier) if !is_blank => array.copy_from(backend, &earlier)?,
            _ if is_blank => array.forget(),
            _ => {}
        }
        array.write(backend)
    }

    /// The content is not needed any more. Readers keep theirs.
    pub(super) fn make_blank(&mut self) {
        self.is_blank = true;
    }

    /// Write access to the next version. If there are readers, its content is undefined until the
    /// caller has written all of it.
    ///
    /// # Errors
    /// Those of [`Self::reserve`], unless it has succeeded before.
    pub(super) fn next(&mut self, backend: &B) -> Result<Next<'_, B>> {
        let mut earlier = None;
        if self.current.is_read() {
            let fresh = match self.spare.take() {
                Some(spare) => spare,
                None => self.current.another(backend)?,
            };
            earlier = Some(std::mem::replace(&mut self.current, fresh));
        }
        self.spare = None;
        Ok(Next { array: &mut self.current, earlier })
    }

    /// Write access to the next version, in the memory of `gradient`, which nobody else reads. It
    /// has the gradient until the caller writes it. `gradient` gets the memory of this version.
    pub(super) fn rotate(&mut self, gradient: &mut Self) -> Next<'_, B> {
        std::mem::swap(&mut self.current, &mut gradient.current);
        Next { earlier: Some(gradient.current.clone()), array: &mut self.current }
    }

    /// Provides the memory of the current version, if it has no readers. Lets waiting threads of
    /// the machine run after each piece, because steps of other jobs are more urgent than the
    /// opening of a job.
    pub(super) fn populate(&mut self, backend: &B) {
        let numel = self.current.numel(backend);
        for start in (0..numel).step_by(POPULATED) {
            if start > 0 {
                thread::yield_now();
            }
            self.current.populate(backend, start..numel.min(start + POPULATED));
        }
    }

    /// Writes changes back to the array's tier, if it is outside of memory.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::Storage`].
    pub(super) fn settle(&self, backend: &B) -> Result<()> {
        self.current.settle(backend)
    }

    /// Releases reserved memory that was not needed.
    pub(super) fn release(&mut self) {
        self.spare = None;
    }

    /// Releases reserved memory if the reader for which it was reserved is gone.
    pub(super) fn release_unread(&mut self) {
        if !self.current.is_read() {
            self.spare = None;
        }
    }
}

/// The same array as the argument of a step in memory.
pub(super) fn in_memory<'a, B: Backend>(next: Next<'a, B>) -> Output<'a, B::Buffer> {
    let memory = "the array is in memory";
    let Array::Memory(buffer) = next.array else { unreachable!("{memory}") };
    let buffer = Arc::get_mut(buffer).expect("nobody else holds the next version");
    let earlier = next.earlier.map(|earlier| earlier.memory().expect(memory).clone());
    Output { buffer, earlier }
}
