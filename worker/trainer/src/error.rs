//! The errors that end a run.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// An error that ends a run.
#[derive(Debug, Error)]
pub enum Error {
    /// The training text cannot be used.
    #[error(transparent)]
    Text(#[from] super::text::Error),
    /// The batch cannot be divided.
    #[error(transparent)]
    Batch(#[from] super::batches::Error),
    /// An error of the cluster, including the refusal of a job.
    #[error(transparent)]
    Cluster(#[from] zeroshard_model::Error),
    /// An error among the tensor-parallel ranks of a replica, or among the ranks of a group.
    #[error(transparent)]
    Parallel(zeroshard_worker::parallel::Error),
    /// The embedded cluster failed.
    #[error("embedded cluster: {0}")]
    Embedded(#[from] zeroshard_server::serve::Error),
    /// The value of a flag is invalid, or contradicts another flag.
    #[error("{flag} is {found}; expected {expected}")]
    Flag {
        /// The flag.
        flag: &'static str,
        /// The value of the flag.
        found: String,
        /// The accepted values.
        expected: String,
    },
    /// The job has already taken the number of steps that --steps requests.
    #[error(
        "job {job:?} is already at step {version} of {steps}; increase --steps, or choose another \
         --job"
    )]
    NothingToDo {
        /// The job.
        job: String,
        /// The version of the job.
        version: u64,
        /// The requested number of steps.
        steps: u64,
    },
    /// A file or folder of the report cannot be written.
    #[error("cannot write {path:?}: {cause}")]
    Report {
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        cause: io::Error,
    },
    /// An operation of the operating system failed.
    #[error("cannot {doing}: {cause}")]
    System {
        /// The operation that failed.
        doing: &'static str,
        /// The error of the operating system.
        cause: io::Error,
    },
    /// A worker is lost, and the others of its group, or of a tensor-parallel run, cannot continue
    /// without it.
    #[error(
        "{cause}. The ranks of a group and those of a tensor-parallel run cannot continue without \
         each other: start all of them again, and job {job:?} continues at step {step}"
    )]
    Incomplete {
        /// The job.
        job: String,
        /// The step that was running.
        step: u64,
        /// The cause.
        cause: String,
    },
    /// A program of the cluster is not in the folder of this program.
    #[error(
        "{program:?} not found; build it with `cargo build --release`, and place it in the folder \
         of this program"
    )]
    NoProgram {
        /// The expected path.
        program: PathBuf,
    },
    /// A program of the cluster did not start, or failed.
    #[error("{program} {did}")]
    Process {
        /// The program.
        program: String,
        /// The failure, as a predicate of the program.
        did: String,
    },
    /// This program computes on a GPU, and the machine has none.
    #[error(
        "{cause}. With --nccl, or built with the feature cuda, this program needs a machine with a \
         GPU"
    )]
    NoGpu {
        /// The missing part.
        cause: String,
    },
    /// A worker thread panicked.
    #[error("worker {rank} panicked")]
    Panicked {
        /// The rank of the worker.
        rank: u32,
    },
}

impl From<zeroshard_worker::parallel::Error> for Error {
    fn from(error: zeroshard_worker::parallel::Error) -> Self {
        match error {
            zeroshard_worker::parallel::Error::Invalid(error) => Self::Cluster(error),
            other => Self::Parallel(other),
        }
    }
}

/// The result of a part of a run.
pub type Result<T, E = Error> = std::result::Result<T, E>;
