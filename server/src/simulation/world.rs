//! The virtual network and its clock.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    sync::Arc,
    time::Duration,
};

use fastrand::Rng;
use zeroshard_coordinator::{
    job::Description,
    vocabulary::{
        events::{Completion, Event, Placing},
        ids::{Lease, Now},
    },
};
use zeroshard_model::{
    CheckpointPolicy, DType, JobSpec, Line, Manifest, OnLoss, OnMemoryShortage, RunningAverage,
    Server, SpikeAction, SpikePolicy, TensorSpec,
};
use zeroshard_proto::pb::{serve_request, serve_response};

use super::{
    checkpoints::{Slices, Store, URL},
    coordinator::{Coordinator, Registering},
    data::{Answer, Request, Sender},
    decisions::Decisions,
    faults::{Fault, Faults},
    pair::Pair,
    reader::{Reader, Round},
    record::{Batches, Record},
    server::ShardServer,
    worker::{Told, Worker},
};

/// The name of the job.
pub(super) const JOB: &str = "job";
/// The clock at which a run must have ended.
const LIMIT: Now = Duration::from_secs(1800);
/// The number of happenings after which a run must have ended.
const MAX_HAPPENINGS: u64 = 1_000_000;

/// Something that happens at a time. `life` is that of the process it happens to: a message for an
/// earlier life is lost.
#[derive(Debug)]
pub(super) enum Happening {
    /// An event reaches the coordinator. With a stream of a server, it was sent on it.
    Event { life: u64, stream: Option<u64>, event: Box<Event> },
    /// The first messages of a server on a new control stream reach the coordinator.
    Register { life: u64, server: usize, from: Registering },
    /// A server's message reaches the coordinator.
    ServerEvent { life: u64, server: usize, stream: u64, said: Box<serve_request::Event> },
    /// The coordinator's timer fires.
    Tick { life: u64 },
    /// A new coordinator starts.
    CoordinatorStarts { index: usize },
    /// The coordinator dials the address of a server without a control stream.
    Probe { life: u64, server: Server },
    /// A command reaches a server.
    Command {
        server: usize,
        life: u64,
        stream: u64,
        term: u64,
        command: Box<serve_response::Command>,
    },
    /// A server notices that its control stream has ended.
    StreamEnded { server: usize, life: u64, stream: u64 },
    /// A server dials the coordinator.
    Dial { server: usize, life: u64 },
    /// A new process of a server starts.
    ServerStarts { server: usize },
    /// A server carries out the next command for its job.
    Work { server: usize, life: u64 },
    /// A server has read the slices of a job from a checkpoint.
    Opens { server: usize, life: u64, job: u64, epoch: u64 },
    /// A server requests what it needs as a backup.
    Follow { server: usize, life: u64 },
    /// A request reaches a server, or is tried again there because it had to wait.
    Request { server: usize, life: u64, from: Sender, request: Request, tries: u32 },
    /// The same at a mirror.
    MirrorRequest { mirror: usize, from: Sender, request: Request, tries: u32 },
    /// The answer to a request.
    Answered { to: Sender, request: Request, answer: Answer },
    /// The coordinator's answer to a call, or a membership, reaches a worker.
    Told { rank: u32, life: u64, told: Told },
    /// A worker does what is to be done next, and then `again` and again.
    Wake { rank: u32, life: u64, again: bool },
    /// A new process of a worker starts.
    WorkerStarts { rank: u32 },
    /// A new process of a reader starts.
    ReaderStarts { reader: usize },
    /// A reader asks the coordinator for a description of the job.
    Describe(Round),
    /// The description reaches a reader; `None`: there is none now.
    Described(Round, Option<Box<Description>>),
    /// A reader has rested, or has waited for long.
    ReaderWakes(Round),
    /// A server hashes a slice for readers.
    Hash { server: usize, life: u64 },
    /// A server has written slices to a checkpoint, or has failed.
    Written { server: usize, life: u64, job: u64, save: u64, slices: Option<Slices> },
    /// The coordinator has looked for the checkpoint from which a job starts.
    Find { life: u64, placing: Placing },
    /// The coordinator writes the manifest of a checkpoint.
    Complete { life: u64, completion: Completion },
    /// Something goes wrong.
    Fault(Fault),
}

struct Scheduled {
    at: Now,
    number: u64,
    happening: Happening,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}
impl Eq for Scheduled {}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// A connection on which messages stay in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Connection {
    /// From a server to the coordinator, on a control stream.
    Up(u64),
    /// From the coordinator to a server.
    Down(u64),
    /// From the coordinator to a worker.
    Member(Lease),
}

