//! The gRPC service `zeroshard.v1.DataService`, implemented by hand, because generated code would
//! copy every payload.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures_util::StreamExt;
use http::{HeaderMap, HeaderValue, Request, Response, header};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use tokio_util::sync::CancellationToken;
use tonic::{Status, body::Body, server::NamedService};
use tower::Service;
use zeroshard_kernels::Backend;
use zeroshard_model::{Error, Result};
use zeroshard_net::Deadline;
use zeroshard_proto::{
    frame::{decode_message, encode_message},
    pb,
    status::{from_status, to_status},
};

use super::{pull, push, store::Store};
use crate::{access::Caller, connection::Peer};
use zeroshard_model::quota::Holder;

/// The maximum size of a `PullRequest` with its prefix, in bytes: about 100,000 extents.
const MAX_PULL_REQUEST: usize = 4 << 20;

pub(super) struct Data<B: Backend> {
    store: Arc<Store<B>>,
    shutdown: CancellationToken,
}

impl<B: Backend> Data<B> {
    pub(super) fn new(store: Arc<Store<B>>, shutdown: CancellationToken) -> Self {
        Self { store, shutdown }
    }
}

impl<B: Backend> Clone for Data<B> {
    fn clone(&self) -> Self {
        Self { store: self.store.clone(), shutdown: self.shutdown.clone() }
    }
}

impl<B: Backend> NamedService for Data<B> {
    const NAME: &'static str = "zeroshard.v1.DataService";
}

type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

impl<B: Backend> Service<Request<Body>> for Data<B> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Answer {
        let Self { store, shutdown } = self.clone();
        Box::pin(async move {
            let answer = match request.uri().path() {
                "/zeroshard.v1.DataService/Pull" => answer_pull(&store, request, shutdown).await,
                "/zeroshard.v1.DataService/Push" => {
                    let pushed = answer_push(&store, request);
                    let pushed = shutdown.run_until_cancelled(pushed).await;
                    pushed.unwrap_or_else(|| Err(going_away())).map(|pushed| unary(&pushed))
                }
                path => {
                    return Ok(Status::unimplemented(format!("unknown method {path}")).into_http());
                }
            };
            Ok(answer.unwrap_or_else(|error| to_status(error).into_http()))
        })
    }
}

fn going_away() -> Error {
    Error::Unavailable {
        peer: "this shard server".to_owned(),
        cause: "it is shutting down".to_owned(),
    }
}

/// A response with a single message.
fn unary(message: &pb::PushResponse) -> Response<Body> {
    let message = Frame::data(encode_message(message));
    let frames = [Ok::<_, Infallible>(message), Ok(Frame::trailers(trailers(Ok(()))))];
    grpc(Body::new(StreamBody::new(futures_util::stream::iter(frames))))
}

async fn answer_push<B: Backend>(
    store: &Store<B>,
    request: Request<Body>,
) -> Result<pb::PushResponse> {
    let caller = Caller::of(request.extensions())?;
    let quota = request.extensions().get::<Holder>().map(|holder| holder.quota);
    let weight = quota.unwrap_or_default().weight;
    let deadline = Deadline::of_call(request.headers());
    let (parts, body) = request.into_parts();
    let pusher = push::Pusher { caller, weight, headers: parts.headers };
    push::push(store, pusher, body, deadline).await
}

async fn answer_pull<B: Backend>(
    store: &Arc<Store<B>>,
    request: Request<Body>,
    shutdown: CancellationToken,
) -> Result<Response<Body>> {
    let peer = request.extensions().get::<Peer>().cloned();
    let caller = Caller::of(request.extensions())?;
    let deadline = Deadline::of_call(request.headers());
    let (parts, body) = request.into_parts();
    let request = read_request(body).await?;
    caller.check_read(&request.job)?;
    let frames = pull::pull(store, &request, &parts.headers, deadline)?;
    let frames = frames.take_until(shutdown.clone().cancelled_owned());
    // Data frames, followed by the trailers with the status.
    let body = futures_util::stream::unfold(Some(Box::pin(frames)), move |frames| {
        let shutdown = shutdown.clone();
        async move {
            let mut frames = frames?;
            let frame = match frames.next().await {
                Some(Ok(data)) => return Some((Frame::data(data), Some(frames))),
                Some(Err(error)) => Frame::trailers(trailers(Err(error))),
                None if shutdown.is_cancelled() => Frame::trailers(trailers(Err(going_away()))),
                None => Frame::trailers(trailers(Ok(()))),
            };
            Some((frame, None))
        }
    });
    let body = body.map(Ok::<Frame<Bytes>, Infallible>);
    let (metrics, limit) = (store.metrics.clone(), store.limits.wait);
    let pb::PullRequest { job, version, .. } = request;
    let body = store.readers.watch(body, move || {
        metrics.shard.stalled_read();
        let seconds = limit.as_secs_f64();
        tracing::warn!(
            job,
            version,
            seconds,
            "a reader has read nothing for this time; its connection is closed"
        );
        if let Some(peer) = &peer {
            peer.hang_up();
        }
    });
    Ok(grpc(Body::new(StreamBody::new(body))))
}

fn grpc(body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

fn trailers(result: Result<()>) -> HeaderMap {
    let status = result.map_or_else(to_status, |()| Status::ok(""));
    let mut trailers = HeaderMap::new();
    if let Err(unfit) = status.add_header(&mut trailers) {
        trailers.insert("grpc-status", HeaderValue::from(unfit.code() as u16));
    }
    trailers
}

async fn read_request(body: Body) -> Result<pb::PullRequest, Error> {
    let body = http_body_util::Limited::new(body, MAX_PULL_REQUEST);
    let bytes = body
        .collect()
        .await
        .map_err(|cause| match cause.downcast::<Status>() {
            Ok(status) => from_status(&status, "caller"),
            Err(cause) => Error::refused(format!(
                "the request cannot be read: {cause}; a pull has at most {MAX_PULL_REQUEST} bytes"
            )),
        })?
        .to_bytes();
    decode_message(&bytes)
}
