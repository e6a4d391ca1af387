//! Converts the answers of the coordinator into messages.

use zeroshard_coordinator::{
    cluster::{
        Cluster,
        context::Common,
        servers::{Missing, ServerState},
    },
    job::{Description, Job, Phase},
    operators::{
        advice::{Advice, advice},
        metrics_view::JobState,
    },
    state::{
        memberships::{Change, Peer},
        progress::Wait,
    },
    vocabulary::{
        calls::{Drained, Rested, Stays},
        decision::Report,
        gradient::{Absent, Norm, Overflow},
        ids::Now,
        reports::{JobReader, JobStats, Stats},
    },
};
use zeroshard_model::{Attempt, JobSpec, Server, version::VERSION};
use zeroshard_proto::pb;

use crate::clock::unix_ms;

/// A value of the state machine that is sent as a message.
pub(crate) trait Message<M> {
    /// Converts it.
    fn message(self) -> M;
}

impl Message<pb::DescribeJobResponse> for Description {
    fn message(self) -> pb::DescribeJobResponse {
        let description = self;
        let Description { spec, placement, epoch, version, line, job_id } = description;
        let (spec, placement) = (Some(spec.as_ref().into()), Some(placement.as_ref().into()));
        pb::DescribeJobResponse { spec, epoch, placement, version, job_id, line }
    }
}

impl Message<pb::JoinResponse> for Change {
    fn message(self) -> pb::JoinResponse {
        let change = self;
        let peer = |Peer { rank, address }| pb::Peer { rank, address };
        pb::JoinResponse {
            lease: change.lease.0,
            epoch: change.epoch,
            world: change.world,
            version: change.version,
            restored: change.restored.map(|(epoch, version)| pb::Restored { epoch, version }),
            spec: change.spec.map(|spec| spec.as_ref().into()),
            placement: change.placement.map(|placement| placement.as_ref().into()),
            peers: change.peers.into_iter().map(peer).collect(),
            job_id: change.job_id,
            line: Some((&*change.line).into()),
        }
    }
}

impl Message<pb::CommitResponse> for Report {
    fn message(self) -> pb::CommitResponse {
        let report = self;
        pb::CommitResponse {
            version: report.version,
            applied: report.applied,
            gradient_norm: report.norm.value,
            clip_coefficient: report.clip_coefficient,
            overflow: report.norm.overflow.map(Message::message),
            loss: report.loss,
            world: report.world,
            absent: report.absent.into_iter().map(Message::message).collect(),
            resting: report.resting,
            next_epoch: 0,
            spike: report.spike.unwrap_or_default(),
        }
    }
}

/// The report of a step that a coordinator has sent.
pub(super) fn report(report: pb::CommitResponse) -> Report {
    let absent = |pb::Absent { slice, rank, everywhere }| Absent { slice, rank, everywhere };
    let overflow = |pb::Overflow { slice, rank }| Overflow { slice, rank };
    Report {
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
        spike: Some(report.spike).filter(|why| !why.is_empty()),
    }
}

/// The answer to Reduce.
pub(super) fn reduced(norm: Norm, absent: Vec<Absent>, resting: Vec<u32>) -> pb::ReduceResponse {
    let Norm { value: gradient_norm, overflow, tensors } = norm;
    pb::ReduceResponse {
        gradient_norm,
        overflow: overflow.map(Message::message),
        tensor_norms: tensors.to_vec(),
        resting,
        absent: absent.into_iter().map(Message::message).collect(),
    }
}

impl Message<pb::Absent> for Absent {
    fn message(self) -> pb::Absent {
        let Absent { slice, rank, everywhere } = self;
        pb::Absent { slice, rank, everywhere }
    }
}

impl Message<pb::Overflow> for Overflow {
    fn message(self) -> pb::Overflow {
        let Overflow { slice, rank } = self;
        pb::Overflow { slice, rank }
    }
}

fn slow_rank((rank, late_seconds): (u32, f64)) -> pb::SlowRank {
    pb::SlowRank { rank, late_seconds }
}

impl Message<pb::Stats> for Stats {
    fn message(self) -> pb::Stats {
        let stats = self;
        let reader = |JobReader { id, lag }| pb::JobReader { id, lag };
        let job = |job: JobStats| pb::JobStats {
            job: job.job,
            job_id: job.job_id,
            epoch: job.epoch,
            version: job.version,
            slices: job.slices,
            waiting_for: job.waiting_for,
            sent_bytes: job.sent_bytes,
            received_bytes: job.received_bytes,
            windows: job.windows,
            no_window: job.no_window,
            readers: job.readers.into_iter().map(reader).collect(),
        };
        pb::Stats {
            jobs: stats.jobs.into_iter().map(job).collect(),
            master_bytes: stats.master_bytes,
            state_bytes: stats.state_bytes,
            accumulator_bytes: stats.accumulator_bytes,
            published_bytes: stats.published_bytes,
            parked_bytes: stats.parked_bytes,
        }
    }
}

/// The report of a shard server about its memory and jobs.
pub(super) fn stats(stats: pb::Stats) -> Stats {
    let reader = |pb::JobReader { id, lag }| JobReader { id, lag };
    let job = |job: pb::JobStats| JobStats {
        job: job.job,
        job_id: job.job_id,
        epoch: job.epoch,
        version: job.version,
        slices: job.slices,
        waiting_for: job.waiting_for,
        sent_bytes: job.sent_bytes,
        received_bytes: job.received_bytes,
        windows: job.windows,
        no_window: job.no_window,
        readers: job.readers.into_iter().map(reader).collect(),
    };
    Stats {
        jobs: stats.jobs.into_iter().map(job).collect(),
        master_bytes: stats.master_bytes,
        state_bytes: stats.state_bytes,
        accumulator_bytes: stats.accumulator_bytes,
        published_bytes: stats.published_bytes,
        parked_bytes: stats.parked_bytes,
    }
}