/// The size of a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    pub(super) servers: usize,
    pub(super) replicas: u32,
    pub(super) world: u32,
    pub(super) steps: u64,
    /// The number of readers, with the mirror.
    pub(super) readers: usize,
    /// The first reader is a mirror.
    pub(super) has_mirror: bool,
    /// The job is saved at versions that are multiples of this number.
    pub(super) save_every: Option<u64>,
}

/// A whole cluster.
pub(super) struct World {
    pub(super) size: Size,
    pub(super) rng: Rng,
    pub(super) now: Now,
    queue: BinaryHeap<Reverse<Scheduled>>,
    number: u64,
    /// The time of the last delivery on each connection.
    last: BTreeMap<Connection, Now>,
    /// One, or two that know nothing of each other.
    pub(super) coordinators: Vec<Coordinator>,
    pub(super) pair: Pair,
    pub(super) decisions: Decisions,
    pub(super) servers: Vec<ShardServer>,
    pub(super) workers: Vec<Worker>,
    pub(super) readers: Vec<Reader>,
    pub(super) store: Store,
    pub(super) faults: Faults,
    /// The batches whose gradients are far too large, and the rank that sends them.
    pub(super) spikes: BTreeMap<u64, u32>,
    /// `true` if no server has held the job at some time, so that a new coordinator may not know
    /// it.
    pub(super) nobody_held: bool,
    /// `true` if all workers have begun to train, after which things go wrong.
    pub(super) has_begun: bool,
    pub(super) record: Record,
    /// The lines of the job, by their first epoch.
    pub(super) lines: BTreeMap<u64, Arc<Line>>,
    /// The line of an undisturbed run that skips batches.
    pub(super) reference: Option<Line>,
    /// What has happened, if it is to be printed.
    log: Option<Vec<String>>,
    /// What must not happen, and has.
    pub(super) failure: Option<String>,
    /// `true` if the run counts as failed at its end, to see its log.
    fails_at_end: bool,
}

/// A job with checkpoints returns to the last one before a spike. The median of one step is never
/// unknown after a checkpoint.
const SPIKES: SpikePolicy = SpikePolicy {
    action: SpikeAction::Rewind { steps: 1 },
    norm_factor: Some(1e3),
    loss_factor: None,
    window: 1,
    nonfinite_steps: 0,
    limit: 100,
    limit_batches: 1,
};

/// Tensors of one slice each, of different sizes; one is frozen, and one is bfloat16.
pub(super) fn spec(size: Size) -> JobSpec {
    let frozen = TensorSpec { frozen: true, ..TensorSpec::new("frozen", [2]) };
    let tensors = [("a", 3), ("b", 4), ("c", 1), ("d", 6)];
    let mut tensors: Vec<_> =
        tensors.map(|(name, numel)| TensorSpec::new(name, [numel])).into_iter().collect();
    tensors.insert(1, frozen);
    tensors.push(TensorSpec { buffer: true, ..TensorSpec::new("buffer", [3]) });
    tensors[4].dtype = DType::Bf16;
    let manifest = Manifest::new(tensors).expect("valid tensors");
    let adamw = "adamw".parse().expect("an optimizer");
    JobSpec {
        world: size.world,
        replicas: size.replicas,
        min_servers: size.servers as u32,
        compare_every: 1,
        checkpoints: size.save_every.map(|every| CheckpointPolicy {
            url: URL.to_owned(),
            every_steps: Some(every),
            every: None,
            keep: 2,
            on_loss: OnLoss::Restore,
            on_memory_shortage: OnMemoryShortage::default(),
        }),
        averages: [RunningAverage::exponential("slow", 0.9)].into(),
        spikes: size.save_every.map(|_| SPIKES),
        ..JobSpec::new(JOB, manifest, vec![adamw])
    }
}

impl World {
    pub(super) fn new(size: Size, seed: u64, faults: Faults, record: Record) -> Self {
        let mut world = Self {
            size,
            rng: Rng::with_seed(seed),
            now: Now::ZERO,
            queue: BinaryHeap::new(),
            number: 0,
            last: BTreeMap::new(),
            coordinators: vec![Coordinator::default()],
            pair: Pair::new(size, seed),
            decisions: Decisions::default(),
            servers: (0..size.servers).map(ShardServer::new).collect(),
            workers: (0..size.world).map(|_| Worker::new()).collect(),
            readers: Vec::new(),
            store: Store::default(),
            faults,
            spikes: BTreeMap::new(),
            nobody_held: false,
            has_begun: false,
            record,
            lines: BTreeMap::new(),
            reference: None,
            log: None,
            failure: None,
            fails_at_end: false,
        };
        world.later(Happening::CoordinatorStarts { index: 0 });
        (0..size.servers).for_each(|server| world.later(Happening::ServerStarts { server }));
        (0..size.world).for_each(|rank| world.later(Happening::WorkerStarts { rank }));
        world.schedule_faults();
        world.add_readers();
        world
    }

