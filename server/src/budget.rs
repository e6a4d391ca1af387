//! A limit on the number of bytes that a server uses for one purpose, over all of its jobs.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// The limit and the number of bytes in use.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: u64,
    used: AtomicU64,
}

impl Budget {
    pub(crate) fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicU64::new(0) })
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Reserves this number of bytes, if the budget allows.
    pub(crate) fn take(self: &Arc<Self>, bytes: u64) -> Option<Space> {
        let fits = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= self.limit);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        Some(Space { budget: self.clone(), bytes })
    }
}

/// A reserved part of the budget, returned when dropped.
#[derive(Debug)]
pub(crate) struct Space {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Drop for Space {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_is_reserved_within_the_limit_and_returned_when_dropped() {
        let budget = Budget::new(10);
        let six = budget.take(6).unwrap();
        assert!(budget.take(5).is_none() && budget.take(u64::MAX).is_none());
        let four = budget.take(4).unwrap();
        assert_eq!(budget.used(), budget.limit());
        drop(six);
        assert_eq!(budget.used(), 4);
        drop(four);
        assert_eq!(budget.used(), 0);
    }
}
