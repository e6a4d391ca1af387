//! The status that a cluster's servers and jobs report.

use std::{collections::BTreeMap, fmt, time::Duration};

use zeroshard_model::{Error, Result, Server, version::VERSION};
use zeroshard_proto::pb;

/// The request that states the version of this client.
pub(crate) fn status_request() -> pb::StatusRequest {
    pb::StatusRequest { version: VERSION.to_owned() }
}

/// The servers and jobs of a cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// The connected shard servers.
    pub servers: Vec<ServerStatus>,
    /// The jobs.
    pub jobs: Vec<JobStatus>,
    /// The version of the coordinator; empty if it does not state it.
    pub version: String,
    /// The clock of the coordinator: milliseconds since 1970, UTC.
    pub unix_ms: u64,
    /// How long this coordinator has been the leader.
    pub leading: Duration,
    /// `true` if servers may still describe jobs of an earlier coordinator, so that servers and
    /// jobs may be absent here.
    pub recovering: bool,
    /// The shard servers that were connected, and were not drained before they left.
    pub missing: Vec<MissingServer>,
    /// Advice for the operator about the cluster itself; `None` if nothing is wrong.
    pub advice: Option<Advice>,
}

/// An action that is recommended to an operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// The action in imperative form, without a period.
    pub text: String,
    /// A command that carries it out, with upper-case words where a value has to be inserted.
    pub command: Option<String>,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)?;
        match &self.command {
            Some(command) => write!(f, ": {command}"),
            None => Ok(()),
        }
    }
}

/// A shard server that is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingServer {
    /// The server.
    pub server: Server,
    /// The name that the operator gave it (`--id`); empty: none.
    pub name: String,
    /// How long it has been missing.
    pub since: Duration,
    /// Why its connection to the coordinator has ended.
    pub cause: String,
}

impl Status {
    /// The reasons why the cluster itself needs attention: its coordinator is recovering, or shard
    /// servers are missing. Empty for a healthy cluster, whose jobs may have problems of their own.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if self.recovering {
            problems.push(
                "the coordinator is recovering: servers and jobs may not have been found yet"
                    .to_owned(),
            );
        }
        let missing = |MissingServer { server, name, since, cause }: &MissingServer| {
            let (address, seconds) = (&server.address, since.as_secs());
            let server =
                if name.is_empty() { address.clone() } else { format!("{name} ({address})") };
            format!("shard server {server} has been missing for {seconds} s: {cause}")
        };
        problems.extend(self.missing.iter().map(missing));
        if self.servers.is_empty() {
            problems.push("no shard server is connected".to_owned());
        }
        problems
    }
}

/// A shard server and its memory. All numbers are 0 until its first report, which arrives within a
/// second.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerStatus {
    /// The server.
    pub server: Server,
    /// The name that the operator gave it (`--id`); empty: none.
    pub name: String,
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
    /// The version of the server; empty if it does not state it.
    pub version: String,
    /// `true` if the server is cordoned: it receives no new slices.
    pub cordoned: bool,
    /// The jobs that have slices on the server.
    pub jobs: Vec<JobOnServer>,
}

/// A job on a shard server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobOnServer {
    /// The name of the job.
    pub job: String,
    /// Bytes of parameters that the server has sent since it opened the job.
    pub sent_bytes: u64,
    /// Bytes of gradients and initial parameters that it has received since then.
    pub received_bytes: u64,
    /// The number of ranks that share memory with the server.
    pub windows: u32,
    /// Why the last rank that asked for it does not.
    pub no_window: Option<String>,
    /// The readers that follow the job ([`crate::Cluster::follow`]), and have asked the server
    /// within the last minute: the random number of each, and how many versions it is behind the
    /// newest version of the server; `None` if it has none yet.
    pub readers: BTreeMap<u64, Option<u64>>,
}