    /// Adds readers, some of which start long before the job or after its first steps.
    fn add_readers(&mut self) {
        let slices = self.slices().len() as u32;
        for reader in 0..self.size.readers {
            let any = match self.size.has_mirror && reader == 0 {
                true => Reader::mirror(&mut self.rng, slices),
                false => Reader::any(&mut self.rng, slices),
            };
            // The first reader besides the mirror follows through it, and most of the others.
            let mirror = self.readers.first().filter(|_| self.size.has_mirror);
            let any = match mirror.filter(|_| reader == 1 || self.rng.bool()) {
                Some(mirror) => any.through(0, mirror),
                None => any,
            };
            self.readers.push(any);
            let scale = [1_000, 50_000, 300_000][self.rng.usize(..3)];
            let wait = Duration::from_micros(self.rng.u64(..scale));
            self.after(wait, Happening::ReaderStarts { reader });
        }
    }

    /// Prints what happens if the run fails.
    pub(super) fn logged(self) -> Self {
        Self { log: Some(Vec::new()), ..self }
    }

    /// Lets an undisturbed run skip the batches that this line skips.
    pub(super) fn along(self, line: Line) -> Self {
        Self { reference: Some(line), ..self }
    }

    /// The batches of the steps before `version` on a line.
    pub(super) fn batches(&self, line: &Line, version: u64) -> Batches {
        let line = self.reference.as_ref().unwrap_or(line);
        (0..version).map(|step| line.batch(step)).collect()
    }

    /// The line of the job in an epoch.
    pub(super) fn line_in(&self, epoch: u64) -> Arc<Line> {
        let last = self.lines.range(..=epoch).next_back();
        last.map_or_else(Arc::default, |(_, line)| line.clone())
    }

    /// Lets the run fail at its end, so that its log can be seen.
    pub(super) fn fail_at_end(&mut self) {
        self.fails_at_end = true;
    }

    /// Runs to the end. Returns the record.
    ///
    /// # Errors
    /// What must not happen, and has; with everything that happened before, if it is logged.
    pub(super) fn run(mut self) -> Result<Record, String> {
        while self.failure.is_none() && !self.has_ended() {
            let Some(Reverse(Scheduled { at, number, happening })) = self.queue.pop() else {
                self.fail("nothing happens any more".to_owned());
                break;
            };
            self.now = at;
            if at > LIMIT || self.number > MAX_HAPPENINGS {
                self.fail(format!("the run has not ended at {at:?}"));
                break;
            }
            if let Some(log) = &mut self.log {
                log.push(format!("{at:>12.6?} {happening:?}"));
            }
            match self.stands_still(&happening) {
                // With the same number, so that messages stay in order.
                Some(at) => self.queue.push(Reverse(Scheduled { at, number, happening })),
                None => self.happen(happening),
            }
        }
        if self.failure.is_none() {
            self.compare_final_states();
            let outcome = self.record.compare_reads();
            self.check(outcome);
        }
        if self.fails_at_end {
            self.fail("the end".to_owned());
        }
        match self.failure {
            None => {
                self.record.deciders = self.decisions.deciders();
                Ok(self.record)
            }
            Some(failure) => {
                let log = self.log.map(|log| log.join("\n") + "\n").unwrap_or_default();
                Err(format!("{log}{failure}"))
            }
        }
    }

    fn has_ended(&self) -> bool {
        self.has_trained() && (self.readers.is_empty() || self.readers_have_ended())
    }

    /// Returns whether all steps are made, after which nothing goes wrong any more.
    pub(super) fn has_trained(&self) -> bool {
        let is_saved = || self.store.latest().is_some_and(|(of, _)| of.version == self.size.steps);
        self.workers.iter().all(|worker| worker.step >= self.size.steps)
            && (self.size.save_every.is_none() || is_saved() && self.is_whole())
    }

    /// Something has happened that must not happen.
    pub(super) fn fail(&mut self, failure: String) {
        self.failure.get_or_insert(failure);
    }

    /// Records the outcome of a comparison.
    pub(super) fn check(&mut self, outcome: Result<(), String>) {
        if let Err(failure) = outcome {
            self.fail(failure);
        }
    }

