//! Limits the open calls of a server, and the bytes of requests that it is receiving.
//!
//! A client may send many large requests, or stop in the middle of them. What a server has received
//! of all of them together is bounded, except for pushes and for control streams, whose messages
//! are used as they arrive.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    body::Body,
    extract::{Request, State},
    middleware::Next,
    response::Response,
};
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt;
use tokio::time::Sleep;
use tonic::Status;
use zeroshard_model::{
    Error,
    limits::{MAX_CALLS, MAX_REQUEST_BYTES},
};
use zeroshard_proto::status::to_status;
use zeroshard_shard::budget::{Budget, Space};

use super::is_probe;
use crate::connection::Peer;

/// The bytes of each request that do not count, so that calls with small requests are answered
/// while a client has used up the others.
const SMALL: u64 = 16 << 10;

/// The maximum size of a probe.
const MAX_PROBE: u64 = 1024;

/// The time limit for receiving a request.
const RECEIVE_LIMIT: Duration = Duration::from_secs(60);

/// What a server has left for calls and for the bytes of requests. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct RequestLimits {
    calls: Arc<Budget>,
    bytes: Arc<Budget>,
}

/// Answers a request within the limits.
pub(crate) async fn limit(
    State(limits): State<RequestLimits>,
    request: Request,
    next: Next,
) -> Response {
    let call = match limits.enter(&request) {
        Ok(call) => call,
        Err(error) => return to_status(error).into_http(),
    };
    let received = Arc::new(Mutex::new(None));
    let path = request.uri().path();
    let (is_streamed, is_held) = (is_streamed(path), path.ends_with("/CreateJob"));
    let largest = if call.is_none() { MAX_PROBE } else { u64::MAX };
    let request = match is_streamed {
        true => request,
        false => {
            request.map(|body| Body::new(Metered::new(body, largest, &limits, &received, is_held)))
        }
    };
    let answer = next.run(request).await;
    drop(received);
    // The call is open until the body of its answer is dropped.
    answer.map(|body| {
        Body::new(body.map_frame(move |frame| {
            let _open = &call;
            frame
        }))
    })
}

impl RequestLimits {
    /// The limits of a server with this memory; `None` if it is not known.
    pub(crate) fn new(memory: Option<u64>) -> Self {
        let bytes = memory.map_or(MAX_REQUEST_BYTES, |memory| (memory / 8).min(MAX_REQUEST_BYTES));
        Self { calls: Budget::new(MAX_CALLS as u64), bytes: Budget::new(bytes) }
    }

    /// Counts a call; `None` for a probe of the health of the server, which is always answered.
    ///
    /// # Errors
    /// [`Error::LimitExceeded`] if there are too many connections, and [`Error::Unavailable`] if
    /// there are too many open calls.
    fn enter(&self, request: &Request) -> Result<Option<Space>, Error> {
        if is_probe(request.uri().path()) {
            return Ok(None);
        }
        if let Some(limit) = request.extensions().get::<Peer>().and_then(Peer::refused) {
            return Err(Error::LimitExceeded {
                what: "connections to this server (--max-connections)".to_owned(),
                limit,
                remedy: "close connections that are not used, or increase the limit".to_owned(),
            });
        }
        let call = self.calls.take(1);
        call.map(Some).ok_or_else(|| busy("open calls", self.calls.limit()))
    }
}

/// Returns whether the messages of the method are used as they arrive.
fn is_streamed(path: &str) -> bool {
    path == "/zeroshard.v1.DataService/Push" || path.ends_with("/Serve")
}

/// The error of a call that can be repeated when other calls have ended.
fn busy(what: &str, limit: u64) -> Error {
    let cause = format!("the limit of {limit} {what} of this server is reached");
    Error::Unavailable { peer: "this server".to_owned(), cause }
}

/// The bytes that have been received of a request.
type Received = Arc<Mutex<Option<Space>>>;

/// The size of the prefix of a gRPC message: the compression flag, and the size of the message.
const PREFIX: usize = 5;

/// The body of a request whose bytes are counted.
struct Metered {
    body: Body,
    /// The maximum number of bytes of the request.
    largest: u64,
    bytes: Arc<Budget>,
    /// The number of received bytes.
    arrived: u64,
    /// The first bytes of the body, up to [`PREFIX`] bytes.
    prefix: Vec<u8>,
    /// The number of bytes that are reserved in the budget.
    reserved: u64,
    received: Received,
    /// `true` if the bytes count until the call is answered, because the message that was decoded
    /// from them is as large and is kept.
    is_held: bool,
    limit: Pin<Box<Sleep>>,
}

