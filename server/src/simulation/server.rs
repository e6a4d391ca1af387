//! A shard server: its jobs are those of production. Their commands are carried out one after the
//! other, as by their tasks.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use zeroshard_coordinator::vocabulary::{
    commands::About, events::Event, ids::Now, job_report::JobReport,
};
use zeroshard_kernels::Cpu;
use zeroshard_model::{Attempt, JobSpec, Line, LineVersion, Placement, Result, Server};
use zeroshard_proto::pb::{self, serve_request, serve_response};
use zeroshard_shard::{
    budget::Budget,
    device::Device,
    events::JobEvent,
    fair::Resources,
    job::Opening,
    slice::{Role, Slice},
};

use super::{
    checkpoints::{Slices, fill, snapshot},
    coordinator::Registering,
    data::{Request, Sender},
    follow::{BUDGETS, Hashing},
    world::{Connection, Happening, JOB, World},
};
use crate::{
    coordinator::control,
    shard::{
        commands::{Command, execute},
        control::{check_term, job_command},
        events::Events,
        job::{Job, Origin, being_restored},
    },
};

/// The pause between two tries of a server to reach the coordinator, at most.
const REDIAL: Duration = Duration::from_millis(500);
/// The interval at which a backup asks for what is missing.
const FOLLOW: Duration = Duration::from_millis(2);
/// The time in which a server reads its slices from a checkpoint, at most.
const READING: Duration = Duration::from_millis(500);
/// The time after which a request without an answer is repeated.
pub(super) const REPEAT: Duration = Duration::from_millis(100);

/// A process of a shard server, and those before it.
pub(super) struct ShardServer {
    pub(super) index: usize,
    /// The number of the process, which is also its incarnation.
    pub(super) life: u64,
    pub(super) is_alive: bool,
    /// Until when it does nothing.
    pub(super) still_until: Now,
    /// The coordinator's life and the number of the control stream.
    stream: Option<(u64, u64)>,
    /// The highest term of a coordinator so far.
    term: AtomicU64,
    events: Events,
    said: Option<mpsc::Receiver<serve_request::Event>>,
    pub(super) jobs: BTreeMap<u64, Running>,
    /// The last decision that it has received, by job.
    pub(super) decided: BTreeMap<u64, Attempt>,
    /// Jobs that are being opened.
    opening: BTreeMap<u64, BeingOpened>,
    /// The descriptions of jobs that have not been read from their checkpoints.
    restoring: BTreeMap<u64, pb::JobReport>,
    follows: bool,
    /// Saves that begin: the job, the number, and the content.
    writes: Vec<(u64, u64, Result<Slices>)>,
    /// The budget for the changes of steps.
    pub(super) history: Arc<Budget>,
    /// Values that are to be hashed for readers.
    pub(super) hashing: VecDeque<Hashing>,
    /// When the reduced gradient and the content of a slice were requested.
    asked: BTreeMap<(bool, u32, Attempt), Now>,
}

/// A job on a server.
pub(super) struct Running {
    pub(super) job: Arc<Job<Cpu>>,
    commands: VecDeque<Command>,
    /// The save in progress.
    pub(super) save: Option<u64>,
    /// The copy in progress: its number, its version, and the slices that are still to be copied.
    pub(super) copy: Option<Copy>,
}

/// A job that is being opened, and the commands that have arrived for it.
struct BeingOpened {
    message: pb::OpenJob,
    commands: VecDeque<Command>,
}

/// Whether a server has memory for further slices.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Memory {
    Free,
    Full,
}

/// Slices that are copied from their primaries.
pub(super) struct Copy {
    pub(super) number: u64,
    pub(super) version: u64,
    pub(super) slices: Vec<u32>,
    pub(super) missing: Vec<u32>,
}

impl Running {
    /// Reports the copy, if all of it has arrived.
    pub(super) fn end_copy(&mut self) {
        if let Some(Copy { number, .. }) = self.copy.take_if(|copy| copy.missing.is_empty()) {
            self.job.tell(JobEvent::Copied { number });
        }
    }
}

