//! Counts and times calls by method and gRPC code.
//!
//! A call ends with its body, and not with its headers: streams are timed as a whole, and the code
//! is read from the trailers. If a body is dropped before its end, the caller has cancelled the
//! call.

use std::{sync::Arc, time::Instant};

use axum::{
    body::Body,
    extract::{Request, State},
    middleware::Next,
    response::Response,
};
use http::HeaderMap;
use http_body_util::BodyExt;
use tonic::Code;

use crate::metrics::Metrics;

/// Counts and times a request.
pub(crate) async fn count(
    State(metrics): State<Arc<Metrics>>,
    request: Request,
    next: Next,
) -> Response {
    let mut call = Call::start(metrics, request.uri().path());
    let response = next.run(request).await;
    // An error without a response body has its code in the headers.
    call.see(response.headers());
    response.map(|body| {
        Body::new(body.map_frame(move |frame| {
            if let Some(trailers) = frame.trailers_ref() {
                call.see(trailers);
            }
            frame
        }))
    })
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

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use axum::{Router, middleware::from_fn_with_state};
    use bytes::Bytes;
    use futures_util::StreamExt;
    use http_body::Frame;
    use http_body_util::StreamBody;
    use tower::ServiceExt;

    use super::*;

    /// Calls a service that responds with `headers`, one byte of data and trailers, and returns the
    /// body of the response.
    async fn call(metrics: &Arc<Metrics>, headers: HeaderMap) -> Body {
        let inner = async move || {
            let frames = [Frame::data(Bytes::from("x")), Frame::trailers(status("0"))]
                .map(Ok::<_, Infallible>);
            let body = Body::new(StreamBody::new(futures_util::stream::iter(frames)));
            (headers, body)
        };
        let request = Request::builder().uri("/zeroshard.v1.DataService/Pull");
        Router::new()
            .fallback(inner)
            .layer(from_fn_with_state(metrics.clone(), count))
            .oneshot(request.body(Body::empty()).unwrap())
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
