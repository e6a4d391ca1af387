//! What can go wrong between a client and the servers, in one table: [`Error`] <-> `tonic::Status`.
//!
//! A status carries a `google.rpc.ErrorInfo` whose `reason` names the variant (`STALE_EPOCH`, ...)
//! and whose metadata has the variant's fields as JSON under `detail`, so that any gRPC client can
//! tell the errors apart without reading the message.

use std::fmt::Display;

use serde::{Deserialize, Serialize};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

mod quote;

use quote::{MAX_MESSAGE, bound, cut, quote};

/// `ErrorInfo.domain` of every error of ours.
pub const DOMAIN: &str = "zeroshard";

/// The most characters of input that [`Error::invalid`] quotes.
const MAX_QUOTED: usize = 200;
/// The most characters that it says of what would be right.
const MAX_EXPECTED: usize = 500;

/// An error that crosses the wire.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Error {
    /// The request itself is wrong; sent again it will be refused again.
    #[error("{what} is {found}; it must be {expected}")]
    Invalid {
        /// Which field of what, with tensor, slice, rank or step where there is one.
        what: String,
        /// What it was.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// The call did not carry the token of the cluster.
    #[error("the call carries {found}; set ZEROSHARD_TOKEN to the token of the cluster")]
    Unauthenticated {
        /// What it carried; never the token itself.
        found: String,
    },
    /// No such job here.
    #[error("job {job:?} does not exist on this server; `zsctl status` lists the jobs")]
    UnknownJob {
        /// Its name.
        job: String,
    },
    /// Another job of this name exists, with another spec.
    #[error(
        "job {job:?} already exists with a different {difference}; choose another name or delete \
         the existing job"
    )]
    JobExists {
        /// Its name.
        job: String,
        /// The first part of the spec that differs.
        difference: String,
    },
    /// The job cannot go on.
    #[error("job {job:?} has failed: {reason}")]
    JobFailed {
        /// Its name.
        job: String,
        /// Why.
        #[serde(rename = "why")]
        reason: String,
    },
    /// The slice exists, but another server owns it.
    #[error(
        "slice {slice} of job {job:?} is not on this server; get the current placement from the \
         coordinator"
    )]
    NotHere {
        /// The job.
        job: String,
        /// The slice.
        slice: u32,
    },
    /// The caller's view of the membership is old.
    #[error(
        "epoch {epoch} of job {job:?} is not the current epoch, which is {current}; join the job \
         again or wait for the membership update"
    )]
    StaleEpoch {
        /// The job.
        job: String,
        /// What the caller said.
        epoch: u64,
        /// What it is.
        current: u64,
    },
    /// The job was deleted, and another one has its name.
    #[error(
        "job {job:?} was deleted and created again after this client opened it; join the new job"
    )]
    JobReplaced {
        /// Its name.
        job: String,
    },
    /// The caller's coordinator has been replaced.
    #[error("term {term} of the coordinator has ended; the current term is {current}")]
    StaleTerm {
        /// What the sender said.
        term: u64,
        /// The highest that was seen.
        current: u64,
    },
    /// The attempt at the step is not the open one.
    #[error(
        "attempt {attempt} at step {step} of job {job:?} is not the open attempt, which is \
         {current}; push the gradients of the step again"
    )]
    StaleAttempt {
        /// The job.
        job: String,
        /// The step.
        step: u64,
        /// What the caller said.
        attempt: u32,
        /// What it is.
        current: u32,
    },
    /// A rank that the step needs has left the job.
    #[error(
        "step {step} of job {job:?} cannot be completed: rank {rank} has left the job; run the \
         same number of steps on every rank, start another worker for rank {rank}, or create the \
         job with departure=absent"
    )]
    RankLeft {
        /// The job.
        job: String,
        /// The rank.
        rank: u32,
        /// The open step.
        step: u64,
    },
    /// The step is not the open one.
    #[error("step {step} of job {job:?} is not the open step, which is {current}")]
    StepMismatch {
        /// The job.
        job: String,
        /// What the caller said.
        step: u64,
        /// What it is.
        current: u64,
    },
    /// The step was dropped on all servers: run it again, from the same data.
    #[error("step {step} of job {job:?} was aborted: {cause}; run the step again in epoch {epoch}")]
    StepAborted {
        /// The job.
        job: String,
        /// The step.
        step: u64,
        /// The epoch to run it in.
        epoch: u64,
        /// What happened.
        cause: String,
    },
    /// The version was there, and has been replaced.
    #[error(
        "version {version} of job {job:?} is no longer available; the current version is {current}"
    )]
    VersionGone {
        /// The job.
        job: String,
        /// What the caller asked for.
        version: u64,
        /// What is there.
        current: u64,
    },
    /// A deadline passed.
    #[error("timed out after {waited_ms} ms waiting for {waiting_for}")]
    Timeout {
        /// Which worker, server, tensor, step, epoch.
        waiting_for: String,
        /// For how long.
        waited_ms: u64,
    },
    /// Somebody holds the rank.
    #[error("rank {rank} of job {job:?} is held by another worker")]
    RankTaken {
        /// The job.
        job: String,
        /// The rank.
        rank: u32,
    },
    /// The lease has ended.
    #[error("the lease of rank {rank} of job {job:?} has ended; join the job again")]
    LeaseLost {
        /// The job.
        job: String,
        /// The rank.
        rank: u32,
    },
    /// Two ranks said different things about what must be the same.
    #[error(
        "rank {rank} disagrees with another rank about {what} at step {step} of job {job:?}; all \
         ranks must agree on it"
    )]
    Disagreement {
        /// The job.
        job: String,
        /// The step.
        step: u64,
        /// The rank that came later.
        rank: u32,
        /// About what.
        what: String,
    },
    /// Early gradients fill the budget; push the other slices first, then this one again.
    #[error(
        "the server's buffer for early gradients ({budget} bytes) is full: the gradient of slice \
         {slice} from rank {rank} must wait for rank {waiting_for}; push other slices first, or \
         increase --parked-bytes"
    )]
    ParkingFull {
        /// The slice.
        slice: u32,
        /// The rank.
        rank: u32,
        /// First element that was not taken, of those that the rank has of the slice. What the push
        /// sent before it was taken.
        offset: u64,
        /// The rank whose gradient comes next in the order of addition.
        waiting_for: u32,
        /// `--parked-bytes` of the server.
        budget: u64,
    },
    /// Memory for the job could not be had.
    #[error("out of memory: cannot allocate {bytes} bytes for {what}")]
    OutOfMemory {
        /// For what.
        what: String,
        /// How much.
        bytes: u64,
    },
    /// The peer cannot be reached, or is going away.
    #[error("{peer} is unavailable: {cause}")]
    Unavailable {
        /// Role and address.
        peer: String,
        /// What the transport said.
        cause: String,
    },
    /// A bug: something that should hold does not.
    #[error("internal error: {cause}")]
    Internal {
        /// What did not hold.
        cause: String,
    },
}

