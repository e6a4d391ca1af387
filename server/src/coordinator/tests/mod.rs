//! Scenarios: what happens in which order, and what must come of it. Time is a number.

mod commits;
mod members;
mod reduces;
mod service;

use std::{collections::HashMap, time::Duration};

use zeroshard_proto::{
    DType, Error, JobSpec, Manifest, Result, TensorSpec,
    pb::{self, server_command::Command},
};

use super::{
    cluster::Cluster,
    state::{Action, Caller, Commit, Event, Lease, Now, Reduce, Reply, Worker},
};

const WAIT: Duration = Duration::from_secs(60);

/// Two tensors that train, of one slice each, and a frozen one between them.
fn spec(world: u32) -> JobSpec {
    let frozen = TensorSpec { frozen: true, ..TensorSpec::new("frozen", [2]) };
    let manifest = Manifest::new(vec![TensorSpec::new("a", [3]), frozen, TensorSpec::new("b", [4])]).unwrap();
    JobSpec { world, ..JobSpec::new("job", manifest, vec!["adamw".parse().unwrap()]) }
}

/// Plays a scenario, and remembers what came of it.
#[derive(Default)]
struct Script {
    cluster: Cluster,
    now: Now,
    last: u64,
    answers: HashMap<Caller, Result<Reply>>,
    commands: Vec<(u32, Command)>,
    told: Vec<(Lease, pb::Membership)>,
    ended: Vec<(Lease, Option<Error>)>,
    dismissed: Vec<u32>,
}

impl Script {
    /// `count` servers with the ids 1, 2, ...
    fn with_servers(count: u32) -> Self {
        let mut script = Self::default();
        (1..=count).for_each(|server| script.server(server));
        script
    }

    /// A job of `world` ranks on `count` servers, all parameters there, all ranks joined; the lease of
    /// each rank.
    fn training(world: u32, count: u32) -> (Self, Vec<Lease>) {
        Self::training_of(spec(world), count)
    }

    fn training_of(spec: JobSpec, count: u32) -> (Self, Vec<Lease>) {
        let world = spec.world;
        let mut script = Self::with_servers(count);
        script.create(spec);
        script.open_all();
        let leases = (0..world).map(|rank| script.join(rank).expect("free")).collect();
        script.initialise_all();
        (script, leases)
    }

    fn event(&mut self, event: Event) {
        for action in self.cluster.handle(event, self.now) {
            match action {
                Action::Answer(caller, answer) => {
                    assert!(self.answers.insert(caller, answer).is_none(), "{caller:?} is answered twice");
                }
                Action::Command(server, command) => self.commands.push((server, command)),
                Action::Tell(lease, membership) => self.told.push((lease, membership)),
                Action::End(lease, error) => self.ended.push((lease, error)),
                Action::Dismiss(server) => self.dismissed.push(server),
                Action::Decided { .. } | Action::Aborted | Action::Forgotten { .. } | Action::Note(_) => {}
            }
        }
    }

    fn server(&mut self, server: u32) {
        self.event(Event::ServerJoined { server, address: format!("host:{server}") });
    }

    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn caller(&mut self) -> Caller {
        Caller(self.next())
    }

    fn create(&mut self, spec: JobSpec) -> Caller {
        let caller = self.caller();
        self.event(Event::Create { caller, spec: Box::new(spec), wait: WAIT });
        caller
    }

    /// Servers that were told to open the job, and in which epoch.
    fn opens(&self) -> Vec<(u32, u64)> {
        let open = |(server, command): &(u32, Command)| match command {
            Command::Open(open) => Some((*server, open.epoch)),
            _ => None,
        };
        self.commands.iter().filter_map(open).collect()
    }

    fn open_all(&mut self) {
        for (server, epoch) in self.opens() {
            self.event(Event::Opened { server, job: "job".into(), epoch });
        }
    }

    fn initialise_all(&mut self) {
        let epoch = self.cluster.describe("job").expect("open").epoch;
        for (server, _) in self.opens() {
            self.event(Event::Initialised { server, job: "job".into(), epoch });
        }
    }

    fn join(&mut self, rank: u32) -> Result<Lease> {
        self.join_as(Worker { rank, address: None })
    }

