//! The coordinator: its state machine, and a driver that sends messages on the virtual network.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use zeroshard_proto::{Server, pb::serve_request};

use super::{
    worker::{Told, Worker},
    world::{Connection, Happening, JOB, World},
};
use crate::coordinator::{
    cluster::Cluster,
    control,
    events::{Action, Caller, Command, Event, Lease, Link, Now},
};

/// The pause between two tries to reach a server without a control stream.
const PROBE: Duration = Duration::from_millis(250);

/// A process of the coordinator. The streams and calls of an earlier process have ended.
#[derive(Debug, Default)]
pub(super) struct Coordinator {
    pub(super) cluster: Option<Cluster>,
    /// The number of this process, which is also its term.
    pub(super) life: u64,
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
    /// The lease of which it opens the stream.
    lease: Option<Lease>,
}

impl Coordinator {
    /// Whether the timer is to be set to an earlier time, like that of the driver.
    fn fires_after(&self, at: Now) -> bool {
        self.armed.is_none_or(|armed| at < armed)
    }

    fn next(&mut self) -> u64 {
        self.last += 1;
        self.life << 32 | self.last
    }
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
    pub(super) fn coordinator_starts(&mut self) {
        if self.coordinator.cluster.is_some() {
            return;
        }
        let life = self.coordinator.life + 1;
        let mut cluster = Cluster::starting();
        cluster.set_term(life);
        let cluster = Some(cluster);
        let started = self.now;
        self.coordinator = Coordinator { cluster, life, ..Coordinator::default() };
        self.coordinator.armed = None;
        self.started = started;
        self.arm();
    }

    /// The clock of the coordinator, which begins with its process.
    fn clock(&self) -> Now {
        self.now - self.started
    }

    /// The process of the coordinator ends: nobody receives what is under way.
    pub(super) fn kill_coordinator(&mut self) {
        let Coordinator { life, last, .. } = self.coordinator;
        let none = Coordinator { life, last, ..Coordinator::default() };
        let dead = std::mem::replace(&mut self.coordinator, none);
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
        let caller = Caller(self.coordinator.next());
        if self.coordinator.cluster.is_none() {
            self.later(Happening::Told { rank, life, told: Told::CallBroken(caller) });
            return caller;
        }
        let event = event(caller, &self.workers[rank as usize]);
        let lease = match &event {
            Event::Join { join, .. } => Some(join.lease),
            Event::Attach { attach, .. } => Some(attach.lease),
            _ => None,
        };
        let call = OpenCall { rank, life, gone: event.gone(), lease };
        self.coordinator.calls.insert(caller, call);
        let life = self.coordinator.life;
        self.later(Happening::Event { life, stream: None, event: Box::new(event) });
        caller
    }

    /// The process of a worker has ended: its calls and its stream end.
    pub(super) fn disconnect(&mut self, rank: u32, worker: u64) {
        let life = self.coordinator.life;
        let is_its = |of: &(u32, u64)| *of == (rank, worker);
        let calls = &mut self.coordinator.calls;
        let calls: Vec<OpenCall> = calls
            .extract_if(.., |_, call| is_its(&(call.rank, call.life)))
            .map(|(_, call)| call)
            .collect();
        let members = &mut self.coordinator.members;
        let mut leases: BTreeSet<Lease> =
            members.extract_if(.., |_, of| is_its(of)).map(|(lease, _)| lease).collect();
        leases.extend(calls.iter().filter_map(|call| call.lease));
        let gone = calls.into_iter().filter_map(|call| call.gone);
        let ended = |lease| Event::LeaseEnded { job: JOB.to_owned(), rank, lease };
        for event in gone.chain(leases.into_iter().map(ended)) {
            self.later(Happening::Event { life, stream: None, event: Box::new(event) });
        }
    }

    /// The number of a control stream that a server opens now; `None`: nobody listens.
    pub(super) fn open_stream(&mut self) -> Option<u64> {
        self.coordinator.cluster.is_some().then(|| self.coordinator.next())
    }