/// What a caller does about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remedy {
    /// Send the same again, after a pause.
    Retry,
    /// Get the current membership, then send again.
    Refresh,
    /// Run the step again, from the same data.
    RedoStep,
    /// Tell the user.
    GiveUp,
}

impl Error {
    /// An [`Error::Invalid`]. Input in `what` and `found` is quoted up to a length.
    pub fn invalid(
        what: impl Into<String>,
        found: impl Display,
        expected: impl Into<String>,
    ) -> Self {
        Self::Invalid {
            what: quote(MAX_QUOTED, what.into()),
            found: quote(MAX_QUOTED, found),
            expected: quote(MAX_EXPECTED, expected.into()),
        }
    }

    /// What to do about it.
    pub fn remedy(&self) -> Remedy {
        match self {
            // The peer may be back, or the ranks before us may have pushed.
            Self::Unavailable { .. } | Self::ParkingFull { .. } => Remedy::Retry,
            // The coordinator has told the caller first; the server will know in a moment.
            Self::StaleEpoch { epoch, current, .. } if current < epoch => Remedy::Retry,
            Self::StaleAttempt { attempt, current, .. } if current < attempt => Remedy::Retry,
            Self::StaleEpoch { .. } | Self::NotHere { .. } => Remedy::Refresh,
            Self::StepAborted { .. } | Self::StaleAttempt { .. } => Remedy::RedoStep,
            Self::Invalid { .. }
            | Self::Unauthenticated { .. }
            | Self::UnknownJob { .. }
            | Self::JobExists { .. }
            | Self::JobReplaced { .. }
            | Self::JobFailed { .. }
            | Self::StaleTerm { .. }
            | Self::RankLeft { .. }
            | Self::StepMismatch { .. }
            | Self::VersionGone { .. }
            | Self::Timeout { .. }
            | Self::RankTaken { .. }
            | Self::LeaseLost { .. }
            | Self::Disagreement { .. }
            | Self::OutOfMemory { .. }
            | Self::Internal { .. } => Remedy::GiveUp,
        }
    }

