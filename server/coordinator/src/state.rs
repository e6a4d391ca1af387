//! The coordinator's data about servers and jobs.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use zeroshard_model::{
    Attempt, Error, JobSpec, Placement, Restore, Result, Succession, memory::Capacity,
};

use super::{
    absence::Away,
    admission::Loads,
    commit::Round,
    compare::Comparison,
    decisions::Decided,
    events::{Action, Checkpoint, Command, FailedThere, Lease, Now, ServerId, Turn, Waiter},
    feed::Peers,
    figures::Lateness,
    held::Age,
    jobs::Plan,
    links::Links,
    members::{Members, Queue},
    progress::Progress,
    recovery::{Recovery, unknown_yet},
    replicas::Replicas,
    reports::Stats,
    resting::Resting,
    restore::Interrupted,
    save::Saves,
    user_data::UserData,
};

/// A connected shard server.
#[derive(Debug)]
pub struct ServerState {
    /// Its control stream.
    pub stream: u64,
    pub incarnation: u64,
    pub address: String,
    /// Its room for the arrays of slices; `None` if it has no known limit.
    pub capacity: Option<Capacity>,
    /// Its last report.
    pub stats: Option<Stats>,
    /// Why jobs had failed on it when it connected, by the id of the job.
    pub failed: BTreeMap<u64, FailedThere>,
    /// The version of the server; empty if it is unknown.
    pub version: String,
    /// `true` if the server is cordoned: it receives no new slices.
    pub cordoned: bool,
}

impl ServerState {
    /// Why the server does not have a job that it has had.
    pub(super) fn lacks(&self, job_id: u64) -> String {
        let failed = self.failed.get(&job_id).map(|failed| failed.reason.clone());
        failed.unwrap_or_else(|| "it has dropped the job".to_owned())
    }
}

/// A job in any phase.
#[derive(Debug)]
pub struct Job {
    pub spec: Arc<JobSpec>,
    /// Random, never 0.
    pub id: u64,
    /// 0 until the job is placed.
    pub epoch: u64,
    /// The time when the last lease ended; before the first lease, the time when workers could
    /// first join; or the time when the job failed. It has no meaning while a rank has a lease.
    pub unused_since: Now,
    /// How it continues from another job, if it does.
    pub succession: Option<Arc<Succession>>,
    /// The checkpoint that its creator has requested, if any.
    pub restore: Option<Arc<Restore>>,
    /// The latest description by a server; `None` for a job that was created here.
    pub learned: Option<Age>,
    pub progress: Progress,
    pub phase: Phase,
}

/// The phase of a job.
#[derive(Debug)]
pub enum Phase {
    /// The job waits for servers, or for its placement.
    Waiting {
        creators: Vec<Waiter>,
        /// `true` if [`Action::Place`] is in progress.
        placing: bool,
        /// The ranks that wait for the job to be restored, if it was open before.
        interrupted: Option<Box<Interrupted>>,
    },
    /// The servers of the job allocate memory.
    Opening {
        plan: Plan,
        /// The checkpoint that the servers read, and the data of the ranks in it.
        restored: Option<Box<(Checkpoint, UserData)>>,
        pending: BTreeSet<ServerId>,
        creators: Vec<Waiter>,
        /// As in `Waiting`.
        interrupted: Option<Box<Interrupted>>,
    },
    /// Workers can join.
    Open(Box<Open>),
    /// The coordinator was restarted, and learns the job from its servers.
    Recovering(Box<Recovery>),
    /// The job has failed, and its servers were told to close it.
    Failed {
        reason: String,
        /// `true` if its state, and with it its latest checkpoint, may be wrong.
        is_damaged: bool,
    },
}

