//! What can go wrong in a run.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a run ended early.
#[derive(Debug, Error)]
pub enum Error {
    /// The text.
    #[error(transparent)]
    Text(#[from] super::text::Error),
    /// The division of the batch.
    #[error(transparent)]
    Batch(#[from] super::batches::Error),
    /// The cluster, or a job that it does not take.
    #[error(transparent)]
    Cluster(#[from] zeroshard_proto::Error),
    /// The workers that have a replica of the model together.
    #[error(transparent)]
    Parallel(#[from] crate::parallel::Error),
    /// The embedded cluster.
    #[error("embedded cluster: {0}")]
    Embedded(#[from] zeroshard_server::serve::Error),
    /// A flag that contradicts another.
    #[error("{flag} is {found}; it must be {expected}")]
    Flag {
        /// The flag.
        flag: &'static str,
        /// Its value.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// The job has taken all the steps that were asked for, and more.
    #[error(
        "job {job:?} is at step {version} of {steps} already; ask for more --steps, or take another --job"
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
        /// Which.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// Standard output or the runtime.
    #[error("{doing}: {cause}")]
    System {
        /// What was tried.
        doing: &'static str,
        /// What the system said.
        cause: io::Error,
    },
    /// A worker of a tensor-parallel run is gone, and with it its part of what the others compute.
    #[error(
        "{cause}. Workers that have a model together end together: start all of them again, and job {job:?} goes on at \
         step {step}"
    )]
    Incomplete {
        /// The job.
        job: String,
        /// The step that was under way.
        step: u64,
        /// What was heard of it.
        cause: String,
    },
    /// A program of the cluster that is not where this one is.
    #[error(
        "there is no {program:?}; build it (`cargo build --release`) and keep it beside this program"
    )]
    NoProgram {
        /// Where it was looked for.
        program: PathBuf,
    },
    /// A program of the cluster that did not start or did not go on.
    #[error("{program} {did}")]
    Process {
        /// Which.
        program: String,
        /// What it did.
        did: String,
    },
    /// A worker thread that panicked.
    #[error("worker {rank} panicked")]
    Panicked {
        /// Its rank.
        rank: u32,
    },
}

/// The result of a part of a run.
pub type Result<T, E = Error> = std::result::Result<T, E>;
