//! The errors that end a run.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a run ended early.
#[derive(Debug, Error)]
pub enum Error {
    /// The training text.
    #[error(transparent)]
    Text(#[from] super::text::Error),
    /// The division of the batch.
    #[error(transparent)]
    Batch(#[from] super::batches::Error),
    /// The cluster, or a job that it refuses.
    #[error(transparent)]
    Cluster(#[from] zeroshard_proto::Error),
    /// The tensor-parallel ranks of a replica.
    #[error(transparent)]
    Parallel(#[from] crate::parallel::Error),
    /// The embedded cluster.
    #[error("embedded cluster: {0}")]
    Embedded(#[from] zeroshard_server::serve::Error),
    /// A flag that contradicts another.
    #[error("{flag} is {found}; expected {expected}")]
    Flag {
        /// The flag.
        flag: &'static str,
        /// Its value.
        found: String,
        /// The accepted values.
        expected: String,
    },
    /// The job has already taken as many steps as --steps asks for.
    #[error(
        "job {job:?} is already at step {version} of {steps}; increase --steps, or choose another \
         --job"
    )]
    NothingToDo {
        /// The job.
        job: String,
        /// Its version.
        version: u64,
        /// Steps asked for.
        steps: u64,
    },
    /// A file or folder of the report.
    #[error("write {path:?}: {cause}")]
    Report {
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        cause: io::Error,
    },
    /// Standard output or the runtime.
    #[error("{doing}: {cause}")]
    System {
        /// The operation that failed.
        doing: &'static str,
        /// The error of the operating system.
        cause: io::Error,
    },
    /// A worker of a tensor-parallel run is lost, and the others cannot compute its part.
    #[error(
        "{cause}. The ranks of a tensor-parallel run end together: start all of them again, and \
         job {job:?} continues at step {step}"
    )]
    Incomplete {
        /// The job.
        job: String,
        /// The step that was under way.
        step: u64,
        /// The cause.
        cause: String,
    },
    /// A program of the cluster is not in the folder of this program.
    #[error(
        "{program:?} not found; build it with `cargo build --release`, and keep it in the folder \
         of this program"
    )]
    NoProgram {
        /// Its expected path.
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
    /// A worker thread panicked.
    #[error("worker {rank} panicked")]
    Panicked {
        /// Its rank.
        rank: u32,
    },
}

/// The result of a part of a run.
pub type Result<T, E = Error> = std::result::Result<T, E>;
