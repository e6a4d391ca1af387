//! The state of the roles of this process, for the status page.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use zeroshard_coordinator::operators::overview;

use crate::shard;

/// The roles of this process that are running.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sources {
    /// The state of the cluster; set on the coordinator that is the leader.
    pub(crate) cluster: Source<overview::Overview, overview::View>,
    /// The state of the shard server.
    pub(crate) shard: Source<shard::overview::Overview>,
}

type Read<T, V> = Arc<dyn Fn(&V) -> Option<T> + Send + Sync>;

/// The state of a role, of which a view selects a part. The role provides it when it starts.
pub(crate) struct Source<T, V = ()>(Arc<Mutex<Option<Read<T, V>>>>);

impl<T, V> Source<T, V> {
    /// Sets the function that reads the state. It returns `None` after the role has ended.
    pub(crate) fn set(&self, read: impl Fn(&V) -> Option<T> + Send + Sync + 'static) {
        // Each change is a single assignment.
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(read));
    }

    /// The current state; `None` if the role is not running.
    pub(crate) fn read(&self, view: &V) -> Option<T> {
        let read = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        read?(view)
    }
}

impl<T, V> Clone for Source<T, V> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T, V> Default for Source<T, V> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T, V> fmt::Debug for Source<T, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Source")
    }
}
