//! Scenarios: sequences of events and their expected results. Time is a number.

mod acknowledgements;
mod admission;
mod attempts;
mod callers;
mod commits;
mod decisions;
mod departures;
mod descriptions;
mod disconnects;
mod fork;
mod identities;
mod idle;
mod interrupted;
mod latest;
mod leases;
mod links;
mod members;
mod memberships;
mod model;
mod operators;
mod recovery;
mod reduces;
mod replicas;
mod resting;
mod restore;
mod rewind;
mod saves;
mod spikes;
mod user_data;
mod visits;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use zeroshard_model::{
    Attempt, DType, Error, Fork, JobSpec, Line, Manifest, RecentSteps, Result, Server, TensorSpec,
    memory::Capacity,
};

use crate::{
    cluster::Cluster,
    job::{Description, Job, Open},
    placement::{Zones, plan::Plan},
    state::{memberships::Change, user_data::UserData},
    vocabulary::{
        calls::{Commit, Create, Discard, Join, Leave, Reduce, Reply, Rest, Save, Saved, Turn},
        commands::{About, Checkpoint, Command, ServerEvent},
        decision::{Decision, Report, Update},
        events::{Action, Completion, Event, Placed, Placing, Search},
        gradient::{Absent, Largest, Norm, Overflow, Reduced},
        ids::{Caller, JobRef, Lease, Link, Now},
        reports::{Files, JobStats, Stats},
    },
};

/// The id of the job.
const JOB: u64 = 0x7007;
const WAIT: Duration = Duration::from_secs(60);
/// How long a Join waits for its rank.
const RANK_WAIT: Duration = Duration::from_secs(30);

/// Two trained tensors of one slice each, and a frozen tensor between them.
fn spec(world: u32) -> JobSpec {
    let frozen = TensorSpec { frozen: true, ..TensorSpec::new("frozen", [2]) };
    let manifest =
        Manifest::new(vec![TensorSpec::new("a", [3]), frozen, TensorSpec::new("b", [4])]).unwrap();
    JobSpec { world, ..JobSpec::new("job", manifest, vec!["adamw".parse().unwrap()]) }
}

fn creation(spec: JobSpec) -> Box<Create> {
    Box::new(Create { spec, fork: None, restore: None, quota: None })
}

/// The job, as its members and servers name it.
fn job() -> JobRef {
    JobRef { name: "job".into(), id: JOB }
}

/// Plays a scenario, and records its results.
#[derive(Default)]
struct Script {
    cluster: Cluster,
    now: Now,
    last: u64,
    /// `true` if servers leave leases unaccepted and decisions unstored.
    silent: bool,
    /// The servers without memory for further slices.
    full: BTreeSet<u64>,
    links: HashMap<u64, Link>,
    answers: HashMap<Caller, Result<Reply>>,
    commands: Vec<(u64, Command)>,
    woken: Vec<Lease>,
    ended: Vec<(Lease, Option<Error>)>,
    dismissed: Vec<u64>,
    completions: Vec<Completion>,
    /// The checkpoint that jobs find.
    found: Option<Checkpoint>,
    /// The data of the ranks in that checkpoint.
    found_data: UserData,
    /// The errors of the storage in which jobs look for it, the last one first.
    storage_errors: Vec<Error>,
    probed: Vec<Server>,
    /// The factor of all gradients, and the rank with the largest ones.
    spike: Option<(f64, u32)>,
    /// The figures in the checkpoint that jobs find.
    found_recent: RecentSteps,
    searches: Vec<Search>,
}

impl Script {
    /// `count` servers with the ids 1, 2, ...
    fn with_servers(count: u64) -> Self {
        let mut script = Self::default();
        (1..=count).for_each(|server| script.server(server));
        script
    }

    /// A job of `world` ranks on `count` servers, at version 0 and with all ranks joined. Returns
    /// the lease of each rank.
    fn training(world: u32, count: u64) -> (Self, Vec<Lease>) {
        Self::training_of(spec(world), count)
    }

