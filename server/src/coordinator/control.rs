//! Control streams: the messages from shard servers, and the commands to them.

use std::{sync::Arc, time::Duration};

use futures_util::{Stream, StreamExt};
use prost::Message as _;
use tokio::sync::watch;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use zeroshard_coordinator::{
    placement::{fork::SliceCopy, plan::Plan},
    vocabulary::{
        commands::{About, Begins, Command, FailedThere, OpenJob, SavePlan, ServerEvent},
        decision::{Decision, Figures, Replicated, Update},
        events::Event,
        gradient::{Absent, Largest, Overflow, Reduced},
        ids::{JobRef, Lease, Link},
        job_report::{JobReport, Ranks},
        reports::Files,
    },
};
use zeroshard_model::{
    Attempt, Error, Fork, JobSpec, JobVersion, Line, Placement, RecentSteps, Restore, Result,
    Server,
    limits::MAX_SERVER_NAME,
    memory::Capacity,
    name::{check_name, server_id},
    version::{self, VERSION},
};
use zeroshard_net::Deadline;
use zeroshard_proto::{
    convert::optimizers,
    pb::{self, serve_request, serve_response},
    status::to_status,
};

use super::{
    driver::{Control, Driver},
    requests::dialled,
    responses::{self, Message as _},
};
use crate::failure::Failure;

/// The commands of a control stream, until the server is dismissed.
pub(super) fn commands(
    control: Control,
    term: u64,
    failure: Failure,
) -> impl Stream<Item = Result<pb::ServeResponse, Status>> + Send {
    let convert = move |command| {
        let failure = failure.clone();
        async move {
            let command = match command {
                // The spec and the placement may be large.
                Command::Open(_) | Command::NewPlacement { .. } => {
                    let convert = move || Ok(wire(command));
                    failure
                        .blocking("convert a job to be opened", convert)
                        .await
                        .map_err(to_status)?
                }
                command => wire(command),
            };
            Ok(pb::ServeResponse { command: Some(command), term })
        }
    };
    ReceiverStream::new(control.commands).take_until(control.dismissal.ended()).then(convert)
}

/// The time limit for the first messages of a server, which describe its jobs.
const REGISTRATION_LIMIT: Duration = Duration::from_secs(30);

/// The maximum number of jobs that a server may describe.
const MAX_JOB_REPORTS: u32 = 4096;
/// The longest name of a zone, in bytes.
const MAX_ZONE: usize = 256;

/// A server that registers.
#[derive(Debug)]
pub(crate) struct Registration {
    pub(crate) server: Server,
    pub(crate) about: About,
    /// The term of the coordinator that it has followed before; 0 for none.
    pub(crate) term: u64,
    /// The jobs that it holds.
    pub(crate) reports: Vec<JobReport>,
}

/// Reads the first messages of a control stream, in which the server announces itself and its jobs.
///
/// # Errors
/// [`Error::Timeout`] after [`REGISTRATION_LIMIT`]; [`Error::Invalid`]; those of the stream.
pub(super) async fn registration(
    events: &mut Streaming<pb::ServeRequest>,
    failure: &Failure,
) -> Result<Registration, Status> {
    let deadline = Deadline::after(REGISTRATION_LIMIT);
    let waiting_for = || "Hello and the jobs of a shard server".to_owned();
    deadline.limit(waiting_for, read_registration(events, failure)).await.map_err(to_status)?
}

