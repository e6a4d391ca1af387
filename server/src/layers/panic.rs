//! Ends a call whose handler panics, and all later calls, with an error.
//!
//! The servers of this process have then failed: see [`Failure`]. Open calls are ended as well,
//! including those that wait.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    task::{Context, Poll},
};

use futures_util::FutureExt;
use http::{HeaderMap, Request, Response};
use http_body::{Frame, SizeHint};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tower::{Layer, Service};
use zeroshard_proto::status::to_status;

use crate::failure::Failure;

/// Creates [`CatchPanic`].
#[derive(Clone, Debug)]
pub struct PanicLayer(pub Failure);

impl<S> Layer<S> for PanicLayer {
    type Service = CatchPanic<S>;

    fn layer(&self, inner: S) -> Self::Service {
        CatchPanic { inner, failure: self.0.clone() }
    }
}

/// The wrapped service.
#[derive(Clone, Debug)]
pub struct CatchPanic<S> {
    inner: S,
    failure: Failure,
}

impl<S, In, Out> Service<Request<In>> for CatchPanic<S>
where
    S: Service<Request<In>, Response = Response<Out>>,
    S::Future: Send + 'static,
    S::Error: 'static,
    Out: Default + 'static,
{
    type Response = Response<Guarded<Out>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<In>) -> Self::Future {
        let failure = self.failure.clone();
        let method = request.uri().path().to_owned();
        // The state of a handler that panics is never used again: no call passes this layer after
        // the failure.
        let answer = catch_unwind(AssertUnwindSafe(|| self.inner.call(request)));
        Box::pin(async move {
            let answered = async {
                match answer {
                    Ok(answer) => AssertUnwindSafe(answer).catch_unwind().await,
                    Err(panic) => Err(panic),
                }
            };
            tokio::select! {
                biased;
                () = failure.failed() => {}
                answered = answered => match answered {
                    Ok(answered) => return Ok(answered?.map(|body| Guarded::new(body, failure, method))),
                    Err(panic) => failure.report(&method, &*panic),
                },
            }
            let refusal = to_status(failure.error()).into_http::<Out>();
            Ok(refusal.map(|body| Guarded::new(body, failure, method)))
        })
    }
}

/// A body that ends with an error when the servers have failed.
#[derive(Debug)]
pub struct Guarded<B> {
    /// `None` after the error.
    body: Option<Pin<Box<B>>>,
    failure: Failure,
    failed: Pin<Box<WaitForCancellationFutureOwned>>,
    method: String,
}

impl<B> Guarded<B> {
    fn new(body: B, failure: Failure, method: String) -> Self {
        Self { body: Some(Box::pin(body)), failed: Box::pin(failure.failed()), failure, method }
    }
}

impl<B: http_body::Body> http_body::Body for Guarded<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let Self { body, failure, failed, method } = &mut *self;
        let Some(inner) = body else { return Poll::Ready(None) };
        if failed.as_mut().poll(cx).is_pending() {
            let polled: Result<_, Box<dyn Any + Send>> =
                catch_unwind(AssertUnwindSafe(|| inner.as_mut().poll_frame(cx)));
            match polled {
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

    use bytes::Bytes;
    use futures_util::StreamExt;
    use http_body_util::{BodyExt, StreamBody};
    use tower::{ServiceExt, service_fn};
    use zeroshard_model::Error;

    use tonic::{Status, body::Body};
    use zeroshard_proto::status::from_status;

    use super::*;

    /// Handles a call; the path selects the behaviour.
    async fn handle(request: Request<()>) -> Result<Response<Body>, Infallible> {
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
        Ok(Response::new(match request.uri().path() {
            "/waits/later" => Body::new(StreamBody::new(waits)),
            _ => Body::new(StreamBody::new(frames)),
        }))
    }

    async fn call(failure: &Failure, path: &str) -> Result<usize, Error> {
        let service = PanicLayer(failure.clone()).layer(service_fn(handle));
        let answer = service.oneshot(Request::builder().uri(path).body(()).unwrap()).await.unwrap();
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