    fn training_of(spec: JobSpec, count: u64) -> (Self, Vec<Lease>) {
        let world = spec.world;
        let mut script = Self::opened_job(spec, count);
        let leases = (0..world).map(|rank| script.join(rank).expect("free")).collect();
        script.initialise_all();
        (script, leases)
    }

    /// A job that workers can join.
    fn opened_job(spec: JobSpec, count: u64) -> Self {
        let mut script = Self::with_servers(count);
        script.create(spec);
        script.open_all();
        script
    }

    fn event(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let (before, is_tick) = (self.cluster.next_deadline(), matches!(event, Event::Tick));
            let mut timers: Vec<Now> = before.into_iter().collect();
            timers.extend(event.wait().map(|wait| self.now + wait));
            for action in self.cluster.handle(event, self.now) {
                timers.extend(if let Action::Tick(at) = action { Some(at) } else { None });
                events.extend(self.act(action));
            }
            self.check_index();
            // The timer of the driver is set again after a tick. Otherwise an earlier deadline must
            // be announced.
            let after = self.cluster.next_deadline();
            let is_late = |after: Now| timers.iter().all(|&timer| timer > after.max(self.now));
            assert!(
                is_tick || !after.is_some_and(is_late),
                "no timer for {after:?} at {:?}",
                self.now
            );
        }
    }

    /// Records an action, and returns the event that follows from it at once.
    fn act(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Answer(caller, answer) => {
                assert!(
                    self.answers.insert(caller, answer).is_none(),
                    "{caller:?} is answered twice"
                );
            }
            Action::Command(server, command) => {
                let said = self.reply(server, &command).filter(|_| !self.silent);
                self.commands.push((server, command));
                return said
                    .map(|said| Event::FromServer { from: self.links[&server], event: said });
            }
            Action::Place(placing) => {
                let Placing { ref spec, ref live, ref zones, ref free_memory, .. } = placing;
                let plan = Plan::within(spec, live, zones, free_memory);
                let found = placing.restore.and(self.found.clone());
                let user_data = self.found_data.clone();
                let Placing { ref line, returns, .. } = placing;
                let line = Line::clone(line).numbered(line.number + u64::from(returns));
                let placed = plan.map(|plan| Placed {
                    plan,
                    checkpoint: found,
                    user_data,
                    line,
                    recent: self.found_recent.clone(),
                });
                let placed = self.storage_errors.pop().map_or(placed, Err);
                return Some(Event::Placed { job: placing.job, placed });
            }
            Action::Wake(lease) => self.woken.push(lease),
            Action::End(lease, error) => self.ended.push((lease, error)),
            Action::Dismiss(link) => self.dismissed.push(link.server),
            Action::Probe(server) => self.probed.push(server),
            Action::Decided { .. }
            | Action::Aborted { .. }
            | Action::Interrupted { .. }
            | Action::Attached(..)
            | Action::Tick(_)
            | Action::Forgotten { .. }
            | Action::EndClaims { .. }
            | Action::SaveEnded { .. }
            | Action::Redundant { .. }
            | Action::Spiked { .. }
            | Action::Alarm(..)
            | Action::Note(_) => {}
            Action::Complete(completion) => self.completions.push(completion),
            Action::Search(search) => self.searches.push(search),
        }
        None
    }

    /// The reply of a server to a command that it can carry out at once.
    fn reply(&self, server: u64, command: &Command) -> Option<ServerEvent> {
        match command.clone() {
            Command::Grant { job, rank, lease } => Some(ServerEvent::Granted { job, rank, lease }),
            Command::Copy { job, number, .. } if self.full.contains(&server) => {
                Some(ServerEvent::CopyRefused { job, number, reason: "out of memory".to_owned() })
            }
            Command::Copy { job, number, .. } => Some(ServerEvent::Copied { job, number }),
            Command::Confirm { number } => Some(ServerEvent::Confirmed { number }),
            Command::Decide { job, decision: Decision { attempt, .. } } => {
                Some(ServerEvent::Stored { job, epoch: attempt.epoch, step: attempt.step })
            }
            _ => None,
        }
    }

    fn server(&mut self, id: u64) {
        self.server_as(Server { id, incarnation: 1, address: format!("host:{id}") });
    }

    fn server_as(&mut self, server: Server) {
        self.server_with(server, None);
    }

    /// A server with this room registers.
    fn server_with(&mut self, server: Server, capacity: Option<Capacity>) {
        let stream = self.next();
        self.links.insert(server.id, Link { server: server.id, stream });
        self.event(Event::ServerJoined {
            stream,
            server,
            about: About { capacity, ..About::default() },
            reports: Vec::new(),
            is_new: true,
        });
    }

    /// The process of a server ends.
    fn lose_server(&mut self, server: u64) {
        let live = self.cluster.common.servers.live();
        self.lose_link(self.links[&server]);
        let dead = live.into_iter().find(|live| live.id == server);
        dead.into_iter().for_each(|dead| self.event(Event::Refused(dead)));
    }

    fn lose_link(&mut self, from: Link) {
        self.event(Event::ServerLost { from, cause: "its control stream ended".into() });
    }

    /// A server reports that it cannot hold the job.
    fn failed(&mut self, server: u64, reason: &str) {
        let epoch = self.cluster.jobs()["job"].epoch;
        self.failed_in(server, epoch, reason, false);
    }

    /// A server reports that it cannot hold the job, which it has opened in this epoch.
    fn failed_in(&mut self, server: u64, epoch: u64, reason: &str, transient: bool) {
        let reason = reason.to_owned();
        self.said(server, ServerEvent::Failed { job: job(), epoch, reason, transient });
    }

    fn said(&mut self, server: u64, said: ServerEvent) {
        self.event(Event::FromServer { from: self.links[&server], event: said });
    }

    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn caller(&mut self) -> Caller {
        Caller(self.next())
    }

    fn create(&mut self, spec: JobSpec) -> Caller {
        self.create_as(JOB, spec)
    }

    fn create_as(&mut self, job_id: u64, spec: JobSpec) -> Caller {
        self.create_from(job_id, spec, None)
    }

    fn create_from(&mut self, job_id: u64, spec: JobSpec, fork: Option<Fork>) -> Caller {
        let caller = self.caller();
        let create = Box::new(Create { spec, fork, restore: None, quota: None });
        self.event(Event::Create { caller, job_id, create, wait: WAIT });
        caller
    }

    fn delete(&mut self, id: u64) -> Caller {
        let caller = self.caller();
        self.event(Event::Delete { caller, job: JobRef { id, ..job() }, wait: WAIT });
        caller
    }

    /// The servers that were told to open the job, and the epochs.
    fn opens(&self) -> Vec<(u64, u64)> {
        let open = |(server, command): &(u64, Command)| match command {
            Command::Open(open) => Some((*server, open.epoch)),
            _ => None,
        };
        self.commands.iter().filter_map(open).collect()
    }

    /// What a server says that has opened a job in its current epoch.
    fn opened(&self, job: JobRef) -> ServerEvent {
        let epoch = self.cluster.jobs().get(&job.name).map_or(0, |found| found.epoch);
        ServerEvent::Opened { job, epoch }
    }

    fn open_all(&mut self) {
        for (server, _) in self.opens() {
            self.said(server, self.opened(job()));
        }
    }

    fn open(&self) -> &Open {
        self.cluster.jobs()["job"].phase.open("job").expect("open")
    }

    fn describe(&self, job: &str) -> Result<Description> {
        self.cluster.job(job).and_then(Job::describe)
    }

    /// Why the job has failed, if it has.
    fn failure(&self) -> Option<&str> {
        self.cluster.jobs().get("job").and_then(Job::failure)
    }

    fn epoch(&self) -> u64 {
        self.describe("job").expect("open").epoch
    }

    fn version(&self) -> Option<u64> {
        self.describe("job").expect("open").version
    }

    fn initialise_all(&mut self) {
        let epoch = self.epoch();
        for (server, _) in self.opens() {
            self.said(server, ServerEvent::Initialised { job: job(), epoch });
        }
    }

    fn join(&mut self, rank: u32) -> Result<Lease> {
        self.join_as(rank, None)
    }

    /// Joins, and expects an answer at once.
    fn join_as(&mut self, rank: u32, address: Option<String>) -> Result<Lease> {
        let (caller, lease) = self.start_join(rank, address);
        self.answers.remove(&caller).expect("the join is answered at once").map(|_| lease)
    }

    fn start_join(&mut self, rank: u32, address: Option<String>) -> (Caller, Lease) {
        let (caller, lease) = (self.caller(), Lease(self.next()));
        let join =
            Join { job: "job".into(), rank, address, lease, rank_wait: RANK_WAIT, wait: WAIT };
        self.event(Event::Join { caller, join });
        (caller, lease)
    }

    fn lose(&mut self, rank: u32, lease: Lease) {
        self.event(Event::LeaseEnded { job: "job".into(), rank, lease });
    }

    fn leave(&mut self, lease: Lease, done: bool) -> Caller {
        let caller = self.caller();
        self.event(Event::Leave { caller, leave: Leave { job: job(), lease, done }, wait: WAIT });
        caller
    }

    /// The next membership of a worker, if it has changed.
    fn told(&mut self, lease: Lease) -> Option<Change> {
        self.cluster.next_membership("job", lease)
    }

    fn commit(&mut self, commit: Commit) -> Caller {
        let caller = self.caller();
        self.event(Event::Commit { caller, commit: Box::new(commit) });
        caller
    }

    fn discard(&mut self, turn: Turn) -> Caller {
        let caller = self.caller();
        self.event(Event::Discard { caller, discard: Discard { turn, wait: WAIT } });
        caller
    }

    /// `excluded` is that of [`Rest`].
    fn rest(&mut self, turn: Turn, excluded: bool) -> Caller {
        let caller = self.caller();
        self.event(Event::Rest { caller, rest: Rest { turn, excluded, wait: WAIT } });
        caller
    }

    fn reduce(&mut self, lease: Lease, epoch: u64, step: u64, loss_scale: f64) -> Caller {
        let caller = self.caller();
        let reduce = Reduce { turn: turn(lease, epoch, 0, step), loss_scale, wait: WAIT };
        self.event(Event::Reduce { caller, reduce: Box::new(reduce) });
        caller
    }

    /// Every server reports its slices, each with a sum of squares of 1 plus its number.
    fn ready_all(&mut self, step: u64) {
        for server in self.servers() {
            self.ready(server, step, |_| {});
        }
    }

    fn servers(&self) -> Vec<u64> {
        self.cluster.common.servers.connected().keys().copied().collect()
    }

    /// A server reports its slices for the first attempt at `step` in the current epoch.
    fn ready(&mut self, server: u64, step: u64, change: impl FnOnce(&mut Reduced)) {
        let mut reduced = self.gradients(server);
        change(&mut reduced);
        let job = JobRef { id: self.cluster.jobs()["job"].id, ..job() };
        self.said(server, ServerEvent::Ready { job, attempt: self.first_attempt(step), reduced });
    }

    /// A server reports its slices for `attempt`.
    fn ready_at(&mut self, server: u64, attempt: Attempt) {
        let reduced = self.gradients(server);
        self.said(server, ServerEvent::Ready { job: job(), attempt, reduced });
    }

    fn first_attempt(&self, step: u64) -> Attempt {
        Attempt::first(self.epoch(), step)
    }

    fn gradients(&self, server: u64) -> Reduced {
        let described = self.describe("job").expect("open");
        let manifest = spec(1).manifest;
        let slices =
            described.placement.primary_slices(server).filter(|&slice| manifest.trains(slice));
        let (factor, rank) = self.spike.unwrap_or((1.0, 0));
        let squares = |slice: u32| (f64::from(slice) + 1.0) * factor * factor;
        let sums: Vec<_> = slices.map(|slice| (slice as u32, squares(slice as u32))).collect();
        let largest =
            sums.iter().map(|&(slice, squares)| Largest { slice, rank, squares }).collect();
        Reduced { sums, overflow: None, absent: Vec::new(), largest, copies: 0 }
    }

    fn stored(&mut self, server: u64, epoch: u64, step: u64) {
        self.said(server, ServerEvent::Stored { job: job(), epoch, step });
    }

    fn after(&mut self, wait: Duration) {
        self.now += wait;
        self.event(Event::Tick);
    }

    fn answer(&self, caller: Caller) -> Option<&Result<Reply>> {
        self.answers.get(&caller)
    }

    fn error(&self, caller: Caller) -> &Error {
        match self.answer(caller) {
            Some(Err(error)) => error,
            other => panic!("{caller:?} has {other:?}"),
        }
    }

    fn report(&self, caller: Caller) -> Report {
        match self.answer(caller) {
            Some(Ok(Reply::Report(report, _))) => report.clone(),
            other => panic!("{caller:?} has {other:?}"),
        }
    }

    fn reduced(&self, caller: Caller) -> Norm {
        match self.answer(caller) {
            Some(Ok(Reply::Reduced { norm, .. })) => norm.clone(),
            other => panic!("{caller:?} has {other:?}"),
        }
    }

    fn decisions(&self) -> Vec<(u64, Decision)> {
        let decision = |(server, command): &(u64, Command)| match command {
            Command::Decide { decision, .. } => Some((*server, decision.clone())),
            _ => None,
        };
        self.commands.iter().filter_map(decision).collect()
    }

    /// The update in decision number `index`.
    fn update(&self, index: usize) -> Update {
        self.decisions().swap_remove(index).1.update.expect("the step is applied")
    }

    fn new_epochs(&self) -> Vec<(u64, u64)> {
        let epoch = |(server, command): &(u64, Command)| match command {
            &Command::NewEpoch { epoch, .. } => Some((*server, epoch)),
            _ => None,
        };
        self.commands.iter().filter_map(epoch).collect()
    }

    fn closed(&self) -> Vec<u64> {
        let close = |(server, command): &(u64, Command)| {
            matches!(command, Command::Close(_)).then_some(*server)
        };
        self.commands.iter().filter_map(close).collect()
    }
}