    /// The delay of a message. Most are short.
    pub(super) fn delay(&mut self) -> Duration {
        let micros = match self.rng.u32(..20) {
            0 => self.rng.u64(..50_000),
            1..5 => self.rng.u64(..5_000),
            _ => self.rng.u64(..500),
        };
        Duration::from_micros(micros)
    }

    /// Schedules something after a random delay, on no connection: it may overtake others.
    pub(super) fn later(&mut self, happening: Happening) {
        let at = self.now + self.delay();
        self.at(at, happening);
    }

    pub(super) fn after(&mut self, wait: Duration, happening: Happening) {
        self.at(self.now + wait, happening);
    }

    /// Sends a message on a connection, after those that were sent before.
    pub(super) fn send(&mut self, connection: Connection, happening: Happening) {
        let delay = self.delay();
        self.send_after(delay, connection, happening);
    }

    /// The same, with this delay.
    pub(super) fn send_after(
        &mut self,
        delay: Duration,
        connection: Connection,
        happening: Happening,
    ) {
        let at = self.now + delay;
        let at = self.last.get(&connection).map_or(at, |last| at.max(*last));
        self.last.insert(connection, at);
        self.at(at, happening);
    }

    pub(super) fn at(&mut self, at: Now, happening: Happening) {
        self.number += 1;
        self.queue.push(Reverse(Scheduled { at, number: self.number, happening }));
    }

    /// Sends a request to a server, now and then twice or not at all.
    pub(super) fn request(&mut self, to: &Server, from: Sender, request: Request) {
        let server = (to.id - 1) as usize;
        let copies = self.faults.copies(&mut self.rng);
        for _ in 0..copies {
            let request = request.clone();
            let life = to.incarnation;
            self.later(Happening::Request { server, life, from, request, tries: 0 });
        }
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Event { life, stream, event } => self.event(life, stream, *event),
            Happening::Register { life, server, from } => self.register(life, server, from),
            Happening::ServerEvent { life, server, stream, said } => {
                self.said(life, server, stream, *said);
            }
            Happening::Tick { life } => self.tick(life),
            Happening::CoordinatorStarts { index } => self.coordinator_starts(index),
            Happening::Probe { life, server } => self.probe(life, server),
            Happening::Command { server, life, stream, term, command } => {
                self.command(server, life, (stream, term), *command);
            }
            Happening::StreamEnded { server, life, stream } => {
                self.stream_ended(server, life, stream);
            }
            Happening::Dial { server, life } => self.dial(server, life),
            Happening::ServerStarts { server } => self.server_starts(server),
            Happening::Work { server, life } => self.work(server, life),
            Happening::Opens { server, life, job, epoch } => self.opens(server, life, job, epoch),
            Happening::Follow { server, life } => self.follow(server, life),
            Happening::Request { server, life, from, request, tries } => {
                self.requested(server, life, from, (request, tries));
            }
            Happening::MirrorRequest { mirror, from, request, tries } => {
                self.mirror_requested(mirror, from, (request, tries));
            }
            Happening::Answered { to, request, answer } => self.answered(to, request, answer),
            Happening::Told { rank, life, told } => self.told(rank, life, told),
            Happening::Wake { rank, life, again } => self.wake(rank, life, again),
            Happening::WorkerStarts { rank } => self.worker_starts(rank),
            Happening::ReaderStarts { reader } => self.reader_starts(reader),
            Happening::Describe(round) => self.describe_to(round),
            Happening::Described(round, of) => self.described(round, of),
            Happening::ReaderWakes(round) => self.reader_wakes(round),
            Happening::Hash { server, life } => self.hash(server, life),
            Happening::Written { server, life, job, save, slices } => {
                self.written(server, life, (job, save), slices);
            }
            Happening::Find { life, placing } => self.found(life, placing),
            Happening::Complete { life, completion } => self.complete(life, completion),
            Happening::Fault(fault) => self.fault(fault),
        }
    }

    /// When a server that stands still continues, if this happens to it.
    fn stands_still(&self, happening: &Happening) -> Option<Now> {
        let server = match happening {
            Happening::Command { server, .. }
            | Happening::StreamEnded { server, .. }
            | Happening::Dial { server, .. }
            | Happening::Work { server, .. }
            | Happening::Follow { server, .. }
            | Happening::Written { server, .. }
            | Happening::Hash { server, .. }
            | Happening::Request { server, .. }
            | Happening::Answered { to: Sender::Server { server, .. }, .. } => server,
            _ => return None,
        };
        Some(self.servers[*server].still_until).filter(|&until| until > self.now)
    }
}
