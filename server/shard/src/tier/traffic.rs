//! Counts what moves to and from a tier, in counters of the server.

use std::sync::Arc;

/// A counter of bytes.
pub trait Counter: Send + Sync {
    /// Counts further bytes.
    fn inc_by(&self, bytes: u64);

    /// Returns the bytes that have been counted.
    fn get(&self) -> u64;
}

/// The counters of the bytes that are read from and written to a tier.
#[derive(Clone)]
pub struct Traffic {
    /// Bytes read.
    pub read: Arc<dyn Counter>,
    /// Bytes written.
    pub written: Arc<dyn Counter>,
}