impl ShardServer {
    pub(super) fn new(index: usize) -> Self {
        Self {
            index,
            life: 0,
            is_alive: false,
            still_until: Now::ZERO,
            stream: None,
            term: AtomicU64::new(0),
            events: Events::default(),
            said: None,
            jobs: BTreeMap::new(),
            decided: BTreeMap::new(),
            opening: BTreeMap::new(),
            restoring: BTreeMap::new(),
            follows: false,
            writes: Vec::new(),
            history: Budget::new(0),
            hashing: VecDeque::new(),
            asked: BTreeMap::new(),
        }
    }

    fn id(&self) -> u64 {
        self.index as u64 + 1
    }

    /// How others know this process.
    pub(super) fn server(&self) -> Server {
        let (id, incarnation) = (self.id(), self.life);
        Server { id, incarnation, address: format!("host{id}:{incarnation}") }
    }

    /// Returns whether the server can describe the job to a new coordinator.
    fn holds(&self) -> bool {
        !self.jobs.is_empty() || !self.restoring.is_empty()
    }

    /// Returns whether this is its control stream.
    fn follows(&self, stream: u64) -> bool {
        self.stream.is_some_and(|(_, number)| number == stream)
    }

    /// Ends a job, whether or not it is open.
    fn close(&mut self, id: u64) {
        self.events.closed(id);
        self.opening.remove(&id);
        self.restoring.remove(&id);
        if let Some(running) = self.jobs.remove(&id) {
            running.job.close();
        }
    }

    /// Opens a job that was being opened.
    fn open(&mut self, opened: BeingOpened, restored: Option<(u64, Slices)>) -> Result<()> {
        let BeingOpened { message: open, commands } = opened;
        let (id, epoch, leases) = (open.job_id, open.epoch, open.leases);
        let line = open.line.unwrap_or_default();
        let (restore, recent) = (open.requested, open.recent);
        let origin = Origin { restore, line, recent, ..Origin::default() };
        let opening = Opening {
            id,
            spec: JobSpec::try_from(open.spec.unwrap_or_default())?,
            epoch,
            placement: Placement::try_from(open.placement.unwrap_or_default())?,
            server: self.id(),
            version: open.version,
            is_restored: false,
            closed: CancellationToken::new(),
            devices: Arc::new([Device::new(Arc::new(Cpu::new()), None)]),
            shares: Resources::new().shares(),
            budget: Budget::new(1 << 20),
        };
        let job = Job::open(opening, origin, self.events.clone())?;
        let is_waited_for = !leases.is_empty();
        leases.into_iter().for_each(|lease| job.grant(lease.rank, lease.lease));
        open.decision.into_iter().for_each(|decision| job.remember(decision));
        if let Some((version, slices)) = restored {
            fill(&job, &slices)?;
            if is_waited_for { job.return_to(version)? } else { job.publish_at(version)? }
        }
        open.left.into_iter().for_each(|rank| job.rank_left(rank));
        open.done.into_iter().try_for_each(|rank| job.rank_done(rank))?;
        self.events.tell_of(JOB, id, JobEvent::Opened { epoch });
        job.finish_upload(job.attempt(), 0);
        let job = Arc::new(job);
        self.restoring.remove(&id);
        self.jobs.insert(id, Running { job, commands, save: None, copy: None });
        Ok(())
    }