async fn read_registration(
    events: &mut Streaming<pb::ServeRequest>,
    failure: &Failure,
) -> Result<Registration, Status> {
    let hello = match events.message().await?.and_then(|message| message.event) {
        Some(serve_request::Event::Hello(hello)) => hello,
        _ => {
            return Err(to_status(Error::refused("the control stream did not start with `Hello`")));
        }
    };
    let (server, name, zone) = (
        server(&hello).map_err(to_status)?,
        name(&hello).map_err(to_status)?,
        zone(&hello).map_err(to_status)?,
    );
    version::check(&format!("shard server {}", server.address), &hello.version, VERSION)
        .map_err(to_status)?;
    if hello.job_reports > MAX_JOB_REPORTS {
        let what = format!("job_reports of shard server {}", server.address);
        let expected = format!("at most {MAX_JOB_REPORTS}");
        return Err(to_status(Error::invalid(what, hello.job_reports, expected)));
    }
    let mut reports = Vec::new();
    for _ in 0..hello.job_reports {
        match events.message().await?.and_then(|message| message.event) {
            // The spec and the placement may be large.
            Some(serve_request::Event::JobReport(job)) => {
                let convert = move || job_report(job);
                let job = failure.blocking("convert a job", convert).await.map_err(to_status)?;
                reports.push(JobReport { term: hello.term, ..job });
            }
            _ => {
                let sentence =
                    "the control stream has fewer `JobReport` after `Hello` than it says";
                return Err(to_status(Error::refused(sentence)));
            }
        }
    }
    let failed = hello.failed_jobs.into_iter().map(|failed| (failed.job_id, failed_there(failed)));
    let about = About {
        name,
        zone,
        capacity: hello.capacity.map(Capacity::from),
        failed: failed.collect(),
        version: hello.version,
        cordoned: hello.cordoned,
    };
    Ok(Registration { server, about, term: hello.term, reports })
}

pub(crate) fn failed_there(pb::JobFailed { reason, transient, .. }: pb::JobFailed) -> FailedThere {
    FailedThere { reason, transient }
}

fn server(hello: &pb::Hello) -> Result<Server> {
    let address = dialled("address of the server", &hello.address)?.to_string();
    for (what, number) in [("server_id", hello.server_id), ("incarnation", hello.incarnation)] {
        if number == 0 {
            return Err(Error::invalid(
                format!("{what} of shard server {address}"),
                0,
                "greater than 0",
            ));
        }
    }
    Ok(Server { id: hello.server_id, incarnation: hello.incarnation, address })
}

fn name(hello: &pb::Hello) -> Result<String> {
    let name = &hello.name;
    if !name.is_empty() {
        let what = format!("name of shard server {}", hello.address);
        check_name(&what, name, MAX_SERVER_NAME)?;
        if server_id(name) != hello.server_id {
            let expected = format!("a name whose id is {:016x}", hello.server_id);
            return Err(Error::invalid(what, format!("{name:?}"), expected));
        }
    }
    Ok(name.clone())
}

fn zone(hello: &pb::Hello) -> Result<String> {
    if hello.zone.len() > MAX_ZONE {
        let what = format!("zone of shard server {}", hello.address);
        let found = format!("{} bytes long", hello.zone.len());
        return Err(Error::invalid(what, found, format!("at most {MAX_ZONE} bytes")));
    }
    Ok(hello.zone.clone())
}

/// Passes on the messages of the server until its stream ends.
pub(super) async fn listen(
    driver: &Driver,
    from: Link,
    heard: &watch::Sender<()>,
    events: &mut Streaming<pb::ServeRequest>,
) -> Result<(), Status> {
    while let Some(message) = events.message().await? {
        heard.send_replace(());
        // A message without a known event comes from a newer server.
        if let Some(event) = message.event {
            driver.tell(Event::FromServer { from, event: server_event(event).map_err(to_status)? });
        }
    }
    Ok(())
}

