//! Events and actions: all inputs and outputs of the coordinator's state machine.
//!
//! The driver draws random numbers (job ids, leases) and the identities of callers and streams, and
//! passes them inside the events, so that the state machine is a pure function.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use zeroshard_model::{
    Attempt, Error, JobSpec, Optimizer, Placement, Restore, Result, Server, Succession,
    memory::Capacity, quota::Holder,
};

use super::{
    admission::Rooms,
    decisions::{Decision, Report},
    drains::Drained,
    held::Held,
    history::{Severity, Step},
    placement::Zones,
    plan::Plan,
    reduce::{Norm, Reduced},
    reports::{Files, Stats},
    resting::{Begins, Rested},
    save::{Completion, Save, SavePlan, Saved},
    succession::Source,
    user_data::{RankData, UserData},
};

/// A point in time: the duration since the driver started.
pub type Now = Duration;

/// The number of an open call. The driver never reuses one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Caller(pub u64);

/// The random number of a worker's lease on a rank; never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lease(pub u64);

/// The id of a shard server. It survives restarts of the server.
pub type ServerId = u64;

/// One control stream of a shard server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    pub server: ServerId,
    /// The number of the stream. The driver never reuses one.
    pub stream: u64,
}

/// A job as its members and servers identify it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobRef {
    pub name: String,
    pub id: u64,
}

/// A caller and the deadline of its call.
#[derive(Debug, Clone, Copy)]
pub struct Waiter {
    pub caller: Caller,
    pub since: Now,
    pub deadline: Now,
}

impl Waiter {
    pub fn new(caller: Caller, now: Now, wait: Duration) -> Self {
        Self { caller, since: now, deadline: now + wait }
    }

    /// The error for a call whose deadline has passed.
    pub fn timeout(&self, now: Now, waiting_for: String) -> Error {
        let waited_ms = now.saturating_sub(self.since).as_millis() as u64;
        Error::Timeout { waiting_for, waited_ms }
    }
}

/// An input of the state machine.
#[derive(Debug)]
pub enum Event {
    /// A shard server opened a control stream. It holds jobs, of another coordinator if it `is_new`
    /// here.
    ServerJoined { stream: u64, server: Server, about: About, held: Vec<Held>, is_new: bool },
    /// A control stream ended.
    ServerLost { from: Link, cause: String },
    /// A message on a control stream.
    Said { from: Link, said: Said },
    /// The answer to [`Action::Place`].
    Placed { job: JobRef, placed: Result<Placed> },
    /// CreateJob. `job_id` is for the case that the job is new.
    Create { caller: Caller, job_id: u64, create: Box<Create>, wait: Duration },
    /// DeleteJob. An id of 0 stands for any job of the name.
    Delete { caller: Caller, job: JobRef, wait: Duration },
    /// Join.
    Join { caller: Caller, join: Join },
    /// A Join with a lease that the rank has already.
    Attach { caller: Caller, attach: Attach },
    /// Leave.
    Leave { caller: Caller, leave: Leave, wait: Duration },
    /// The stream of a Join ended, or its caller disconnected before the stream was opened.
    LeaseEnded { job: String, rank: u32, lease: Lease },
    /// Commit.
    Commit { caller: Caller, commit: Box<Commit> },
    /// Reduce.
    Reduce { caller: Caller, reduce: Box<Reduce> },
    /// Discard.
    Discard { caller: Caller, discard: Discard },
    /// Rest.
    Rest { caller: Caller, rest: Rest },
    /// ReportLink.
    Link { caller: Caller, report: LinkReport },
    /// SaveCheckpoint.
    Save { caller: Caller, save: Save },
    /// SendUserData.
    UserData { caller: Caller, data: RankData },
    /// CordonServer. `server` is an address or an id.
    Cordon { caller: Caller, server: String, cordoned: bool },
    /// DrainServer.
    Drain { caller: Caller, server: String, restore: bool },
    /// EvictRank.
    Evict { caller: Caller, job: String, rank: u32 },
    /// The end of [`Action::Complete`], with the size of the checkpoint in bytes.
    Completed { job: JobRef, save: u64, outcome: Result<u64> },
    /// The caller disconnected before it was answered; `rank` is absent for CreateJob.
    Gone { caller: Caller, job: String, rank: Option<u32> },
    /// The caller of SaveCheckpoint disconnected before it was answered.
    SaverGone { caller: Caller, job: String },
    /// The address of a server, which was dialled for [`Action::Probe`], refuses connections.
    Refused(Server),
    /// The coordinator is about to stop.
    Stopping,
    /// A deadline may have passed.
    Tick,
}

