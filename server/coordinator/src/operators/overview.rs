//! The state of the cluster for the status page. It is read under the driver's lock, so its size is
//! bounded, and large parts are shared instead of copied.

use std::{cmp::Reverse, collections::BTreeMap, sync::Arc, time::Duration};

use zeroshard_model::{JobSpec, Placement, memory::Capacity};

use crate::{
    cluster::{
        Cluster,
        servers::{Missing, ServerState, Servers},
    },
    job::{Job, Phase},
    operators::{
        advice::{Advice, advice},
        history::{Happened, History, Severity},
        metrics_view::{JobMetrics, JobState},
    },
    vocabulary::{
        ids::{Now, ServerId},
        reports::Stats,
    },
};

/// The maximum number of jobs in the overview.
pub(crate) const MAX_JOBS: usize = 100;

/// The maximum number of jobs whose details are in the overview.
pub const MAX_DETAILED: usize = 12;

/// The maximum number of servers in the overview.
const MAX_SERVERS: usize = 200;

/// The maximum number of late ranks of a job in the overview.
const MAX_LATE: usize = 8;

/// The part of the cluster that a page shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct View {
    /// The number of the page of jobs, from 0.
    pub page: usize,
    /// The id of a job that comes first, whatever its urgency.
    pub job: Option<u64>,
    /// Events of a lower severity are left out.
    pub events: Severity,
}

/// The servers and jobs of a cluster.
#[derive(Debug)]
pub struct Overview {
    /// The part that was asked for.
    pub view: View,
    /// Advice for the operator about the cluster itself.
    pub advice: Option<Advice>,
    /// At most `MAX_SERVERS` servers: first those that jobs wait for, then by the share of memory
    /// in use, highest first.
    pub servers: Vec<ServerOverview>,
    /// The number of connected servers.
    pub connected: usize,
    /// The number of servers that were connected, and were not drained before they left.
    pub missing: usize,
    /// The selected job, and a page of at most `MAX_JOBS` others: first failed jobs, then jobs
    /// that do not train, then the jobs with the most recent steps.
    pub jobs: Vec<JobOverview>,
    /// The number of pages of jobs.
    pub pages: usize,
    /// The total number of jobs, and how many of them have failed.
    pub all_jobs: usize,
    pub failed_jobs: usize,
    /// The number of workers of all jobs.
    pub workers: usize,
    /// The number of bytes that all jobs need, and the total capacity of the servers if all
    /// capacities are known.
    pub memory: (u64, Option<u64>),
    /// `true` if servers may still describe jobs of an earlier coordinator.
    pub is_learning: bool,
    /// The last events, newest first, and the number of events of each severity or a higher one.
    pub events: Vec<Happened>,
    pub counts: [usize; Severity::ALL.len()],
}

/// A shard server.
#[derive(Debug)]
pub struct ServerOverview {
    pub id: ServerId,
    pub address: String,
    /// The name that the operator gave it; empty: none.
    pub name: String,
    pub zone: String,
    /// The capacity for the arrays of slices.
    pub capacity: Option<Capacity>,
    /// The number of bytes that the jobs need on the server.
    pub assigned: u64,
    /// The last report of the server.
    pub stats: Option<Stats>,
    /// The number of jobs that wait for the server, if it is not connected.
    pub awaited_by: usize,
    /// Why the server is not connected.
    pub lost: Option<String>,
    /// `true` if the server is cordoned.
    pub cordoned: bool,
}

/// A job.
#[derive(Debug)]
pub struct JobOverview {
    pub id: u64,
    /// How often the job has returned to a checkpoint.
    pub line: u64,
    pub spec: Arc<JobSpec>,
    pub metrics: JobMetrics,
    /// The reason for the failure of the job, or the error of the last save if it has failed.
    pub failure: Option<String>,
    /// Advice for the operator about the job.
    pub advice: Option<Advice>,
    /// The number of servers that lack initial parameters.
    pub uninitialised: usize,
    /// The number of resting ranks, and the number of ranks that have finished.
    pub resting: usize,
    pub done: usize,
    pub saved: Option<u64>,
    pub saving: Option<u64>,
    /// The time since the last checkpoint was completed, and the number of failed saves since.
    pub saved_ago: Option<Duration>,
    pub failed_saves: u32,
    /// Steps per second.
    pub rate: Option<f64>,
    /// The time since the last step.
    pub idle: Option<Duration>,
    pub loss: Option<f64>,
    pub norm: Option<f64>,
    /// The details, for the first [`MAX_DETAILED`] jobs.
    pub details: Option<Details>,
}