impl Metered {
    /// Counts the bytes of `body`, which may have at most `largest` bytes.
    fn new(
        body: Body,
        largest: u64,
        limits: &RequestLimits,
        received: &Received,
        is_held: bool,
    ) -> Self {
        let limit = Box::pin(tokio::time::sleep(RECEIVE_LIMIT));
        let (bytes, received) = (limits.bytes.clone(), received.clone());
        let (arrived, prefix, reserved) = (0, Vec::new(), SMALL);
        Self { body, largest, bytes, arrived, prefix, reserved, received, is_held, limit }
    }

    /// Counts received bytes, and reserves the declared size of the message as soon as it is known.
    /// A request that does not fit is thus refused at its beginning, before it fills memory.
    fn count(&mut self, data: &[u8]) -> Result<(), Error> {
        self.arrived += data.len() as u64;
        if self.arrived > self.largest {
            let sentence = format!("the probe request exceeds {} bytes", self.largest);
            return Err(Error::refused(sentence));
        }
        let missing = PREFIX - self.prefix.len();
        self.prefix.extend(data.iter().take(missing));
        let needed = self.arrived.max(self.declared());
        let more = needed.saturating_sub(self.reserved);
        if more == 0 {
            return Ok(());
        }
        let mut received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        let is_counted = match &mut *received {
            Some(space) => space.grow(more),
            none => {
                *none = self.bytes.take(more);
                none.is_some()
            }
        };
        if !is_counted {
            let limit = self.bytes.limit();
            return Err(busy("bytes of requests that are being received", limit));
        }
        self.reserved = needed;
        Ok(())
    }

    /// The declared size of the message with its prefix; 0 while it is unknown. Also 0 for a size
    /// above the limit, which the service refuses.
    fn declared(&self) -> u64 {
        match self.prefix[..] {
            [_, a, b, c, d] => {
                let size = u64::from(u32::from_be_bytes([a, b, c, d])) + PREFIX as u64;
                if size <= self.bytes.limit() { size } else { 0 }
            }
            _ => 0,
        }
    }

