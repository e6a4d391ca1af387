//! The errors after which a call is retried, and the time limit of the retries. No other module
//! decides this.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use zeroshard_model::{Error, Result, error::Remedy};
use zeroshard_net::{Deadline, deadline::MARGIN};

/// The minimum of the first pause before a retry. The minimum doubles with each further pause up to
/// [`MAX_PAUSE`]. Each pause is random, and at most twice its minimum.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_millis(500);

/// The reaction to a failed try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Next {
    /// Send the same request again after a pause.
    Again(Duration),
    /// Get the current membership; the error states that it has changed.
    Refresh(Error),
}

/// The tries of one operation, until its deadline.
#[derive(Debug)]
pub(crate) struct Tries {
    deadline: Deadline,
    pauses: ExponentialBackoff,
    /// The error of the last try.
    last: Option<Error>,
}

impl Tries {
    pub(crate) fn until(deadline: Deadline) -> Self {
        let pauses = ExponentialBuilder::default()
            .with_min_delay(FIRST_PAUSE)
            .with_max_delay(MAX_PAUSE)
            .without_max_times()
            .with_jitter()
            .build();
        Self { deadline, pauses, last: None }
    }

    /// The time limit of the call in the next try. It is slightly longer than the remaining time,
    /// so that the try ends here with an error that is more informative than that of the transport.
    /// The server may wait for a shorter time if its own limit is lower.
    pub(crate) fn timeout(&self) -> Duration {
        self.deadline.left() + Duration::from_millis(1)
    }

    /// Runs one try. `waiting_for` is used in the message if the deadline passes and no earlier try
    /// has reported the missing input.
    ///
    /// # Errors
    /// [`Error::Timeout`].
    pub(crate) async fn limit<T>(
        &self,
        waiting_for: impl FnOnce() -> String,
        work: impl Future<Output = T>,
    ) -> Result<T> {
        self.deadline.limit(|| self.missing().unwrap_or_else(waiting_for), work).await
    }

    /// Waits for `pause` before another try, in another way than the one that failed with `error`.
    ///
    /// # Errors
    /// [`Error::Timeout`] if no time is left for it.
    pub(crate) async fn change(&mut self, error: Error, pause: Duration) -> Result<()> {
        self.last = Some(error);
        if self.deadline.left() <= MARGIN + pause {
            return Err(self.deadline.timeout(self.missing().unwrap_or_default()));
        }
        tokio::time::sleep(pause).await;
        Ok(())
    }

    /// The error of the last try that failed.
    pub(crate) fn last(&self) -> Option<&Error> {
        self.last.as_ref()
    }

    /// The missing input that the last try reported.
    fn missing(&self) -> Option<String> {
        match self.last.as_ref()? {
            Error::Timeout { waiting_for, .. } => Some(waiting_for.clone()),
            error => Some(format!("a successful retry; the last try failed: {error}")),
        }
    }

    /// Decides about a try that failed with `error`. If the decision is a pause, this function
    /// waits for it.
    ///
    /// # Errors
    /// `error`, if it is final; [`Error::Timeout`] if no time is left for another try.
    pub(crate) async fn next(&mut self, error: Error) -> Result<Next> {
        let next = self.decide(error, self.deadline.left())?;
        if let Next::Again(pause) = next {
            tokio::time::sleep(pause).await;
        }
        Ok(next)
    }

    /// The decision of [`Self::next`] for the remaining time `left`.
    fn decide(&mut self, error: Error, left: Duration) -> Result<Next> {
        match (error.remedy(), &error) {
            (Remedy::Retry, _) => {}
            // The server's limit may be lower than this deadline.
            (Remedy::GiveUp, Error::Timeout { .. }) => {}
            (Remedy::Refresh, _) => return Ok(Next::Refresh(error)),
            (Remedy::GiveUp | Remedy::RedoStep, _) => return Err(error),
        }
        let pause = self.pauses.next().unwrap_or(MAX_PAUSE);
        self.last = Some(error);
        match left > MARGIN + pause {
            true => Ok(Next::Again(pause)),
            false => Err(self.deadline.timeout(self.missing().unwrap_or_default())),
        }
    }
}