/// The response to `Status`.
pub(super) fn status(cluster: &Cluster, now: Now) -> pb::StatusResponse {
    let Common { servers, index, startup, .. } = cluster.common();
    let assigned = index.assigned();
    let server = |server: Server, known: &ServerState| pb::ServerStatus {
        capacity: known.capacity.map(Into::into),
        assigned_bytes: assigned.get(&server.id).map_or(0, |load| load.bytes),
        name: servers.given_name(server.id),
        zone: servers.zone_of(server.id),
        version: known.version.clone(),
        cordoned: known.cordoned,
        server: Some(server.into()),
        stats: known.stats.clone().map(Message::message),
    };
    let job = |job: &Job| {
        let wait = job.wait(cluster.common());
        let waited_ms = now.saturating_sub(job.progress.since()).as_millis() as u64;
        let wait = wait.map(|wait| {
            let Wait { reason, lacks_workers, lacks_servers } = wait;
            pb::JobWait { reason, waited_ms, lacks_workers, lacks_servers }
        });
        let saved_ms_ago = match &job.phase {
            Phase::Open(open) => open.saves.completed(),
            _ => None,
        };
        let saved_ms_ago = saved_ms_ago.map(|at| now.saturating_sub(at).as_millis() as u64);
        let advice = job.advice(cluster.common()).map(Message::message);
        pb::JobStatus { wait, trouble: trouble(job, now), saved_ms_ago, advice, ..job.message() }
    };
    let missing = |Missing { server, since, cause }| pb::MissingServer {
        name: servers.given_name(server.id),
        server: Some(server.into()),
        missing_ms: now.saturating_sub(since).as_millis() as u64,
        cause,
    };
    let live = servers.live().into_iter();
    pb::StatusResponse {
        servers: live.filter_map(|of| Some(server(of.clone(), servers.get(of.id)?))).collect(),
        jobs: cluster.jobs().values().map(job).collect(),
        version: VERSION.to_owned(),
        unix_ms: unix_ms(),
        leading_ms: now.as_millis() as u64,
        recovering: startup.is_learning(),
        missing: cluster.missing().into_iter().map(missing).collect(),
        advice: advice(cluster).map(Message::message),
    }
}

impl Message<pb::Advice> for Advice {
    fn message(self) -> pb::Advice {
        let Advice { text, command } = self;
        pb::Advice { text, command: command.unwrap_or_default() }
    }
}

fn trouble(job: &Job, now: Now) -> Option<pb::JobTrouble> {
    let (error, at) = job.progress.trouble()?;
    let ago_ms = now.saturating_sub(*at).as_millis() as u64;
    Some(pb::JobTrouble { error: error.name(), message: error.to_string(), ago_ms })
}

impl Message<pb::RestResponse> for Rested {
    fn message(self) -> pb::RestResponse {
        let Rested { attempt: Attempt { step, number, .. }, last } = self;
        pb::RestResponse { step, attempt: number, last }
    }
}

impl Message<pb::JobState> for JobState {
    fn message(self) -> pb::JobState {
        let state = self;
        match state {
            JobState::Waiting => pb::JobState::Waiting,
            JobState::Opening => pb::JobState::Opening,
            JobState::Open => pb::JobState::Open,
            JobState::Restoring => pb::JobState::Restoring,
            JobState::Recovering => pb::JobState::Recovering,
            JobState::Failed => pb::JobState::Failed,
        }
    }
}

impl Message<pb::DrainServerResponse> for Drained {
    fn message(self) -> pb::DrainServerResponse {
        let Drained { server, stays, degraded } = self;
        let job = |Stays { job, reason, transient }| pb::JobOnServer { job, reason, transient };
        pb::DrainServerResponse {
            server: Some(server.into()),
            jobs: stays.into_iter().map(job).collect(),
            degraded_slices: degraded,
        }
    }
}

impl Message<pb::JobStatus> for &Job {
    fn message(self) -> pb::JobStatus {
        let job = self;
        let JobSpec { name, manifest, world, .. } = job.spec.as_ref();
        let open = match &job.phase {
            Phase::Open(open) => Some(open),
            _ => None,
        };
        let failure = match &job.phase {
            Phase::Failed { reason, .. } => Some(reason.clone()),
            _ => None,
        };
        pb::JobStatus {
            name: name.clone(),
            epoch: job.epoch,
            world: *world,
            joined: open.map(|open| open.members.ranks().collect()).unwrap_or_default(),
            version: open.and_then(|open| open.version.current()),
            parameters: manifest.parameters(),
            tensors: manifest.tensors().len() as u32,
            slices: manifest.number_of_slices() as u32,
            failure,
            job_id: job.id,
            line: job.line.number,
            resting: open.map(|open| open.uneven_inputs.ranks().collect()).unwrap_or_default(),
            saved_version: open.and_then(|open| open.saves.last()),
            saving_version: open.and_then(|open| open.saves.current()),
            state: job.phase.shown().message().into(),
            slowest: open.and_then(|open| open.lateness.slowest()).map(slow_rank),
            degraded_slices: open.map_or(0, |open| open.degraded_slices(&job.spec) as u32),
            // These fields depend on the whole cluster and on the time; the caller sets them.
            wait: None,
            trouble: None,
            saved_ms_ago: None,
            advice: None,
            failed_saves: open.map_or(0, |open| open.saves.failures()),
            save_error: open.and_then(|open| open.saves.failure()).unwrap_or_default().to_owned(),
        }
    }
}
