//! Counts and times calls by method and gRPC code.
//!
//! A call ends with its body, and not with its headers: streams are timed as a whole, and the code
//! is read from the trailers. If a body is dropped before its end, the caller has cancelled the
//! call.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Instant,
};

use http::{HeaderMap, Request, Response};
use http_body::{Body, Frame, SizeHint};
use tonic::Code;
use tower::{Layer, Service};

use crate::metrics::Metrics;

/// Creates [`RequestMetrics`].
#[derive(Clone, Debug)]
pub struct RequestMetricsLayer(pub Arc<Metrics>);

impl<S> Layer<S> for RequestMetricsLayer {
    type Service = RequestMetrics<S>;

    fn layer(&self, inner: S) -> Self::Service {
        RequestMetrics { inner, metrics: self.0.clone() }
    }
}

/// The wrapped service.
#[derive(Clone, Debug)]
pub struct RequestMetrics<S> {
    inner: S,
    metrics: Arc<Metrics>,
}

impl<S, In, Out> Service<Request<In>> for RequestMetrics<S>
where
    S: Service<Request<In>, Response = Response<Out>>,
    S::Future: Send + 'static,
    S::Error: 'static,
    Out: 'static,
{
    type Response = Response<Counted<Out>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<In>) -> Self::Future {
        let call = Call::start(self.metrics.clone(), request.uri().path());
        let response = self.inner.call(request);
        Box::pin(async move {
            let response = response.await?;
            let mut call = call;
            // An error without a response body has its code in the headers.
            call.see(response.headers());
            Ok(response.map(|body| Counted { body: Box::pin(body), call }))
        })
    }
}

/// One call, counted when it is dropped.
#[derive(Debug)]
struct Call {
    metrics: Arc<Metrics>,
    method: String,
    started: Instant,
    code: Code,
}

impl Call {
    fn start(metrics: Arc<Metrics>, path: &str) -> Self {
        let method = metrics.method(path).to_owned();
        metrics.request_started(&method);
        Self { metrics, method, started: Instant::now(), code: Code::Cancelled }
    }

    fn see(&mut self, headers: &HeaderMap) {
        if let Some(code) = headers.get("grpc-status") {
            self.code = Code::from_bytes(code.as_bytes());
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let code = format!("{:?}", self.code);
        self.metrics.request_ended(&self.method, &code, self.started.elapsed());
    }
}

/// A body that records how its call ended.
#[derive(Debug)]
pub struct Counted<B> {
    body: Pin<Box<B>>,
    call: Call,
}

impl<B: Body> Body for Counted<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let frame = ready!(self.body.as_mut().poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(trailers) = frame.trailers_ref()
        {
            self.call.see(trailers);
        }
        Poll::Ready(frame)
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

    use futures_util::StreamExt;
    use http_body_util::{BodyExt, StreamBody};
    use tower::{ServiceExt, service_fn};

    use super::*;

    /// Calls a service that responds with `headers`, one byte of data and trailers, and returns the
    /// body of the response.
    async fn call(metrics: &Arc<Metrics>, headers: HeaderMap) -> Counted<impl Body> {
        let inner = service_fn(|_: Request<()>| {
            let frames =
                [Frame::data(&b"x"[..]), Frame::trailers(status("0"))].map(Ok::<_, Infallible>);
            let mut response = Response::new(StreamBody::new(futures_util::stream::iter(frames)));
            *response.headers_mut() = headers.clone();
            std::future::ready(Ok::<_, Infallible>(response))
        });
        let request = Request::builder().uri("/zeroshard.v1.DataService/Pull").body(()).unwrap();
        RequestMetricsLayer(metrics.clone())
            .layer(inner)
            .oneshot(request)
            .await
            .unwrap()
            .into_body()
    }

    fn status(code: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(
            http::HeaderName::from_static("grpc-status"),
            code.parse().unwrap(),
        )])
    }

    fn counted(metrics: &Metrics, code: &str) -> bool {
        let line = format!(
            "zeroshard_requests_total{{code=\"{code}\",method=\"/zeroshard.v1.DataService/Pull\"}} 1"
        );
        metrics.text().contains(&line)
    }

    #[tokio::test]
    async fn the_code_of_a_stream_is_in_its_trailers() {
        let metrics = Metrics::new();
        let body = call(&metrics, HeaderMap::new()).await;
        assert!(!counted(&metrics, "Ok"), "the call is still open");
        assert!(body.collect().await.is_ok());
        assert!(counted(&metrics, "Ok"));
    }

    #[tokio::test]
    async fn the_code_of_a_refusal_is_in_its_headers() {
        let metrics = Metrics::new();
        drop(call(&metrics, status("5")).await);
        assert!(counted(&metrics, "NotFound"));
    }

    #[tokio::test]
    async fn a_body_dropped_before_its_end_counts_as_cancelled() {
        let metrics = Metrics::new();
        let body = call(&metrics, HeaderMap::new()).await;
        let first = body.into_data_stream().next().await;
        assert!(first.is_some());
        assert!(counted(&metrics, "Cancelled"));
    }
}
