//! Waits for a version or for gradients, always with a deadline.

use std::time::Duration;

use zeroshard_kernels::Backend;
use zeroshard_model::Result;
use zeroshard_net::Deadline;

use super::Job;

impl<B: Backend> Job<B> {
    /// Waits until `ready` returns a value, and calls it again after every change.
    ///
    /// # Errors
    /// Those of `ready`; [`zeroshard_model::Error::Timeout`] with `waiting_for` after `deadline`.
    pub(crate) async fn wait_for<T>(
        &self,
        deadline: Deadline,
        mut ready: impl FnMut() -> Result<Option<T>>,
        waiting_for: impl FnOnce() -> String,
    ) -> Result<T> {
        let mut changed = self.subscribe();
        let wait = async {
            loop {
                changed.borrow_and_update();
                if let Some(value) = ready()? {
                    return Ok(value);
                }
                tokio::select! {
                    _ = changed.changed() => {}
                    () = self.closed().cancelled() => return Err(self.closed_error()),
                }
            }
        };
        deadline.limit(waiting_for, wait).await?
    }

    /// Waits until all slices have at least `version`, and it can be read.
    ///
    /// # Errors
    /// Those of [`Self::wait_for`].
    pub(crate) async fn wait_for_version(&self, version: u64, deadline: Deadline) -> Result<()> {
        let there = || {
            let current = self.version().filter(|&current| current >= version);
            Ok(current.filter(|_| self.serves(version)))
        };
        let waiting_for = || format!("version {version} of job {:?}", self.spec.name);
        self.wait_for(deadline, there, waiting_for).await.map(|_| ())
    }

    /// Waits until more gradients have arrived, or `limit` has passed.
    pub(crate) async fn contribution(&self, limit: Duration) {
        let _ = tokio::time::timeout(limit, self.contributed().notified()).await;
    }
}
