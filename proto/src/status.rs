//! Errors as the status of a call.
//!
//! A status carries a `google.rpc.ErrorInfo` whose `reason` names the variant (`STALE_EPOCH`, ...)
//! and whose metadata contains the variant's fields as JSON under `detail`. Any gRPC client can
//! therefore distinguish the errors without parsing the message.

use std::error::Error as _;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};
use zeroshard_model::Error;

use bound::{MAX_MESSAGE, bound, cut};

mod bound;

/// `ErrorInfo.domain` of every ZeroShard error.
pub const DOMAIN: &str = "zeroshard";

/// Converts an error to the status of a call.
pub fn to_status(error: Error) -> Status {
    let mut detail = serde_json::to_value(&error).expect("strings and integers are JSON");
    bound(&mut detail);
    let reason = detail["reason"].as_str().expect("the tag of the enum").to_owned();
    let metadata = [("detail".to_owned(), detail.to_string())];
    let error: Error = serde_json::from_value(detail).expect("an error with shorter texts");
    let mut message = error.to_string();
    cut(&mut message, MAX_MESSAGE);
    let details = ErrorDetails::with_error_info(reason, DOMAIN, metadata);
    Status::with_error_details(code(&error), message, details)
}

/// Converts the status of a call to `peer` (role and address).
pub fn from_status(status: &Status, peer: &str) -> Error {
    let ours = status
        .get_details_error_info()
        .filter(|info| info.domain == DOMAIN)
        .and_then(|info| serde_json::from_str(info.metadata.get("detail")?).ok());
    ours.unwrap_or_else(|| match status.code() {
        // The status comes from the transport and not from a ZeroShard server: the call may be
        // repeated.
        Code::Unavailable if let Some(error) = dial_error(status) => match error {
            Error::Unavailable { cause, .. } => {
                Error::Unavailable { peer: peer.to_owned(), cause: cause.clone() }
            }
            error => error.clone(),
        },
        Code::Unavailable | Code::Cancelled | Code::Unknown => {
            Error::Unavailable { peer: peer.to_owned(), cause: transport_cause(status) }
        }
        // A connection that is closed in the middle of a frame is an error of HTTP/2.
        Code::Internal if status.message().starts_with("h2 protocol error") => {
            Error::Unavailable { peer: peer.to_owned(), cause: transport_cause(status) }
        }
        Code::DeadlineExceeded => {
            Error::Timeout { waiting_for: format!("a response from {peer}"), waited_ms: 0 }
        }
        code => Error::Internal {
            cause: format!("{peer} responded with {code:?}: {}", status.message()),
        },
    })
}
fn code(error: &Error) -> Code {
    match error {
        Error::Invalid { .. } | Error::Refused { .. } => Code::InvalidArgument,
        Error::Tls { .. } | Error::Unauthenticated { .. } => Code::Unauthenticated,
        Error::Forbidden { .. } => Code::PermissionDenied,
        Error::UnknownJob { .. } | Error::JobReplaced { .. } | Error::NoCheckpoint { .. } => {
            Code::NotFound
        }
        Error::JobExists { .. } | Error::RankTaken { .. } | Error::ServerIdTaken { .. } => {
            Code::AlreadyExists
        }
        Error::NotHere { .. }
        | Error::VersionMismatch { .. }
        | Error::StaleEpoch { .. }
        | Error::StaleTerm { .. }
        | Error::StaleAttempt { .. }
        | Error::RankLeft { .. }
        | Error::StepMismatch { .. }
        | Error::JobFailed { .. }
        | Error::LeaseLost { .. }
        | Error::Disagreement { .. } => Code::FailedPrecondition,
        Error::StepAborted { .. } | Error::RolledBack { .. } => Code::Aborted,
        Error::UserDataLost { .. } | Error::CheckpointDamaged { .. } => Code::DataLoss,
        Error::Storage { .. } => Code::FailedPrecondition,
        Error::VersionGone { .. } => Code::OutOfRange,
        Error::Timeout { .. } => Code::DeadlineExceeded,
        Error::ParkingFull { .. }
        | Error::OutOfMemory { .. }
        | Error::InsufficientMemory { .. }
        | Error::LimitExceeded { .. } => Code::ResourceExhausted,
        Error::Unavailable { .. } => Code::Unavailable,
        Error::Device { .. } | Error::Internal { .. } => Code::Internal,
    }
}

/// The error for which the connection of a call could not be opened.
fn dial_error(status: &Status) -> Option<&Error> {
    let mut sources = std::iter::successors(status.source(), |&error| error.source());
    sources.find_map(|error| error.downcast_ref::<Error>())
}

/// The message of a status that comes from the transport, and its root cause.
fn transport_cause(status: &Status) -> String {
    let sources = std::iter::successors(status.source(), |&error| error.source());
    match sources.last().map(ToString::to_string) {
        Some(root) if !status.message().contains(&root) => format!("{}: {root}", status.message()),
        _ => status.message().to_owned(),
    }
}

#[cfg(test)]
mod tests;
