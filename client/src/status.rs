//! What a cluster's servers and jobs report about themselves.

use zeroshard_proto::{Error, Result, Server, pb};

/// Servers and jobs of a cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// The shard servers that are connected.
    pub servers: Vec<ServerStatus>,
    /// The jobs.
    pub jobs: Vec<JobStatus>,
}

/// A shard server, and what it holds. All numbers are 0 until its first report, which comes within
/// a second.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerStatus {
    /// The server.
    pub server: Server,
    /// Number of slices.
    pub slices: u32,
    /// Bytes of master weights.
    pub master_bytes: u64,
    /// Bytes of optimizer state.
    pub state_bytes: u64,
    /// Bytes of gradient accumulators.
    pub accumulator_bytes: u64,
    /// Bytes of published parameters beside the master weights.
    pub published_bytes: u64,
    /// Bytes of gradients that wait for those of other ranks.
    pub parked_bytes: u64,
}

/// A job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobStatus {
    /// Its name.
    pub name: String,
    /// Tells the job from earlier and later ones of its name.
    pub id: u64,
    /// Its membership generation; 0 before its slices are placed.
    pub epoch: u64,
    /// Number of ranks.
    pub world: u32,
    /// The ranks that a worker holds, ascending.
    pub joined: Vec<u32>,
    /// The current version; `None` before the initial parameters are complete.
    pub version: Option<u64>,
    /// Number of parameters.
    pub parameters: u64,
    /// Number of tensors.
    pub tensors: u32,
    /// Number of slices.
    pub slices: u32,
    /// Why it has failed, if it has.
    pub failure: Option<String>,
}

impl TryFrom<pb::StatusResponse> for Status {
    type Error = Error;

    fn try_from(message: pb::StatusResponse) -> Result<Self> {
        let servers = message.servers.into_iter().map(ServerStatus::try_from);
        let jobs = message.jobs.into_iter().map(JobStatus::from);
        Ok(Self { servers: servers.collect::<Result<_>>()?, jobs: jobs.collect() })
    }
}

impl TryFrom<pb::ServerStatus> for ServerStatus {
    type Error = Error;

    fn try_from(message: pb::ServerStatus) -> Result<Self> {
        let absent = || Error::invalid("server of a status", "absent", "present");
        let server = message.server.ok_or_else(absent)?;
        let stats = message.stats.unwrap_or_default();
        Ok(Self {
            server: server.into(),
            slices: stats.jobs.iter().map(|job| job.slices).sum(),
            master_bytes: stats.master_bytes,
            state_bytes: stats.state_bytes,
            accumulator_bytes: stats.accumulator_bytes,
            published_bytes: stats.published_bytes,
            parked_bytes: stats.parked_bytes,
        })
    }
}

impl From<pb::JobStatus> for JobStatus {
    fn from(message: pb::JobStatus) -> Self {
        Self {
            name: message.name,
            id: message.job_id,
            epoch: message.epoch,
            world: message.world,
            joined: message.joined,
            version: message.version,
            parameters: message.parameters,
            tensors: message.tensors,
            slices: message.slices,
            failure: message.failure,
        }
    }
}