/// The curves of a job, and its slices.
#[derive(Debug)]
pub struct Details {
    pub history: History,
    /// The placement of the slices; `None` before they are placed.
    pub placement: Option<Arc<Placement>>,
    /// The slowest ranks, with their mean lateness in seconds.
    pub late: Vec<(u32, f64)>,
    /// The input that a server lacks for the open step or for version 0, as text.
    pub waiting_for: Option<String>,
}

impl Overview {
    /// The overview of a cluster.
    pub fn of(
        cluster: &Cluster,
        view: View,
        histories: &BTreeMap<String, History>,
        now: Now,
    ) -> Overview {
        let mut jobs: Vec<(&Job, JobMetrics)> =
            cluster.jobs().values().map(|job| (job, job.metrics())).collect();
        let workers = jobs.iter().map(|(_, metrics)| metrics.workers).sum();
        let has_failed = |(_, metrics): &&(&Job, JobMetrics)| metrics.state == JobState::Failed;
        let failed_jobs = jobs.iter().filter(has_failed).count();
        let (servers, memory) = servers_overview(cluster);
        let idle = |job: &Job| histories.get(&job.spec.name).and_then(|of| of.idle(now));
        jobs.sort_by_cached_key(|(job, metrics)| {
            (Reverse(urgency(metrics)), idle(job).unwrap_or(Duration::MAX), &job.spec.name)
        });
        let selected: Vec<_> = jobs.extract_if(.., |(job, _)| Some(job.id) == view.job).collect();
        let pages = jobs.len().div_ceil(MAX_JOBS).max(1);
        let page = view.page.min(pages - 1);
        let shown = jobs.into_iter().skip(page * MAX_JOBS).take(MAX_JOBS);
        let jobs = selected.into_iter().chain(shown).enumerate().map(|(at, (job, metrics))| {
            let history = histories.get(&job.spec.name);
            job_overview(cluster, job, metrics, history, at < MAX_DETAILED, now)
        });
        Self {
            view: View { page, ..view },
            advice: advice(cluster),
            servers,
            connected: cluster.common.servers.connected().len(),
            missing: cluster.missing().len(),
            jobs: jobs.collect(),
            pages,
            all_jobs: cluster.jobs().len(),
            failed_jobs,
            workers,
            memory,
            is_learning: cluster.common.startup.is_learning(),
            events: Vec::new(),
            counts: Default::default(),
        }
    }
}

fn servers_overview(cluster: &Cluster) -> (Vec<ServerOverview>, (u64, Option<u64>)) {
    let servers = &cluster.common.servers;
    let assigned = cluster.common.index.assigned();
    let assigned = |id: ServerId| assigned.get(&id).map_or(0, |load| load.bytes);
    let connected = servers.connected().iter().map(|(&id, known)| {
        let ServerState { address, capacity, stats, cordoned, .. } = known;
        ServerOverview {
            id,
            address: address.clone(),
            name: servers.given_name(id),
            zone: servers.zone_of(id),
            capacity: *capacity,
            assigned: assigned(id),
            stats: stats.clone(),
            awaited_by: 0,
            lost: None,
            cordoned: *cordoned,
        }
    });
    let mut all: Vec<_> = connected.collect();
    let in_use = all.iter().map(|server| server.assigned).fold(0, u64::saturating_add);
    let capacity = all.iter().try_fold(0u64, |sum, server| {
        server.capacity.map(|capacity| sum.saturating_add(capacity.bytes))
    });
    all.extend(awaited_servers(cluster, assigned));
    let fullness = |server: &ServerOverview| {
        server.capacity.map_or(0.0, |room| server.assigned as f64 / room.bytes.max(1) as f64)
    };
    all.sort_by(|a, b| {
        let by_fullness = fullness(b).total_cmp(&fullness(a));
        let by_loss = b.lost.is_some().cmp(&a.lost.is_some());
        by_loss
            .then(b.awaited_by.cmp(&a.awaited_by))
            .then(by_fullness)
            .then(a.address.cmp(&b.address))
    });
    all.truncate(MAX_SERVERS);
    (all, (in_use, capacity))
}

