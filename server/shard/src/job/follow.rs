//! Readers that follow a job: they receive what each step has changed. The slices record changes as
//! long as somebody asks for them.

use std::sync::{Arc, atomic::Ordering};

use zeroshard_kernels::Backend;
use zeroshard_model::{DType, Result};

use super::Job;
use crate::{budget::Budget, slice::Unhashed};

impl<B: Backend, D: Send + Sync> Job<B, D> {
    /// Notes that somebody follows the job in `dtype`.
    pub fn note_follower(&self, dtype: DType) {
        self.followers.ask(dtype, self.host.now());
    }

    /// Records the changes of a slice in `dtype` from now on. `budget`: that of the server, of
    /// which one job takes at most three quarters. Returns values that the caller has to hash
    /// before [`crate::slice::Slice::changes`] knows anything, if they are needed.
    ///
    /// # Errors
    /// Those of [`Self::primary_slice`] and of [`crate::slice::Slice::follow`].
    pub fn follow(
        &self,
        index: u32,
        dtype: DType,
        budget: &Arc<Budget>,
    ) -> Result<Option<Unhashed<B>>> {
        self.primary_slice(index)?.follow(dtype, self.followers.budget(budget))
    }

    /// Drops the changes in dtypes that nobody has asked for lately.
    pub fn end_follows(&self) {
        for dtype in self.followers.ended(|| self.host.now()) {
            self.slices().for_each(|(_, slice)| slice.unfollow(dtype));
        }
    }

    /// The newest version that can be read of all slices on this server.
    pub fn readable_version(&self) -> Option<u64> {
        let version = self.version()?;
        match self.serves(version) {
            true => Some(version),
            false => Some(version.min(self.served.load(Ordering::Acquire))),
        }
    }
}
