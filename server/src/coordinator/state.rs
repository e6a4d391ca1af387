//! What the coordinator knows, what happens to it, and what it wants done: types without clock, socket or
//! runtime. Time is the duration since the driver started.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use zeroshard_proto::{Error, JobSpec, Optimizer, Placement, Result, pb};

use super::commit::Round;

/// A point in time.
pub(crate) type Now = Duration;

/// Somebody whose call is open. Given by the driver, never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Caller(pub(crate) u64);

/// A worker's hold on a rank. Given by the driver, never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Lease(pub(crate) u64);

/// A shard server. Given by the driver, never used twice.
pub(crate) type ServerId = u64;

/// A caller, and how long it is willing to wait.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Waiter {
    pub(crate) caller: Caller,
    pub(crate) since: Now,
    pub(crate) deadline: Now,
}

impl Waiter {
    pub(crate) fn new(caller: Caller, now: Now, wait: Duration) -> Self {
        Self { caller, since: now, deadline: now + wait }
    }

    /// What it is told at its deadline.
    pub(crate) fn timeout(&self, now: Now, waiting_for: String) -> Error {
        let waited_ms = now.saturating_sub(self.since).as_millis() as u64;
        Error::Timeout { waiting_for, waited_ms }
    }
}

/// What happened.
#[derive(Debug)]
pub(crate) enum Event {
    /// A shard server's control stream opened.
    ServerJoined { server: ServerId, address: String },
    /// Its control stream ended.
    ServerLost { server: ServerId },
    /// It has memory for the job.
    Opened { server: ServerId, job: String, epoch: u64 },
    /// It has all initial parameters of its slices.
    Initialised { server: ServerId, job: String, epoch: u64 },
    /// It has every rank's gradients of the step.
    Ready { server: ServerId, report: pb::StepReady },
    /// It cannot hold or go on with the job.
    Failed { server: ServerId, job: String, epoch: u64, reason: String },
    /// What it holds.
    Stats { server: ServerId, stats: pb::Stats },
    /// Somebody wants the job to be there.
    Create { caller: Caller, spec: Box<JobSpec>, wait: Duration },
    /// Somebody wants the job to be gone.
    Delete { caller: Caller, job: String },
    /// A worker wants a rank.
    Join { caller: Caller, lease: Lease, job: String, worker: Worker },
    /// A worker gives its rank back.
    Leave { caller: Caller, job: String, lease: Lease },
    /// A worker's stream ended.
    LeaseEnded { job: String, lease: Lease },
    /// A rank has pushed all of a step.
    Commit { caller: Caller, commit: Box<Commit> },
    /// A rank wants to know the norm of a step's gradient.
    Reduce { caller: Caller, reduce: Box<Reduce> },
    /// Time has passed.
    Tick,
}

/// Who a worker says it is.
#[derive(Debug, Clone)]
pub(crate) struct Worker {
    pub(crate) rank: u32,
    /// host:port at which its peers reach it, if they do.
    pub(crate) address: Option<String>,
}

/// A rank's word that it has pushed all of a step.
#[derive(Debug, Clone)]
pub(crate) struct Commit {
    pub(crate) job: String,
    pub(crate) lease: Lease,
    pub(crate) epoch: u64,
    pub(crate) rank: u32,
    pub(crate) step: u64,
    /// None: those of the spec.
    pub(crate) groups: Option<Vec<Optimizer>>,
    /// INVARIANT: finite and more than 0.
    pub(crate) loss_scale: f64,
    /// INVARIANT: finite and more than 0.
    pub(crate) max_norm: Option<f64>,
    pub(crate) loss: Option<f64>,
    /// Skip the step whatever its gradients are.
    pub(crate) discard: bool,
    pub(crate) wait: Duration,
}

/// A rank's wish to know the norm of a step's gradient before it is decided.
#[derive(Debug, Clone)]
pub(crate) struct Reduce {
    pub(crate) job: String,
    pub(crate) lease: Lease,
    pub(crate) epoch: u64,
    pub(crate) rank: u32,
    pub(crate) step: u64,
    /// INVARIANT: finite and more than 0.
    pub(crate) loss_scale: f64,
    pub(crate) wait: Duration,
}

/// What a caller is told.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Reply {
    Created {
        epoch: u64,
    },
    Deleted,
    /// The lease holds; memberships come by [`Action::Tell`].
    Joined,
    Left,
    Report(pb::StepReport),
    Reduced(pb::ReduceReport),
}

