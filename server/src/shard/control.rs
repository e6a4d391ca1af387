//! The control stream: registers with the coordinator, and passes its commands to the jobs' own
//! tasks, so that the work of one job never delays another.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::future::try_join_all;
use prost::Message;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tokio_util::sync::{CancellationToken, DropGuard};
use zeroshard_model::{Error, Result, memory::Capacity, version::VERSION};
use zeroshard_net::{
    Deadline,
    transport::{Addresses, Credentials, MAX_CONTROL_MESSAGE},
};
use zeroshard_proto::{
    pb::{
        self, coordinator_service_client::CoordinatorServiceClient, serve_request::Event,
        serve_response::Command as Wire,
    },
    status::from_status,
};

use super::{
    commands::{Command, Task},
    events::Events,
    job::being_restored,
    save::SaveGate,
    store::Store,
};
#[cfg(test)]
use crate::simulation::{Safeguard, is_missing};
use crate::{health::Health, shutdown::Shutdown};
use zeroshard_kernels::Backend;
use zeroshard_model::Attempt;
use zeroshard_shard::events::JobEvent;

/// The bytes that a message of the control stream needs beside its event, at most.
const EVENT_BYTES: usize = 16;

/// The interval of the reports about this server's memory.
const STATS_INTERVAL: Duration = Duration::from_secs(1);

/// The maximum number of commands that wait for one job. A job gets a few commands for each step
/// and for each rank that joins or leaves.
const MAX_COMMANDS: usize = 1 << 17;

/// The addresses and identity for the registration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Contact<'a> {
    pub(super) coordinator: &'a str,
    pub(super) credentials: &'a Credentials,
    /// The address that other processes dial to reach this server.
    pub(super) advertised: &'a str,
    /// The name that the operator gave this server; empty: none.
    pub(super) name: &'a str,
    /// The zone of this server; empty: a zone of its own.
    pub(super) zone: &'a str,
    /// The room for the arrays of slices; `None` if there is no limit.
    pub(super) capacity: Option<Capacity>,
    pub(super) server_id: u64,
    pub(super) incarnation: u64,
    /// The highest term of a coordinator so far.
    pub(super) term: &'a AtomicU64,
}

/// How long the jobs may take to carry out the commands of the last coordinator. If they take
/// longer, the server dials again.
const DESCRIPTION_LIMIT: Duration = Duration::from_secs(8);

/// The tasks of the jobs, which last longer than a control stream.
#[derive(Default)]
pub(super) struct Tasks {
    events: Events,
    /// The jobs that are open or being opened, by id.
    jobs: HashMap<u64, Queue>,
    /// The descriptions of jobs that have not been read from their checkpoints, while ranks wait.
    restoring: HashMap<u64, pb::JobReport>,
    /// `true` if a coordinator has cordoned this server.
    cordoned: bool,
}

impl Tasks {
    /// The jobs of this server, after the commands that they have received. A job that is still
    /// being opened is closed: the next coordinator opens it again if ranks wait for it.
    async fn describe<B: Backend>(&mut self, store: &Store<B>) -> Result<Vec<pb::JobReport>> {
        self.jobs.retain(|&id, _| store.holds(id));
        let deadline = Deadline::after(DESCRIPTION_LIMIT);
        let descriptions = self.jobs.iter().map(|(id, queue)| async move {
            let waiting_for = || format!("job {id:016x} to carry out earlier commands");
            deadline.limit(waiting_for, queue.describe()).await
        });
        let reports = try_join_all(descriptions).await?;
        // A job without a description has ended meanwhile.
        let reports: Vec<_> = reports.into_iter().flatten().collect();
        let failed = self.events.failed();
        // A job that could not be read for a reason that may pass is read again.
        let has_ended = |id: u64| {
            let (mut reports, mut failed) =
                (reports.iter(), failed.iter().filter(|of| !of.transient));
            reports.any(|report| report.job_id == id) || failed.any(|failed| failed.job_id == id)
        };
        self.restoring.retain(|&id, _| !has_ended(id));
        let restoring = self.restoring.values().cloned();
        let (reports, too_long): (Vec<_>, Vec<_>) = reports
            .into_iter()
            .chain(restoring)
            .partition(|report| is_sendable(report, MAX_CONTROL_MESSAGE));
        for job in too_long {
            let bytes = job.encoded_len();
            let name = job.spec.unwrap_or_default().name;
            tracing::error!(job = name, bytes, "the description of a job is too long");
            store.close(&name, job.job_id);
            let reason = format!(
                "its description for the coordinator needs {bytes} bytes, of at most \
                 {MAX_CONTROL_MESSAGE}"
            );
            let failed = JobEvent::Failed { epoch: job.epoch, reason, transient: false };
            self.events.tell_of(&name, job.job_id, failed);
            self.restoring.remove(&job.job_id);
        }
        self.jobs.retain(|&id, _| reports.iter().any(|report| report.job_id == id));
        Ok(reports)
    }
}

