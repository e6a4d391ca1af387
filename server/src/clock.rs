//! The clock of the system, for messages to operators.

use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds since 1970, UTC; 0 if the clock is set to an earlier time.
pub(crate) fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