    /// The request is complete.
    fn end(&self) {
        if !self.is_held {
            *self.received.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
}

impl http_body::Body for Metered {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = match Pin::new(&mut self.body).poll_frame(cx) {
            Poll::Pending => {
                ready!(self.limit.as_mut().poll(cx));
                let waited_ms = RECEIVE_LIMIT.as_millis() as u64;
                let waiting_for = "the rest of the request".to_owned();
                return Poll::Ready(Some(Err(to_status(Error::Timeout {
                    waiting_for,
                    waited_ms,
                }))));
            }
            Poll::Ready(frame) => frame,
        };
        Poll::Ready(match frame {
            Some(Ok(frame)) => {
                let counted = frame.data_ref().map_or(Ok(()), |data| self.count(data));
                Some(counted.map(|()| frame).map_err(to_status))
            }
            Some(Err(error)) => Some(Err(Status::from_error(error.into_inner()))),
            None => {
                self.end();
                None
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use axum::{Router, middleware::from_fn_with_state};
    use http_body_util::Full;
    use tower::ServiceExt;

    use super::*;

    fn limits(calls: u64, bytes: u64) -> RequestLimits {
        RequestLimits { calls: Budget::new(calls), bytes: Budget::new(bytes) }
    }

    fn request(path: &str, bytes: u64) -> Request {
        let body = Body::new(Full::new(Bytes::from(vec![0; bytes as usize])));
        Request::builder().uri(path).body(body).unwrap()
    }

    /// Receives a request, and answers with the code of the error in it.
    async fn receive(request: Request) -> String {
        let code = match request.into_body().collect().await {
            Ok(_) => tonic::Code::Ok,
            Err(error) => Status::from_error(error.into_inner()).code(),
        };
        format!("{code:?}")
    }

    async fn answer(limits: &RequestLimits, request: Request) -> Response {
        let layer = from_fn_with_state(limits.clone(), limit);
        Router::new().fallback(receive).layer(layer).oneshot(request).await.unwrap()
    }

    async fn text(answer: Response) -> String {
        let body = answer.into_body().collect().await.unwrap();
        String::from_utf8(body.to_bytes().to_vec()).unwrap()
    }

    // promise: isolation
    #[tokio::test]
    async fn a_call_counts_until_its_answer_is_dropped_and_probes_do_not_count() {
        let limits = limits(1, 0);
        let is_refused = |answer: &Response| answer.headers().contains_key("grpc-status");
        let first = answer(&limits, request("/a", 0)).await;
        let second = answer(&limits, request("/a", 0)).await;
        assert!(!is_refused(&first) && is_refused(&second));
        assert!(!is_refused(&answer(&limits, request("/grpc.health.v1.Health/Check", 0)).await));
        drop(first);
        assert!(!is_refused(&answer(&limits, request("/a", 0)).await));
        assert_eq!(limits.calls.used(), 0);
    }

    #[tokio::test]
    async fn the_bytes_of_large_requests_count_until_they_are_answered() {
        let limits = limits(10, 100);
        let text = async |request| text(answer(&limits, request).await).await;
        assert_eq!(text(request("/a", SMALL + 100)).await, "Ok");
        assert_eq!(text(request("/a", SMALL + 101)).await, "Unavailable");
        assert_eq!(limits.bytes.used(), 0);
        let _others = limits.bytes.take(100).unwrap();
        assert_eq!(text(request("/a", SMALL)).await, "Ok");
        assert_eq!(text(request("/a", SMALL + 1)).await, "Unavailable");
        assert_eq!(text(request("/zeroshard.v1.DataService/Pull", SMALL + 1)).await, "Unavailable");
        assert_eq!(text(request("/zeroshard.v1.DataService/Push", SMALL + 1)).await, "Ok");
    }

    #[tokio::test]
    async fn the_bytes_of_a_job_count_until_it_is_created_and_others_until_they_have_arrived() {
        let limits = limits(10, 100);
        for (path, expected) in [("/a", 0), ("/zeroshard.v1.CoordinatorService/CreateJob", 7)] {
            let bytes = limits.bytes.clone();
            let receive = async move |request: Request| {
                request.into_body().collect().await.unwrap();
                bytes.used().to_string()
            };
            let layer = from_fn_with_state(limits.clone(), limit);
            let service = Router::new().fallback(receive).layer(layer);
            let answer = service.oneshot(request(path, SMALL + 7)).await.unwrap();
            assert_eq!(text(answer).await, expected.to_string(), "{path}");
        }
        assert_eq!(limits.bytes.used(), 0);
    }

    #[tokio::test]
    async fn a_request_counts_with_its_declared_size() {
        let limits = limits(10, 4 * SMALL);
        let begun = |declared: u64| {
            let prefix = [&[0][..], &(declared as u32).to_be_bytes()].concat();
            let first =
                futures_util::stream::iter([Ok::<_, Infallible>(Frame::data(prefix.into()))]);
            let rest = futures_util::stream::pending();
            let body = http_body_util::StreamBody::new(futures_util::StreamExt::chain(first, rest));
            Request::builder().uri("/a").body(Body::new(body)).unwrap()
        };
        let waits = answer(&limits, begun(3 * SMALL));
        tokio::select! {
            biased;
            _ = waits => panic!("the request is not complete"),
            refused = answer(&limits, begun(3 * SMALL + SMALL / 2)) => {
                assert_eq!(text(refused).await, "Unavailable");
            }
        }
        assert_eq!(limits.bytes.used(), 0);
    }

    #[tokio::test]
    async fn a_probe_is_answered_also_on_a_refused_connection_and_is_small() {
        let limits = limits(0, 0);
        let check = "/grpc.health.v1.Health/Check";
        let text = async |request| text(answer(&limits, request).await).await;
        assert_eq!(text(request(check, MAX_PROBE)).await, "Ok");
        assert_ne!(text(request(check, MAX_PROBE + 1)).await, "Ok");
        let watch = answer(&limits, request("/grpc.health.v1.Health/Watch", 0)).await;
        assert!(watch.headers().contains_key("grpc-status"), "a stream counts");
    }

    // promise: isolation
    #[tokio::test(start_paused = true)]
    async fn a_request_that_does_not_arrive_ends_with_an_error() {
        let body = Body::new(http_body_util::StreamBody::new(futures_util::stream::pending::<
            Result<Frame<Bytes>, Infallible>,
        >()));
        let request = Request::builder().uri("/a").body(body).unwrap();
        assert_eq!(text(answer(&limits(1, 1), request).await).await, "DeadlineExceeded");
    }
}
