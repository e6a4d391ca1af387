//! Events and actions: all inputs and outputs of the coordinator's state machine.
//!
//! The driver draws random numbers (job ids, leases) and the identities of callers and streams, and
//! passes them inside the events, so that the state machine is a pure function.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use zeroshard_model::{Attempt, Error, JobSpec, Line, RecentSteps, Restore, Result, Server};

use crate::{
    operators::history::{Severity, Step},
    placement::{Zones, free_memory::FreeMemory, plan::Plan},
    state::user_data::UserData,
    vocabulary::{
        calls::{
            Attach, Commit, Create, Discard, Join, Leave, LinkReport, RankData, Reduce, Reply,
            Rest, Rewind, Save, Turn,
        },
        commands::{About, Checkpoint, Command, SavePlan, ServerEvent},
        ids::{Caller, JobRef, Lease, Link, Now, ServerId},
        job_report::JobReport,
        reports::Files,
    },
};

/// An input of the state machine.
#[derive(Debug)]
pub enum Event {
    /// A shard server opened a control stream. It holds jobs, of another coordinator if it `is_new`
    /// here.
    ServerJoined {
        stream: u64,
        server: Server,
        about: About,
        reports: Vec<JobReport>,
        is_new: bool,
    },
    /// A control stream ended.
    ServerLost { from: Link, cause: String },
    /// A message on a control stream.
    FromServer { from: Link, event: ServerEvent },
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
    /// RewindJob.
    Rewind { caller: Caller, rewind: Rewind },
    /// The answer to [`Action::Search`].
    Searched { search: Box<Search>, found: Result<Target> },
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
            Self::Rewind { rewind, .. } => Some(rewind.wait),
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

/// A request to place a job's slices, which is long work that the driver does without its lock.
#[derive(Debug, Clone, PartialEq)]
pub struct Placing {
    pub job: JobRef,
    pub spec: Arc<JobSpec>,
    pub live: Vec<Server>,
    pub zones: Zones,
    pub free_memory: FreeMemory,
    /// The checkpoint from which the job starts, if it does.
    pub restore: Option<Arc<Restore>>,
    /// `true` if an open job returns to one of its own checkpoints.
    pub returns: bool,
    /// The line on which the job was. The next one skips the same batches.
    pub line: Arc<Line>,
}

/// The placement of a job, and the checkpoint from which it starts.
#[derive(Debug, Clone, PartialEq)]
pub struct Placed {
    pub plan: Plan,
    pub checkpoint: Option<Checkpoint>,
    /// The data of the ranks in the checkpoint.
    pub user_data: UserData,
    /// The line that begins.
    pub line: Line,
    /// The figures of the steps before the version of the checkpoint.
    pub recent: RecentSteps,
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
    /// Search for the checkpoint to which a job returns, then send [`Event::Searched`].
    Search(Search),
    /// Count a spike.
    Spiked { job: String },
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

/// The end of a save, which the driver carries out without its lock: the data of the ranks and the
/// manifest are written, and old checkpoints are removed.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    pub job: JobRef,
    pub spec: Arc<JobSpec>,
    pub line: Arc<Line>,
    pub plan: SavePlan,
    pub files: Vec<Files>,
    pub user_data: BTreeMap<u32, Bytes>,
    /// The ranks whose data was lost.
    pub lost_ranks: Vec<u32>,
    /// The figures of the steps before the version.
    pub recent: RecentSteps,
}

/// A search for the checkpoint to which a job returns after a spike.
#[derive(Debug, Clone, PartialEq)]
pub struct Search {
    pub job: JobRef,
    pub spec: Arc<JobSpec>,
    pub line: Arc<Line>,
    /// The attempt at the step that is the spike.
    pub attempt: Attempt,
    /// The latest version to which the job may return.
    pub until: u64,
    /// The batches that the next line skips.
    pub skip: Range<u64>,
    /// The number of completed saves. A later save may remove the checkpoint that the driver finds.
    pub completed: u64,
}

/// The checkpoint that a search has found.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    pub to: Checkpoint,
    /// All batches that the next line skips.
    pub skips: Vec<Range<u64>>,
}
