//! The limits of the tokens and certificates of a cluster: who the holder of one is, and how fast
//! its calls may follow each other.

use std::{
    num::NonZero,
    time::{Duration, Instant},
};

use zeroshard_proto::{Error, Result, Role, quota::Quota};

/// The calls that may come at once: those of this time.
const BURST: Duration = Duration::from_secs(1);
/// How long a call that comes too early waits. Beyond it, calls are refused.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// The role and the limits of the token or certificate of a request, which is an extension of it.
#[derive(Debug, Clone)]
pub(crate) struct Holder {
    pub(crate) role: Role,
    pub(crate) quota: Quota,
}

/// The calls with one token, or with the certificates of a role: a bucket of tokens that is
/// refilled at a constant rate, stored as the time at which it would be full (the generic cell rate
/// algorithm of ITU-T I.371).
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Rate {
    full: Option<Instant>,
}

impl Rate {
    /// Counts a call at `now`. Returns how long it must wait.
    ///
    /// # Errors
    /// [`Error::LimitExceeded`] if that is too long; the call does not count then.
    pub(crate) fn admit(
        &mut self,
        requests: NonZero<u32>,
        role: &Role,
        now: Instant,
    ) -> Result<Duration> {
        let full = self.full.map_or(now, |full| full.max(now)) + BURST / requests.get();
        let wait = full.saturating_duration_since(now + BURST);
        if wait > MAX_WAIT {
            return Err(Error::LimitExceeded {
                what: format!(
                    "requests per second with a token or certificate of role {role} \
                     (`requests` in the file of tokens)"
                ),
                limit: requests.get().into(),
                remedy:
                    "send fewer requests, or ask the operator of the cluster for a higher limit"
                        .to_owned(),
            });
        }
        self.full = Some(full);
        Ok(wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_beyond_the_rate_wait_and_then_are_refused() {
        let (mut rate, now) = (Rate::default(), Instant::now());
        let mut admit = |now| rate.admit(NonZero::new(10).unwrap(), &Role::Admin, now);
        for _ in 0..10 {
            assert_eq!(admit(now), Ok(Duration::ZERO));
        }
        for call in 1..=10 {
            assert_eq!(admit(now), Ok(Duration::from_millis(100 * call)));
        }
        assert!(matches!(admit(now), Err(Error::LimitExceeded { limit: 10, .. })));
        // A refused call does not count.
        assert_eq!(admit(now + Duration::from_millis(100)), Ok(Duration::from_secs(1)));
        assert_eq!(admit(now + Duration::from_secs(60)), Ok(Duration::ZERO));
    }
}
