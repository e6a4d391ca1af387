//! Drives the coordinator's state machine as its driver does: simulated servers answer its
//! commands, time is virtual, and every event is timed.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    hint::black_box,
    time::{Duration, Instant},
};

use rustix::time::{ClockId, clock_gettime};
use zeroshard_coordinator::{
    cluster::{Cluster, context::JobLimits},
    job::Job,
    placement::plan::Plan,
    vocabulary::{
        commands::{About, Command, ServerEvent},
        events::{Action, Event, Placed, Placing},
        ids::{Caller, JobRef, Lease, Link, Now, ServerId},
    },
};
use zeroshard_model::{RecentSteps, Server};

use super::LARGE;
use crate::Error;

/// The virtual time between two events.
const PAUSE: Duration = Duration::from_micros(1);
/// The default `--job-timeout` of a coordinator.
const JOB_TIMEOUT: Duration = Duration::from_secs(3600);

/// The events that the benchmark compares, with the row in which each is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Commit(Size),
    Ready(Size),
    Stored(Size),
    LeaseEnded(Size),
    Join(Size),
    Granted(Size),
    Stats,
    Tick,
}

/// The job of an event: the large one or any other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Size {
    Large,
    Small,
}

impl Kind {
    /// The kind of `event`; `None` for an event of the set-up.
    fn of(event: &Event) -> Option<Self> {
        let size = |name: &str| if name == LARGE { Size::Large } else { Size::Small };
        Some(match event {
            Event::Commit { commit, .. } => Self::Commit(size(&commit.turn.job.name)),
            Event::FromServer { event: ServerEvent::Ready { job, .. }, .. } => {
                Self::Ready(size(&job.name))
            }
            Event::FromServer { event: ServerEvent::Stored { job, .. }, .. } => {
                Self::Stored(size(&job.name))
            }
            Event::FromServer { event: ServerEvent::Granted { job, .. }, .. } => {
                Self::Granted(size(&job.name))
            }
            Event::FromServer { event: ServerEvent::Stats(_), .. } => Self::Stats,
            Event::LeaseEnded { job, .. } => Self::LeaseEnded(size(job)),
            Event::Join { join, .. } => Self::Join(size(&join.job)),
            Event::Tick => Self::Tick,
            _ => return None,
        })
    }

    /// The name of the event, and the size of its job.
    pub(super) fn labels(self) -> (&'static str, Option<&'static str>) {
        let (event, size) = match self {
            Self::Commit(size) => ("commit", size),
            Self::Ready(size) => ("ready", size),
            Self::Stored(size) => ("stored", size),
            Self::LeaseEnded(size) => ("lease-ended", size),
            Self::Join(size) => ("join", size),
            Self::Granted(size) => ("granted", size),
            Self::Stats => return ("stats", None),
            Self::Tick => return ("tick", None),
        };
        (event, Some(if size == Size::Large { "large" } else { "small" }))
    }
}

/// The costs of all events of a kind.
#[derive(Debug, Default)]
pub(super) struct Costs {
    /// The microseconds of [`Cluster::handle`].
    pub(super) handle: Vec<f64>,
    /// The microseconds of everything that the driver computes with the state for an event.
    pub(super) event: Vec<f64>,
    /// The jobs that the state machine has visited; empty if it does not count them.
    pub(super) visits: Vec<f64>,
}

/// A state machine with simulated servers.
pub(super) struct Driver {
    pub(super) cluster: Cluster,
    pub(super) costs: BTreeMap<Kind, Costs>,
    links: HashMap<ServerId, Link>,
    now: Now,
    last: u64,
    /// `true` once all jobs train. Events before that are not timed.
    is_timed: bool,
    /// The time for which the timer is set.
    armed: Now,
    /// The CPU time of all timed events, in seconds.
    busy: f64,
    /// `busy` when the large job's last step was decided.
    decided_at: Option<f64>,
    /// The number of calls that were answered without an error.
    answered: usize,
}

impl Driver {
    /// A cluster of `servers` servers that may have `jobs` jobs.
    pub(super) fn new(servers: u32, jobs: usize) -> Result<Self, Error> {
        let limits = JobLimits { timeout: Some(JOB_TIMEOUT), number: jobs };
        let mut driver = Self {
            cluster: Cluster::default().with_limits(limits),
            costs: BTreeMap::new(),
            links: HashMap::new(),
            now: Now::ZERO,
            last: 0,
            is_timed: false,
            armed: Now::MAX,
            busy: 0.0,
            decided_at: None,
            answered: 0,
        };
        for server in (1..=u64::from(servers)).map(server) {
            let stream = driver.next();
            driver.links.insert(server.id, Link { server: server.id, stream });
            driver.send(joined(stream, server, About::default()))?;
        }
        Ok(driver)
    }

    /// Returns a number that no event has had.
    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    pub(super) fn caller(&mut self) -> Caller {
        Caller(self.next())
    }

    pub(super) fn lease(&mut self) -> Lease {
        Lease(self.next())
    }

    /// Times all further events.
    pub(super) fn start_timing(&mut self) {
        self.is_timed = true;
        self.armed = self.cluster.next_deadline().unwrap_or(Now::MAX);
    }

    /// The CPU time of all timed events, in seconds.
    pub(super) fn busy(&self) -> f64 {
        self.busy
    }

