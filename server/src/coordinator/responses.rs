//! Converts the answers of the coordinator into messages.

use zeroshard_model::{JobSpec, Server, version::VERSION};
use zeroshard_proto::pb;

use super::{
    advice::Advice,
    cluster::{Cluster, Description},
    decisions::Report,
    drains::{Drained, Stays},
    events::Now,
    feed::{Change, Peer},
    missing::Missing,
    progress::Wait,
    reduce::{Absent, Norm, Overflow},
    state::{Job, Phase, ServerState},
};
use crate::{clock::unix_ms, metrics::JobState};

impl From<Description> for pb::DescribeJobResponse {
    fn from(description: Description) -> Self {
        let Description { spec, placement, epoch, version, job_id } = description;
        let (spec, placement) = (Some(spec.as_ref().into()), Some(placement.as_ref().into()));
        Self { spec, epoch, placement, version, job_id }
    }
}

impl From<Change> for pb::JoinResponse {
    fn from(change: Change) -> Self {
        let peer = |Peer { rank, address }| pb::Peer { rank, address };
        Self {
            lease: change.lease.0,
            epoch: change.epoch,
            world: change.world,
            version: change.version,
            restored: change.restored.map(|(epoch, version)| pb::Restored { epoch, version }),
            spec: change.spec.map(|spec| spec.as_ref().into()),
            placement: change.placement.map(|placement| placement.as_ref().into()),
            peers: change.peers.into_iter().map(peer).collect(),
            job_id: change.job_id,
        }
    }
}

impl From<Report> for pb::CommitResponse {
    fn from(report: Report) -> Self {
        let absent = |Absent { slice, rank, everywhere }| pb::Absent { slice, rank, everywhere };
        Self {
            version: report.version,
            applied: report.applied,
            gradient_norm: report.norm.value,
            clip_coefficient: report.clip_coefficient,
            overflow: report.norm.overflow.map(Into::into),
            loss: report.loss,
            world: report.world,
            absent: report.absent.into_iter().map(absent).collect(),
            resting: report.resting,
            next_epoch: 0,
        }
    }
}

impl From<pb::CommitResponse> for Report {
    fn from(report: pb::CommitResponse) -> Self {
        let absent = |pb::Absent { slice, rank, everywhere }| Absent { slice, rank, everywhere };
        let overflow = |pb::Overflow { slice, rank }| Overflow { slice, rank };
        Self {
            version: report.version,
            applied: report.applied,
            norm: Norm {
                value: report.gradient_norm,
                overflow: report.overflow.map(overflow),
                tensors: [].into(),
            },
            clip_coefficient: report.clip_coefficient,
            loss: report.loss,
            world: report.world,
            absent: report.absent.into_iter().map(absent).collect(),
            resting: report.resting,
        }
    }
}

/// The answer to Reduce.
pub(super) fn reduced(norm: Norm, resting: Vec<u32>) -> pb::ReduceResponse {
    let Norm { value: gradient_norm, overflow, tensors } = norm;
    let (overflow, tensor_norms) = (overflow.map(Into::into), tensors.to_vec());
    pb::ReduceResponse { gradient_norm, overflow, tensor_norms, resting }
}

impl From<Overflow> for pb::Overflow {
    fn from(Overflow { slice, rank }: Overflow) -> Self {
        Self { slice, rank }
    }
}

fn slow_rank((rank, late_seconds): (u32, f64)) -> pb::SlowRank {
    pb::SlowRank { rank, late_seconds }
}

/// The last report of a shard server about its memory and jobs. The state machine stores it for
/// operators, and itself reads only [`Self::waiting_for`].
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Stats(pub(super) pb::Stats);

/// The files of a checkpoint that a server has written.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Files(pub(super) Vec<pb::CheckpointFile>);

impl Stats {
    /// The first tensor and rank of which the server lacks data of the job.
    pub(super) fn waiting_for(&self, job_id: u64) -> Option<&str> {
        self.0.jobs.iter().find(|job| job.job_id == job_id)?.waiting_for.as_deref()
    }
}

