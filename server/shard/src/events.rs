//! What a job tells the coordinator.

use zeroshard_model::{Attempt, Error};

use super::job::Ready;

/// An event of a job.
#[derive(Debug)]
pub enum JobEvent {
    /// The memory of the job is allocated.
    Opened { epoch: u64 },
    /// All initial parameters have been uploaded in this epoch.
    Initialised { epoch: u64 },
    /// Pushes with the lease are accepted from now on.
    Granted { rank: u32, lease: u64 },
    /// The gradients of the attempt are complete: those of all trained slices, in any order.
    Ready { attempt: Attempt, reduced: Ready },
    /// The decision about the step is stored.
    Stored { epoch: u64, step: u64 },
    /// The slices of the copy with this number are copied.
    Copied { number: u64 },
    /// There is no memory for the slices of the copy with this number.
    CopyRefused { number: u64, reason: String },
    /// The hashes of slices at a version, by slice.
    Hashes { epoch: u64, version: u64, slices: Vec<(u32, u64)> },
    /// This server's part of a checkpoint could not be written.
    SaveFailed { save: u64, url: String, error: Error },
    /// The job cannot continue. `transient`: this server may be able to open it later.
    Failed { epoch: u64, reason: String, transient: bool },
}

impl JobEvent {
    /// The job cannot continue because of `error`.
    pub fn failed(epoch: u64, error: &Error) -> Self {
        let transient = matches!(
            error,
            Error::Storage { .. }
                | Error::Unavailable { .. }
                | Error::Timeout { .. }
                | Error::OutOfMemory { .. }
        );
        Self::Failed { epoch, reason: error.to_string(), transient }
    }
}