    pub(super) fn register(&mut self, life: u64, server: usize, stream: (u64, u64), joined: Event) {
        let (number, server_life) = stream;
        if life != self.coordinator.life || self.coordinator.cluster.is_none() {
            let ended = Happening::StreamEnded { server, life: server_life, stream: number };
            return self.later(ended);
        }
        self.break_stream(server);
        self.coordinator.streams.insert(server, stream);
        self.handle(joined);
    }

    pub(super) fn event(&mut self, life: u64, stream: Option<u64>, event: Event) {
        let is_open =
            |stream: u64| self.coordinator.streams.values().any(|(open, _)| *open == stream);
        let is_gone = caller(&event).is_some_and(|c| !self.coordinator.calls.contains_key(&c));
        let is_closed = stream.is_some_and(|stream| !is_open(stream));
        if life == self.coordinator.life && !is_closed && !is_gone {
            self.handle(event);
        }
    }

    pub(super) fn said(
        &mut self,
        life: u64,
        server: usize,
        stream: u64,
        said: serve_request::Event,
    ) {
        let said = control::said(said).expect("a server sends valid events");
        let from = Link { server: server as u64 + 1, stream };
        self.event(life, Some(stream), Event::Said { from, said });
    }

    pub(super) fn tick(&mut self, life: u64) {
        if life == self.coordinator.life && self.coordinator.armed.is_some() {
            self.coordinator.armed = None;
            self.handle(Event::Tick);
        }
    }