/// The message of a command.
pub(crate) fn wire(command: Command) -> serve_response::Command {
    match command {
        Command::Welcome => serve_response::Command::Welcome(pb::Welcome {}),
        Command::Open(open) => serve_response::Command::Open(open_job(&open)),
        Command::Close(JobRef { name: job, id: job_id }) => {
            serve_response::Command::Close(pb::CloseJob { job, job_id })
        }
        Command::Publish { job: JobRef { name: job, id: job_id }, epoch } => {
            serve_response::Command::Publish(pb::Publish { job, job_id, epoch })
        }
        Command::Grant { job: JobRef { name: job, id: job_id }, rank, lease: Lease(lease) } => {
            serve_response::Command::Grant(pb::GrantLease { job, job_id, rank, lease })
        }
        Command::NewEpoch { job: JobRef { name: job, id: job_id }, epoch, rank, left } => {
            serve_response::Command::NewEpoch(pb::NewEpoch { job, job_id, epoch, rank, left })
        }
        Command::NewAttempt { job: JobRef { name: job, id: job_id }, attempt, rested } => {
            let Attempt { epoch, step, number: attempt } = attempt;
            serve_response::Command::NewAttempt(pb::NewAttempt {
                job,
                job_id,
                epoch,
                step,
                attempt,
                rested,
            })
        }
        Command::RankDone { job: JobRef { name: job, id: job_id }, rank } => {
            serve_response::Command::Done(pb::RankDone { job, job_id, rank })
        }
        Command::RankRests { job: JobRef { name: job, id: job_id }, rank, begins } => {
            let ends = begins.is_none();
            let Begins { since, excluded } = begins.unwrap_or(Begins { since: 0, excluded: false });
            serve_response::Command::Rests(pb::RankRests {
                job,
                job_id,
                rank,
                ends,
                since,
                excluded,
            })
        }
        Command::Decide { job, decision } => serve_response::Command::Decide(decide(job, decision)),
        Command::NewPlacement { job: JobRef { name: job, id: job_id }, epoch, placement } => {
            let placement = Some(placement.as_ref().into());
            serve_response::Command::NewPlacement(pb::NewPlacement {
                job,
                job_id,
                epoch,
                placement,
            })
        }
        Command::Copy { job: JobRef { name: job, id: job_id }, number, version, slices } => {
            serve_response::Command::Copy(pb::CopySlices { job, job_id, number, version, slices })
        }
        Command::ServeVersion { job: JobRef { name: job, id: job_id }, version } => {
            serve_response::Command::ServeVersion(pb::ServeVersion { job, job_id, version })
        }
        Command::Write { job: JobRef { name: job, id: job_id }, plan } => {
            let SavePlan { save, version, url, .. } = plan;
            let version = version.version;
            serve_response::Command::Write(pb::WriteCheckpoint { job, job_id, save, url, version })
        }
        Command::CancelSave { job: JobRef { name: job, id: job_id }, save } => {
            serve_response::Command::Cancel(pb::CancelCheckpoint { job, job_id, save })
        }
        Command::Confirm { number } => serve_response::Command::Confirm(pb::Confirm { number }),
        Command::Release => serve_response::Command::Release(pb::Release {}),
        Command::Cordon { cordoned } => serve_response::Command::Cordon(pb::Cordon { cordoned }),
    }
}