    fn join_as(&mut self, worker: Worker) -> Result<Lease> {
        let (caller, lease) = (self.caller(), Lease(self.next()));
        self.event(Event::Join { caller, lease, job: "job".into(), worker });
        self.answers.remove(&caller).expect("joins are answered at once").map(|_| lease)
    }

    fn lose(&mut self, lease: Lease) {
        self.event(Event::LeaseEnded { job: "job".into(), lease });
    }

    fn commit(&mut self, commit: Commit) -> Caller {
        let caller = self.caller();
        self.event(Event::Commit { caller, commit: Box::new(commit) });
        caller
    }

    fn reduce(&mut self, lease: Lease, epoch: u64, step: u64, loss_scale: f64) -> Caller {
        let caller = self.caller();
        let reduce = Reduce { job: "job".into(), lease, epoch, rank: 0, step, loss_scale, wait: WAIT };
        self.event(Event::Reduce { caller, reduce: Box::new(reduce) });
        caller
    }

    /// Every server reports its slices, each with the sum of squares 1 + its number.
    fn ready_all(&mut self, step: u64) {
        for server in self.servers() {
            self.ready(server, step, |_| {});
        }
    }

    fn servers(&self) -> Vec<u32> {
        self.cluster.servers.keys().copied().collect()
    }

    fn ready(&mut self, server: u32, step: u64, change: impl FnOnce(&mut pb::StepReady)) {
        let described = self.cluster.describe("job").expect("open");
        let placement = zeroshard_proto::Placement::try_from(described.placement.unwrap()).unwrap();
        let manifest = spec(1).manifest;
        let slices = placement.primary_slices(server).filter(|&slice| manifest.trains(slice));
        let slices: Vec<u32> = slices.map(|slice| slice as u32).collect();
        let mut report = pb::StepReady {
            job: "job".into(),
            epoch: described.epoch,
            step,
            sums_of_squares: slices.iter().map(|&slice| f64::from(slice) + 1.0).collect(),
            slices,
            overflow: None,
            absent: Vec::new(),
            ..Default::default()
        };
        change(&mut report);
        self.event(Event::Ready { server, report });
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

    fn report(&self, caller: Caller) -> pb::StepReport {
        match self.answer(caller) {
            Some(Ok(Reply::Report(report))) => report.clone(),
            other => panic!("{caller:?} has {other:?}"),
        }
    }

    fn reduced(&self, caller: Caller) -> pb::ReduceReport {
        match self.answer(caller) {
            Some(Ok(Reply::Reduced(report))) => *report,
            other => panic!("{caller:?} has {other:?}"),
        }
    }

    fn decisions(&self) -> Vec<(u32, pb::Decision)> {
        let decision = |(server, command): &(u32, Command)| match command {
            Command::Decide(decision) => Some((*server, decision.clone())),
            _ => None,
        };
        self.commands.iter().filter_map(decision).collect()
    }

    fn new_epochs(&self) -> Vec<(u32, u64)> {
        let epoch = |(server, command): &(u32, Command)| match command {
            Command::NewEpoch(new) => Some((*server, new.epoch)),
            _ => None,
        };
        self.commands.iter().filter_map(epoch).collect()
    }

    fn closed(&self) -> Vec<u32> {
        let close =
            |(server, command): &(u32, Command)| matches!(command, Command::Close(_)).then_some(*server);
        self.commands.iter().filter_map(close).collect()
    }
}

/// `rank` has pushed all of `step`.
fn commit(lease: Lease, epoch: u64, rank: u32, step: u64) -> Commit {
    Commit {
        job: "job".into(),
        lease,
        epoch,
        rank,
        step,
        groups: None,
        loss_scale: 1.0,
        max_norm: None,
        loss: None,
        discard: false,
        wait: WAIT,
    }
}

#[test]
fn a_slice_weighs_what_the_servers_keep_of_it() {
    let bf16 = TensorSpec { dtype: DType::Bf16, ..TensorSpec::new("h", [10]) };
    let frozen = TensorSpec { frozen: true, ..TensorSpec::new("f", [10]) };
    let manifest = Manifest::new(vec![TensorSpec::new("w", [10]), bf16, frozen]).unwrap();
    let weights = |name: &str| {
        super::jobs::weights(&JobSpec::new("job", manifest.clone(), vec![name.parse().unwrap()]))
    };
    assert_eq!(weights("adamw"), [160, 180, 40]);
    assert_eq!(weights("sgd"), [80, 100, 40]);
}
