//! The coordinators: their state machine, and a driver that sends messages on the virtual network.
//! Most runs have one process at a time.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use zeroshard_coordinator::{
    cluster::Cluster,
    job::Job,
    vocabulary::{
        calls::Reply,
        commands::Command,
        events::{Action, Event},
        ids::{Caller, Lease, Link, Now},
    },
};
use zeroshard_model::Server;
use zeroshard_proto::pb::serve_request;

use super::{
    worker::{Told, Worker},
    world::{Connection, Happening, JOB, World},
};
use crate::coordinator::{control, leadership::Leadership};

/// The pause between two tries to reach a server without a control stream.
const PROBE: Duration = Duration::from_millis(250);
/// The pause after which a coordinator that has ended is started again, at most.
const RESTART: Duration = Duration::from_secs(2);

/// A process of a coordinator. The streams and calls of an earlier process have ended.
#[derive(Debug, Default)]
pub(super) struct Coordinator {
    pub(super) cluster: Option<Cluster>,
    /// The number of this process. No other coordinator has it.
    pub(super) life: u64,
    /// Its right to decide, while it runs.
    leadership: Option<Leadership>,
    /// When it has started.
    started: Now,
    last: u64,
    /// The control streams: number, and the life of the server.
    pub(super) streams: BTreeMap<usize, (u64, u64)>,
    /// The open calls.
    calls: BTreeMap<Caller, OpenCall>,
    /// The streams of workers.
    members: BTreeMap<Lease, (u32, u64)>,
    /// When the timer fires.
    armed: Option<Now>,
}

/// A call of a worker.
#[derive(Debug)]
struct OpenCall {
    rank: u32,
    /// The life of the worker.
    life: u64,
    /// The event if the worker disconnects.
    gone: Option<Event>,
    /// The lease of which it opens the stream, if it succeeds.
    lease: Option<Lease>,
}

impl Coordinator {
    /// Returns whether the timer is to be set to an earlier time, like that of the driver.
    fn fires_after(&self, at: Now) -> bool {
        self.armed.is_none_or(|armed| at < armed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.last += 1;
        self.life << 32 | self.last
    }

    pub(super) fn runs(&self) -> bool {
        self.cluster.is_some()
    }

    fn term(&self) -> u64 {
        self.leadership.as_ref().map_or(0, Leadership::term)
    }
}

/// The connections of a worker's process that have ended at a coordinator.
#[derive(Debug)]
pub(super) struct HungUp {
    pub(super) calls: Vec<Caller>,
    /// The leases of its streams.
    pub(super) members: Vec<Lease>,
    /// What the coordinator learns.
    pub(super) events: Vec<Event>,
}

/// A server that registers.
#[derive(Debug)]
pub(super) struct Registering {
    pub(super) life: u64,
    pub(super) stream: u64,
    /// The highest term that it has seen.
    pub(super) term: u64,
    pub(super) joined: Box<Event>,
}

fn lease_ended(rank: u32, lease: Lease) -> Event {
    Event::LeaseEnded { job: JOB.to_owned(), rank, lease }
}

/// The call of a worker that an event begins.
fn caller(event: &Event) -> Option<Caller> {
    match event {
        Event::Create { caller, .. }
        | Event::Join { caller, .. }
        | Event::Attach { caller, .. }
        | Event::Commit { caller, .. }
        | Event::UserData { caller, .. }
        | Event::Save { caller, .. } => Some(*caller),
        _ => None,
    }
}

impl World {
    pub(super) fn coordinator_starts(&mut self, index: usize) {
        if self.coordinators[index].runs() || self.pair.is_stopped(index) {
            return;
        }
        self.end_other_leadership(index);
        let life = self.coordinators.iter().map(|of| of.life).max().unwrap_or(0) + 1;
        let leadership = self.leadership(life);
        let mut cluster = Cluster::starting();
        cluster.set_term(leadership.term());
        let (cluster, leadership) = (Some(cluster), Some(leadership));
        let started = self.now;
        self.coordinators[index] =
            Coordinator { cluster, life, leadership, started, ..Coordinator::default() };
        self.arm(index);
    }

