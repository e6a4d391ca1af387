//! Records the requests that change the cluster in the audit log (see `audit`).

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use futures_util::future::Either;
use http::{Request, Response};
use tonic::Status;
use tower::{Layer, Service};

use crate::audit::Record;

/// The path prefix of requests that may change the cluster.
const COORDINATOR: &str = "/zeroshard.v1.CoordinatorService/";

/// Creates [`Audit`]. This layer must be inside [`TokenLayer`](super::token::TokenLayer), which
/// identifies the caller.
#[derive(Clone, Debug)]
pub struct AuditLayer;

impl<S> Layer<S> for AuditLayer {
    type Service = Audit<S>;

    fn layer(&self, inner: S) -> Audit<S> {
        Audit { inner }
    }
}

/// The wrapped service.
#[derive(Clone, Debug)]
pub struct Audit<S> {
    inner: S,
}

impl<S, In, Out> Service<Request<In>> for Audit<S>
where
    S: Service<Request<In>, Response = Response<Out>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future =
        Either<S::Future, Pin<Box<dyn Future<Output = Result<Response<Out>, S::Error>> + Send>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<In>) -> Self::Future {
        if !request.uri().path().starts_with(COORDINATOR) {
            return Either::Left(self.inner.call(request));
        }
        let (mut head, body) = request.into_parts();
        let record = Record::begin(&head.headers, &mut head.extensions);
        let answer = self.inner.call(Request::from_parts(head, body));
        Either::Right(Box::pin(async move {
            let answer = answer.await;
            // The error of an answer without messages is in the headers.
            let error = answer.as_ref().ok().and_then(|of| Status::from_header_map(of.headers()));
            record.end(error.as_ref());
            answer
        }))
    }
}
