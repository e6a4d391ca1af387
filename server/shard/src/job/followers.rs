//! Those who follow a job: readers that receive what each step has changed. The slices record
//! changes as long as somebody asks for them.

use std::{
    sync::{Arc, Mutex, MutexGuard, OnceLock},
    time::{Duration, Instant},
};

use zeroshard_kernels::Backend;
use zeroshard_model::{DType, Result};

use super::Job;
use crate::{budget::Budget, slice::Unhashed};

/// The time for which changes are recorded after the last request for them.
const FOLLOWED: Duration = Duration::from_secs(60);

/// The dtypes in which a job is followed.
#[derive(Default)]
pub(super) struct Followers {
    /// The dtypes, with the last request for each.
    asked: Mutex<Vec<(DType, Instant)>>,
    /// The job's part of the server's budget for changes.
    budget: OnceLock<Arc<Budget>>,
}

impl Followers {
    fn asked(&self) -> MutexGuard<'_, Vec<(DType, Instant)>> {
        self.asked.lock().expect("no holder of the lock panics")
    }
}

impl<B: Backend, D: Send + Sync> Job<B, D> {
    /// Records the changes of a slice in `dtype` from now on. `budget`: that of the server, of which
    /// one job takes at most three quarters. Returns values that the caller has to hash before
    /// [`crate::slice::Slice::changes`] knows anything, if they are needed.
    ///
    /// # Errors
    /// Those of [`Self::primary_slice`] and of [`crate::slice::Slice::follow`].
    pub fn follow(
        &self,
        index: u32,
        dtype: DType,
        budget: &Arc<Budget>,
    ) -> Result<Option<Unhashed<B>>> {
        let slice = self.primary_slice(index)?;
        let part = || budget.part(budget.limit() / 4 * 3);
        slice.follow(dtype, self.followers.budget.get_or_init(part))
    }

    /// Notes that somebody follows the job in `dtype`.
    pub fn note_follower(&self, dtype: DType) {
        let now = self.host.now();
        let mut asked = self.followers.asked();
        match asked.iter_mut().find(|(of, _)| *of == dtype) {
            Some((_, last)) => *last = now,
            None => asked.push((dtype, now)),
        }
    }

    /// The bytes of the changes that this server keeps of the job.
    pub fn history_bytes(&self) -> u64 {
        self.followers.budget.get().map_or(0, |budget| budget.used())
    }

    /// Drops the changes in dtypes that nobody has asked for lately.
    pub fn end_follows(&self) {
        let mut ended = Vec::new();
        {
            let mut asked = self.followers.asked();
            if asked.is_empty() {
                return;
            }
            let now = self.host.now();
            asked.retain(|&(dtype, last)| {
                let is_followed = now.saturating_duration_since(last) < FOLLOWED;
                ended.extend((!is_followed).then_some(dtype));
                is_followed
            });
        }
        for dtype in ended {
            self.slices().for_each(|(_, slice)| slice.unfollow(dtype));
        }
    }

    /// The newest version that can be read of all slices on this server.
    pub fn readable_version(&self) -> Option<u64> {
        let version = self.version()?;
        match self.serves(version) {
            true => Some(version),
            false => Some(version.min(self.served.load(std::sync::atomic::Ordering::Acquire))),
        }
    }
}