/// The state of a job that workers can join.
#[derive(Debug)]
pub struct Open {
    pub placement: Arc<Placement>,
    /// The trained slices of each server that has any, ascending.
    pub trainable: BTreeMap<ServerId, Vec<u32>>,
    /// The bytes that the job needs of each server.
    pub loads: Loads,
    /// The servers that do not have all of their initial parameters.
    pub uninitialised: BTreeSet<ServerId>,
    /// INVARIANT: Some when `uninitialised` is empty.
    pub version: Option<u64>,
    pub members: Members,
    /// Joins that wait for the end of an earlier lease.
    pub queue: Queue,
    /// Ranks that left in order, and that no other worker has taken since. INVARIANT: not in
    /// `members`.
    pub left: BTreeSet<u32>,
    /// Ranks that have no more data, with the first version at which that is known. INVARIANT: not
    /// in `members`, not in `left`.
    pub done: BTreeMap<u32, u64>,
    pub resting: Resting,
    pub peers: Peers,
    pub round: Round,
    /// The decision that produced `version`.
    pub last: Option<Box<Decided>>,
    pub saves: Saves,
    /// The first epoch and the version after the last restoration, if ranks were waiting.
    pub rolled_back: Option<(u64, u64)>,
    /// The servers of the placement that are not connected.
    pub away: BTreeMap<ServerId, Away>,
    /// The links from ranks to servers that do not work.
    pub links: Links,
    pub replicas: Replicas,
    pub comparison: Comparison,
    pub lateness: Lateness,
}

impl Open {
    pub fn new(plan: Plan, replicas: Replicas) -> Self {
        let Plan { placement, trainable, loads } = plan;
        let uninitialised: BTreeSet<_> =
            placement.servers().iter().map(|server| server.id).collect();
        Self {
            version: uninitialised.is_empty().then_some(0),
            placement,
            trainable,
            loads,
            uninitialised,
            members: Members::default(),
            queue: Queue::default(),
            left: BTreeSet::new(),
            done: BTreeMap::new(),
            resting: Resting::default(),
            peers: Peers::default(),
            round: Round::default(),
            last: None,
            saves: Saves::default(),
            rolled_back: None,
            away: BTreeMap::new(),
            links: Links::default(),
            replicas,
            comparison: Comparison::default(),
            lateness: Lateness::default(),
        }
    }

    /// The open step. It can be pushed and committed before the initial parameters are complete.
    pub fn step(&self) -> u64 {
        self.version.unwrap_or(0)
    }

    /// The open attempt, in the job's current epoch.
    pub fn attempt(&self, epoch: u64) -> Attempt {
        Attempt { epoch, step: self.step(), number: self.round.attempt }
    }

    /// The ids of the servers of the placement.
    pub fn servers(&self) -> impl Iterator<Item = ServerId> + '_ {
        self.placement.servers().iter().map(|server| server.id)
    }

    /// Sends `command` to every server of the placement.
    pub fn send(&self, command: &Command, out: &mut Vec<Action>) {
        out.extend(self.servers().map(|server| Action::Command(server, command.clone())));
    }

    /// Wakes the streams of all members to look for changes.
    pub fn wake_all(&self, out: &mut Vec<Action>) {
        out.extend(self.members.leases().map(Action::Wake));
    }

    /// The number of ranks that take part in the open step.
    pub fn active(&self, world: u32) -> usize {
        world as usize - self.done.len() - self.resting.len()
    }

    /// Returns whether every rank has left in order or has no more data.
    pub fn has_ended(&self, world: u32) -> bool {
        self.members.is_empty() && self.left.len() + self.done.len() == world as usize
    }

    /// Returns whether the rank takes part in the open step: it is neither done nor resting.
    pub fn takes_part(&self, rank: u32) -> bool {
        !self.done.contains_key(&rank) && !self.resting.contains(rank)
    }

    /// The ranks below `world` that take part and have no call in `present`: those with a
    /// worker, and those without.
    pub fn missing<T>(&self, world: u32, present: &BTreeMap<u32, T>) -> (Vec<u32>, Vec<u32>) {
        let missing =
            (0..world).filter(|rank| !present.contains_key(rank) && self.takes_part(*rank));
        missing.partition(|&rank| self.members.get(rank).is_some())
    }

    /// Checks that a call belongs to the rank's current lease.
    ///
    /// # Errors
    /// [`Error::LeaseLost`].
    pub fn check_lease(&self, turn: &Turn) -> Result<()> {
        let &Turn { ref job, lease, rank, .. } = turn;
        if self.members.get(rank).is_none_or(|member| member.lease != lease) {
            return Err(Error::LeaseLost { job: job.name.clone(), rank });
        }
        Ok(())
    }

    /// Checks that a call belongs to the rank's current lease and to the attempt `current`, and
    /// that the rank does not rest.
    ///
    /// # Errors
    /// [`Error::LeaseLost`], [`Error::RankLeft`], [`Error::StaleEpoch`], [`Error::StepMismatch`],
    /// [`Error::StaleAttempt`], [`Error::Invalid`].
    pub fn check_turn(&self, turn: &Turn, current: Attempt) -> Result<()> {
        self.check_lease(turn)?;
        let &Turn { ref job, rank, attempt, .. } = turn;
        if let Some((_, version)) = self.rolled_back.filter(|(epoch, _)| attempt.epoch < *epoch) {
            return Err(Error::RolledBack { job: job.name.clone(), version });
        }
        if let Some(since) = self.resting.since(rank) {
            let what = format!("rank {rank} of job {:?}", job.name);
            let expected = "a rank with further batches; it takes part again when every rank rests";
            return Err(Error::invalid(what, format!("resting since step {since}"), expected));
        }
        if let Some(&rank) = self.left.first() {
            return Err(Error::RankLeft { job: job.name.clone(), rank, step: self.step() });
        }
        if attempt == current { Ok(()) } else { Err(attempt.refusal(&job.name, current)) }
    }
}