/// Returns whether the server that returned `error` has dropped the job, or is about to. The
/// coordinator then announces another placement, or the end of the job with its reason.
pub(crate) fn drops_job(error: &Error) -> bool {
    matches!(
        error,
        Error::JobFailed { .. }
            | Error::UnknownJob { .. }
            | Error::Storage { .. }
            | Error::Device { .. }
    )
}

/// Returns whether `error` is the answer of a server that has ended the call. Otherwise the
/// connection failed, and the server may still be at work.
pub(crate) fn is_answer(error: &Error) -> bool {
    !matches!(error, Error::Unavailable { .. } | Error::Timeout { .. } | Error::Internal { .. })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
mod tests {
    use super::*;

    fn tries(after: Duration) -> Tries {
        Tries::until(Deadline::after(after))
    }

    fn unavailable() -> Error {
        Error::Unavailable { peer: "shard server 1".into(), cause: "connection reset".into() }
    }

    fn timeout() -> Error {
        Error::Timeout { waiting_for: "rank 3 to commit".into(), waited_ms: 600_000 }
    }

    #[test]
    fn pauses_grow_up_to_a_second_and_differ() {
        let mut tries = tries(Duration::from_secs(3600));
        let pause = |_| match tries.decide(unavailable(), Duration::from_secs(3600)) {
            Ok(Next::Again(pause)) => pause,
            other => panic!("{other:?}"),
        };
        let pauses: Vec<_> = (0..40).map(pause).collect();
        assert!(pauses[0] <= 2 * FIRST_PAUSE, "{pauses:?}");
        assert!(pauses[10..].iter().all(|&pause| pause >= MAX_PAUSE && pause <= 2 * MAX_PAUSE));
        assert!(pauses[10..].iter().any(|&pause| pause != pauses[39]), "{pauses:?}");
    }

    #[test]
    fn a_servers_timeout_before_the_deadline_is_retried_and_reported_at_the_deadline() {
        let mut tries = tries(Duration::from_secs(1500));
        for left in [900, 300] {
            assert!(matches!(
                tries.decide(timeout(), Duration::from_secs(left)),
                Ok(Next::Again(_))
            ));
        }
        let told = Error::Timeout { waiting_for: "rank 3 to commit".into(), waited_ms: 1_500_000 };
        assert_eq!(tries.decide(timeout(), MARGIN), Err(told));
    }

    #[tokio::test]
    async fn a_deadline_during_a_later_try_reports_the_servers_earlier_error() {
        for (error, told) in [(timeout(), "rank 3 to commit"), (unavailable(), "connection reset")]
        {
            let mut tries = tries(Duration::from_millis(20));
            tries.decide(error, Duration::from_secs(10)).unwrap();
            let ended = tries.limit(|| "an answer".into(), std::future::pending::<()>()).await;
            let Err(Error::Timeout { waiting_for, waited_ms: 20 }) = ended else {
                panic!("{ended:?}")
            };
            assert!(waiting_for.contains(told), "{waiting_for}");
        }
    }

    #[tokio::test]
    async fn final_errors_are_not_retried() {
        let left = Error::RankLeft { job: "a".into(), rank: 1, step: 2 };
        let aborted =
            Error::StepAborted { job: "a".into(), step: 2, epoch: 3, cause: "lost".into() };
        for error in [left, aborted, Error::UnknownJob { job: "a".into() }] {
            assert_eq!(tries(Duration::from_secs(10)).next(error.clone()).await, Err(error));
        }
        let moved = Error::NotHere { job: "a".into(), slice: 1 };
        assert_eq!(
            tries(Duration::from_secs(10)).next(moved.clone()).await,
            Ok(Next::Refresh(moved))
        );
    }

    #[tokio::test]
    async fn a_deadline_may_be_arbitrarily_long() {
        assert!(tries(Duration::MAX).timeout() > Duration::from_secs(86_400 * 365));
    }
}
