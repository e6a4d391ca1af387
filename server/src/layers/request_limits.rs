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

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Frame, SizeHint};
use tokio::time::Sleep;
use tonic::{Status, body::Body};
use tower::{Layer, Service};
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

/// Creates [`LimitRequests`].
#[derive(Clone, Debug)]
pub struct RequestLimitsLayer {
    calls: Arc<Budget>,
    bytes: Arc<Budget>,
}

impl RequestLimitsLayer {
    /// The limits of a server with this memory; `None` if it is not known.
    pub fn new(memory: Option<u64>) -> Self {
        let bytes = memory.map_or(MAX_REQUEST_BYTES, |memory| (memory / 8).min(MAX_REQUEST_BYTES));
        Self { calls: Budget::new(MAX_CALLS as u64), bytes: Budget::new(bytes) }
    }
}

impl<S> Layer<S> for RequestLimitsLayer {
    type Service = LimitRequests<S>;

    fn layer(&self, inner: S) -> Self::Service {
        LimitRequests { inner, limits: self.clone() }
    }
}

/// The wrapped service.
#[derive(Clone, Debug)]
pub struct LimitRequests<S> {
    inner: S,
    limits: RequestLimitsLayer,
}

impl<S, Out> Service<Request<Body>> for LimitRequests<S>
where
    S: Service<Request<Body>, Response = Response<Out>>,
    S::Future: Send + 'static,
    S::Error: 'static,
    Out: Default + 'static,
{
    type Response = Response<Counted<Out>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let call = match self.enter(&request) {
            Ok(call) => call,
            Err(error) => {
                return Box::pin(async move {
                    let refusal = to_status(error).into_http::<Out>();
                    Ok(refusal.map(|body| Counted { body: Box::pin(body), _call: None }))
                });
            }
        };
        let received = Arc::new(Mutex::new(None));
        let path = request.uri().path();
        let (is_streamed, is_held) = (is_streamed(path), path.ends_with("/CreateJob"));
        let largest = if call.is_none() { MAX_PROBE } else { u64::MAX };
        let request = match is_streamed {
            true => request,
            false => request.map(|body| {
                Body::new(Metered::new(body, largest, &self.limits, &received, is_held))
            }),
        };
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            drop(received);
            Ok(answer?.map(|body| Counted { body: Box::pin(body), _call: call }))
        })
    }
}

impl<S> LimitRequests<S> {
    /// Counts a call; `None` for a probe of the health of the server, which is always answered.
    ///
    /// # Errors
    /// [`Error::LimitExceeded`] if there are too many connections, and [`Error::Unavailable`] if
    /// there are too many open calls.
    fn enter(&self, request: &Request<Body>) -> Result<Option<Space>, Error> {
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
        let call = self.limits.calls.take(1);
        call.map(Some).ok_or_else(|| busy("open calls", self.limits.calls.limit()))
    }
}

/// Returns whether the messages of the method are used as they arrive.
fn is_streamed(path: &str) -> bool {
    path == "/zeroshard.v1.DataService/Push" || path.ends_with("/Serve")
}

