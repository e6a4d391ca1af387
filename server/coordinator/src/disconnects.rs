//! A server of a job that is not connected.

use crate::ids::Now;

/// A server of an open job that is not connected.
#[derive(Debug)]
pub struct Away {
    /// Why its control stream has ended.
    pub(crate) cause: String,
    /// When the server is given up.
    pub(crate) until: Now,
}