impl Event {
    /// The maximum time until the state machine answers; `None` for an event that it answers at
    /// once.
    pub fn wait(&self) -> Option<Duration> {
        match self {
            Self::Create { wait, .. } | Self::Delete { wait, .. } | Self::Leave { wait, .. } => {
                Some(*wait)
            }
            Self::Join { join, .. } => Some(join.rank_wait),
            Self::Commit { commit, .. } => Some(commit.wait),
            Self::Reduce { reduce, .. } => Some(reduce.wait),
            Self::Discard { discard, .. } => Some(discard.wait),
            Self::Rest { rest, .. } => Some(rest.wait),
            Self::Save { save, .. } => Some(save.wait),
            _ => None,
        }
    }

    /// The event to send when the caller of this event disconnects.
    pub fn gone(&self) -> Option<Self> {
        let of_turn = |caller: &Caller, turn: &Turn| {
            Some(Self::Gone { caller: *caller, job: turn.job.name.clone(), rank: Some(turn.rank) })
        };
        match self {
            Self::Create { caller, create, .. } => {
                Some(Self::Gone { caller: *caller, job: create.spec.name.clone(), rank: None })
            }
            Self::Commit { caller, commit } => of_turn(caller, &commit.turn),
            Self::Reduce { caller, reduce } => of_turn(caller, &reduce.turn),
            Self::Discard { caller, discard } => of_turn(caller, &discard.turn),
            Self::Rest { caller, rest } => of_turn(caller, &rest.turn),
            Self::Save { caller, save } => {
                Some(Self::SaverGone { caller: *caller, job: save.job.name.clone() })
            }
            _ => None,
        }
    }
}

/// Why a job has failed on a server.
#[derive(Debug, Clone, PartialEq)]
pub struct FailedThere {
    pub reason: String,
    /// `true` if the server may be able to open the job later.
    pub transient: bool,
}

/// The properties that a shard server reports when it registers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct About {
    /// The name that the operator gave the server. Empty: none.
    pub name: String,
    /// The zone of the server. Empty: the server is a zone of its own.
    pub zone: String,
    /// The memory for the arrays of slices; `None` without a known limit.
    pub capacity: Option<Capacity>,
    /// Why jobs have failed on the server, by job id.
    pub failed: BTreeMap<u64, FailedThere>,
    /// The version of the server; empty if it is unknown.
    pub version: String,
    /// `true` if the server is cordoned.
    pub cordoned: bool,
}

