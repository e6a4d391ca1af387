//! The right of a coordinator to decide: a term, and the time until which it lasts.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant, SystemTime},
};

/// Terms of elected coordinators begin here, far above the time in milliseconds, so that servers
/// accept the first elected coordinator after one without an election.
const ELECTED: u64 = 1 << 48;

/// A term, and the time until which its coordinator may decide. Clones share the time.
#[derive(Debug, Clone)]
pub struct Leadership {
    term: u64,
    origin: Instant,
    /// In milliseconds since `origin`.
    until: Arc<AtomicU64>,
}

impl Leadership {
    /// The leadership of the only coordinator of a cluster: it does not end. Its term is the time
    /// in milliseconds since the Unix epoch.
    pub fn alone() -> Self {
        let since_epoch = SystemTime::UNIX_EPOCH.elapsed().unwrap_or(Duration::ZERO);
        let until = Arc::new(AtomicU64::new(u64::MAX));
        Self { term: millis(since_epoch), origin: Instant::now(), until }
    }

    /// The leadership of a coordinator that was elected at `revision`, which is higher than that
    /// of each earlier leader. It lasts until `until`, unless it is extended.
    pub fn elected(revision: u64, until: Instant) -> Self {
        let origin = Instant::now();
        let until = Arc::new(AtomicU64::new(millis(until - origin)));
        Self { term: ELECTED + revision, origin, until }
    }

    /// The leadership lasts until `until`. Returns `false` if it has ended before.
    pub fn extend(&self, until: Instant) -> bool {
        let is_valid = self.is_valid();
        if is_valid {
            self.until.store(millis(until - self.origin), SeqCst);
        }
        is_valid
    }

    /// Ends the leadership now.
    pub fn end(&self) {
        self.until.store(0, SeqCst);
    }

    /// The term: a number that is higher than that of each earlier coordinator.
    pub fn term(&self) -> u64 {
        self.term
    }

    /// Whether the coordinator may decide now.
    pub fn is_valid(&self) -> bool {
        millis(self.origin.elapsed()) < self.until.load(SeqCst)
    }
}

fn millis(duration: Duration) -> u64 {
    duration.as_millis() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_elected_coordinator_follows_one_without_an_election() {
        let elected = Leadership::elected(1, Instant::now() + Duration::from_secs(1));
        assert!(elected.term() > Leadership::alone().term());
    }

    #[test]
    fn a_leadership_that_has_ended_stays_ended() {
        let leadership = Leadership::elected(5, Instant::now() + Duration::from_secs(3600));
        assert!(leadership.clone().extend(leadership.origin + Duration::from_secs(7200)));
        assert!(leadership.is_valid());
        leadership.clone().end();
        assert!(!leadership.is_valid());
        assert!(!leadership.extend(leadership.origin + Duration::from_secs(7200)));
        assert!(!leadership.is_valid());
    }
}