/// What is to be done, in this order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action {
    /// End a call.
    Answer(Caller, Result<Reply>),
    /// Send a command to a server.
    Command(ServerId, pb::server_command::Command),
    /// Tell a worker about a change.
    Tell(Lease, pb::Membership),
    /// End a worker's stream: in order, or with an error.
    End(Lease, Option<Error>),
    /// End a server's control stream.
    Dismiss(ServerId),
    /// A step was decided.
    Decided { applied: bool, commit_spread: Duration, ready_wait: Duration },
    /// A step was dropped.
    Aborted,
    /// A job is gone.
    Forgotten { job: String },
    /// What happened and why, for the log.
    Note(String),
}

/// A shard server that is connected.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) address: String,
    pub(crate) stats: Option<pb::Stats>,
}

/// A job, in whatever phase.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) spec: Arc<JobSpec>,
    /// 0 until it is placed.
    pub(crate) epoch: u64,
    pub(crate) phase: Phase,
}

/// How far a job is.
#[derive(Debug)]
pub(crate) enum Phase {
    /// Not enough servers yet.
    Waiting { creators: Vec<Waiter> },
    /// Servers make room.
    Opening { placement: Arc<Placement>, pending: BTreeSet<ServerId>, creators: Vec<Waiter> },
    /// Workers can join.
    Open(Open),
    /// It cannot go on; its servers were told to drop it.
    Failed { reason: String },
}

/// A worker that holds a rank.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) lease: Lease,
    /// Where its peers reach it, if they do.
    pub(crate) address: Option<String>,
}

/// What an open job has.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) placement: Arc<Placement>,
    /// The epoch in which it was opened.
    pub(crate) opened: u64,
    /// Servers without all of their initial parameters.
    pub(crate) uninitialised: BTreeSet<ServerId>,
    /// INVARIANT: Some when `uninitialised` is empty.
    pub(crate) version: Option<u64>,
    pub(crate) members: BTreeMap<u32, Member>,
    /// Slices that take gradients, ascending, of each server that has some.
    pub(crate) trainable: BTreeMap<ServerId, Vec<u32>>,
    pub(crate) round: Round,
    /// Of the step that made `version`.
    pub(crate) last: Option<Box<pb::StepReport>>,
}

impl Open {
    pub(crate) fn new(spec: &JobSpec, placement: Arc<Placement>, epoch: u64) -> Self {
        let mut trainable = BTreeMap::<ServerId, Vec<u32>>::new();
        for slice in (0..placement.slices()).filter(|&slice| spec.manifest.trains(slice)) {
            let server = placement.servers()[placement.primary(slice)].id;
            trainable.entry(server).or_default().push(slice as u32);
        }
        let uninitialised: BTreeSet<_> = placement.servers().iter().map(|server| server.id).collect();
        Self {
            version: uninitialised.is_empty().then_some(0),
            placement,
            opened: epoch,
            uninitialised,
            members: BTreeMap::new(),
            trainable,
            round: Round::default(),
            last: None,
        }
    }

    /// The step that is open: it can be pushed and committed before the initial parameters are complete.
    pub(crate) fn step(&self) -> u64 {
        self.version.unwrap_or(0)
    }

    /// What a member is told; the spec only in its first message.
    pub(crate) fn membership(&self, spec: &JobSpec, epoch: u64, lease: Lease, first: bool) -> pb::Membership {
        pb::Membership {
            lease: lease.0,
            epoch,
            world: spec.world,
            version: self.version,
            spec: first.then(|| spec.into()),
            placement: Some(self.placement.as_ref().into()),
            peers: self.peers().collect(),
            job_id: 0,
        }
    }

    /// Members that said where their peers reach them, by rank.
    fn peers(&self) -> impl Iterator<Item = pb::Peer> {
        let peer =
            |(&rank, member): (&u32, &Member)| Some(pb::Peer { rank, address: member.address.clone()? });
        self.members.iter().filter_map(peer)
    }

    /// The rank that `lease` is of, if it has not ended.
    pub(crate) fn rank_of(&self, lease: Lease) -> Option<u32> {
        self.members.iter().find(|(_, member)| member.lease == lease).map(|(&rank, _)| rank)
    }

    /// What all members are told about a change.
    pub(crate) fn tell_all(&self, spec: &JobSpec, epoch: u64, out: &mut Vec<Action>) {
        for &Member { lease, .. } in self.members.values() {
            out.push(Action::Tell(lease, self.membership(spec, epoch, lease, false)));
        }
    }
}