/// Runs one connection to the coordinator, from the greeting until it breaks. Returns the reason.
pub(super) async fn session<B: Backend>(
    store: &Arc<Store<B>>,
    health: &Health,
    contact: Contact<'_>,
    tasks: &mut Tasks,
    shutdown: &Shutdown,
) -> Error {
    let (mut session, mut commands) = match Session::open(store, contact, tasks).await {
        Ok(opened) => opened,
        Err(error) => return error,
    };
    store.metrics.shard.show_connected(true);
    health.set_ready(true).await;
    session.run(&mut commands, shutdown).await
}

struct Session<'a, B: Backend> {
    contact: Contact<'a>,
    /// The name of the coordinator, for messages.
    peer: String,
    store: &'a Arc<Store<B>>,
    tasks: &'a mut Tasks,
}

/// A job's task. When it is dropped, the task ends, and with it every call of the job.
struct Queue {
    commands: mpsc::Sender<Result<Command>>,
    gate: SaveGate,
    _closed: DropGuard,
}

impl Queue {
    /// The job after the commands that it has received; `None` if it has ended.
    async fn describe(&self) -> Option<pb::JobReport> {
        let (answer, description) = oneshot::channel();
        // The next command may be waiting for a save.
        self.gate.close();
        self.commands.send(Ok(Command::Describe(answer))).await.ok()?;
        description.await.ok()
    }
}

/// Checks the term of a coordinator that sends a command. `seen` is the highest one so far.
///
/// # Errors
/// [`Error::StaleTerm`] if a later coordinator has sent a command.
pub(crate) fn check_term(seen: &AtomicU64, term: u64) -> Result<()> {
    let current = seen.fetch_max(term, Ordering::AcqRel);
    #[cfg(test)]
    if is_missing(Safeguard::Terms) {
        return Ok(());
    }
    if term < current { Err(Error::StaleTerm { term, current }) } else { Ok(()) }
}

/// Returns whether a description fits into a message of `limit` bytes. A longer one would break the
/// control stream of all jobs.
fn is_sendable(report: &pb::JobReport, limit: usize) -> bool {
    report.encoded_len() + EVENT_BYTES <= limit
}

type Commands = tonic::Streaming<pb::ServeResponse>;