    /// Carries out the next command for a job. Returns whether there was one.
    fn work(&mut self, memory: Memory) -> bool {
        let Some((&id, running)) =
            self.jobs.iter_mut().find(|(_, running)| !running.commands.is_empty())
        else {
            return false;
        };
        let command = running.commands.pop_front().expect("there is one");
        let job = running.job.clone();
        let done = match command {
            Command::Grant { rank, lease } => {
                job.grant(rank, lease);
                Ok(())
            }
            Command::Serve { version } => {
                job.serve(version);
                Ok(())
            }
            Command::Write(pb::WriteCheckpoint { save, version, .. }) => {
                running.save = Some(save);
                self.writes.push((id, save, snapshot(&job, version)));
                Ok(())
            }
            Command::CancelSave { save } => {
                running.save.take_if(|current| *current == save);
                Ok(())
            }
            Command::Copy(pb::CopySlices { number, .. }) if memory == Memory::Full => {
                job.refuse_copy(number, "the memory is full".to_owned());
                Ok(())
            }
            Command::Copy(pb::CopySlices { number, version, slices, .. }) => {
                job.begin_copy(number, &slices).map(|missing| {
                    // It is refused if new values were dropped while the memory was full.
                    let Some(missing) = missing else { return };
                    let slices = missing.clone();
                    running.copy = Some(Copy { number, version, slices, missing });
                    running.end_copy();
                })
            }
            command => {
                if matches!(command, Command::NewPlacement { .. }) {
                    running.copy = None;
                }
                execute(&job, &command)
            }
        };
        if let Err(error) = done {
            self.events.tell_of(JOB, id, JobEvent::failed(job.epoch(), &error));
            self.jobs.remove(&id);
        }
        true
    }
}

/// The attempt that a decision is about.
fn attempt(decision: &pb::Decision) -> Attempt {
    let pb::Decision { epoch, step, attempt, .. } = *decision;
    Attempt { epoch, step, number: attempt }
}

impl World {
    pub(super) fn server_starts(&mut self, server: usize) {
        let of = &mut self.servers[server];
        if of.is_alive {
            return;
        }
        let life = of.life + 1;
        let history = Budget::new(BUDGETS[self.rng.usize(..BUDGETS.len())]);
        *of = ShardServer { life, is_alive: true, history, ..ShardServer::new(server) };
        self.later(Happening::Dial { server, life });
    }

    /// The process of a server ends, and everything that it has is lost.
    pub(super) fn kill_server(&mut self, server: usize) {
        let life = self.servers[server].life;
        self.servers[server] = ShardServer { life, ..ShardServer::new(server) };
        self.nobody_held |= self.has_begun && !self.servers.iter().any(ShardServer::holds);
        self.break_stream(server);
    }

    pub(super) fn dial(&mut self, server: usize, life: u64) {
        let of = &self.servers[server];
        if of.life != life || !of.is_alive || of.stream.is_some() {
            return;
        }
        let Some((coordinator, stream)) = self.open_stream(server) else {
            let wait = Duration::from_micros(self.rng.u64(..REDIAL.as_micros() as u64));
            return self.after(wait, Happening::Dial { server, life });
        };
        let of = &mut self.servers[server];
        while of.work(Memory::Free) {}
        // Nobody waits for a save of the last coordinator.
        of.jobs.values_mut().for_each(|running| running.save = None);
        of.said = Some(of.events.connect());
        of.stream = Some((coordinator, stream));
        let term = of.term.load(SeqCst);
        // Nobody waits for a job that is being opened, unless ranks do.
        of.opening.clear();
        let reports = of.jobs.values().map(|running| running.job.report());
        let reports = reports.chain(of.restoring.values().cloned());
        let described = |report| control::job_report(report).expect("a valid description");
        let reports = reports.map(described).map(|report| JobReport { term, ..report });
        let failed =
            of.events.failed().into_iter().map(|of| (of.job_id, control::failed_there(of)));
        let joined = Event::ServerJoined {
            stream,
            server: of.server(),
            about: About { failed: failed.collect(), ..About::default() },
            reports: reports.collect(),
            is_new: false,
        };
        let joined = Box::new(joined);
        let from = Registering { life, stream, term, joined };
        let register = Happening::Register { life: coordinator, server, from };
        self.send(Connection::Up(stream), register);
        self.flush(server);
    }

    pub(super) fn stream_ended(&mut self, server: usize, life: u64, stream: u64) {
        let of = &mut self.servers[server];
        if of.life == life && of.is_alive && of.follows(stream) {
            of.stream = None;
            self.later(Happening::Dial { server, life });
        }
    }