    /// Takes the value that [`Self::busy`] had when the large job's last step was decided.
    pub(super) fn take_decided_at(&mut self) -> Result<f64, Error> {
        self.decided_at.take().ok_or_else(|| "the step was not decided".into())
    }

    /// Takes the number of calls that were answered since the last time.
    pub(super) fn take_answered(&mut self) -> usize {
        std::mem::take(&mut self.answered)
    }

    /// Lets time pass.
    pub(super) fn pass(&mut self, time: Duration) {
        self.now += time;
    }

    /// Passes on the message of a server.
    pub(super) fn say(&mut self, server: ServerId, said: ServerEvent) -> Result<(), Error> {
        self.send(Event::FromServer { from: self.links[&server], event: said })
    }

    /// Passes on an event, and then the answers of the servers to its commands.
    pub(super) fn send(&mut self, event: Event) -> Result<(), Error> {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            self.now += PAUSE;
            let actions =
                if self.is_timed { self.time(event) } else { self.cluster.handle(event, self.now) };
            for action in actions {
                events.extend(self.act(action)?);
            }
        }
        Ok(())
    }

    /// Handles an event as the driver of the coordinator does under its lock: after each event it
    /// shows the figures of the jobs that have changed, and it asks for the next deadline after
    /// each tick and when an event has an earlier one. The updates of the metrics with the figures
    /// are not included.
    fn time(&mut self, event: Event) -> Vec<Action> {
        let kind = Kind::of(&event);
        let mut due = event.wait().map_or(Now::MAX, |wait| self.now + wait);
        let is_tick = matches!(event, Event::Tick);
        let before = self.cluster.visits();
        let cpu = cpu_seconds();
        let start = Instant::now();
        let actions = self.cluster.handle(event, self.now);
        let handle = start.elapsed().as_secs_f64();
        let is_decision = |action: &Action| matches!(action, Action::Command(_, Command::Decide { job, .. }) if job.name == LARGE);
        if actions.iter().any(is_decision) {
            self.decided_at = Some(self.busy + cpu_seconds() - cpu);
        }
        for action in &actions {
            if let Action::Tick(at) = action {
                due = due.min(*at);
            }
        }
        let start = Instant::now();
        for name in self.cluster.take_changed() {
            black_box(self.cluster.jobs().get(&*name).map(Job::metrics));
        }
        if is_tick || due < self.armed {
            self.armed = self.cluster.next_deadline().unwrap_or(Now::MAX);
        }
        let event = handle + start.elapsed().as_secs_f64();
        self.busy += cpu_seconds() - cpu;
        if let Some(kind) = kind {
            let costs = self.costs.entry(kind).or_default();
            costs.handle.push(handle * 1e6);
            costs.event.push(event * 1e6);
            costs.visits.push((self.cluster.visits() - before) as f64);
        }
        actions
    }

    /// Carries out an action. Returns the event that follows from it.
    ///
    /// # Errors
    /// The error with which a call is answered, or with which a lease ends.
    fn act(&mut self, action: Action) -> Result<Option<Event>, Error> {
        match action {
            Action::Answer(_, answer) => {
                answer?;
                self.answered += 1;
            }
            Action::Command(server, command) => {
                let said = reply(command);
                return Ok(
                    said.map(|said| Event::FromServer { from: self.links[&server], event: said })
                );
            }
            Action::Place(Placing { job, spec, live, zones, free_memory, .. }) => {
                let plan = Plan::within(&spec, &live, &zones, &free_memory)?;
                let (user_data, line) = Default::default();
                let placed = Placed {
                    plan,
                    checkpoint: None,
                    user_data,
                    line,
                    recent: RecentSteps::default(),
                };
                return Ok(Some(Event::Placed { job, placed: Ok(placed) }));
            }
            Action::End(_, Some(error)) => return Err(error.into()),
            _ => {}
        }
        Ok(None)
    }

    /// The epoch of a job, and its version.
    pub(super) fn progress(&self, job: &JobRef) -> Result<(u64, Option<u64>), Error> {
        let described = self.cluster.job(&job.name)?.describe()?;
        Ok((described.epoch, described.version))
    }
}

/// The CPU time of this thread, in seconds.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// The answer of a server to a command that it can carry out at once.
fn reply(command: Command) -> Option<ServerEvent> {
    match command {
        Command::Open(open) => {
            let job = JobRef { name: open.spec.name.clone(), id: open.job_id };
            Some(ServerEvent::Opened { job, epoch: open.epoch })
        }
        Command::Grant { job, rank, lease } => Some(ServerEvent::Granted { job, rank, lease }),
        Command::Decide { job, decision } => {
            let attempt = decision.attempt;
            Some(ServerEvent::Stored { job, epoch: attempt.epoch, step: attempt.step })
        }
        Command::Confirm { number } => Some(ServerEvent::Confirmed { number }),
        _ => None,
    }
}

/// The server with this id.
pub(super) fn server(id: ServerId) -> Server {
    Server { id, incarnation: 1, address: format!("server-{id}:7401") }
}

/// The event of a server that registers.
pub(super) fn joined(stream: u64, server: Server, about: About) -> Event {
    Event::ServerJoined { stream, server, about, reports: Vec::new(), is_new: true }
}
