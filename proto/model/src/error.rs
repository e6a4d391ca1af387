//! The errors of clients and servers.

use std::fmt::Display;

use serde::{Deserialize, Serialize};

pub use quote::quote;

mod quote;

/// The maximum number of characters of input that [`Error::invalid`] quotes.
pub const MAX_QUOTED: usize = 200;
/// The maximum number of characters of its `expected` text.
const MAX_EXPECTED: usize = 500;
/// The maximum number of characters of the sentence of [`Error::refused`].
const MAX_SENTENCE: usize = 500;

/// An error that is sent over the wire.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Error {
    /// The request is invalid; a retry fails in the same way. Functions that document this error
    /// return [`Error::Refused`] if the case needs a sentence of its own.
    #[error("{what} is {found}; it must be {expected}")]
    Invalid {
        /// The invalid field, with its tensor, slice, rank or step if it has one.
        what: String,
        /// The invalid value.
        found: String,
        /// A description of the valid values.
        expected: String,
    },
    /// The request is invalid, and the case has a sentence of its own; a retry fails in the same
    /// way.
    #[error("{sentence}")]
    Refused {
        /// What is wrong, where, and what to do.
        sentence: String,
    },
    /// The two sides of a connection do not trust each other, or only one of them uses TLS.
    #[error("no secure connection to {peer}: {cause}")]
    Tls {
        /// The other side of the connection.
        peer: String,
        /// The cause, and how to correct it.
        cause: String,
    },
    /// The call carried neither a token of the cluster nor a certificate with a role.
    #[error(
        "the call carries {found}; set ZEROSHARD_TOKEN to the token of the cluster, or \
         ZEROSHARD_TLS_CERT to a certificate with a role"
    )]
    Unauthenticated {
        /// A description of what the call carried; never the token itself.
        found: String,
    },
    /// The role of the caller does not permit the call.
    #[error(
        "a caller of role {role} cannot {action}; use a token of another role (`zsctl token new`) \
         or a certificate of another role"
    )]
    Forbidden {
        /// The role of the token or certificate, as in the file of tokens.
        role: String,
        /// The action that was refused.
        action: String,
    },
    /// A client or a shard server does not have the same minor version as the coordinator.
    #[error(
        "{program} has version {version} and the coordinator has version {coordinator}; they work \
         together only if the major and minor versions are equal: install the same version of both"
    )]
    VersionMismatch {
        /// The client, or the shard server with its address.
        program: String,
        /// The version of the client or shard server.
        version: String,
        /// The version of the coordinator.
        coordinator: String,
    },
    /// The job does not exist on this server.
    #[error("job {job:?} does not exist on this server; `zsctl status` lists the jobs")]
    UnknownJob {
        /// The name of the job.
        job: String,
    },
    /// A job of this name exists, but has a different spec.
    #[error(
        "job {job:?} already exists with a different {difference}; choose another name or delete \
         the existing job"
    )]
    JobExists {
        /// The name of the job.
        job: String,
        /// The first part of the spec that differs.
        difference: String,
    },
    /// The job has failed and cannot continue.
    #[error("job {job:?} has failed: {reason}")]
    JobFailed {
        /// The name of the job.
        job: String,
        /// The reason.
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
    /// The caller's view of the membership is outdated.
    #[error(
        "epoch {epoch} of job {job:?} is not the current epoch, which is {current}; join the job \
         again or wait for the membership update"
    )]
    StaleEpoch {
        /// The job.
        job: String,
        /// The epoch of the call.
        epoch: u64,
        /// The current epoch.
        current: u64,
    },
    /// The job was deleted, and another job has its name.
    #[error(
        "job {job:?} was deleted and created again after this client opened it; join the new job"
    )]
    JobReplaced {
        /// The name of the job.
        job: String,
    },
    /// The coordinator that sent the command has been replaced.
    #[error("term {term} of the coordinator has ended; the current term is {current}")]
    StaleTerm {
        /// The term of the sender.
        term: u64,
        /// The highest term that this server has seen.
        current: u64,
    },
    /// The attempt of the call is not the open attempt of the step.
    #[error(
        "attempt {attempt} at step {step} of job {job:?} is not the open attempt, which is \
         {current}; push the gradients of the step again"
    )]
    StaleAttempt {
        /// The job.
        job: String,
        /// The step.
        step: u64,
        /// The attempt of the call.
        attempt: u32,
        /// The open attempt.
        current: u32,
    },
    /// A rank that the step needs has left the job.
    #[error(
        "step {step} of job {job:?} cannot be completed: rank {rank} has left the job; run the \
         same number of steps on every rank or, in Python, train under zeroshard.torch.join; or \
         start another worker for rank {rank}"
    )]
    RankLeft {
        /// The job.
        job: String,
        /// The rank.
        rank: u32,
        /// The open step.
        step: u64,
    },
    /// The step of the call is not the open step.
    #[error("step {step} of job {job:?} is not the open step, which is {current}")]
    StepMismatch {
        /// The job.
        job: String,
        /// The step of the call.
        step: u64,
        /// The open step.
        current: u64,
    },
    /// The step was aborted on all servers and must be run again with the same data.
    #[error("step {step} of job {job:?} was aborted: {cause}; run the step again in epoch {epoch}")]
    StepAborted {
        /// The job.
        job: String,
        /// The step.
        step: u64,
        /// The epoch in which to run the step again.
        epoch: u64,
        /// The cause.
        cause: String,
    },
    /// The job has returned to a checkpoint, because it lost a server or the data of a rank, or
    /// because somebody has rewound it.
    #[error(
        "job {job:?} has returned to its checkpoint of version {version}, because later state was \
         lost or somebody has rewound the job; continue from step {version}"
    )]
    RolledBack {
        /// The job.
        job: String,
        /// The version from which the job continues.
        version: u64,
    },
    /// The data of a rank for a checkpoint was lost.
    #[error(
        "version {version} of job {job:?} cannot be continued exactly without the data of rank \
         {rank}, which was lost before the coordinator had stored it; save a later version, or \
         continue from an earlier checkpoint"
    )]
    UserDataLost {
        /// The job.
        job: String,
        /// The version.
        version: u64,
        /// The rank, which ended before it had sent its data, or whose data the last coordinator
        /// had.
        rank: u32,
    },
    /// There is no complete checkpoint.
    #[error(
        "there is no complete checkpoint of {version} of job {job:?} at {url}; \
         `zsctl checkpoint ls` lists the checkpoints"
    )]
    NoCheckpoint {
        /// The directory or prefix.
        url: String,
        /// The job.
        job: String,
        /// "version" and its number, or "any version".
        version: String,
    },
    /// A file of a checkpoint is missing, incomplete or damaged.
    #[error(
        "{file} of a checkpoint is damaged: {cause}; restore another version or another copy of it"
    )]
    CheckpointDamaged {
        /// The file, with its URL, and the tensor if only one is damaged.
        file: String,
        /// A description of the damage.
        cause: String,
    },
    /// A checkpoint, or the file of slices that do not fit in memory, cannot be read or written.
    #[error("cannot {action} {url}: {cause}")]
    Storage {
        /// "read", "write", "list" or "remove".
        action: String,
        /// The file or directory.
        url: String,
        /// The message of the storage.
        cause: String,
    },
    /// The version has been replaced by a later one.
    #[error(
        "version {version} of job {job:?} is no longer available; the current version is {current}"
    )]
    VersionGone {
        /// The job.
        job: String,
        /// The requested version.
        version: u64,
        /// The current version.
        current: u64,
    },
    /// A deadline passed.
    #[error("timed out after {waited_ms} ms waiting for {waiting_for}")]
    Timeout {
        /// The worker, server, tensor, step and epoch that the call waited for.
        waiting_for: String,
        /// The duration of the wait.
        waited_ms: u64,
    },
    /// Another worker holds the rank.
    #[error("rank {rank} of job {job:?} is held by another worker")]
    RankTaken {
        /// The job.
        job: String,
        /// The rank.
        rank: u32,
    },
    /// Another shard server has registered with the same id, and answers.
    #[error(
        "another shard server, at {address}, has the id {id:016x} and answers; give each server an \
         id of its own (--id), or stop the other one first"
    )]
    ServerIdTaken {
        /// The id.
        id: u64,
        /// The address of the other server.
        address: String,
    },
    /// The lease has ended.
    #[error("the lease of rank {rank} of job {job:?} has ended; join the job again")]
    LeaseLost {
        /// The job.
        job: String,
        /// The rank.
        rank: u32,
    },
    /// Two ranks passed different values for something that must be equal on all ranks.
    #[error(
        "rank {rank} and rank {other_rank} disagree about {what} at step {step} of job {job:?}: \
         rank {rank} has {value}, rank {other_rank} has {other_value}; all ranks must agree on it"
    )]
    Disagreement {
        /// The job.
        job: String,
        /// The step.
        step: u64,
        /// The subject of the disagreement.
        what: String,
        /// The rank whose call came later.
        rank: u32,
        /// Its value.
        value: String,
        /// Another rank.
        other_rank: u32,
        /// The value of the other rank.
        other_value: String,
    },
    /// The buffer for early gradients is full. The client should push the other slices first, then
    /// this slice again.
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
        /// The first element of the rank's part of the slice that was not accepted. The server has
        /// accepted everything that the push sent before it.
        offset: u64,
        /// The rank whose gradient comes next in the order of addition.
        waiting_for: u32,
        /// `--parked-bytes` of the server.
        budget: u64,
    },
    /// The memory for the job could not be allocated.
    #[error("out of memory: cannot allocate {bytes} bytes for {what}")]
    OutOfMemory {
        /// The purpose of the memory.
        what: String,
        /// The number of bytes.
        bytes: u64,
    },
    /// The shard servers have no room for the job.
    #[error(
        "job {job:?} needs {bytes} bytes on the shard servers, which have {free} bytes free \
         ({servers}); add shard servers, give them more memory (--memory), delete other jobs, or \
         use fewer replicas"
    )]
    InsufficientMemory {
        /// The job.
        job: String,
        /// The bytes that the job needs on all servers together, with its replicas.
        bytes: u64,
        /// The bytes that are free on all servers together.
        free: u64,
        /// The memory of each server, and the slices that do not fit.
        servers: String,
    },
    /// A limit of the cluster or of a server is reached.
    #[error("the limit of {limit} {what} is reached; {remedy}")]
    LimitExceeded {
        /// What is limited, such as "jobs of the cluster (--max-jobs)".
        what: String,
        /// The limit.
        limit: u64,
        /// What the caller or the operator can do.
        remedy: String,
    },
    /// A device of the server has failed.
    #[error("{}{cause}", of_slice(*slice))]
    Device {
        /// The slice that the operation was for, if it is known.
        slice: Option<u32>,
        /// The device, its operation, and the error of its driver.
        cause: String,
    },
    /// The peer cannot be reached, or is shutting down.
    #[error("{peer} is unavailable: {cause}")]
    Unavailable {
        /// The role and address of the peer.
        peer: String,
        /// The message of the transport.
        cause: String,
    },
    /// An invariant does not hold, which is a bug.
    #[error("internal error: {cause}")]
    Internal {
        /// The violated invariant.
        cause: String,
    },
}

