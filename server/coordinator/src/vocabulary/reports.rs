//! Reports of shard servers that the state machine stores: it hardly reads them itself.

use bytes::Bytes;

/// The memory and the jobs of a shard server, which reports them once a second.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Stats {
    /// The jobs of which the server holds slices.
    pub jobs: Vec<JobStats>,
    /// Bytes of master weights.
    pub master_bytes: u64,
    /// Bytes of optimizer state.
    pub state_bytes: u64,
    /// Bytes of gradient accumulators.
    pub accumulator_bytes: u64,
    /// Bytes of published parameters that are stored in addition to the master weights.
    pub published_bytes: u64,
    /// Bytes of gradients that wait for the gradients of other ranks.
    pub parked_bytes: u64,
}

/// A job on a shard server.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct JobStats {
    /// The name of the job.
    pub job: String,
    /// The id of the job.
    pub job_id: u64,
    /// The epoch that the server knows.
    pub epoch: u64,
    /// The version that all of its slices have; `None` until version 0 is published.
    pub version: Option<u64>,
    /// The number of its slices on the server.
    pub slices: u32,
    /// The first tensor and rank whose gradient, or initial parameters, are missing.
    pub waiting_for: Option<String>,
    /// Bytes of parameters that the server has sent since it opened the job.
    pub sent_bytes: u64,
    /// Bytes of gradients and initial parameters that it has received since then.
    pub received_bytes: u64,
    /// The number of ranks that share memory with the server.
    pub windows: u32,
    /// Why the last rank that asked for it does not.
    pub no_window: Option<String>,
    /// The readers that follow the job, and have asked the server within the last minute.
    pub readers: Vec<JobReader>,
}

/// A reader that follows a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobReader {
    /// The random number of the reader.
    pub id: u64,
    /// How many versions it is behind the newest version of the server; `None` if it has none yet.
    pub lag: Option<u64>,
}

impl Stats {
    /// The first tensor and rank of which the server lacks data of the job.
    pub(crate) fn waiting_for(&self, job_id: u64) -> Option<&str> {
        self.jobs.iter().find(|job| job.job_id == job_id)?.waiting_for.as_deref()
    }
}

/// The files of a checkpoint that a server has written: encoded `CheckpointFile` messages, which
/// only the manifest reads.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Files(pub Vec<Bytes>);