/// A job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobStatus {
    /// The name.
    pub name: String,
    /// The id, which distinguishes the job from earlier and later jobs of the same name.
    pub id: u64,
    /// How often the job has returned to a checkpoint ([`zeroshard_model::Line`]).
    pub line: u64,
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
    /// The state of the job.
    pub state: JobState,
    /// The input that the job waits for; `None` if nothing is missing, the job has failed, or all
    /// of its ranks have ended.
    pub wait: Option<JobWait>,
    /// The rank that commits last, on average over the last steps; `None` in a job with one rank,
    /// and before the first step.
    pub slowest: Option<SlowRank>,
    /// The number of slices that have fewer replicas than the job requires.
    pub degraded_slices: u32,
    /// The last event since the start of the coordinator that has aborted a step or an attempt.
    pub trouble: Option<Trouble>,
    /// The version of the last checkpoint that was completed since the start of the coordinator.
    pub saved_version: Option<u64>,
    /// The time since that checkpoint was completed.
    pub saved_ago: Option<Duration>,
    /// The number of saves that have failed since then.
    pub failed_saves: u32,
    /// The error of the last of them; empty if there was none.
    pub save_error: String,
    /// Advice for the operator about the job; `None` if nothing is wrong.
    pub advice: Option<Advice>,
}

impl JobStatus {
    /// The reason why the job needs attention: it has failed, it cannot continue because workers or
    /// servers are missing, or the loss of one more server could destroy its state. `None` for a
    /// healthy job.
    pub fn problem(&self) -> Option<String> {
        if let Some(failure) = &self.failure {
            return Some(format!("it has failed: {failure}"));
        }
        if let Some(wait) = self.wait.as_ref().filter(|wait| wait.is_blocked()) {
            return Some(wait.reason.clone());
        }
        if matches!(self.state, JobState::Recovering | JobState::Restoring) {
            return Some(format!("it is {}", self.state));
        }
        if self.degraded_slices > 0 {
            return Some(format!("{} slices have too few replicas", self.degraded_slices));
        }
        let (failed, error) = (self.failed_saves, &self.save_error);
        (failed > 0).then(|| format!("its last {failed} saves have failed: {error}"))
    }
}

/// The state of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum JobState {
    /// A state that this client does not know, because the coordinator has another version.
    #[default]
    Unknown,
    /// The job waits for shard servers or for its placement.
    Waiting,
    /// The servers of the job allocate memory.
    Opening,
    /// Workers can join and train the job.
    Open,
    /// The job returns to its last checkpoint.
    Restoring,
    /// The coordinator was restarted, and learns the job from its shard servers.
    Recovering,
    /// The job has failed.
    Failed,
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unknown => "unknown",
            Self::Waiting => "waiting",
            Self::Opening => "opening",
            Self::Open => "open",
            Self::Restoring => "restoring",
            Self::Recovering => "recovering",
            Self::Failed => "failed",
        })
    }
}

impl From<pb::JobState> for JobState {
    fn from(state: pb::JobState) -> Self {
        match state {
            pb::JobState::Unspecified => Self::Unknown,
            pb::JobState::Waiting => Self::Waiting,
            pb::JobState::Opening => Self::Opening,
            pb::JobState::Open => Self::Open,
            pb::JobState::Restoring => Self::Restoring,
            pb::JobState::Recovering => Self::Recovering,
            pb::JobState::Failed => Self::Failed,
        }
    }
}

/// The input that a job waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobWait {
    /// A description of the missing ranks, servers or data.
    pub reason: String,
    /// The time since the last step of the job, or since its last change of state.
    pub waited: Duration,
    /// `true` if ranks have no worker.
    pub lacks_workers: bool,
    /// `true` if shard servers are missing or not connected.
    pub lacks_servers: bool,
}

impl JobWait {
    /// Returns whether the job cannot continue until missing workers or servers connect. Otherwise
    /// it waits for connected ranks and servers, as it does in every step.
    pub fn is_blocked(&self) -> bool {
        self.lacks_workers || self.lacks_servers
    }
}

/// A rank that commits later than others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlowRank {
    /// The rank.
    pub rank: u32,
    /// The average delay of its commit after the first commit, over the last steps.
    pub late: Duration,
}

/// An event that has disturbed a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// The name of the error that the ranks received, such as `STEP_ABORTED`.
    pub error: String,
    /// The message of the error.
    pub message: String,
    /// The time since the event.
    pub ago: Duration,
}

impl TryFrom<pb::StatusResponse> for Status {
    type Error = Error;