    pub(super) fn command(
        &mut self,
        server: usize,
        life: u64,
        (stream, term): (u64, u64),
        command: serve_response::Command,
    ) {
        use serve_response::Command as Wire;
        let of = &mut self.servers[server];
        if of.life != life || !of.is_alive || !of.follows(stream) {
            return;
        }
        if !self.accepts(server, term, &command) {
            return;
        }
        let of = &mut self.servers[server];
        match command {
            Wire::Open(open) => {
                self.open(server, open);
            }
            Wire::Close(pb::CloseJob { job_id, .. }) => of.close(job_id),
            // Servers of simulations stop without notice.
            Wire::Release(_) => {}
            Wire::Confirm(pb::Confirm { number }) => {
                of.events.tell(serve_request::Event::Confirmed(pb::Confirmed { number }));
            }
            other => {
                let Some((job, command)) = job_command(other) else { return };
                let command = command.expect("a valid command");
                if let Some(opening) = of.opening.get_mut(&job) {
                    opening.commands.push_back(command);
                } else if let Some(running) = of.jobs.get_mut(&job) {
                    running.commands.push_back(command);
                    self.later(Happening::Work { server, life });
                }
            }
        }
        self.flush(server);
    }

    /// Returns whether a server carries out a command. One of an earlier term ends the control
    /// stream.
    fn accepts(&mut self, server: usize, term: u64, command: &serve_response::Command) -> bool {
        let of = &mut self.servers[server];
        if check_term(&of.term, term).is_err() {
            self.break_stream(server);
            return false;
        }
        // A job that is opened without ranks returns to a checkpoint as well.
        if let serve_response::Command::Open(open) = command
            && let Some(version) = open.restore.as_ref().and_then(|restore| restore.version)
        {
            self.decisions.returned(open.job_id, (open.epoch, version));
        }
        if let serve_response::Command::Open(open) = command {
            let line = open.line.clone().unwrap_or_default();
            let line = Line::try_from(line).expect("the coordinator has sent it");
            self.lines.insert(open.epoch, Arc::new(line));
        }
        let of = &mut self.servers[server];
        if let serve_response::Command::Decide(decision) = command {
            of.decided.insert(decision.job_id, attempt(decision));
            let life = of.stream.map_or(0, |(life, _)| life);
            let outcome = self.decisions.received(life, decision.job_id, attempt(decision));
            self.check(outcome);
        }
        true
    }

    /// A job is opened, which takes some time if it is read from a checkpoint.
    fn open(&mut self, server: usize, message: pb::OpenJob) {
        let (id, epoch, takes_time) = (message.job_id, message.epoch, message.restore.is_some());
        let of = &mut self.servers[server];
        of.close(id);
        of.restoring.extend(being_restored(&message).map(|report| (id, report)));
        of.opening.insert(id, BeingOpened { message, commands: VecDeque::new() });
        let life = of.life;
        match takes_time {
            true => {
                let takes = Duration::from_micros(self.rng.u64(..READING.as_micros() as u64));
                self.after(takes, Happening::Opens { server, life, job: id, epoch });
            }
            false => self.opens(server, life, id, epoch),
        }
    }

    /// A job has been opened, unless it was closed meanwhile.
    pub(super) fn opens(&mut self, server: usize, life: u64, job: u64, epoch: u64) {
        let of = &mut self.servers[server];
        let opens = |opening: &BeingOpened| opening.message.epoch == epoch;
        if of.life != life || !of.is_alive || !of.opening.get(&job).is_some_and(opens) {
            return;
        }
        let opening = of.opening.remove(&job).expect("it was found");
        let commands = opening.commands.len();
        let saved = |restore: &pb::Restore| {
            let line = restore.line.unwrap_or_default();
            restore.version.map(|version| LineVersion { version, line })
        };
        let version = opening.message.restore.as_ref().and_then(saved);
        let restored = match version.map(|of| (of.version, self.checkpoint(of))) {
            None => Ok(None),
            Some((version, Ok(slices))) => Ok(Some((version, slices))),
            Some((_, Err(error))) => Err(error),
        };
        let of = &mut self.servers[server];
        match restored.map(|restored| of.open(opening, restored)) {
            Ok(Ok(())) => (0..commands).for_each(|_| self.later(Happening::Work { server, life })),
            Ok(Err(error)) => self.fail(format!("server {server} cannot open the job: {error}")),
            Err(error) => of.events.tell_of(JOB, job, JobEvent::failed(epoch, &error)),
        }
        self.flush(server);
    }

