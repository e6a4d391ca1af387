//! Ends a call whose handler panics, and all later calls, with an error.
//!
//! The servers of this process have then failed: see [`Failure`]. Open calls are ended as well,
//! including those that wait.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    task::{Context, Poll},
};

use axum::{
    body::Body,
    extract::{Request, State},
    middleware::Next,
    response::Response,
};
use bytes::Bytes;
use http::HeaderMap;
use http_body::{Frame, SizeHint};
use tokio_util::sync::WaitForCancellationFutureOwned;
use zeroshard_proto::status::to_status;

use crate::failure::Failure;

/// Answers a request. The state of a handler that panics is never used again: no call passes this
/// layer after the failure.
pub(crate) async fn catch(
    State(failure): State<Failure>,
    request: Request,
    next: Next,
) -> Response {
    let method = request.uri().path().to_owned();
    let answer = tokio::select! {
        biased;
        () = failure.failed() => None,
        answer = failure.guard(&method, next.run(request)) => answer,
    };
    let Some(answer) = answer else { return to_status(failure.error()).into_http() };
    let failed = Box::pin(failure.failed());
    answer.map(|body| Body::new(Guarded { body: Some(body), failure, failed, method }))
}

/// A body that ends with an error when the servers have failed.
#[derive(Debug)]
struct Guarded {
    /// `None` after the error.
    body: Option<Body>,
    failure: Failure,
    failed: Pin<Box<WaitForCancellationFutureOwned>>,
    method: String,
}

impl http_body::Body for Guarded {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Self { body, failure, failed, method } = &mut *self;
        let Some(inner) = body else { return Poll::Ready(None) };
        if failed.as_mut().poll(cx).is_pending() {
            match catch_unwind(AssertUnwindSafe(|| Pin::new(inner).poll_frame(cx))) {
                Ok(polled) => return polled,
                Err(panic) => failure.report(method, &*panic),
            }
        }
        *body = None;
        let mut trailers = HeaderMap::new();
        let status = to_status(failure.error());
        if status.add_header(&mut trailers).is_err() {
            trailers.insert("grpc-status", (status.code() as u16).into());
        }
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(|body| body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(SizeHint::default, |body| body.size_hint())
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use axum::{Router, middleware::from_fn_with_state};
    use futures_util::StreamExt;
    use http_body_util::{BodyExt, StreamBody};
    use tower::ServiceExt;
    use zeroshard_model::Error;

    use tonic::Status;
    use zeroshard_proto::status::from_status;

    use super::*;

    /// Handles a call; the path selects the behaviour.
    async fn handle(request: Request) -> Response {
        assert_ne!(request.uri().path(), "/panics", "in the handler");
        let panics = request.uri().path() == "/panics/later";
        let frames = futures_util::stream::iter([1, 2]).map(move |frame| {
            assert!(frame == 1 || !panics, "in the body");
            Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"x")))
        });
        if request.uri().path() == "/waits" {
            std::future::pending::<()>().await;
        }
        let waits = futures_util::stream::pending::<Result<Frame<Bytes>, Infallible>>();
        Response::new(match request.uri().path() {
            "/waits/later" => Body::new(StreamBody::new(waits)),
            _ => Body::new(StreamBody::new(frames)),
        })
    }

    async fn call(failure: &Failure, path: &str) -> Result<usize, Error> {
        let answer = Router::new()
            .fallback(handle)
            .layer(from_fn_with_state(failure.clone(), catch))
            .oneshot(Request::builder().uri(path).body(Body::empty()).unwrap())
            .await
            .unwrap();
        if let Some(status) = Status::from_header_map(answer.headers()) {
            return Err(from_status(&status, "server"));
        }
        let body = answer.into_body().collect().await.unwrap();
        match body.trailers().and_then(Status::from_header_map) {
            Some(status) => Err(from_status(&status, "server")),
            None => Ok(body.to_bytes().len()),
        }
    }

    fn told(answer: Result<usize, Error>) -> String {
        match answer {
            Err(Error::Unavailable { cause, .. }) => cause,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_handler_or_body_that_panics_fails_its_call_and_all_later_ones() {
        for path in ["/panics", "/panics/later"] {
            let failure = Failure::default();
            assert_eq!(call(&failure, "/").await, Ok(2));
            let cause = told(call(&failure, path).await);
            assert!(cause.contains(&format!("{path} panicked: ")), "{cause}");
            assert_eq!(told(call(&failure, "/").await), cause);
        }
    }

    #[tokio::test]
    async fn calls_that_wait_are_ended() {
        let failure = Failure::default();
        let fail = async {
            tokio::task::yield_now().await;
            failure.report("another task", &"oh");
        };
        let (answer, body, ()) =
            tokio::join!(call(&failure, "/waits"), call(&failure, "/waits/later"), fail);
        assert_eq!(told(answer), told(body));
    }
}