/// The missing servers, and the number of open jobs that wait for each.
fn awaited_servers(cluster: &Cluster, assigned: impl Fn(ServerId) -> u64) -> Vec<ServerOverview> {
    let servers = &cluster.common.servers;
    let overview = |Missing { server, cause, .. }: Missing| ServerOverview {
        id: server.id,
        name: servers.given_name(server.id),
        zone: servers.zone_of(server.id),
        capacity: None,
        assigned: assigned(server.id),
        stats: None,
        awaited_by: 0,
        lost: Some(cause),
        cordoned: false,
        address: server.address,
    };
    let missing = cluster.missing().into_iter().map(|of| (of.server.id, overview(of)));
    let mut awaited: BTreeMap<ServerId, ServerOverview> = missing.collect();
    for job in cluster.jobs().values() {
        let Phase::Open(open) = &job.phase else { continue };
        for server in open.away() {
            let cause = "it is not connected".to_owned();
            let new = || overview(Missing { server: server.clone(), since: Now::ZERO, cause });
            awaited.entry(server.id).or_insert_with(new).awaited_by += 1;
        }
    }
    awaited.into_values().collect()
}

fn job_overview(
    cluster: &Cluster,
    job: &Job,
    metrics: JobMetrics,
    history: Option<&History>,
    is_detailed: bool,
    now: Now,
) -> JobOverview {
    let (open, failure) = match &job.phase {
        Phase::Open(open) => (Some(open), open.saves.failure().map(str::to_owned)),
        Phase::Failed { reason, .. } => (None, Some(reason.clone())),
        _ => (None, None),
    };
    let last = history.and_then(|history| history.points().last());
    let details = || Details {
        history: history.cloned().unwrap_or_default(),
        placement: open.map(|open| open.plan.placement.clone()),
        late: open.map_or(Vec::new(), |open| open.lateness.latest(MAX_LATE)),
        waiting_for: waiting_for(&cluster.common.servers, job),
    };
    JobOverview {
        id: job.id,
        line: job.line.number,
        spec: job.spec.clone(),
        metrics,
        failure,
        advice: job.advice(&cluster.common),
        uninitialised: open.map_or(0, |open| open.version.uninitialised().len()),
        resting: open.map_or(0, |open| open.uneven_inputs.ranks().count()),
        done: open.map_or(0, |open| open.departed.done().len()),
        saved: open.and_then(|open| open.saves.last()),
        saving: open.and_then(|open| open.saves.current()),
        saved_ago: open.and_then(|open| open.saves.completed()).map(|at| now.saturating_sub(at)),
        failed_saves: open.map_or(0, |open| open.saves.failures()),
        rate: history.and_then(|history| history.rate(now)),
        idle: history.and_then(|history| history.idle(now)),
        loss: last.and_then(|last| last.loss()),
        norm: last.and_then(|last| last.norm()),
        details: is_detailed.then(details),
    }
}

/// The input that the first waiting server of the job lacks.
fn waiting_for(servers: &Servers, job: &Job) -> Option<String> {
    let placed = job.phase.placement()?.servers().iter();
    placed.filter_map(|server| servers.get(server.id)).find_map(|known| {
        let waiting_for = known.stats.as_ref()?.waiting_for(job.id)?;
        Some(format!("{} waits for {waiting_for}", known.address))
    })
}

/// The urgency of a job for an operator. Jobs with a higher value come first.
fn urgency(metrics: &JobMetrics) -> u8 {
    match metrics.state {
        JobState::Failed => 3,
        JobState::Restoring | JobState::Recovering | JobState::Waiting => 2,
        JobState::Opening => 1,
        JobState::Open if metrics.degraded > 0 => 1,
        JobState::Open => 0,
    }
}