    /// The coordinator with this life, if it still runs.
    pub(super) fn running(&self, life: u64) -> Option<usize> {
        self.coordinators.iter().position(|of| of.life == life && of.runs())
    }

    /// The clusters of the processes that run. When one of two was given up, only the other counts.
    pub(super) fn clusters(&self) -> impl Iterator<Item = &Cluster> {
        let all = self.coordinators.iter().enumerate();
        let kept = all.filter(|(index, _)| self.pair.kept.is_none_or(|kept| kept == *index));
        kept.filter_map(|(_, of)| of.cluster.as_ref())
    }

    /// The job in these clusters.
    fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.clusters().filter_map(|cluster| cluster.jobs().get(JOB))
    }

    /// The process of a coordinator ends: nobody receives what is under way.
    pub(super) fn kill_coordinator(&mut self, index: usize) {
        let Coordinator { life, last, .. } = self.coordinators[index];
        let none = Coordinator { life, last, ..Coordinator::default() };
        let dead = std::mem::replace(&mut self.coordinators[index], none);
        for (server, (stream, life)) in dead.streams {
            self.later(Happening::StreamEnded { server, life, stream });
        }
        for (caller, OpenCall { rank, life, .. }) in dead.calls {
            self.later(Happening::Told { rank, life, told: Told::CallBroken(caller) });
        }
        for (lease, (rank, life)) in dead.members {
            let broken = Happening::Told { rank, life, told: Told::StreamBroken };
            self.send(Connection::Member(lease), broken);
        }
    }

    /// A worker calls the coordinator. `event` makes the event of the call.
    /// Returns the number of the call.
    pub(super) fn call(
        &mut self,
        rank: u32,
        event: impl FnOnce(Caller, &Worker) -> Event,
    ) -> Caller {
        let life = self.workers[rank as usize].life;
        let Some(index) = self.coordinator_of(rank) else {
            let caller = Caller(self.coordinators[0].next());
            self.later(Happening::Told { rank, life, told: Told::CallBroken(caller) });
            return caller;
        };
        let caller = Caller(self.coordinators[index].next());
        let event = event(caller, &self.workers[rank as usize]);
        let lease = match &event {
            Event::Join { join, .. } => Some(join.lease),
            Event::Attach { attach, .. } => Some(attach.lease),
            _ => None,
        };
        let gone = match &event {
            // The lease of a Join ends with the call. An Attach that is not answered has no stream.
            Event::Join { join, .. } => Some(lease_ended(rank, join.lease)),
            event => event.gone(),
        };
        let call = OpenCall { rank, life, gone, lease };
        self.coordinators[index].calls.insert(caller, call);
        let life = self.coordinators[index].life;
        self.later(Happening::Event { life, stream: None, event: Box::new(event) });
        caller
    }

    /// The process of a worker has ended: its calls and its stream end.
    pub(super) fn disconnect(&mut self, rank: u32, worker: u64) {
        for index in 0..self.coordinators.len() {
            for event in self.hang_up(index, rank, worker).events {
                let life = self.coordinators[index].life;
                self.later(Happening::Event { life, stream: None, event: Box::new(event) });
            }
        }
    }