    pub(super) fn work(&mut self, server: usize, life: u64) {
        if self.servers[server].life == life && self.servers[server].is_alive {
            let is_full = self.faults.loses(&mut self.rng);
            self.servers[server].work(if is_full { Memory::Full } else { Memory::Free });
            self.flush(server);
        }
    }

    /// Sends the events of a server, and continues with what it needs as a backup.
    pub(super) fn flush(&mut self, server: usize) {
        for (job, save, slices) in std::mem::take(&mut self.servers[server].writes) {
            self.write(server, job, save, slices);
        }
        let of = &mut self.servers[server];
        let life = of.life;
        let mut said = Vec::new();
        while let Some(event) = of.said.as_mut().and_then(|said| said.try_recv().ok()) {
            said.push(event);
        }
        if let Some((coordinator, stream)) = of.stream {
            for said in said.into_iter().map(Box::new) {
                let said = Happening::ServerEvent { life: coordinator, server, stream, said };
                self.send(Connection::Up(stream), said);
            }
        }
        let of = &mut self.servers[server];
        if !of.follows && of.jobs.values().any(|running| running.job.spec.replicas > 1) {
            of.follows = true;
            self.later(Happening::Follow { server, life });
        }
    }

    /// Requests reduced gradients and slices that are missing.
    pub(super) fn follow(&mut self, server: usize, life: u64) {
        let of = &mut self.servers[server];
        if of.life != life || !of.is_alive {
            return;
        }
        of.follows = false;
        let mut requests = Vec::new();
        for (&job, running) in &of.jobs {
            let placement = running.job.placement();
            let (attempt, missing) = running.job.missing_reduced();
            for (primary, slices) in missing {
                let to = placement.servers()[primary].clone();
                for (slice, offset) in slices {
                    let request = Request::Reduced { job, attempt, slice, offset };
                    requests.push(((true, slice, attempt), to.clone(), request));
                }
            }
            let Some(Copy { number, version, missing, .. }) = &running.copy else { continue };
            for &slice in missing {
                let to = placement.servers()[placement.primary(slice as usize)].clone();
                let (number, version) = (*number, *version);
                let request = Request::Copy { job, number, version, slice };
                requests.push(((false, slice, attempt), to, request));
            }
        }
        if !requests.is_empty() {
            self.servers[server].follows = true;
            let wait = FOLLOW + Duration::from_micros(self.rng.u64(..5_000));
            self.after(wait, Happening::Follow { server, life });
        }
        for (key, to, request) in requests {
            let asked = &mut self.servers[server].asked;
            if asked.get(&key).is_none_or(|at| *at + REPEAT <= self.now) {
                asked.insert(key, self.now);
                self.request(&to, Sender::Server { server, life }, request);
            }
        }
    }

    /// Compares the state of all slices after the last step, on all of their servers.
    pub(super) fn compare_final_states(&mut self) {
        let version = self.size.steps;
        let mut found = Vec::new();
        for server in self.servers.iter_mut().filter(|server| server.is_alive) {
            while server.work(Memory::Free) {}
            for Running { job, .. } in server.jobs.values() {
                let has = |slice: &Slice<Cpu>| {
                    let role = slice.role();
                    slice.version() == Some(version) && matches!(role, Role::Primary | Role::Backup)
                };
                for (index, slice) in job.slices().filter(|(_, slice)| has(slice)) {
                    let hash = slice.digest(JOB, version);
                    found.push((index, hash.expect("it is at this version")));
                }
            }
        }
        let line = self.line_in(u64::MAX);
        let batches = self.batches(&line, version);
        for &(slice, hash) in &found {
            let outcome = self.record.ended(batches.clone(), slice, hash);
            self.check(outcome);
        }
        self.record.line = Line::clone(&line);
        for (slice, ..) in self.slices() {
            if !found.iter().any(|(index, _)| *index == slice) {
                return self.fail(format!("no server has the final state of slice {slice}"));
            }
        }
    }
}
