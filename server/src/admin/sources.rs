//! Where the status page finds the state of the roles of this process.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use crate::{coordinator, shard};

/// The roles of this process, as far as they run.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sources {
    /// The cluster, on the coordinator that is the leader.
    pub(crate) cluster: Source<coordinator::overview::Overview>,
    /// The shard server.
    pub(crate) shard: Source<shard::overview::Overview>,
}

type Read<T> = Arc<dyn Fn() -> Option<T> + Send + Sync>;

/// The state of a role, which sets it when it begins.
pub(crate) struct Source<T>(Arc<Mutex<Option<Read<T>>>>);

impl<T> Source<T> {
    /// Sets how the state is read; the function returns `None` when the role has ended.
    pub(crate) fn set(&self, read: impl Fn() -> Option<T> + Send + Sync + 'static) {
        // Each change is a single assignment.
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(read));
    }

    /// The current state, if the role runs.
    pub(crate) fn read(&self) -> Option<T> {
        let read = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        read?()
    }
}

impl<T> Clone for Source<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Default for Source<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T> fmt::Debug for Source<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Source")
    }
}