    /// The calls and the streams of a worker's process end at a coordinator. Returns the calls and
    /// the leases with streams, and the events by which the coordinator learns it.
    pub(super) fn hang_up(&mut self, index: usize, rank: u32, worker: u64) -> HungUp {
        let Coordinator { calls, members, .. } = &mut self.coordinators[index];
        let is_its = |of: &(u32, u64)| *of == (rank, worker);
        let calls: Vec<(Caller, OpenCall)> =
            calls.extract_if(.., |_, call| is_its(&(call.rank, call.life))).collect();
        let members = members.extract_if(.., |_, of| is_its(of)).map(|(lease, _)| lease);
        let members: Vec<Lease> = members.collect();
        let called = calls.iter().map(|(caller, _)| *caller).collect();
        let gone = calls.into_iter().filter_map(|(_, call)| call.gone);
        let ended = members.iter().map(|&lease| lease_ended(rank, lease));
        let events = gone.chain(ended).collect();
        HungUp { calls: called, members, events }
    }

    /// A control stream that a server opens now: the coordinator's life, and its number; `None`:
    /// nobody listens.
    pub(super) fn open_stream(&mut self, server: usize) -> Option<(u64, u64)> {
        let index = self.reached_by_server(server)?;
        let coordinator = &mut self.coordinators[index];
        Some((coordinator.life, coordinator.next()))
    }

    /// A server registers, like [`Driver::add_server`](crate::coordinator::driver).
    pub(super) fn register(&mut self, life: u64, server: usize, from: Registering) {
        let Registering { life: server_life, stream, term: before, mut joined } = from;
        let ended = Happening::StreamEnded { server, life: server_life, stream };
        let Some(index) = self.running(life).filter(|&index| self.reaches_server(index, server))
        else {
            return self.later(ended);
        };
        if before > self.coordinators[index].term() && !self.pass(index, server, before) {
            return self.later(ended);
        }
        self.break_stream_of(index, server);
        let coordinator = &mut self.coordinators[index];
        coordinator.streams.insert(server, (stream, server_life));
        if let Event::ServerJoined { is_new, .. } = &mut *joined {
            *is_new = before != 0 && before != coordinator.term();
        }
        self.handle(index, *joined);
    }

    /// A server has seen a higher term. Returns whether the coordinator has a higher one now.
    fn pass(&mut self, index: usize, server: usize, seen: u64) -> bool {
        let coordinator = &mut self.coordinators[index];
        let (Some(cluster), Some(leadership)) = (&mut coordinator.cluster, &coordinator.leadership)
        else {
            return false;
        };
        let is_own = coordinator.streams.contains_key(&server)
            || cluster.common().servers.misses(server as u64 + 1);
        if !leadership.pass(seen, is_own) {
            if !leadership.is_valid() {
                self.kill_coordinator(index);
                let wait = Duration::from_micros(self.rng.u64(..RESTART.as_micros() as u64));
                self.after(wait, Happening::CoordinatorStarts { index });
            }
            return false;
        }
        cluster.set_term(leadership.term());
        let streams = coordinator.streams.iter();
        let streams: Vec<(usize, u64)> = streams.map(|(&server, of)| (server, of.0)).collect();
        for (server, stream) in streams {
            self.break_stream_of(index, server);
            let from = Link { server: server as u64 + 1, stream };
            let cause = "the coordinator has taken a higher term".to_owned();
            self.handle(index, Event::ServerLost { from, cause });
        }
        true
    }

    pub(super) fn event(&mut self, life: u64, stream: Option<u64>, event: Event) {
        let Some(index) = self.running(life) else { return };
        let Coordinator { streams, calls, .. } = &self.coordinators[index];
        let is_open = |stream: u64| streams.values().any(|(open, _)| *open == stream);
        let is_gone = caller(&event).is_some_and(|c| !calls.contains_key(&c));
        let is_closed = stream.is_some_and(|stream| !is_open(stream));
        // The worker has opened another stream of the lease before the end of this one was noticed.
        let is_replaced = matches!(&event, Event::LeaseEnded { lease, .. }
            if self.coordinators[index].members.contains_key(lease));
        if !is_closed && !is_gone && !is_replaced {
            self.handle(index, event);
        }
    }