impl Phase {
    pub fn placement(&self) -> Option<&Placement> {
        match self {
            Self::Waiting { .. } | Self::Failed { .. } => None,
            Self::Opening { plan, .. } => Some(&plan.placement),
            Self::Recovering(recovery) => Some(&recovery.plan.placement),
            Self::Open(open) => Some(&open.placement),
        }
    }

    /// The bytes that the job needs of each server, once it is placed.
    pub fn loads(&self) -> Option<&Loads> {
        match self {
            Self::Waiting { .. } | Self::Failed { .. } => None,
            Self::Opening { plan, .. } => Some(&plan.loads),
            Self::Recovering(recovery) => Some(&recovery.plan.loads),
            Self::Open(open) => Some(&open.loads),
        }
    }

    /// The servers that may hold the job as it was before it returned to a checkpoint.
    pub fn holders(&self) -> impl Iterator<Item = ServerId> {
        let interrupted = match self {
            Self::Waiting { interrupted, .. } | Self::Opening { interrupted, .. } => interrupted,
            Self::Open(_) | Self::Recovering(_) | Self::Failed { .. } => &None,
        };
        interrupted.iter().flat_map(|interrupted| interrupted.holders())
    }

    /// Returns whether the server holds slices of the job, or allocates memory for them.
    pub fn uses(&self, server: ServerId) -> bool {
        self.placement().is_some_and(|placement| placement.servers().iter().any(|s| s.id == server))
    }

    /// All waiting calls, and all leases.
    pub fn into_waiting(self) -> (Vec<Waiter>, Vec<Lease>) {
        match self {
            Self::Waiting { mut creators, interrupted, .. }
            | Self::Opening { mut creators, interrupted, .. } => {
                let mut leases = Vec::new();
                if let Some(interrupted) = interrupted {
                    leases.extend(interrupted.members.leases());
                    creators.extend(interrupted.into_waiters());
                }
                (creators, leases)
            }
            Self::Open(mut open) => {
                let mut waiters = open.round.drop_all();
                waiters.extend(open.last.into_iter().flat_map(|last| last.waiters));
                waiters.extend(open.resting.end().1);
                waiters.extend(open.saves.into_waiters());
                waiters.extend(open.queue.into_waiters());
                let leases = open.members.leases().collect();
                waiters.extend(open.members.into_joining());
                (waiters, leases)
            }
            Self::Recovering(_) | Self::Failed { .. } => (Vec::new(), Vec::new()),
        }
    }

    pub fn open(&self, job: &str) -> Result<&Open> {
        match self {
            Self::Open(open) => Ok(open),
            other => Err(other.not_open(job)),
        }
    }

    pub fn open_mut(&mut self, job: &str) -> Result<&mut Open> {
        match self {
            Self::Open(open) => Ok(open),
            other => Err(other.not_open(job)),
        }
    }

    /// The error for a call that needs an open job.
    fn not_open(&self, job: &str) -> Error {
        match self {
            Self::Failed { reason, .. } => {
                Error::JobFailed { job: job.to_owned(), reason: reason.clone() }
            }
            Self::Recovering(_) => unknown_yet(job),
            Self::Waiting { .. } | Self::Opening { .. } | Self::Open(_) => Error::Unavailable {
                peer: format!("job {job:?}"),
                cause: "its shard servers have not all opened it yet".to_owned(),
            },
        }
    }
}
