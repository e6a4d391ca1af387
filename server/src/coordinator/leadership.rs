//! The right of a coordinator to decide: a term, and the time until which it lasts.
//!
//! Terms do not depend on clocks. A coordinator of an election has the term of its revision. One
//! without an election takes a term above all that its servers have seen, until it has led; a
//! higher term afterwards is that of a coordinator that has replaced it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use tokio_util::sync::CancellationToken;
use zeroshard_coordinator::cluster::numbers::RANDOM;
use zeroshard_model::Result;

use crate::identity;
#[cfg(test)]
use crate::simulation::{Safeguard, is_missing};

/// Terms of elected coordinators begin here, far above those of a coordinator without an election,
/// so that servers accept the first elected coordinator after it.
const ELECTED: u64 = 1 << 48;

/// A term, and the time until which its coordinator may decide. Clones share them.
#[derive(Debug, Clone)]
pub struct Leadership {
    term: Arc<AtomicU64>,
    /// How the coordinator takes a higher term; `None` if it was elected.
    alone: Option<Arc<Alone>>,
    origin: Instant,
    /// In milliseconds since `origin`.
    until: Arc<AtomicU64>,
}

/// A coordinator without an election.
#[derive(Debug)]
struct Alone {
    /// The low bits of its terms.
    random: u64,
    /// `true` if it has sent a command that depends on its decisions.
    has_led: AtomicBool,
    /// Cancelled when another coordinator has replaced it.
    replaced: CancellationToken,
}

impl Leadership {
    /// The leadership of the only coordinator of a cluster: it lasts until a server has a later
    /// coordinator.
    ///
    /// # Errors
    /// [`Error::Internal`](zeroshard_model::Error::Internal) if the system has no random numbers.
    pub fn alone() -> Result<Self> {
        Ok(Self::alone_with(identity::random()?))
    }

    /// The same, with the random part of its terms.
    pub(crate) fn alone_with(random: u64) -> Self {
        let random = random & ((1 << RANDOM) - 1);
        let (has_led, replaced) = (AtomicBool::new(false), CancellationToken::new());
        Self {
            term: Arc::new(AtomicU64::new(above(0, random))),
            alone: Some(Arc::new(Alone { random, has_led, replaced })),
            origin: Instant::now(),
            until: Arc::new(AtomicU64::new(u64::MAX)),
        }
    }

    /// The leadership of a coordinator that was elected at `revision`, which is higher than that
    /// of each earlier leader. It lasts until `until`, unless it is extended.
    pub fn elected(revision: u64, until: Instant) -> Self {
        let origin = Instant::now();
        let until = Arc::new(AtomicU64::new(millis(until - origin)));
        Self { term: Arc::new(AtomicU64::new(ELECTED + revision)), alone: None, origin, until }
    }

    /// The coordinator sends a command that depends on its decisions.
    pub(crate) fn lead(&self) {
        if let Some(alone) = &self.alone {
            alone.has_led.store(true, SeqCst);
        }
    }

    /// A server has seen the term `seen`, which is higher. Returns whether the coordinator has a
    /// higher one now. Otherwise it has been replaced, if the server is one of its own; another
    /// server belongs to another cluster.
    pub(crate) fn pass(&self, seen: u64, is_own: bool) -> bool {
        #[cfg(test)]
        if is_missing(Safeguard::Terms) {
            return true;
        }
        let Some(alone) = &self.alone else { return false };
        let has_led = alone.has_led.load(SeqCst);
        if has_led || seen >= ELECTED {
            if has_led && is_own {
                self.end();
                alone.replaced.cancel();
            }
            return false;
        }
        self.term.store(above(seen, alone.random), SeqCst);
        true
    }

    /// Completes when a coordinator without an election has been replaced.
    pub(crate) async fn replaced(&self) {
        match &self.alone {
            Some(alone) => alone.replaced.cancelled().await,
            None => std::future::pending().await,
        }
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
        self.term.load(SeqCst)
    }

    /// Returns whether the coordinator may decide now.
    pub fn is_valid(&self) -> bool {
        millis(self.origin.elapsed()) < self.until.load(SeqCst)
    }
}

/// The lowest term above `seen` with these low bits, of a coordinator without an election.
fn above(seen: u64, random: u64) -> u64 {
    (((seen >> RANDOM) + 1) << RANDOM) | random
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
        assert!(elected.term() > Leadership::alone().unwrap().term());
    }

    #[test]
    fn a_coordinator_without_an_election_takes_the_next_term_until_it_has_led() {
        let (first, second) = (Leadership::alone().unwrap(), Leadership::alone().unwrap());
        // Before terms were numbered, they were the time in milliseconds.
        for seen in [first.term(), 1_800_000_000_000] {
            assert!(second.pass(seen, false));
            assert!(second.term() > seen);
        }
        first.lead();
        assert!(first.is_valid());
        assert!(!first.pass(second.term(), false), "a server of another cluster");
        assert!(first.is_valid());
        assert!(!first.pass(second.term(), true), "it was replaced");
        assert!(!first.is_valid());
        assert!(second.is_valid());
    }

    #[test]
    fn two_coordinators_without_an_election_that_have_seen_the_same_term_have_different_ones() {
        assert_ne!(above(7 << RANDOM, 3), above(7 << RANDOM, 4));
        let alone = || Leadership::alone().unwrap().term();
        assert_ne!(alone(), alone());
    }

    #[test]
    fn a_coordinator_without_an_election_does_not_replace_an_elected_one() {
        let elected = Leadership::elected(1, Instant::now() + Duration::from_secs(1));
        let alone = Leadership::alone().unwrap();
        assert!(!alone.pass(elected.term(), true));
        assert!(alone.is_valid(), "it waits for other servers");
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