/// A message from a shard server.
#[derive(Debug)]
pub enum Said {
    /// The server has allocated memory for the job.
    Opened { job: JobRef, epoch: u64 },
    /// The server has all initial parameters of its slices.
    Initialised { job: JobRef, epoch: u64 },
    /// The server has all gradients of the attempt.
    Ready { job: JobRef, attempt: Attempt, reduced: Reduced },
    /// The server accepts pushes with the lease.
    Granted { job: JobRef, rank: u32, lease: Lease },
    /// The server has stored the decision about the step.
    Stored { job: JobRef, epoch: u64, step: u64 },
    /// The server cannot hold or continue the job, which it has opened in this epoch or an earlier
    /// one. `transient`: it may be able to open the job later.
    Failed { job: JobRef, epoch: u64, reason: String, transient: bool },
    /// The server has copied slices.
    Copied { job: JobRef, number: u64 },
    /// The server has no memory for the slices that it was told to copy.
    CopyRefused { job: JobRef, number: u64, reason: String },
    /// The hashes of the server's slices at a version.
    Hashes { job: JobRef, epoch: u64, version: u64, slices: Vec<(u32, u64)> },
    /// The server has written its part of a checkpoint.
    Written { job: JobRef, save: u64, files: Files },
    /// The server could not write its part of a checkpoint.
    SaveFailed { job: JobRef, save: u64, cause: Error },
    /// The server has received all commands up to [`Command::Confirm`].
    Confirmed { number: u64 },
    /// The server is about to stop.
    Departing,
    /// The memory and jobs of the server.
    Stats(Stats),
}

/// A job that is to be created.
#[derive(Debug)]
pub struct Create {
    pub spec: JobSpec,
    /// How it continues from another job, if it does.
    pub succession: Option<Succession>,
    /// The checkpoint from which it starts, if it does. INVARIANT: not with `succession`.
    pub restore: Option<Restore>,
    /// The role and the limits of the token of the call, and the number of bytes that the job
    /// needs.
    pub quota: Option<(Holder, u64)>,
}

/// A worker's request for a rank.
#[derive(Debug)]
pub struct Join {
    pub job: String,
    pub rank: u32,
    /// The host:port at which its peers reach the worker, if it has one.
    pub address: Option<String>,
    /// The lease that the worker will get.
    pub lease: Lease,
    /// How long to wait for the end of an earlier lease of the rank. INVARIANT: at most `wait`.
    pub rank_wait: Duration,
    /// How long to wait for the servers to accept the lease.
    pub wait: Duration,
}

/// A worker continues its lease on a rank, after the coordinator was restarted.
#[derive(Debug)]
pub struct Attach {
    pub job: JobRef,
    pub rank: u32,
    /// The host:port at which its peers reach the worker, if it has one.
    pub address: Option<String>,
    pub lease: Lease,
    /// The latest attempt that the worker knows.
    pub attempt: Attempt,
    /// The data for checkpoints that the worker has sent last, and its version.
    pub user_data: Option<(u64, Bytes)>,
}

/// A worker gives its rank back.
#[derive(Debug)]
pub struct Leave {
    pub job: JobRef,
    pub lease: Lease,
    /// `true` if the rank has no more data.
    pub done: bool,
}

/// The membership and attempt for which a rank calls.
#[derive(Debug, Clone)]
pub struct Turn {
    pub job: JobRef,
    pub lease: Lease,
    pub rank: u32,
    pub attempt: Attempt,
}

/// A rank has pushed all gradients of a step.
#[derive(Debug, Clone)]
pub struct Commit {
    pub turn: Turn,
    /// `None`: the hyperparameters of the spec.
    pub groups: Option<Vec<Optimizer>>,
    /// INVARIANT: finite and greater than 0.
    pub loss_scale: f64,
    /// INVARIANT: finite and greater than 0.
    pub max_norm: Option<f64>,
    pub loss: Option<f64>,
    /// Empty, or one for each tensor.
    pub gradient_factors: Vec<f64>,
    /// Empty, or one for each tensor.
    pub written: Vec<u64>,
    /// For a checkpoint of the version that the step makes.
    pub user_data: Bytes,
    /// `true` if the rank sends this data after the step.
    pub user_data_follows: bool,
    pub wait: Duration,
}

/// A rank requests the norm of a step's gradient before the step is decided.
#[derive(Debug, Clone)]
pub struct Reduce {
    pub turn: Turn,
    /// INVARIANT: finite and greater than 0.
    pub loss_scale: f64,
    pub wait: Duration,
}

/// A rank discards the gradients of the open attempt.
#[derive(Debug, Clone)]
pub struct Discard {
    pub turn: Turn,
    pub wait: Duration,
}

