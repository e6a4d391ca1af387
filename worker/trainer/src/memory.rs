//! Counts the bytes of parameters and gradients that a worker holds.
//!
//! The owner of a buffer of parameters or gradients also owns a [`Lease`] for its size, and drops
//! both together. The peak is the memory that a level needs in a worker, without activations.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of bytes that are held, and its maximum. Clones share the counters.
#[derive(Debug, Clone, Default)]
pub struct Ledger(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    held: AtomicUsize,
    peak: AtomicUsize,
}

impl Ledger {
    /// Counts the bytes of `elements` f32 values until the lease is dropped.
    pub fn hold(&self, elements: usize) -> Lease {
        let bytes = elements * size_of::<f32>();
        let held = self.0.held.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.0.peak.fetch_max(held, Ordering::Relaxed);
        Lease { ledger: self.clone(), bytes }
    }

    /// The number of bytes that are held now.
    pub fn held(&self) -> usize {
        self.0.held.load(Ordering::Relaxed)
    }

    /// The maximum number of bytes that were held at once.
    pub fn peak(&self) -> usize {
        self.0.peak.load(Ordering::Relaxed)
    }
}

/// A number of bytes that count as held until the lease is dropped.
#[derive(Debug)]
#[must_use = "the bytes count as held only while the lease lives"]
pub struct Lease {
    ledger: Ledger,
    bytes: usize,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.ledger.0.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_the_maximum_that_was_held_at_once() {
        let ledger = Ledger::default();
        let first = ledger.hold(10);
        let second = ledger.hold(5);
        drop(first);
        let third = ledger.hold(8);
        assert_eq!((ledger.held(), ledger.peak()), (52, 60));
        drop((second, third));
        assert_eq!((ledger.held(), ledger.peak()), (0, 60));
    }
}