    fn handle(&mut self, event: Event) {
        let now = self.clock();
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let mut wakes = matches!(event, Event::Tick);
            wakes |= event.wait().is_some_and(|wait| self.coordinator.fires_after(now + wait));
            let Some(cluster) = &mut self.coordinator.cluster else { return };
            for action in cluster.handle(event, now) {
                if let Action::Tick(at) = action {
                    wakes |= self.coordinator.fires_after(at);
                }
                events.extend(self.act(action));
            }
            if wakes {
                self.arm();
            }
        }
        self.check_not_failed();
    }

    /// A job that has begun must not fail: of each slice there is always a copy, or a checkpoint.
    fn check_not_failed(&mut self) {
        let cluster = self.coordinator.cluster.as_ref();
        if let Some(reason) = cluster.and_then(|cluster| cluster.failure_of(JOB)) {
            let reason = format!("the job has failed: {reason}");
            self.fail(reason);
        }
    }

    /// Sets the timer to the next deadline.
    fn arm(&mut self) {
        let Some(cluster) = &self.coordinator.cluster else { return };
        let Some(due) = cluster.next_deadline() else { return };
        if self.coordinator.armed.is_none_or(|armed| due < armed) {
            self.coordinator.armed = Some(due);
            let (at, life) = (self.started + due, self.coordinator.life);
            self.at(at.max(self.now) + Duration::from_micros(1), Happening::Tick { life });
        }
    }

    /// Carries out an action. Returns the event that follows from it at once.
    fn act(&mut self, action: Action) -> Option<Event> {
        let life = self.coordinator.life;
        match action {
            Action::Answer(caller, answer) => {
                let call = self.coordinator.calls.remove(&caller)?;
                let OpenCall { rank, life, lease, .. } = call;
                let opened = lease.filter(|_| answer.is_ok());
                let told = Told::Answer(caller, answer.map_err(Box::new));
                self.later(Happening::Told { rank, life, told });
                if let Some(lease) = opened {
                    self.coordinator.members.insert(lease, (rank, life));
                    self.tell_member(lease);
                }
            }
            Action::Command(server, command) => self.send_command(server, command),
            Action::Place(placing) => self.place(placing),
            Action::Wake(lease) => self.tell_member(lease),
            Action::End(lease, error) => {
                let (rank, worker) = self.coordinator.members.remove(&lease)?;
                let told = Told::StreamEnded(error);
                self.send(Connection::Member(lease), Happening::Told { rank, life: worker, told });
                let event = Box::new(Event::LeaseEnded { job: JOB.to_owned(), rank, lease });
                self.later(Happening::Event { life, stream: None, event });
            }
            Action::Dismiss(link) => self.dismiss(link),
            Action::Probe(server) => self.later(Happening::Probe { life, server }),
            Action::Complete(completion) => self.begin_manifest(completion),
            Action::Decided { .. }
            | Action::Aborted { .. }
            | Action::Interrupted { .. }
            | Action::Attached(_)
            | Action::Tick(_)
            | Action::Forgotten { .. }
            | Action::EndClaims { .. }
            | Action::SaveEnded { .. }
            | Action::Redundant { .. }
            | Action::Alarm(..)
            | Action::Note(_) => {}
        }
        None
    }

    fn tell_member(&mut self, lease: Lease) {
        let Some(&(rank, life)) = self.coordinator.members.get(&lease) else { return };
        let Some(cluster) = &mut self.coordinator.cluster else { return };
        if let Some(change) = cluster.next_membership(JOB, lease) {
            let told = Told::Membership(Box::new(change));
            self.send(Connection::Member(lease), Happening::Told { rank, life, told });
        }
    }

    fn send_command(&mut self, server: u64, command: Command) {
        let (server, term) = ((server - 1) as usize, self.coordinator.life);
        let Some(&(stream, life)) = self.coordinator.streams.get(&server) else { return };
        let command = Box::new(command.into());
        let happening = Happening::Command { server, life, stream, term, command };
        self.send(Connection::Down(stream), happening);
    }

    fn dismiss(&mut self, link: Link) {
        let server = (link.server - 1) as usize;
        if self.coordinator.streams.get(&server).is_some_and(|of| of.0 == link.stream) {
            self.break_stream(server);
        }
    }

    /// The control stream of a server breaks: what is under way is lost, and both ends notice it.
    pub(super) fn break_stream(&mut self, server: usize) {
        let Some((stream, life)) = self.coordinator.streams.remove(&server) else { return };
        let from = Link { server: server as u64 + 1, stream };
        let event = Box::new(Event::ServerLost { from, cause: "it broke".to_owned() });
        let coordinator = self.coordinator.life;
        self.later(Happening::Event { life: coordinator, stream: None, event });
        self.later(Happening::StreamEnded { server, life, stream });
    }

    pub(super) fn probe(&mut self, life: u64, server: Server) {
        let index = (server.id - 1) as usize;
        if life != self.coordinator.life || self.coordinator.streams.contains_key(&index) {
            return;
        }
        let of = &self.servers[index];
        if of.is_alive && of.life == server.incarnation {
            return self.after(PROBE, Happening::Probe { life, server });
        }
        let event = Box::new(Event::Refused(server));
        self.later(Happening::Event { life, stream: None, event });
    }

    /// The servers of the running job.
    pub(super) fn placed(&self) -> Vec<usize> {
        let cluster = self.coordinator.cluster.as_ref();
        let job = cluster.and_then(|cluster| cluster.describe(JOB).ok());
        let servers = job.iter().flat_map(|job| job.placement.servers());
        servers.map(|server| (server.id - 1) as usize).collect()
    }

    /// Whether every slice of the running job has all its replicas, on servers that are alive.
    pub(super) fn is_redundant(&self) -> bool {
        let cluster = self.coordinator.cluster.as_ref();
        self.is_whole() && cluster.is_some_and(|cluster| cluster.is_redundant(JOB))
    }

    /// Whether the job runs on servers that are alive.
    pub(super) fn is_whole(&self) -> bool {
        let Some(cluster) = self.coordinator.cluster.as_ref() else { return false };
        let Ok(job) = cluster.describe(JOB) else { return false };
        // The coordinator may not have noticed yet that a server is gone.
        let is_alive = |server: &Server| {
            let of = &self.servers[(server.id - 1) as usize];
            of.is_alive && of.life == server.incarnation
        };
        job.placement.servers().iter().all(is_alive)
    }
}
