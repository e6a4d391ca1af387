//! Retries of calls to other servers.

use std::time::Duration;

use zeroshard_proto::{Error, Result, error::Remedy};

/// How often a call is repeated after transient errors.
const RETRIES: u32 = 5;
/// The mean pause before a retry.
const PAUSE: Duration = Duration::from_millis(200);

/// The tries of one call.
#[derive(Debug, Default)]
pub(super) struct Tries(u32);

impl Tries {
    /// Waits before the next try, after a try that failed with `error`.
    ///
    /// # Errors
    /// `error`, if it is not transient or no try is left.
    pub(super) async fn next(&mut self, error: Error) -> Result<()> {
        tokio::time::sleep(self.pause(error)?).await;
        Ok(())
    }

    /// The pause is random, so that servers that failed together do not retry together.
    fn pause(&mut self, error: Error) -> Result<Duration> {
        if error.remedy() != Remedy::Retry || self.0 == RETRIES {
            return Err(error);
        }
        self.0 += 1;
        Ok(PAUSE.mul_f64(0.5 + fastrand::f64()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unavailable() -> Error {
        Error::Unavailable { peer: "shard server 1".into(), cause: "connection reset".into() }
    }

    #[test]
    fn a_transient_error_is_retried_a_limited_number_of_times_after_different_pauses() {
        let mut tries = Tries::default();
        let pauses: Vec<_> = (0..RETRIES).map(|_| tries.pause(unavailable()).unwrap()).collect();
        assert!(pauses.iter().all(|&pause| pause >= PAUSE / 2 && pause <= PAUSE * 3 / 2));
        assert!(pauses.iter().any(|&pause| pause != pauses[0]), "{pauses:?}");
        assert_eq!(tries.pause(unavailable()), Err(unavailable()));
    }

    #[test]
    fn other_errors_are_not_retried() {
        let gone = Error::VersionGone { job: "job".into(), version: 1, current: 2 };
        assert_eq!(Tries::default().pause(gone.clone()), Err(gone));
    }
}