fn turn(lease: Lease, epoch: u64, rank: u32, step: u64) -> Turn {
    Turn { job: job(), lease, rank, attempt: Attempt::first(epoch, step) }
}

/// `rank` has pushed all gradients of `step`.
fn commit(lease: Lease, epoch: u64, rank: u32, step: u64) -> Commit {
    Commit {
        turn: turn(lease, epoch, rank, step),
        groups: None,
        loss_scale: 1.0,
        max_norm: None,
        loss: None,
        gradient_factors: Vec::new(),
        written: Vec::new(),
        user_data: Bytes::new(),
        user_data_follows: false,
        wait: WAIT,
    }
}

#[test]
fn the_weight_of_a_slice_is_its_memory_on_the_servers() {
    let bf16 = TensorSpec { dtype: DType::Bf16, ..TensorSpec::new("h", [10]) };
    let frozen = TensorSpec { frozen: true, ..TensorSpec::new("f", [10]) };
    let manifest = Manifest::new(vec![TensorSpec::new("w", [10]), bf16, frozen]).unwrap();
    let weights = |name: &str| {
        super::placement::plan::weights(&JobSpec::new(
            "job",
            manifest.clone(),
            vec![name.parse().unwrap()],
        ))
    };
    assert_eq!(weights("adamw"), [160, 180, 40]);
    assert_eq!(weights("sgd"), [80, 100, 40]);
}

/// The report of a server that waits for this input of the job.
fn stats(waiting_for: &str) -> Stats {
    let waiting_for = Some(waiting_for.to_owned());
    let job = JobStats { job: "job".into(), job_id: JOB, waiting_for, ..Default::default() };
    Stats { jobs: vec![job], ..Stats::default() }
}