/// A rank contributes nothing more until every rank rests.
#[derive(Debug, Clone)]
pub struct Rest {
    pub turn: Turn,
    /// `true` if mean gradients are over the other ranks.
    pub excluded: bool,
    pub wait: Duration,
}

/// A rank cannot reach a server.
#[derive(Debug, Clone)]
pub struct LinkReport {
    pub turn: Turn,
    pub server: ServerId,
    pub incarnation: u64,
    pub cause: String,
}

/// The answer to a call.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    Created {
        epoch: u64,
        job_id: u64,
    },
    Deleted,
    /// The lease is valid. Memberships are read with [`super::cluster::Cluster::next_membership`].
    Joined,
    Left,
    /// The result of a step, and the epoch of the next one.
    Report(Report, u64),
    /// The norm, and the ranks that rest.
    Reduced(Norm, Vec<u32>),
    /// The open attempt.
    Discarded {
        attempt: u32,
    },
    Rested(Rested),
    /// The report about a link was noted.
    LinkNoted,
    Saved(Saved),
    /// The data of the rank has been stored.
    UserDataStored,
    /// The server was cordoned or uncordoned.
    Cordoned(Server),
    Drained(Drained),
    /// The lease of the rank was ended.
    Evicted {
        epoch: u64,
    },
}

/// A request to place a job's slices, which is long work that the driver does without its lock.
#[derive(Debug, Clone, PartialEq)]
pub struct Placing {
    pub job: JobRef,
    pub spec: Arc<JobSpec>,
    pub live: Vec<Server>,
    pub zones: Zones,
    pub rooms: Rooms,
    /// The checkpoint from which the job starts, if it does.
    pub restore: Option<Arc<Restore>>,
    /// `true` if the job was open, and returns to its own latest checkpoint.
    pub returns: bool,
}

/// The placement of a job, and the checkpoint from which it starts.
#[derive(Debug, Clone, PartialEq)]
pub struct Placed {
    pub plan: Plan,
    pub checkpoint: Option<Checkpoint>,
    /// The data of the ranks in the checkpoint.
    pub user_data: UserData,
}

/// A complete checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    pub url: String,
    /// The name of the job that was saved.
    pub job: String,
    /// Its id.
    pub job_id: u64,
    pub version: u64,
}

/// A command to a shard server.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// The server is registered.
    Welcome,
    /// Allocate memory for slices of a job.
    Open(OpenJob),
    /// Free the slices of the job.
    Close(JobRef),
    /// Publish version 0, because every server has its initial parameters.
    Publish { job: JobRef, epoch: u64 },
    /// Accept pushes with the lease.
    Grant { job: JobRef, rank: u32, lease: Lease },
    /// The lease of the rank has ended, in order if it has `left`.
    NewEpoch { job: JobRef, epoch: u64, rank: u32, left: bool },
    /// All ranks have discarded the previous attempt or have rested; then `rested` is the highest
    /// rank that took part in the last step.
    NewAttempt { job: JobRef, attempt: Attempt, rested: Option<u32> },
    /// The rank has no more data.
    RankDone { job: JobRef, rank: u32 },
    /// The rank rests or, without `begins`, takes part again from the next attempt on.
    RankRests { job: JobRef, rank: u32, begins: Option<Begins> },
    /// Apply or skip the step.
    Decide { job: JobRef, decision: Decision },
    /// The slices are on other servers, in a new epoch.
    NewPlacement { job: JobRef, epoch: u64, placement: Arc<Placement> },
    /// Copy slices from their primaries.
    Copy { job: JobRef, number: u64, version: u64, slices: Vec<u32> },
    /// Send a version to those who ask for it.
    ServeVersion { job: JobRef, version: u64 },
    /// The server is cordoned or uncordoned.
    Cordon { cordoned: bool },
    /// Write the slices of a version.
    Write { job: JobRef, plan: SavePlan },
    /// Give up a save.
    CancelSave { job: JobRef, save: u64 },
    /// State that all earlier commands have been received.
    Confirm { number: u64 },
    /// The server may stop, because none of its jobs is being saved.
    Release,
}