    fn code(&self) -> Code {
        match self {
            Self::Invalid { .. } => Code::InvalidArgument,
            Self::Unauthenticated { .. } => Code::Unauthenticated,
            Self::UnknownJob { .. } | Self::JobReplaced { .. } => Code::NotFound,
            Self::JobExists { .. } | Self::RankTaken { .. } => Code::AlreadyExists,
            Self::NotHere { .. }
            | Self::StaleEpoch { .. }
            | Self::StaleTerm { .. }
            | Self::StaleAttempt { .. }
            | Self::RankLeft { .. }
            | Self::StepMismatch { .. }
            | Self::JobFailed { .. }
            | Self::LeaseLost { .. }
            | Self::Disagreement { .. } => Code::FailedPrecondition,
            Self::StepAborted { .. } => Code::Aborted,
            Self::VersionGone { .. } => Code::OutOfRange,
            Self::Timeout { .. } => Code::DeadlineExceeded,
            Self::ParkingFull { .. } | Self::OutOfMemory { .. } => Code::ResourceExhausted,
            Self::Unavailable { .. } => Code::Unavailable,
            Self::Internal { .. } => Code::Internal,
        }
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let mut detail = serde_json::to_value(&error).expect("strings and integers are JSON");
        bound(&mut detail);
        let reason = detail["reason"].as_str().expect("the enum's tag").to_owned();
        let metadata = [("detail".to_owned(), detail.to_string())];
        let error: Error = serde_json::from_value(detail).expect("an error, with shorter texts");
        let mut message = error.to_string();
        cut(&mut message, MAX_MESSAGE);
        let details = ErrorDetails::with_error_info(reason, DOMAIN, metadata);
        Status::with_error_details(error.code(), message, details)
    }
}

impl Error {
    /// What a call to `peer` (role and address) ended with.
    pub fn from_status(status: &Status, peer: &str) -> Self {
        let ours = status
            .get_details_error_info()
            .filter(|info| info.domain == DOMAIN)
            .and_then(|info| serde_json::from_str(info.metadata.get("detail")?).ok());
        ours.unwrap_or_else(|| match status.code() {
            // What the transport, not a server of ours, says: the call may be sent again.
            Code::Unavailable | Code::Cancelled | Code::Unknown => {
                Self::Unavailable { peer: peer.to_owned(), cause: status.message().to_owned() }
            }
            Code::DeadlineExceeded => {
                Self::Timeout { waiting_for: format!("a response from {peer}"), waited_ms: 0 }
            }
            code => Self::Internal {
                cause: format!("{peer} responded with {code:?}: {}", status.message()),
            },
        })
    }
}

#[cfg(test)]
mod tests;
