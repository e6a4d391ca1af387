//! The status that a cluster's servers and jobs report.

use zeroshard_proto::{Error, Result, Server, pb};

/// The servers and jobs of a cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// The connected shard servers.
    pub servers: Vec<ServerStatus>,
    /// The jobs.
    pub jobs: Vec<JobStatus>,
}

/// A shard server and its memory. All numbers are 0 until its first report, which arrives within a
/// second.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerStatus {
    /// The server.
    pub server: Server,
    /// What fails together with it, such as a rack; empty: a zone of its own.
    pub zone: String,
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
    /// Bytes that the server has for the arrays of slices; `None` if it has no limit.
    pub capacity_bytes: Option<u64>,
    /// Bytes that the jobs need of it.
    pub assigned_bytes: u64,
}

/// A job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobStatus {
    /// The name.
    pub name: String,
    /// The id, which distinguishes the job from earlier and later jobs of the same name.
    pub id: u64,
    /// The membership generation; 0 before the slices are placed.
    pub epoch: u64,
    /// The number of ranks.
    pub world: u32,
    /// The ranks that workers hold, ascending.
    pub joined: Vec<u32>,
    /// The current version; `None` before the initial parameters are complete.
    pub version: Option<u64>,
    /// The number of parameters.
    pub parameters: u64,
    /// The number of tensors.
    pub tensors: u32,
    /// The number of slices.
    pub slices: u32,
    /// The reason, if the job has failed.
    pub failure: Option<String>,
    /// The ranks that rest, ascending.
    pub resting: Vec<u32>,
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
            zone: message.zone,
            slices: stats.jobs.iter().map(|job| job.slices).sum(),
            master_bytes: stats.master_bytes,
            state_bytes: stats.state_bytes,
            accumulator_bytes: stats.accumulator_bytes,
            published_bytes: stats.published_bytes,
            parked_bytes: stats.parked_bytes,
            capacity_bytes: message.capacity.map(|capacity| capacity.bytes),
            assigned_bytes: message.assigned_bytes,
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
            resting: message.resting,
            failure: message.failure,
        }
    }
}