/// The caller's reaction to an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remedy {
    /// Send the same request again after a pause.
    Retry,
    /// Get the current membership, then send the request again.
    Refresh,
    /// Run the step again with the same data.
    RedoStep,
    /// Report the error to the user.
    GiveUp,
}

impl Error {
    /// Creates an [`Error::Invalid`]. The texts are truncated to a maximum length.
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

    /// Creates an [`Error::Refused`]. The sentence is truncated to a maximum length.
    pub fn refused(sentence: impl Display) -> Self {
        Self::Refused { sentence: quote(MAX_SENTENCE, sentence) }
    }

    /// The name of the variant as it is sent over the network, such as `STEP_ABORTED`.
    pub fn name(&self) -> String {
        let value = serde_json::to_value(self).unwrap_or_default();
        value["reason"].as_str().unwrap_or_default().to_owned()
    }

    /// The caller's reaction to this error.
    pub fn remedy(&self) -> Remedy {
        match self {
            // The peer may return, or the ranks that come first may have pushed.
            Self::Unavailable { .. } | Self::ParkingFull { .. } => Remedy::Retry,
            // The operator may replace a certificate while the caller retries.
            Self::Tls { .. } => Remedy::Retry,
            // The coordinator has informed the caller first; the server will learn of the change
            // shortly.
            Self::StaleEpoch { epoch, current, .. } if current < epoch => Remedy::Retry,
            Self::StaleAttempt { attempt, current, .. } if current < attempt => Remedy::Retry,
            Self::StaleEpoch { .. } | Self::NotHere { .. } => Remedy::Refresh,
            Self::StepAborted { .. } | Self::StaleAttempt { .. } => Remedy::RedoStep,
            Self::Invalid { .. }
            | Self::Refused { .. }
            | Self::Unauthenticated { .. }
            | Self::Forbidden { .. }
            | Self::VersionMismatch { .. }
            | Self::UnknownJob { .. }
            | Self::JobExists { .. }
            | Self::JobReplaced { .. }
            | Self::JobFailed { .. }
            | Self::StaleTerm { .. }
            | Self::RankLeft { .. }
            | Self::StepMismatch { .. }
            | Self::RolledBack { .. }
            | Self::UserDataLost { .. }
            | Self::NoCheckpoint { .. }
            | Self::CheckpointDamaged { .. }
            | Self::Storage { .. }
            | Self::VersionGone { .. }
            | Self::Timeout { .. }
            | Self::RankTaken { .. }
            | Self::ServerIdTaken { .. }
            | Self::LeaseLost { .. }
            | Self::Disagreement { .. }
            | Self::OutOfMemory { .. }
            | Self::InsufficientMemory { .. }
            | Self::LimitExceeded { .. }
            | Self::Device { .. }
            | Self::Internal { .. } => Remedy::GiveUp,
        }
    }
}

/// The beginning of a message about a slice.
fn of_slice(slice: Option<u32>) -> String {
    slice.map_or_else(String::new, |slice| format!("slice {slice}: "))
}

#[cfg(test)]
mod tests;
