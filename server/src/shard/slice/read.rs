//! What others see of a slice: a version of it, whole.

use std::sync::Arc;

use zeroshard_proto::{Error, Result};

use super::Slice;
use crate::{backend::Backend, shard::part::Part};

impl<B: Backend> Slice<B> {
    /// A part that the slice has, at `version`, held for as long as the caller likes; `None` if it is not there
    /// yet.
    ///
    /// # Errors
    /// [`Error::VersionGone`] if a later one has replaced it.
    pub(crate) fn read(&self, part: Part, job: &str, version: u64) -> Result<Option<Arc<B::Buffer>>> {
        if self.version().is_none_or(|current| current < version) {
            return Ok(None);
        }
        let inner = self.lock();
        self.check_version(job, version)?;
        Ok(Some(Arc::clone(match part {
            Part::Parameters => inner.published.as_ref().unwrap_or(&inner.master),
            Part::Master => &inner.master,
            Part::State(position) => &inner.state[position],
        })))
    }

    /// How many steps were applied, at `version`.
    ///
    /// # Errors
    /// [`Error::VersionGone`].
    pub(crate) fn applied(&self, job: &str, version: u64) -> Result<u64> {
        let inner = self.lock();
        self.check_version(job, version)?;
        Ok(inner.applied)
    }

    /// BLAKE3 of size, applied steps, master weights and optimizer state at `version`.
    pub(crate) fn digest(&self, backend: &B, job: &str, version: u64) -> Result<[u8; 32]> {
        let (applied, buffers) = {
            let inner = self.lock();
            self.check_version(job, version)?;
            let buffers: Vec<_> = [&inner.master].into_iter().chain(&inner.state).cloned().collect();
            (inner.applied, buffers)
        };
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(self.spec.numel as u64).to_le_bytes());
        hasher.update(&applied.to_le_bytes());
        for buffer in &buffers {
            hasher.update(&backend.read(buffer, 0..self.spec.numel, backend.dtype(buffer)));
        }
        Ok(*hasher.finalize().as_bytes())
    }

    fn check_version(&self, job: &str, version: u64) -> Result<()> {
        match self.version() {
            Some(current) if current == version => Ok(()),
            current => {
                Err(Error::VersionGone { job: job.to_owned(), version, current: current.unwrap_or_default() })
            }
        }
    }
}
