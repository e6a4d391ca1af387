//! Judges whether an answer follows the protocol: it is in time, typed, and of bounded size.

use http::HeaderMap;
use tonic::{Code, Status};
use tonic_types::StatusExt;
use zeroshard_client::Error;
use zeroshard_proto::status::{DOMAIN, from_status};

use crate::call::Answer;

/// The maximum sizes of the text of an error and of its headers, in bytes.
const MAX_TEXT: usize = 1100;
const MAX_HEADERS: usize = 16 << 10;

/// The untyped errors of the gRPC library for calls that violate gRPC.
const TRANSPORT: [(Code, &str); 9] = [
    (Code::Cancelled, "Timeout expired"),
    (Code::Internal, "protocol error: received message with"),
    (Code::Internal, "Unexpected EOF decoding stream"),
    (Code::Internal, "Missing request message"),
    // This error comes from the services for health and reflection.
    (Code::Internal, "failed to decode Protobuf message"),
    (Code::Unimplemented, "Content is compressed"),
    (Code::OutOfRange, "Error, decoded message length too large"),
    (Code::Unknown, "h2 protocol error: http2 error"),
    (Code::Cancelled, "h2 protocol error: http2 error"),
];

/// The judgement of an answer.
#[derive(Debug)]
pub(crate) enum Verdict {
    Answered,
    /// A typed error of a server.
    Refused(Error),
    /// An error of the gRPC library or of another service, or a call that was cancelled or
    /// disconnected.
    Ended,
    /// A fault of the server.
    Fault(String),
}

/// Judges the answer to a call of `path`.
pub(crate) fn judge(path: &str, answer: &Answer) -> Verdict {
    match answer {
        Answer::Status(headers) => judge_status(path, headers),
        Answer::Cancelled(1..) => Verdict::Answered,
        Answer::Cancelled(0) | Answer::Broken(_) => Verdict::Ended,
        Answer::Late => {
            Verdict::Fault("the server did not end the call within its deadline".to_owned())
        }
    }
}

fn judge_status(path: &str, headers: &HeaderMap) -> Verdict {
    let Some(status) = Status::from_header_map(headers) else {
        return Verdict::Fault(format!("the answer has no status: {headers:?}"));
    };
    let size: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    if size > MAX_HEADERS || status.message().len() > MAX_TEXT {
        let text: String = status.message().chars().take(200).collect();
        return Verdict::Fault(format!("the error has {size} bytes: {text}"));
    }
    if status.code() == Code::Ok {
        return Verdict::Answered;
    }
    let info = status.get_details_error_info().filter(|info| info.domain == DOMAIN);
    match (from_status(&status, "server"), info) {
        (Error::Internal { .. } | Error::Device { .. }, Some(_)) => {
            Verdict::Fault(format!("an error that is a bug: {status:?}"))
        }
        (error, Some(_)) => Verdict::Refused(error),
        (_, None) if is_of_transport(path, &status) => Verdict::Ended,
        (_, None) => Verdict::Fault(format!("an error without a type: {status:?}")),
    }
}

fn is_of_transport(path: &str, status: &Status) -> bool {
    let is_listed = TRANSPORT
        .iter()
        .any(|&(code, text)| status.code() == code && status.message().starts_with(text));
    let is_ours = path.starts_with("/zeroshard.");
    let is_bug = matches!(status.code(), Code::Internal | Code::Unknown);
    is_listed || (!is_ours && !is_bug)
}