/// The response to `Status`.
pub(super) fn status(cluster: &Cluster, now: Now) -> pb::StatusResponse {
    let assigned = cluster.assigned();
    let server = |(server, known): (Server, &ServerState)| pb::ServerStatus {
        capacity: known.capacity.map(Into::into),
        assigned_bytes: assigned.get(&server.id).map_or(0, |load| load.bytes),
        name: cluster.names.get(&server.id).cloned().unwrap_or_default(),
        zone: cluster.zones.get(&server.id).cloned().unwrap_or_default(),
        version: known.version.clone(),
        cordoned: known.cordoned,
        server: Some(server.into()),
        stats: known.stats.clone().map(|Stats(stats)| stats),
    };
    let job = |job: &Job| {
        let wait = cluster.wait_of(job);
        let waited_ms = now.saturating_sub(job.progress.since()).as_millis() as u64;
        let wait = wait.map(|wait| {
            let Wait { reason, lacks_workers, lacks_servers } = wait;
            pb::JobWait { reason, waited_ms, lacks_workers, lacks_servers }
        });
        let saved_ms_ago = match &job.phase {
            Phase::Open(open) => open.saves.completed,
            _ => None,
        };
        let saved_ms_ago = saved_ms_ago.map(|at| now.saturating_sub(at).as_millis() as u64);
        let advice = cluster.advice_for(job).map(Into::into);
        pb::JobStatus { wait, trouble: trouble(job, now), saved_ms_ago, advice, ..job.into() }
    };
    let missing = |Missing { server, since, cause }| pb::MissingServer {
        name: cluster.names.get(&server.id).cloned().unwrap_or_default(),
        server: Some(server.into()),
        missing_ms: now.saturating_sub(since).as_millis() as u64,
        cause,
    };
    pb::StatusResponse {
        servers: cluster.live().into_iter().zip(cluster.servers.values()).map(server).collect(),
        jobs: cluster.jobs.values().map(job).collect(),
        version: VERSION.to_owned(),
        unix_ms: unix_ms(),
        leading_ms: now.as_millis() as u64,
        recovering: cluster.is_learning(),
        missing: cluster.missing().into_iter().map(missing).collect(),
        advice: cluster.advice().map(Into::into),
    }
}

impl From<Advice> for pb::Advice {
    fn from(Advice { text, command }: Advice) -> Self {
        Self { text, command: command.unwrap_or_default() }
    }
}

fn trouble(job: &Job, now: Now) -> Option<pb::JobTrouble> {
    let (error, at) = job.progress.trouble()?;
    let ago_ms = now.saturating_sub(*at).as_millis() as u64;
    Some(pb::JobTrouble { error: error.name(), message: error.to_string(), ago_ms })
}

impl From<JobState> for pb::JobState {
    fn from(state: JobState) -> Self {
        match state {
            JobState::Waiting => Self::Waiting,
            JobState::Opening => Self::Opening,
            JobState::Open => Self::Open,
            JobState::Restoring => Self::Restoring,
            JobState::Recovering => Self::Recovering,
            JobState::Failed => Self::Failed,
        }
    }
}

impl From<Drained> for pb::DrainServerResponse {
    fn from(Drained { server, stays, degraded }: Drained) -> Self {
        let job = |Stays { job, reason, transient }| pb::JobOnServer { job, reason, transient };
        Self {
            server: Some(server.into()),
            jobs: stays.into_iter().map(job).collect(),
            degraded_slices: degraded,
        }
    }
}

impl From<&Job> for pb::JobStatus {
    fn from(job: &Job) -> Self {
        let JobSpec { name, manifest, world, .. } = job.spec.as_ref();
        let open = match &job.phase {
            Phase::Open(open) => Some(open),
            _ => None,
        };
        let failure = match &job.phase {
            Phase::Failed { reason, .. } => Some(reason.clone()),
            _ => None,
        };
        Self {
            name: name.clone(),
            epoch: job.epoch,
            world: *world,
            joined: open.map(|open| open.members.ranks().collect()).unwrap_or_default(),
            version: open.and_then(|open| open.version),
            parameters: manifest.parameters(),
            tensors: manifest.tensors().len() as u32,
            slices: manifest.number_of_slices() as u32,
            failure,
            job_id: job.id,
            resting: open.map(|open| open.resting.ranks().collect()).unwrap_or_default(),
            saved_version: open.and_then(|open| open.saves.last()),
            saving_version: open.and_then(|open| open.saves.current()),
            state: pb::JobState::from(job.phase.shown()).into(),
            slowest: open.and_then(|open| open.lateness.slowest()).map(slow_rank),
            degraded_slices: open.map_or(0, |open| open.degraded_slices(&job.spec) as u32),
            // These fields depend on the whole cluster and on the time; the caller sets them.
            wait: None,
            trouble: None,
            saved_ms_ago: None,
            advice: None,
            failed_saves: open.map_or(0, |open| open.saves.failures),
            save_error: open.and_then(|open| open.saves.failure.clone()).unwrap_or_default(),
        }
    }
}
