//! The state of the roles of this process, for the status page.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use crate::{coordinator, shard};

/// The roles of this process that are running.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sources {
    /// The state of the cluster; set on the coordinator that is the leader.
    pub(crate) cluster: Source<coordinator::overview::Overview>,
    /// The state of the shard server.
    pub(crate) shard: Source<shard::overview::Overview>,
}

type Read<T> = Arc<dyn Fn() -> Option<T> + Send + Sync>;

/// The state of a role. The role provides it when it starts.
pub(crate) struct Source<T>(Arc<Mutex<Option<Read<T>>>>);

impl<T> Source<T> {
    /// Sets the function that reads the state. It returns `None` after the role has ended.
    pub(crate) fn set(&self, read: impl Fn() -> Option<T> + Send + Sync + 'static) {
        // Each change is a single assignment.
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(read));
    }

    /// The current state; `None` if the role is not running.
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