    fn try_from(message: pb::StatusResponse) -> Result<Self> {
        let servers = message.servers.into_iter().map(ServerStatus::try_from);
        let jobs = message.jobs.into_iter().map(JobStatus::from);
        Ok(Self {
            servers: servers.collect::<Result<_>>()?,
            jobs: jobs.collect(),
            missing: message
                .missing
                .into_iter()
                .map(MissingServer::try_from)
                .collect::<Result<_>>()?,
            version: message.version,
            unix_ms: message.unix_ms,
            leading: Duration::from_millis(message.leading_ms),
            recovering: message.recovering,
            advice: message.advice.map(Into::into),
        })
    }
}

impl TryFrom<pb::MissingServer> for MissingServer {
    type Error = Error;

    fn try_from(message: pb::MissingServer) -> Result<Self> {
        let absent = || Error::refused("the status of a server has no `server`");
        let server = message.server.ok_or_else(absent)?.into();
        let pb::MissingServer { missing_ms, cause, name, .. } = message;
        Ok(Self { server, name, since: Duration::from_millis(missing_ms), cause })
    }
}

impl TryFrom<pb::ServerStatus> for ServerStatus {
    type Error = Error;

    fn try_from(message: pb::ServerStatus) -> Result<Self> {
        let absent = || Error::refused("the status of a server has no `server`");
        let server = message.server.ok_or_else(absent)?;
        let stats = message.stats.unwrap_or_default();
        Ok(Self {
            server: server.into(),
            name: message.name,
            zone: message.zone,
            slices: stats.jobs.iter().map(|job| job.slices).sum(),
            jobs: stats.jobs.into_iter().map(JobOnServer::from).collect(),
            master_bytes: stats.master_bytes,
            state_bytes: stats.state_bytes,
            accumulator_bytes: stats.accumulator_bytes,
            published_bytes: stats.published_bytes,
            parked_bytes: stats.parked_bytes,
            capacity_bytes: message.capacity.map(|capacity| capacity.bytes),
            assigned_bytes: message.assigned_bytes,
            version: message.version,
            cordoned: message.cordoned,
        })
    }
}

impl From<pb::JobStats> for JobOnServer {
    fn from(message: pb::JobStats) -> Self {
        Self {
            job: message.job,
            sent_bytes: message.sent_bytes,
            received_bytes: message.received_bytes,
            windows: message.windows,
            no_window: message.no_window,
            readers: message.readers.into_iter().map(|of| (of.id, of.lag)).collect(),
        }
    }
}

impl From<pb::Advice> for Advice {
    fn from(pb::Advice { text, command }: pb::Advice) -> Self {
        Self { text, command: Some(command).filter(|command| !command.is_empty()) }
    }
}

impl From<pb::JobWait> for JobWait {
    fn from(message: pb::JobWait) -> Self {
        let pb::JobWait { reason, waited_ms, lacks_workers, lacks_servers } = message;
        let waited = Duration::from_millis(waited_ms);
        Self { reason, waited, lacks_workers, lacks_servers }
    }
}

impl From<pb::SlowRank> for SlowRank {
    fn from(pb::SlowRank { rank, late_seconds }: pb::SlowRank) -> Self {
        Self { rank, late: Duration::try_from_secs_f64(late_seconds).unwrap_or_default() }
    }
}

impl From<pb::JobTrouble> for Trouble {
    fn from(pb::JobTrouble { error, message, ago_ms }: pb::JobTrouble) -> Self {
        Self { error, message, ago: Duration::from_millis(ago_ms) }
    }
}

impl From<pb::JobStatus> for JobStatus {
    fn from(message: pb::JobStatus) -> Self {
        Self {
            state: message.state().into(),
            wait: message.wait.map(Into::into),
            slowest: message.slowest.map(Into::into),
            degraded_slices: message.degraded_slices,
            trouble: message.trouble.map(Into::into),
            saved_version: message.saved_version,
            saved_ago: message.saved_ms_ago.map(Duration::from_millis),
            failed_saves: message.failed_saves,
            save_error: message.save_error,
            advice: message.advice.map(Into::into),
            name: message.name,
            id: message.job_id,
            line: message.line,
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
