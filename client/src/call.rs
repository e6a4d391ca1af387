//! gRPC calls of the data plane, below generated code: request and response bodies are streams of
//! frames.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, header};
use http_body::Body as HttpBody;
use http_body_util::BodyExt;
use prost::Message;
use tonic::{Status, body::Body};
use tower::{Service, ServiceExt};
use zeroshard_model::{Error, Result};
use zeroshard_net::transport::Connection;
use zeroshard_proto::{frame::decode_message, status::from_status};

/// Calls `path` of `peer` with `body`, and returns the body of the response.
///
/// # Errors
/// Those of the server or the transport.
pub(crate) async fn call<B>(
    connection: &Connection,
    path: &'static str,
    body: B,
    peer: &str,
) -> Result<Body>
where
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let unavailable = |cause: &dyn std::error::Error| Error::Unavailable {
        peer: peer.to_owned(),
        cause: std::iter::successors(cause.source(), |e| e.source())
            .fold(cause.to_string(), |message, cause| format!("{message}: {cause}")),
    };
    let mut request = Request::post(path).body(Body::new(body)).expect("the path is a constant");
    let headers = request.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(header::TE, HeaderValue::from_static("trailers"));

    let mut connection = connection.clone();
    let service = connection.ready().await.map_err(|e| unavailable(&e))?;
    let response = service.call(request).await.map_err(|e| unavailable(&e))?;
    check(response.headers(), peer)?;
    if !response.status().is_success() {
        let cause = format!("HTTP status {}", response.status());
        return Err(Error::Unavailable { peer: peer.to_owned(), cause });
    }
    Ok(response.into_body())
}

/// Calls `path` of `peer` with `body`, and returns the single message of the response.
///
/// # Errors
/// Those of the server or the transport.
pub(crate) async fn unary<B, M>(
    connection: &Connection,
    path: &'static str,
    body: B,
    peer: &str,
) -> Result<M>
where
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    M: Message + Default,
{
    let unavailable = |cause: String| Error::Unavailable { peer: peer.to_owned(), cause };
    let body = call(connection, path, body, peer).await?;
    let answer = body.collect().await.map_err(|e| unavailable(e.to_string()))?;
    finish(&answer.trailers().cloned().unwrap_or_default(), peer)?;
    decode_message(&answer.to_bytes())
}

/// Checks the status in headers or trailers. Headers without a status are accepted.
///
/// # Errors
/// The error of the status.
pub(crate) fn check(headers: &HeaderMap, peer: &str) -> Result<()> {
    match Status::from_header_map(headers) {
        Some(status) if status.code() != tonic::Code::Ok => Err(from_status(&status, peer)),
        _ => Ok(()),
    }
}

/// Checks the trailers at the end of a response.
///
/// # Errors
/// The error of the status; [`Error::Unavailable`] if the trailers have no status, because the
/// stream was cut off.
pub(crate) fn finish(trailers: &HeaderMap, peer: &str) -> Result<()> {
    if !trailers.contains_key("grpc-status") {
        let cause = "the response was truncated".to_owned();
        return Err(Error::Unavailable { peer: peer.to_owned(), cause });
    }
    check(trailers, peer)
}