    pub(super) fn said(
        &mut self,
        life: u64,
        server: usize,
        stream: u64,
        said: serve_request::Event,
    ) {
        let said = control::server_event(said).expect("a server sends valid events");
        let from = Link { server: server as u64 + 1, stream };
        self.event(life, Some(stream), Event::FromServer { from, event: said });
    }

    pub(super) fn tick(&mut self, life: u64) {
        if let Some(index) = self.running(life)
            && self.coordinators[index].armed.take().is_some()
        {
            self.handle(index, Event::Tick);
        }
    }

    fn handle(&mut self, index: usize, event: Event) {
        // Its clock begins with its process.
        let now = self.now - self.coordinators[index].started;
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let of = &mut self.coordinators[index];
            let mut wakes = matches!(event, Event::Tick);
            wakes |= event.wait().is_some_and(|wait| of.fires_after(now + wait));
            let Some(cluster) = &mut of.cluster else { return };
            for action in cluster.handle(event, now) {
                if let Action::Tick(at) = action {
                    wakes |= self.coordinators[index].fires_after(at);
                }
                events.extend(self.act(index, action));
            }
            if wakes {
                self.arm(index);
            }
        }
        self.check_not_failed();
    }

    /// A job that has begun must not fail: of each slice there is always a copy, or a checkpoint.
    fn check_not_failed(&mut self) {
        let reason = self.jobs().find_map(Job::failure);
        if let Some(reason) = reason.map(|reason| format!("the job has failed: {reason}")) {
            self.fail(reason);
        }
    }

    /// Sets the timer to the next deadline.
    fn arm(&mut self, index: usize) {
        let of = &mut self.coordinators[index];
        let Some(due) = of.cluster.as_ref().and_then(Cluster::next_deadline) else { return };
        if of.fires_after(due) {
            of.armed = Some(due);
            let (at, life) = (of.started + due, of.life);
            self.at(at.max(self.now) + Duration::from_micros(1), Happening::Tick { life });
        }
    }

    /// Carries out an action. Returns the event that follows from it at once.
    fn act(&mut self, index: usize, action: Action) -> Option<Event> {
        let life = self.coordinators[index].life;
        match action {
            Action::Answer(caller, answer) => {
                let call = self.coordinators[index].calls.remove(&caller)?;
                let OpenCall { rank, life, lease, .. } = call;
                let opened = lease.filter(|_| answer.is_ok());
                if let Ok(Reply::Report(..)) = &answer {
                    self.shows_decision(index);
                }
                let told = Told::Answer(caller, answer.map_err(Box::new));
                self.later(Happening::Told { rank, life, told });
                if let Some(lease) = opened {
                    self.coordinators[index].members.insert(lease, (rank, life));
                    self.tell_member(index, lease);
                }
            }
            Action::Command(server, command) => self.send_command(index, server, command),
            Action::Place(placing) => self.place(life, placing),
            Action::Wake(lease) => self.tell_member(index, lease),
            Action::End(lease, error) => {
                let (rank, worker) = self.coordinators[index].members.remove(&lease)?;
                let told = Told::StreamEnded(error);
                self.send(Connection::Member(lease), Happening::Told { rank, life: worker, told });
            }
            Action::Dismiss(link) => self.dismiss(index, link),
            Action::Probe(server) => self.later(Happening::Probe { life, server }),
            Action::Complete(completion) => self.begin_manifest(life, completion),
            Action::Search(search) => self.search(life, search),
            Action::Decided { job, step } => {
                self.decisions.made(life, job.id, step.attempt);
            }
            Action::Aborted { .. }
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
        }
        None
    }

    /// A rank receives the report of the last decision.
    fn shows_decision(&mut self, index: usize) {
        let cluster = self.coordinators[index].cluster.as_ref();
        let job = cluster.and_then(|cluster| cluster.jobs().get(JOB));
        if let Some((job, attempt)) = job.and_then(|job| Some((job.id, job.last_decision()?))) {
            let outcome = self.decisions.shown(job, attempt);
            self.check(outcome);
        }
    }

    fn tell_member(&mut self, index: usize, lease: Lease) {
        let Coordinator { members, cluster, .. } = &mut self.coordinators[index];
        let Some(&(rank, life)) = members.get(&lease) else { return };
        let Some(cluster) = cluster else { return };
        if let Some(change) = cluster.next_membership(JOB, lease) {
            let told = Told::Membership(Box::new(change));
            self.send(Connection::Member(lease), Happening::Told { rank, life, told });
        }
    }

    fn send_command(&mut self, index: usize, server: u64, command: Command) {
        let coordinator = &self.coordinators[index];
        if command.decides() {
            coordinator.leadership.iter().for_each(Leadership::lead);
        }
        let (server, term) = ((server - 1) as usize, coordinator.term());
        let Some(&(stream, life)) = coordinator.streams.get(&server) else { return };
        let command = Box::new(control::wire(command));
        let happening = Happening::Command { server, life, stream, term, command };
        self.send(Connection::Down(stream), happening);
    }

    fn dismiss(&mut self, index: usize, link: Link) {
        let server = (link.server - 1) as usize;
        if self.coordinators[index].streams.get(&server).is_some_and(|of| of.0 == link.stream) {
            self.break_stream_of(index, server);
        }
    }

    /// The control stream of a server breaks: what is under way is lost, and both ends notice it.
    pub(super) fn break_stream(&mut self, server: usize) {
        (0..self.coordinators.len()).for_each(|index| self.break_stream_of(index, server));
    }

    fn break_stream_of(&mut self, index: usize, server: usize) {
        let [up, down] = [self.delay(), self.delay()];
        self.cut_stream(index, server, [up, down]);
    }

    /// The control stream of a server to a coordinator breaks. The coordinator and the server
    /// notice it after these times.
    pub(super) fn cut_stream(&mut self, index: usize, server: usize, notice: [Duration; 2]) {
        let coordinator = &mut self.coordinators[index];
        let Some((stream, life)) = coordinator.streams.remove(&server) else { return };
        let from = Link { server: server as u64 + 1, stream };
        let event = Box::new(Event::ServerLost { from, cause: "it broke".to_owned() });
        let lost = Happening::Event { life: coordinator.life, stream: None, event };
        self.after(notice[0], lost);
        self.after(notice[1], Happening::StreamEnded { server, life, stream });
    }

    pub(super) fn probe(&mut self, life: u64, server: Server) {
        let at = (server.id - 1) as usize;
        let Some(index) = self.running(life) else { return };
        if self.coordinators[index].streams.contains_key(&at) {
            return;
        }
        let of = &self.servers[at];
        if of.is_alive && of.life == server.incarnation {
            return self.after(PROBE, Happening::Probe { life, server });
        }
        let event = Box::new(Event::Refused(server));
        self.later(Happening::Event { life, stream: None, event });
    }

    /// The servers of the running job.
    pub(super) fn placed(&self) -> Vec<usize> {
        let job = self.jobs().find_map(|job| job.describe().ok());
        let servers = job.iter().flat_map(|job| job.placement.servers());
        servers.map(|server| (server.id - 1) as usize).collect()
    }

    /// Returns whether every slice of the running job has all its replicas, on servers that are
    /// alive.
    pub(super) fn is_redundant(&self) -> bool {
        self.is_whole() && self.jobs().any(Job::is_redundant)
    }

    /// Returns whether the job runs on servers that are alive.
    pub(super) fn is_whole(&self) -> bool {
        let Some(job) = self.jobs().find_map(|job| job.describe().ok()) else {
            return false;
        };
        // The coordinator may not have noticed yet that a server is gone.
        let is_alive = |server: &Server| {
            let of = &self.servers[(server.id - 1) as usize];
            of.is_alive && of.life == server.incarnation
        };
        job.placement.servers().iter().all(is_alive)
    }
}
