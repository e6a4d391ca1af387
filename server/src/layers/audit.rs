//! Records the requests that change the cluster in the audit log (see `audit`).

use axum::{extract::Request, middleware::Next, response::Response};
use tonic::Status;

use crate::audit::Record;

/// The path prefix of requests that may change the cluster.
const COORDINATOR: &str = "/zeroshard.v1.CoordinatorService/";

/// Records a request. This layer must be inside [`check_token`](super::token::check_token), which
/// identifies the caller.
pub(crate) async fn record(request: Request, next: Next) -> Response {
    if !request.uri().path().starts_with(COORDINATOR) {
        return next.run(request).await;
    }
    let (mut head, body) = request.into_parts();
    let record = Record::begin(&head.headers, &mut head.extensions);
    let answer = next.run(Request::from_parts(head, body)).await;
    // The error of an answer without messages is in the headers.
    record.end(Status::from_header_map(answer.headers()).as_ref());
    answer
}
