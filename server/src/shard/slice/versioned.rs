//! A buffer whose versions readers can hold while a step produces the next one.

use std::sync::Arc;

use zeroshard_proto::{Error, Result};

use crate::backend::{Backend, Output};

/// A buffer that is written in place if there is no reader, and otherwise copied.
pub(super) struct Versioned<B: Backend> {
    current: Arc<B::Buffer>,
    /// Memory for the copy, reserved before a step is decided so that the step cannot fail.
    spare: Option<B::Buffer>,
}

impl<B: Backend> Versioned<B> {
    pub(super) fn new(buffer: B::Buffer) -> Self {
        Self { current: Arc::new(buffer), spare: None }
    }

    /// The current version, which remains valid for its holders.
    pub(super) fn current(&self) -> &Arc<B::Buffer> {
        &self.current
    }

    /// Ensures that [`Self::write`] succeeds, as long as no reader is added without a reservation.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the version is being read and there is no memory for another.
    pub(super) fn reserve(&mut self, backend: &B) -> Result<()> {
        if self.spare.is_none() && self.is_read() {
            self.spare = Some(self.another(backend)?);
        }
        Ok(())
    }

    /// Write access to the next version, which starts as a copy of the current one.
    ///
    /// # Errors
    /// Those of [`Self::reserve`], unless it has succeeded before.
    pub(super) fn write(&mut self, backend: &B) -> Result<&mut B::Buffer> {
        let Output { buffer, earlier } = self.next(backend)?;
        if let Some(earlier) = earlier {
            backend.copy(&earlier, buffer);
        }
        Ok(buffer)
    }

    /// Write access to the next version. If there are readers, its content is undefined until the
    /// caller has written all of it.
    ///
    /// # Errors
    /// Those of [`Self::reserve`], unless it has succeeded before.
    pub(super) fn next(&mut self, backend: &B) -> Result<Output<'_, B::Buffer>> {
        let mut earlier = None;
        if self.is_read() {
            let fresh = match self.spare.take() {
                Some(spare) => spare,
                None => self.another(backend)?,
            };
            earlier = Some(std::mem::replace(&mut self.current, Arc::new(fresh)));
        }
        self.spare = None;
        let buffer = Arc::get_mut(&mut self.current).expect("nobody holds what only the slice has");
        Ok(Output { buffer, earlier })
    }

    /// Provides the memory of the current version, if it has no readers.
    pub(super) fn populate(&mut self, backend: &B) {
        if let Some(current) = Arc::get_mut(&mut self.current) {
            backend.populate(current, 0..backend.numel(current));
        }
    }

    /// Releases reserved memory that was not needed.
    pub(super) fn release(&mut self) {
        self.spare = None;
    }

    /// Releases reserved memory if the reader for which it was reserved is gone.
    pub(super) fn release_unread(&mut self) {
        if !self.is_read() {
            self.spare = None;
        }
    }

    /// References are only created by [`Self::current`], under the slice's lock, so a count of one
    /// cannot grow meanwhile.
    fn is_read(&self) -> bool {
        Arc::strong_count(&self.current) > 1
    }

    fn another(&self, backend: &B) -> Result<B::Buffer> {
        let (dtype, numel) = (backend.dtype(&self.current), backend.numel(&self.current));
        let mut another = backend.allocate(dtype, numel).map_err(|_| Error::OutOfMemory {
            what: "a second version beside the one that is being read".to_owned(),
            bytes: (numel * dtype.size()) as u64,
        })?;
        backend.populate(&mut another, 0..numel);
        Ok(another)
    }
}