impl<'a, B: Backend> Session<'a, B> {
    async fn open(
        store: &'a Arc<Store<B>>,
        contact: Contact<'a>,
        tasks: &'a mut Tasks,
    ) -> Result<(Self, Commands)> {
        let Contact { coordinator, advertised, credentials, server_id, incarnation, term, .. } =
            contact;
        let peer = format!("coordinator {coordinator}");
        let addresses = Addresses::parse(coordinator)?;
        let connection = addresses.connect(credentials).await?;
        let mut client = CoordinatorServiceClient::new(connection)
            .max_decoding_message_size(MAX_CONTROL_MESSAGE)
            .max_encoding_message_size(MAX_CONTROL_MESSAGE);
        // Events from now on follow the descriptions, which may contain them already.
        let events = ReceiverStream::new(tasks.events.connect());
        let reports = tasks.describe(store).await?;
        let hello = pb::Hello {
            address: advertised.to_owned(),
            name: contact.name.to_owned(),
            zone: contact.zone.to_owned(),
            capacity: contact.capacity.map(Into::into),
            server_id,
            incarnation,
            term: term.load(Ordering::Acquire),
            job_reports: reports.len() as u32,
            failed_jobs: tasks.events.failed(),
            version: VERSION.to_owned(),
            cordoned: tasks.cordoned,
        };
        let first =
            std::iter::once(Event::Hello(hello)).chain(reports.into_iter().map(Event::JobReport));
        let outgoing = tokio_stream::iter(first.collect::<Vec<_>>()).chain(events);
        let outgoing = StreamExt::map(outgoing, |event| pb::ServeRequest { event: Some(event) });
        let failed = |status: tonic::Status| from_status(&status, &peer);
        let mut commands = client.serve(outgoing).await.map_err(failed)?.into_inner();
        let session = Self { contact, peer: peer.clone(), store, tasks };
        match commands.message().await.map_err(failed)? {
            Some(pb::ServeResponse { command: Some(Wire::Welcome(_)), term }) => {
                check_term(session.contact.term, term)?;
                tracing::info!(coordinator, term, id = format!("{server_id:016x}"), "registered");
                Ok((session, commands))
            }
            other => Err(Error::Internal {
                cause: format!("{peer} sent {other:?} as its first message"),
            }),
        }
    }

    async fn run(&mut self, commands: &mut Commands, shutdown: &Shutdown) -> Error {
        let mut is_departing = false;
        let mut stats = tokio::time::interval(STATS_INTERVAL);
        let unavailable =
            |cause: &str| Error::Unavailable { peer: self.peer.clone(), cause: cause.to_owned() };
        let (hung_up, released, overflow) = (
            unavailable("it closed the stream"),
            unavailable("it has released this server for its shutdown"),
            unavailable("it does not read the events of this server"),
        );
        loop {
            let command = tokio::select! {
                command = commands.message() => command,
                _ = stats.tick() => {
                    self.tasks.events.tell_if_idle(|| Event::Stats(self.store.stats()));
                    continue;
                }
                () = self.tasks.events.overflowed() => return overflow,
                () = shutdown.asked(), if !is_departing => {
                    is_departing = true;
                    self.tasks.events.tell(Event::Departing(pb::Departing {}));
                    continue;
                }
            };
            match command {
                Ok(Some(pb::ServeResponse { command, term })) => {
                    if let Err(error) = check_term(self.contact.term, term) {
                        return error;
                    }
                    match command {
                        Some(Wire::Release(_)) => return released,
                        Some(command) => self.dispatch(command),
                        None => tracing::warn!("a command of a later version was ignored"),
                    }
                }
                Ok(None) => return hung_up,
                Err(status) => return from_status(&status, &self.peer),
            }
        }
    }

    fn dispatch(&mut self, command: Wire) {
        match command {
            Wire::Open(open) => return self.open_job(open),
            Wire::Close(pb::CloseJob { job, job_id }) => {
                tracing::info!(job, "job closed");
                return self.close_job(&job, job_id);
            }
            Wire::Cordon(pb::Cordon { cordoned }) => {
                tracing::info!(cordoned, "an operator has changed whether this server is cordoned");
                return self.tasks.cordoned = cordoned;
            }
            Wire::Confirm(pb::Confirm { number }) => {
                return self.tasks.events.tell(Event::Confirmed(pb::Confirmed { number }));
            }
            _ => {}
        }
        let Some((job_id, command)) = job_command(command) else { return };
        // A job that has failed here has no task any more; the coordinator knows it, or will know
        // it shortly.
        let Some(queue) = self.tasks.jobs.get(&job_id) else { return };
        if let Err(mpsc::error::TrySendError::Full(_)) = queue.commands.try_send(command) {
            tracing::error!(
                job = format!("{job_id:016x}"),
                "{MAX_COMMANDS} commands wait; dropping the job"
            );
            self.tasks.jobs.remove(&job_id);
        }
    }

