//! The limits of the tokens and certificates of a cluster: the holder of one, and the rate limit of
//! its calls.

use std::{
    num::NonZero,
    time::{Duration, Instant},
};

use zeroshard_model::{Error, Result, Role};

/// The burst of calls that may arrive at the same time, as a duration at the permitted rate.
const BURST: Duration = Duration::from_secs(1);
/// The maximum time that a call above the rate waits. Calls that would wait longer are refused.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// The rate limit of one token, or of the certificates of a role: a bucket that is refilled at a
/// constant rate. It is stored as the time at which the bucket would be full (the generic cell rate
/// algorithm of ITU-T I.371).
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Rate {
    full: Option<Instant>,
}

impl Rate {
    /// Counts a call at `now`. Returns the time that the call must wait.
    ///
    /// # Errors
    /// [`Error::LimitExceeded`] if the call would wait for more than [`MAX_WAIT`]. The call does
    /// not count in this case.
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
    fn calls_above_the_rate_wait_and_are_refused_above_the_maximum_wait() {
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
