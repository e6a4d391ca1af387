//! Deadlines of operations, and the header `grpc-timeout` in which a gRPC call carries its
//! deadline.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::time::Instant;
use zeroshard_model::{Error, Result};

/// The gRPC header that contains the time limit of a call.
const TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");
/// The largest number that the header may contain.
const MAX_NUMBER: u128 = 99_999_999;
/// A server stops waiting this long before the deadline of a call. Its error names the missing
/// input, and must reach the caller before the deadline. At the deadline itself tonic's server ends
/// the call with an error that carries no such information. If the time limit of a call is less
/// than twice this duration, the server waits for half of the limit.
pub const MARGIN: Duration = Duration::from_millis(200);
/// A deadline that is later than the clock can represent.
const FAR_FUTURE: Duration = Duration::from_secs(86_400 * 365 * 30);

/// The time at which an operation must have ended.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    at: Instant,
    /// The duration that the error message states.
    after: Duration,
}

impl Deadline {
    /// A deadline at `after` from now.
    pub fn after(after: Duration) -> Self {
        let now = Instant::now();
        Self { at: now.checked_add(after).unwrap_or_else(|| now + FAR_FUTURE), after }
    }

    /// The time at which a server must stop waiting in a call that has just arrived: [`MARGIN`]
    /// before the deadline of the call. `None` if the call has no deadline, or a malformed one.
    pub fn of_call(headers: &HeaderMap) -> Option<Self> {
        let timeout = parse(headers.get(TIMEOUT)?.to_str().ok()?)?;
        Some(Self::after(timeout - MARGIN.min(timeout / 2)))
    }

    /// This deadline, or `limit` from now if that is earlier.
    #[must_use]
    pub fn at_most(self, limit: Duration) -> Self {
        if self.left() > limit { Self::after(limit) } else { self }
    }

    /// The time that is left until the deadline.
    pub fn left(&self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// Waits for the result of `work`.
    ///
    /// # Errors
    /// [`Error::Timeout`] with `waiting_for` if `work` has not ended at the deadline.
    pub async fn limit<T>(
        &self,
        waiting_for: impl FnOnce() -> String,
        work: impl Future<Output = T>,
    ) -> Result<T> {
        // At the deadline, `work` may end with a transport error that does not name the missing
        // input.
        tokio::select! {
            biased;
            () = tokio::time::sleep_until(self.at) => Err(self.timeout(waiting_for())),
            result = work => Ok(result),
        }
    }

    /// The error to return after the deadline.
    pub fn timeout(&self, waiting_for: String) -> Error {
        Error::Timeout { waiting_for, waited_ms: self.after.as_millis() as u64 }
    }
}

/// Sets the time limit of a call to `timeout`.
pub fn write(headers: &mut HeaderMap, timeout: Duration) {
    let seconds = u128::from(timeout.as_secs());
    let units = [
        (timeout.as_micros(), 'u'),
        (timeout.as_millis(), 'm'),
        (seconds, 'S'),
        (seconds / 60, 'M'),
    ];
    let (number, unit) = units
        .into_iter()
        .find(|&(number, _)| number <= MAX_NUMBER)
        .unwrap_or(((seconds / 3600).min(MAX_NUMBER), 'H'));
    let value = HeaderValue::from_str(&format!("{number}{unit}"));
    headers.insert(TIMEOUT, value.expect("digits and a letter"));
}

fn parse(value: &str) -> Option<Duration> {
    let unit = value.char_indices().next_back()?;
    let digits = &value[..unit.0];
    if digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    Some(match unit.1 {
        'H' => Duration::from_secs(number * 3600),
        'M' => Duration::from_secs(number * 60),
        'S' => Duration::from_secs(number),
        'm' => Duration::from_millis(number),
        'u' => Duration::from_micros(number),
        'n' => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(TIMEOUT, HeaderValue::from_static(value))])
    }

    #[test]
    fn a_timeout_survives_the_header_with_eight_digits() {
        let year = Duration::from_secs(86_400 * 365);
        for timeout in [Duration::ZERO, Duration::from_micros(1_500), MARGIN, year, 30 * year] {
            let mut headers = HeaderMap::new();
            write(&mut headers, timeout);
            let read = parse(headers[TIMEOUT].to_str().unwrap()).unwrap();
            assert!(read <= timeout && timeout - read <= timeout / 1_000_000, "{timeout:?}");
        }
        let mut headers = HeaderMap::new();
        write(&mut headers, Duration::MAX);
        assert_eq!(headers[TIMEOUT], "99999999H");
    }

    #[test]
    fn a_server_waits_for_less_than_the_time_limit_of_the_call() {
        let wait = |value| Deadline::of_call(&headers(value)).map(|deadline| deadline.after);
        assert_eq!(wait("10S"), Some(Duration::from_millis(9_800)));
        assert_eq!(wait("300m"), Some(Duration::from_millis(150)));
        assert_eq!(wait("1H"), Some(Duration::from_millis(3_599_800)));
        for malformed in ["", "S", "1", "1s", "+1S", "123456789S", "1 S"] {
            assert_eq!(wait(malformed), None, "{malformed:?}");
        }
        assert!(Deadline::of_call(&HeaderMap::new()).is_none());
    }

    #[tokio::test]
    async fn at_the_deadline_the_error_names_the_missing_input() {
        let deadline = Deadline::after(Duration::MAX).at_most(Duration::from_millis(2));
        let expired = deadline.limit(|| "rank 1".to_owned(), std::future::pending::<()>()).await;
        let told = Error::Timeout { waiting_for: "rank 1".to_owned(), waited_ms: 2 };
        assert_eq!(expired, Err(told));
        assert_eq!(Deadline::after(MARGIN).limit(String::new, async { 7 }).await, Ok(7));
    }
}