    fn close_job(&mut self, name: &str, id: u64) {
        self.tasks.jobs.remove(&id);
        self.tasks.restoring.remove(&id);
        self.tasks.events.closed(id);
        self.store.close(name, id);
    }

    fn open_job(&mut self, open: pb::OpenJob) {
        let name = open.spec.as_ref().map_or("", |spec| spec.name.as_str());
        self.close_job(name, open.job_id);
        if let Some(report) = being_restored(&open) {
            self.tasks.restoring.insert(open.job_id, report);
        }
        let closed = CancellationToken::new();
        let (queue, commands) = mpsc::channel(MAX_COMMANDS);
        let gate = SaveGate::default();
        let _closed = closed.clone().drop_guard();
        let queue = Queue { commands: queue, gate: gate.clone(), _closed };
        self.tasks.jobs.insert(open.job_id, queue);
        let task = Task {
            store: self.store.clone(),
            events: self.tasks.events.clone(),
            server: self.contact.server_id,
            credentials: self.contact.credentials.clone(),
            commands,
            closed,
            gate,
        };
        let failure = self.store.failure.clone();
        tokio::spawn(async move { failure.guard("the task of a job", task.run(open)).await });
    }
}

/// The id of an open job, and a command for it; `None` for other commands.
pub(crate) fn job_command(command: Wire) -> Option<(u64, Result<Command>)> {
    Some(match command {
        Wire::Publish(pb::Publish { job_id, epoch, .. }) => {
            (job_id, Ok(Command::Publish { epoch }))
        }
        Wire::Grant(pb::GrantLease { job_id, rank, lease, .. }) => {
            (job_id, Ok(Command::Grant { rank, lease }))
        }
        Wire::NewEpoch(pb::NewEpoch { job_id, epoch, rank, left, .. }) => {
            (job_id, Ok(Command::NewEpoch { epoch, rank, left }))
        }
        Wire::NewAttempt(next) => {
            let pb::NewAttempt { job_id, epoch, step, attempt: number, rested, .. } = next;
            let attempt = Attempt { epoch, step, number };
            (job_id, Ok(Command::NewAttempt { attempt, rested }))
        }
        Wire::Done(pb::RankDone { job_id, rank, .. }) => (job_id, Ok(Command::RankDone { rank })),
        Wire::Rests(rests) => (rests.job_id, Ok(Command::RankRests(rests))),
        Wire::Write(write) => (write.job_id, Ok(Command::Write(write))),
        Wire::Cancel(pb::CancelCheckpoint { job_id, save, .. }) => {
            (job_id, Ok(Command::CancelSave { save }))
        }
        Wire::NewPlacement(next) => (next.job_id, Command::new_placement(next)),
        Wire::Copy(copy) => (copy.job_id, Ok(Command::Copy(copy))),
        Wire::ServeVersion(pb::ServeVersion { job_id, version, .. }) => {
            (job_id, Ok(Command::Serve { version }))
        }
        Wire::Decide(decision) => (decision.job_id, Command::decide(decision)),
        Wire::Welcome(_)
        | Wire::Open(_)
        | Wire::Close(_)
        | Wire::Confirm(_)
        | Wire::Release(_)
        | Wire::Cordon(_) => {
            return None;
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_that_is_sendable_fits_into_its_message() {
        let report = pb::JobReport { done: (0..1000).collect(), ..Default::default() };
        let message = pb::ServeRequest { event: Some(Event::JobReport(report.clone())) };
        let limit = message.encoded_len();
        assert!(!is_sendable(&report, limit - 16) && is_sendable(&report, limit + 16));
        let smallest = (0..2 * limit).find(|&limit| is_sendable(&report, limit)).unwrap();
        assert!(smallest >= limit);
    }
}