fn open_job(open: &OpenJob) -> pb::OpenJob {
    let OpenJob { spec, placement, job_id, epoch, server, fork, source, .. } = open;
    let copies = source.as_ref().map(|source| {
        let copy = |copy: SliceCopy| pb::SliceCopy {
            slice: copy.slice as u32,
            offset: copy.offset as u64,
            length: copy.length as u64,
            source: copy.source as u32,
            source_offset: copy.source_offset as u64,
            server: source.placement.primary(copy.source) as u32,
            state: copy.state,
            averages: copy.averages,
        };
        let servers = source.placement.servers().iter().cloned().map(Into::into).collect();
        (servers, source.copies(spec, placement, *server).into_iter().map(copy).collect())
    });
    let fork = fork.as_ref().map(|fork| {
        let (servers, copies) = copies.unwrap_or_default();
        let (from, fresh_state) = (Some((&fork.from).into()), fork.fresh_state);
        pb::Fork { from, fresh_state, servers, copies }
    });
    pb::OpenJob {
        spec: Some(spec.as_ref().into()),
        job_id: *job_id,
        epoch: *epoch,
        placement: Some(placement.as_ref().into()),
        fork,
        restore: open.checkpoint.as_ref().map(|checkpoint| pb::Restore {
            url: checkpoint.url.clone(),
            job: checkpoint.job.clone(),
            version: Some(checkpoint.version.version),
            if_any: false,
            line: Some(checkpoint.version.line),
        }),
        restore_job_id: open.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.job_id),
        requested: open.requested.as_deref().map(Into::into),
        leases: open
            .leases
            .iter()
            .map(|&(rank, Lease(lease))| pb::RankLease { rank, lease })
            .collect(),
        done: open.done.clone(),
        left: open.left.clone(),
        version: open.version,
        line: Some((&*open.line).into()),
        recent: Some((&open.recent).into()),
        decision: open.decision.clone().map(|decision| {
            let job = JobRef { name: spec.name.clone(), id: *job_id };
            decide(job, *decision)
        }),
    }
}

fn decide(JobRef { name: job, id: job_id }: JobRef, decision: Decision) -> pb::Decision {
    let Attempt { epoch, step, number: attempt } = decision.attempt;
    let update = decision.update.map(|update| pb::Update {
        groups: update.groups.iter().map(Into::into).collect(),
        coefficient: update.coefficient,
        unclipped: update.unclipped,
        gradient_factors: update.gradient_factors,
    });
    let Figures { scale, clip_coefficient, loss, resting, user_data, spike, recent } =
        decision.figures;
    let (absent, report) = match decision.replicated.map(|of| *of) {
        Some(Replicated { absent, report }) => (absent, Some(report.message())),
        None => (Vec::new(), None),
    };
    pb::Decision {
        job,
        job_id,
        epoch,
        step,
        attempt,
        update,
        scale,
        clip_coefficient,
        loss,
        resting,
        absent,
        report,
        user_data,
        recent: Some((&recent).into()),
        spike: spike.unwrap_or_default(),
    }
}

pub(crate) fn server_event(event: serve_request::Event) -> Result<ServerEvent> {
    use serve_request::Event as Wire;
    let job = |name, id| JobRef { name, id };
    Ok(match event {
        Wire::Opened(pb::JobOpened { job: name, job_id, epoch }) => {
            ServerEvent::Opened { job: job(name, job_id), epoch }
        }
        Wire::Initialised(pb::JobInitialised { job: name, epoch, job_id }) => {
            ServerEvent::Initialised { job: job(name, job_id), epoch }
        }
        Wire::Ready(ready) => step_ready(ready),
        Wire::Stats(stats) => ServerEvent::Stats(responses::stats(stats)),
        Wire::Failed(pb::JobFailed { job: name, reason, job_id, epoch, transient }) => {
            ServerEvent::Failed { job: job(name, job_id), epoch, reason, transient }
        }
        Wire::Granted(pb::LeaseGranted { job: name, job_id, rank, lease }) => {
            ServerEvent::Granted { job: job(name, job_id), rank, lease: Lease(lease) }
        }
        Wire::Stored(pb::DecisionStored { job: name, job_id, epoch, step }) => {
            ServerEvent::Stored { job: job(name, job_id), epoch, step }
        }
        Wire::Confirmed(pb::Confirmed { number }) => ServerEvent::Confirmed { number },
        Wire::Departing(pb::Departing {}) => ServerEvent::Departing,
        Wire::Copied(pb::SlicesCopied { job: name, job_id, number }) => {
            ServerEvent::Copied { job: job(name, job_id), number }
        }
        Wire::CopyRefused(pb::CopyRefused { job: name, job_id, number, reason }) => {
            ServerEvent::CopyRefused { job: job(name, job_id), number, reason }
        }
        Wire::Hashes(pb::SliceHashes { job: name, job_id, epoch, version, slices }) => {
            let slices = slices.into_iter().map(|pb::SliceHash { slice, hash }| (slice, hash));
            ServerEvent::Hashes { job: job(name, job_id), epoch, version, slices: slices.collect() }
        }
        Wire::Hello(_) => return Err(Error::refused("the control stream has a second `Hello`")),
        Wire::JobReport(_) => {
            return Err(Error::refused(
                "the control stream has more `JobReport` than `Hello` says",
            ));
        }
        Wire::Written(pb::CheckpointWritten { job: name, job_id, save, line, files }) => {
            let files = files.iter().map(|file| file.encode_to_vec().into()).collect();
            ServerEvent::Written { job: job(name, job_id), save, line, files: Files(files) }
        }
        Wire::CheckpointFailed(failed) => {
            let pb::CheckpointFailed { job: name, job_id, save, url, reason, missing_bytes } =
                failed;
            let cause = match missing_bytes {
                0 => Error::Storage { action: "write".to_owned(), url, cause: reason },
                bytes => Error::OutOfMemory { what: reason, bytes },
            };
            ServerEvent::SaveFailed { job: job(name, job_id), save, cause }
        }
    })
}

