//! Measurements of the connection to this server, for operators.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use tokio::{sync::Semaphore, time::sleep};
use tokio_util::sync::CancellationToken;
use zeroshard_model::{Error, Result, version::VERSION};
use zeroshard_proto::pb;

use crate::clock::unix_ms;

/// The maximum size of a measurement.
const MAX_BYTES: u64 = 256 << 20;
/// The time limit of a measurement. It applies even if the caller reads nothing.
const LIMIT: Duration = Duration::from_secs(30);
/// The payload of one message.
static ZEROS: [u8; 256 << 10] = [0; 256 << 10];

/// Permits one measurement at a time, so that measurements do not displace the traffic of jobs.
#[derive(Debug, Clone)]
pub(super) struct Gate(Arc<Semaphore>);

impl Default for Gate {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

/// Starts a measurement, and returns its messages.
///
/// # Errors
/// [`Error::Invalid`] for more than [`MAX_BYTES`], [`Error::LimitExceeded`] during another
/// measurement.
pub(super) fn measure(
    gate: &Gate,
    bytes: u64,
) -> Result<impl Stream<Item = pb::MeasureResponse> + Send + use<>> {
    if bytes > MAX_BYTES {
        let expected = format!("at most {MAX_BYTES}");
        return Err(Error::invalid("number of bytes of a measurement", bytes, expected));
    }
    let permit = gate.0.clone().try_acquire_owned().map_err(|_| Error::LimitExceeded {
        what: "simultaneous measurements of a shard server".to_owned(),
        limit: 1,
        remedy: "try again after the other measurement has ended".to_owned(),
    })?;
    let ended = CancellationToken::new();
    let guard = ended.clone().drop_guard();
    // A separate task enforces the limit, because the stream is not polled while the caller reads
    // nothing.
    let limit = ended.clone();
    tokio::spawn(async move {
        let _permit = permit;
        limit.run_until_cancelled(sleep(LIMIT)).await;
        limit.cancel();
    });
    let (version, unix_ms) = (VERSION.to_owned(), unix_ms());
    let first = pb::MeasureResponse { version, unix_ms, ..Default::default() };
    let size = ZEROS.len() as u64;
    let data = (0..bytes.div_ceil(size)).map(move |part| {
        let left = (bytes - part * size).min(size) as usize;
        pb::MeasureResponse { data: Bytes::from_static(&ZEROS[..left]), ..Default::default() }
    });
    let messages = stream::iter(std::iter::once(first).chain(data));
    let messages = messages.take_until(ended.cancelled_owned());
    Ok(messages.map(move |message| {
        // The permit is released when the stream is dropped.
        let _ = &guard;
        message
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_measurement_has_all_its_bytes_and_excludes_others_until_it_ends() {
        let gate = Gate::default();
        let bytes = ZEROS.len() as u64 + 1;
        let messages = measure(&gate, bytes).unwrap();
        assert!(matches!(measure(&gate, 1).map(drop), Err(Error::LimitExceeded { .. })));
        let messages: Vec<_> = messages.collect().await;
        assert_eq!(messages[0].version, VERSION);
        let sent: usize = messages.iter().map(|message| message.data.len()).sum();
        assert_eq!(sent as u64, bytes);
        // Another task releases the permit.
        while measure(&gate, 0).is_err() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_measurement_of_too_many_bytes_is_refused() {
        let refused = measure(&Gate::default(), MAX_BYTES + 1).map(drop);
        assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_reads_nothing_excludes_others_for_a_limited_time() {
        let gate = Gate::default();
        let mut stalled = std::pin::pin!(measure(&gate, MAX_BYTES).unwrap());
        assert!(stalled.next().await.is_some());
        sleep(LIMIT * 2).await;
        assert!(measure(&gate, 1).is_ok());
        assert_eq!(stalled.next().await, None);
    }
}
