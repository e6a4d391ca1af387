//! Room for gradients that come before their turn.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// How many bytes of early gradients a server keeps, over all of its slices.
#[derive(Debug)]
pub(crate) struct ParkingBudget {
    pub(super) limit: u64,
    used: AtomicU64,
}

impl ParkingBudget {
    pub(crate) fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicU64::new(0) })
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Room for so many bytes, if there is.
    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> Option<Space> {
        let fits = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= self.limit);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        Some(Space { budget: self.clone(), bytes })
    }
}

/// A part of the budget, given back when dropped.
#[derive(Debug)]
pub(super) struct Space {
    budget: Arc<ParkingBudget>,
    bytes: u64,
}

impl Space {
    /// Cuts so many bytes off, for something else.
    pub(super) fn split_off(&mut self, bytes: u64) -> Self {
        self.bytes -= bytes;
        Self { budget: self.budget.clone(), bytes }
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