fn step_ready(ready: pb::StepReady) -> ServerEvent {
    let job = JobRef { name: ready.job.clone(), id: ready.job_id };
    let pb::StepReady { epoch, step, attempt: number, .. } = ready;
    ServerEvent::Ready { job, attempt: Attempt { epoch, step, number }, reduced: reduced(ready) }
}

fn reduced(ready: pb::StepReady) -> Reduced {
    let sum = |of: &pb::ReducedSlice| (of.slice, of.sum_of_squares);
    let largest = |of: &pb::ReducedSlice| {
        let (slice, squares) = (of.slice, of.largest_squares);
        of.largest_rank.map(|rank| Largest { slice, rank, squares })
    };
    let absent = |pb::Absent { slice, rank, everywhere }| Absent { slice, rank, everywhere };
    Reduced {
        sums: ready.slices.iter().map(sum).collect(),
        largest: ready.slices.iter().filter_map(largest).collect(),
        overflow: ready.overflow.map(|pb::Overflow { slice, rank }| Overflow { slice, rank }),
        absent: ready.absent.into_iter().map(absent).collect(),
        copies: ready.copies,
    }
}

/// The job that a server describes.
///
/// # Errors
/// [`Error::Invalid`] for a description that contradicts itself.
pub(crate) fn job_report(mut job: pb::JobReport) -> Result<JobReport> {
    let spec = JobSpec::try_from(job.spec.take().unwrap_or_default())?;
    let placement = Placement::try_from(job.placement.take().unwrap_or_default())?;
    let (slices, placed) = (spec.manifest.slices().len(), placement.slices());
    if slices != placed {
        let what = format!("number of placed slices of job {:?}", spec.name);
        return Err(Error::invalid(what, placed, slices.to_string()));
    }
    check_held(&job, &spec)?;
    let from = job.from.map(JobVersion::try_from).transpose()?;
    let fresh_state = job.fresh_state;
    let restore = job.restore.map(Restore::try_from).transpose()?.map(Arc::new);
    let lease = |pb::RankLease { rank, lease }| (rank, Lease(lease));
    let rest = |pb::RankRests { rank, since, excluded, .. }| (rank, (since, excluded));
    let decision = job.decision.map(decision).transpose()?;
    let line = Arc::new(job.line.map(Line::try_from).transpose()?.unwrap_or_default());
    let recent = job.recent.map(RecentSteps::try_from).transpose()?.unwrap_or_default();
    Ok(JobReport {
        id: job.job_id,
        term: 0,
        plan: Plan::of(&spec, placement),
        spec: Arc::new(spec),
        fork: from.map(|from| Arc::new(Fork { from, fresh_state })),
        restore,
        line,
        recent,
        attempt: Attempt { epoch: job.epoch, step: job.step, number: job.attempt },
        published: job.published,
        initialised: job.initialised,
        ranks: Ranks {
            leases: job.leases.into_iter().map(lease).collect(),
            done: job.done.into_iter().collect(),
            left: job.left.into_iter().collect(),
            resting: job.resting.into_iter().map(rest).collect(),
        },
        rested: job.rested,
        ready: job.ready.map(reduced),
        empty: job.empty.into_iter().chain(job.copying).collect(),
        copies: job.copies,
        restoring: job.restoring,
        restored: job.restored.map(|pb::Restored { epoch, version }| (epoch, version)),
        decided: decision.zip(job.decided.map(reduced)),
    })
}