impl Command {
    /// Returns whether the command changes a job, so that its coordinator has led.
    pub fn decides(&self) -> bool {
        match self {
            Self::Welcome
            | Self::Cordon { .. }
            | Self::CancelSave { .. }
            | Self::Confirm { .. }
            | Self::Release => false,
            Self::Open(_)
            | Self::Close(_)
            | Self::Publish { .. }
            | Self::Grant { .. }
            | Self::NewEpoch { .. }
            | Self::NewAttempt { .. }
            | Self::RankDone { .. }
            | Self::RankRests { .. }
            | Self::Decide { .. }
            | Self::NewPlacement { .. }
            | Self::Copy { .. }
            | Self::ServeVersion { .. }
            | Self::Write { .. } => true,
        }
    }
}

/// A job that a server is to open. The spec and the placement are shared, because they may be
/// large.
#[derive(Debug, Clone, PartialEq)]
pub struct OpenJob {
    pub spec: Arc<JobSpec>,
    pub placement: Arc<Placement>,
    pub job_id: u64,
    pub epoch: u64,
    /// The server that opens the job.
    pub server: ServerId,
    /// The predecessor that the job was created from, if it has one.
    pub succession: Option<Arc<Succession>>,
    /// Where its slices come from, if the server copies them from the predecessor.
    pub source: Option<Source>,
    /// The checkpoint that it reads, if it does.
    pub checkpoint: Option<Checkpoint>,
    /// The checkpoint as the creator of the job has requested it.
    pub requested: Option<Arc<Restore>>,
    /// The leases of the ranks, if the job is restored while they wait.
    pub leases: Vec<(u32, Lease)>,
    /// The ranks of such a job that have no more data, and those that have left in order.
    pub done: Vec<u32>,
    pub left: Vec<u32>,
    /// The version of a job that runs, of which the server becomes a backup.
    pub version: Option<u64>,
    /// The decision that has led to this version.
    pub decision: Option<Box<Decision>>,
}

/// An output of the state machine. Actions are carried out in their order.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// End a call.
    Answer(Caller, Result<Reply>),
    /// Send a command to a server.
    Command(ServerId, Command),
    /// Compute a placement, then send [`Event::Placed`].
    Place(Placing),
    /// Notify a member that it has a membership to read.
    Wake(Lease),
    /// Register the new stream of a lease that continues. The call opens it.
    Attached(Lease, Caller),
    /// End a worker's stream, in order or with an error.
    End(Lease, Option<Error>),
    /// End a control stream.
    Dismiss(Link),
    /// Find out whether a server without a control stream still runs: [`Event::Refused`].
    Probe(Server),
    /// Count a decided step.
    Decided { job: JobRef, step: Step },
    /// Complete a checkpoint, then send [`Event::Completed`].
    Complete(Completion),
    /// Count the time without all replicas of a job.
    Redundant { after: Duration },
    /// Count a save. `complete`: its version and its duration, unless it was given up.
    SaveEnded { job: String, complete: Option<(u64, Duration)> },
    /// Count an aborted step.
    Aborted { job: String },
    /// End the trace of an open step that began at `began` and continues in another epoch.
    Interrupted { job: JobRef, attempt: Attempt, began: Now },
    /// Send [`Event::Tick`] at this time, or earlier.
    Tick(Now),
    /// Release the resources of a deleted job.
    Forgotten { job: String },
    /// State that a job is over at the places of its checkpoints.
    EndClaims { job: JobRef, urls: BTreeSet<String> },
    /// Log this text as an event of normal operation.
    Note(String),
    /// Log this text as an event of this severity.
    Alarm(Severity, String),
}
