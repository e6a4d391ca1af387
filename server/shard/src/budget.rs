//! A limit on the number of bytes, connections or calls that a server uses for one purpose.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// The limit and the number of bytes in use.
#[derive(Debug)]
pub struct Budget {
    limit: u64,
    used: AtomicU64,
    /// The budget of which this is a part.
    whole: Option<Arc<Budget>>,
}

impl Budget {
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicU64::new(0), whole: None })
    }

    /// A budget whose space also counts in this one.
    pub fn part(self: &Arc<Self>, limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicU64::new(0), whole: Some(self.clone()) })
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Reserves this number of bytes, if the budget allows.
    pub fn take(self: &Arc<Self>, bytes: u64) -> Option<Space> {
        self.reserve(bytes).then(|| Space { budget: self.clone(), bytes })
    }

    /// Returns whether [`Self::take`] would succeed now.
    pub fn has(&self, bytes: u64) -> bool {
        let fits = self.used().checked_add(bytes).is_some_and(|sum| sum <= self.limit);
        fits && self.whole.as_ref().is_none_or(|whole| whole.has(bytes))
    }

    fn reserve(&self, bytes: u64) -> bool {
        let fits = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= self.limit);
        if self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_err() {
            return false;
        }
        let is_reserved = self.whole.as_ref().is_none_or(|whole| whole.reserve(bytes));
        if !is_reserved {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
        }
        is_reserved
    }

    fn release(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        self.whole.iter().for_each(|whole| whole.release(bytes));
    }
}

/// A reserved part of the budget, returned when dropped.
#[derive(Debug)]
pub struct Space {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Space {
    /// Reserves this number of bytes in addition, if the budget allows.
    pub fn grow(&mut self, bytes: u64) -> bool {
        let is_reserved = self.budget.reserve(bytes);
        self.bytes += if is_reserved { bytes } else { 0 };
        is_reserved
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        self.budget.release(self.bytes);
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
        let mut four = four;
        assert!(!four.grow(7) && four.grow(6));
        assert_eq!(budget.used(), 10);
        drop(four);
        assert_eq!(budget.used(), 0);
        let four = budget.take(4).unwrap();
        assert_eq!(budget.used(), 4);
        drop(four);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn the_space_of_a_part_counts_in_the_whole() {
        let whole = Budget::new(10);
        let (one, other) = (whole.part(7), whole.part(7));
        let mut space = one.take(5).unwrap();
        assert!(one.take(3).is_none() && other.take(6).is_none());
        assert!(!space.grow(3) && space.grow(2));
        assert_eq!((one.used(), other.used(), whole.used()), (7, 0, 7));
        let _rest = other.take(3).unwrap();
        drop(space);
        assert_eq!((one.used(), whole.used()), (0, 3));
    }
}