/// Checks that the ranks, slices and steps of a description exist in its job.
fn check_held(job: &pb::JobReport, spec: &JobSpec) -> Result<()> {
    let invalid = |what: &str, found: u64, limit: u64| {
        let what = format!("{what} in the description of job {:?}", spec.name);
        Err(Error::invalid(what, found, format!("less than {limit}")))
    };
    let leases = job.leases.iter().map(|lease| lease.rank);
    let resting = job.resting.iter().map(|rests| rests.rank);
    let ranks = leases.chain(job.done.iter().copied()).chain(job.left.iter().copied());
    let decided = job.decision.iter();
    let decided = decided.flat_map(|of| of.resting.iter().chain(&of.user_data).copied());
    let mut ranks = ranks.chain(resting).chain(decided);
    if let Some(rank) = ranks.find(|&rank| rank >= spec.world) {
        return invalid("rank", rank.into(), spec.world.into());
    }
    let both = |rank: &&u32| job.resting.iter().any(|rests| rests.rank == **rank);
    if let Some(&rank) = job.done.iter().find(both) {
        return Err(Error::refused(format!(
            "rank {rank} both rests and is done in the description of job {:?}",
            spec.name
        )));
    }
    let figures = job.ready.iter().chain(&job.decided);
    let mut slices = figures.flat_map(|ready| {
        let absent = ready.absent.iter().map(|absent| absent.slice);
        let overflow = ready.overflow.iter().map(|overflow| overflow.slice);
        ready.slices.iter().map(|slice| slice.slice).chain(absent).chain(overflow)
    });
    let report = spec.manifest.slices().len();
    if let Some(slice) = slices.find(|&slice| slice as usize >= report) {
        return invalid("slice", slice.into(), report as u64);
    }
    let steps = job.decision.iter().map(|decision| decision.step);
    let numbers = steps.chain([job.step, job.epoch, job.copies]);
    match numbers.into_iter().find(|&number| number == u64::MAX) {
        Some(number) => invalid("step, epoch or number of a copy", number, u64::MAX),
        None => Ok(()),
    }
}

fn decision(decision: pb::Decision) -> Result<Decision> {
    let pb::Decision { epoch, step, attempt: number, scale, clip_coefficient, loss, .. } = decision;
    let absent = decision.absent;
    let replicated = |report| Box::new(Replicated { absent, report: responses::report(report) });
    let update = |pb::Update { groups, coefficient, unclipped, gradient_factors }| {
        Ok::<_, Error>(Update {
            groups: optimizers(groups)?,
            coefficient,
            unclipped,
            gradient_factors,
        })
    };
    let (resting, user_data) = (decision.resting, decision.user_data);
    let spike = Some(decision.spike).filter(|why| !why.is_empty());
    let recent = decision.recent.map(RecentSteps::try_from).transpose()?.unwrap_or_default();
    let figures = Figures { scale, clip_coefficient, loss, resting, user_data, spike, recent };
    Ok(Decision {
        attempt: Attempt { epoch, step, number },
        update: decision.update.map(update).transpose()?,
        figures,
        replicated: decision.report.map(replicated),
    })
}
