//! A slice of which this server is a backup: it receives the reduced gradients from the primary,
//! and applies the same decisions.

use std::sync::atomic::Ordering;

use zeroshard_kernels::Backend;
use zeroshard_model::{Attempt, DType, Result};

use super::{Reduced, Slice};

/// What this server is for a slice. It changes only under the lock of the slice, so that it is the
/// same during a whole step, and while a gradient arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Role {
    /// It adds the gradients of the ranks, and serves readers.
    Primary,
    /// It has the same content as the primary.
    Backup,
    /// It is copying the content of the open version, and receives the reduced gradient of the
    /// open step meanwhile.
    Copying,
    /// It has no content. Versions pass without effect.
    Empty,
}

impl Role {
    /// Returns whether the slice has the content of its version.
    pub fn has_content(self) -> bool {
        matches!(self, Self::Primary | Self::Backup)
    }

    /// Returns whether the open step needs the reduced gradient here.
    pub fn takes_gradients(self) -> bool {
        self != Self::Empty
    }

    fn of(number: u8) -> Self {
        [Self::Primary, Self::Backup, Self::Copying, Self::Empty][usize::from(number)]
    }
}

impl<B: Backend> Slice<B> {
    pub fn role(&self) -> Role {
        Role::of(self.role.load(Ordering::Acquire))
    }

    pub fn set_role(&self, role: Role) {
        let mut inner = self.lock();
        if role == Role::Copying {
            inner.forget_staged();
        }
        if !role.has_content() {
            inner.histories.clear();
        }
        self.role.store(role as u8, Ordering::Release);
    }

    /// Sets the version of a slice without content, whose job runs already.
    pub fn begin_empty(&self, attempt: Attempt) {
        let mut inner = self.lock();
        inner.attempt = attempt;
        inner.histories.clear();
        self.role.store(Role::Empty as u8, Ordering::Release);
        self.set_version(attempt.step);
    }

    /// The content is complete.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::OutOfMemory`] if the slice has readers, which a backup has not.
    pub fn end_copy(&self) -> Result<()> {
        let mut inner = self.lock();
        let inner = &mut *inner;
        if self.role() != Role::Copying {
            return Ok(()); // a new placement has ended the copy
        }
        inner.encode_all_staged(&self.backend)?;
        inner.cast(&self.backend)?;
        inner.settle(&self.backend)?;
        self.role.store(Role::Backup as u8, Ordering::Release);
        Ok(())
    }

    /// The number of elements of the reduced gradient of `attempt` that have arrived from the
    /// primary; `None` if the slice needs none.
    pub fn reduced_elements(&self, attempt: Attempt) -> Option<usize> {
        let inner = self.lock();
        let is_backup = matches!(self.role(), Role::Backup | Role::Copying);
        let open = inner.open.as_ref().filter(|_| is_backup)?;
        match inner.attempt == attempt {
            true => Some(inner.from_primary).filter(|_| !open.is_reported),
            false => Some(0),
        }
    }

    /// Stores elements of the reduced gradient of `attempt` from the primary, which sends them in
    /// order. Returns the properties of the gradient when it is complete; `None` also if the
    /// attempt has ended.
    ///
    /// # Errors
    /// [`zeroshard_model::Error::OutOfMemory`] if the step could not be applied.
    pub fn store_reduced(
        &self,
        attempt: Attempt,
        offset: usize,
        bytes: &[u8],
    ) -> Result<Option<Reduced>> {
        let mut inner = self.lock();
        if self.version() != Some(attempt.step) || self.role() == Role::Primary {
            return Ok(None);
        }
        self.enter(&mut inner, attempt)?;
        let inner = &mut *inner;
        let elements = bytes.len() / DType::F32.size();
        let end = offset + elements;
        let (is_open, numel) = (inner.attempt == attempt, self.spec.numel);
        let Some(open) = inner.open.as_mut().filter(|open| !open.is_reported) else {
            return Ok(None);
        };
        if !is_open || offset != inner.from_primary || end > numel {
            return Ok(None);
        }
        let mut sum = open.sum.write(&self.backend)?;
        self.backend.store(&mut sum, offset..end, bytes, DType::F32)?;
        drop(sum);
        inner.from_primary = end;
        inner.reduced(&self.backend, self.role())
    }
}