/// The error of a call that can be repeated when other calls have ended.
fn busy(what: &str, limit: u64) -> Error {
    let cause = format!("the limit of {what} of this server, {limit}, is reached");
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
        limits: &RequestLimitsLayer,
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
    fn count(&mut self, data: &[u8]) -> Result<(), Status> {
        self.arrived += data.len() as u64;
        if self.arrived > self.largest {
            let expected = format!("at most {} bytes", self.largest);
            return Err(to_status(Error::invalid("size of a probe", "too large", expected)));
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
            return Err(to_status(busy("bytes of requests that are being received", limit)));
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
                Some(counted.map(|()| frame))
            }
            Some(Err(status)) => Some(Err(status)),
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

/// The body of an answer. Its call is open until it is dropped.
#[derive(Debug)]
pub struct Counted<B> {
    body: Pin<Box<B>>,
    _call: Option<Space>,
}

impl<B: Default> Default for Counted<B> {
    fn default() -> Self {
        Self { body: Box::pin(B::default()), _call: None }
    }
}

impl<B: http_body::Body> http_body::Body for Counted<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        self.body.as_mut().poll_frame(cx)
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

    use http_body_util::{BodyExt, Full};
    use tower::service_fn;

    use super::*;

    fn limits(calls: u64, bytes: u64) -> RequestLimitsLayer {
        RequestLimitsLayer { calls: Budget::new(calls), bytes: Budget::new(bytes) }
    }

    fn request(path: &str, bytes: u64) -> Request<Body> {
        let body = Body::new(Full::new(Bytes::from(vec![0; bytes as usize])));
        Request::builder().uri(path).body(body).unwrap()
    }

    /// Receives a request, and answers with the code of the error in it.
    async fn receive(request: Request<Body>) -> Result<Response<String>, Infallible> {
        let code = match request.into_body().collect().await {
            Ok(_) => tonic::Code::Ok,
            Err(status) => status.code(),
        };
        Ok(Response::new(format!("{code:?}")))
    }

    async fn answer(
        limits: &RequestLimitsLayer,
        request: Request<Body>,
    ) -> Response<Counted<String>> {
        limits.layer(service_fn(receive)).call(request).await.unwrap()
    }

    #[tokio::test]
    async fn a_call_counts_until_its_answer_is_dropped_and_probes_do_not_count() {
        let limits = limits(1, 0);
        let is_refused = |answer: &Response<_>| answer.headers().contains_key("grpc-status");
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
        let text = async |request| answer(&limits, request).await.into_body().body.clone();
        assert_eq!(*text(request("/a", SMALL + 100)).await, "Ok");
        assert_eq!(*text(request("/a", SMALL + 101)).await, "Unavailable");
        assert_eq!(limits.bytes.used(), 0);
        let _others = limits.bytes.take(100).unwrap();
        assert_eq!(*text(request("/a", SMALL)).await, "Ok");
        assert_eq!(*text(request("/a", SMALL + 1)).await, "Unavailable");
        assert_eq!(
            *text(request("/zeroshard.v1.DataService/Pull", SMALL + 1)).await,
            "Unavailable"
        );
        assert_eq!(*text(request("/zeroshard.v1.DataService/Push", SMALL + 1)).await, "Ok");
    }

    #[tokio::test]
    async fn the_bytes_of_a_job_count_until_it_is_created_and_others_until_they_have_arrived() {
        let limits = limits(10, 100);
        for (path, expected) in [("/a", 0), ("/zeroshard.v1.CoordinatorService/CreateJob", 7)] {
            let bytes = limits.bytes.clone();
            let receive = service_fn(move |request: Request<Body>| {
                let bytes = bytes.clone();
                async move {
                    request.into_body().collect().await.unwrap();
                    Ok::<_, Infallible>(Response::new(bytes.used().to_string()))
                }
            });
            let answer = limits.layer(receive).call(request(path, SMALL + 7)).await.unwrap();
            assert_eq!(*answer.into_body().body, expected.to_string(), "{path}");
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
                assert_eq!(*refused.into_body().body, "Unavailable");
            }
        }
        assert_eq!(limits.bytes.used(), 0);
    }

    #[tokio::test]
    async fn a_probe_is_answered_also_on_a_refused_connection_and_is_small() {
        let limits = limits(0, 0);
        let check = "/grpc.health.v1.Health/Check";
        let text = async |request| answer(&limits, request).await.into_body().body.clone();
        assert_eq!(*text(request(check, MAX_PROBE)).await, "Ok");
        assert_ne!(*text(request(check, MAX_PROBE + 1)).await, "Ok");
        let watch = answer(&limits, request("/grpc.health.v1.Health/Watch", 0)).await;
        assert!(watch.headers().contains_key("grpc-status"), "a stream counts");
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_does_not_arrive_ends_with_an_error() {
        let body = Body::new(http_body_util::StreamBody::new(futures_util::stream::pending::<
            Result<Frame<Bytes>, Infallible>,
        >()));
        let request = Request::builder().uri("/a").body(body).unwrap();
        assert_eq!(*answer(&limits(1, 1), request).await.into_body().body, "DeadlineExceeded");
    }
}
