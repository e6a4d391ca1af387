//! Notes when the gradients of an attempt arrive.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// The arrivals of the gradients of an attempt.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    first: Option<Instant>,
    last: BTreeMap<u32, Instant>,
}

impl Arrivals {
    /// Notes that elements from a rank have arrived.
    pub(super) fn note(&mut self, rank: u32, now: Instant) {
        self.first.get_or_insert(now);
        self.last.insert(rank, now);
    }

    /// Returns the time from the first arrival to each rank's last one.
    pub(super) fn by_rank(self) -> BTreeMap<u32, Duration> {
        let Some(first) = self.first else { return BTreeMap::new() };
        let since = |(rank, at): (u32, Instant)| (rank, at.saturating_duration_since(first));
        self.last.into_iter().map(since).collect()
    }
}
