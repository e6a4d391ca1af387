//! A job in any phase. What it does is in the files of `job`, one for each subject.

pub(crate) mod attempts;
pub(crate) mod commit;
pub(crate) mod copies;
pub(crate) mod creators;
pub(crate) mod decisions;
pub(crate) mod disconnects;
pub(crate) mod drains;
pub(crate) mod endings;
pub(crate) mod epochs;
pub(crate) mod figures;
pub(crate) mod idle;
pub(crate) mod leases;
pub(crate) mod links;
pub(crate) mod memberships;
pub(crate) mod opening;
pub(crate) mod operators;
pub(crate) mod progress;
pub(crate) mod rebuild;
pub(crate) mod recovery;
pub(crate) mod reduce;
pub(crate) mod replicas;
pub(crate) mod resting;
pub(crate) mod restore;
pub(crate) mod resync;
pub(crate) mod save;
pub(crate) mod scrub;
pub(crate) mod succession;
pub(crate) mod user_data;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use zeroshard_model::{Attempt, Error, JobSpec, Placement, Restore, Result, Succession};

use crate::{
    calls::Turn,
    commands::{Checkpoint, Command},
    context::{Common, Context},
    decided::Decided,
    disconnects::Away,
    events::Action,
    figures::Lateness,
    held::Age,
    ids::{JobRef, Lease, Now, ServerId, Waiter},
    index::{Entry, Interests, Name},
    interrupted::Interrupted,
    learning::unknown_yet,
    links::Links,
    members::{Members, Queue},
    memberships::Peers,
    plan::{Loads, Plan},
    progress::Progress,
    recovery::Recovery,
    replicas::Replicas,
    resting::Resting,
    round::Round,
    saves::Saves,
    scrub::Scrub,
    user_data::UserData,
};

/// A job in any phase.
#[derive(Debug)]
pub struct Job {
    /// That of the spec.
    pub(crate) name: Name,
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

/// The content of a DescribeJob response, which the service converts without the driver's lock.
#[derive(Debug)]
pub struct Description {
    pub spec: Arc<JobSpec>,
    pub placement: Arc<Placement>,
    pub epoch: u64,
    pub version: Option<u64>,
    pub job_id: u64,
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
    /// The job has ended, and the cluster is about to forget it.
    Gone,
}

impl Job {
    /// The job, as its members and servers name it.
    pub(crate) fn reference(&self) -> JobRef {
        JobRef { name: self.spec.name.clone(), id: self.id }
    }

    /// Returns whether the job is being created: it has never been open.
    pub(crate) fn is_new(&self) -> bool {
        matches!(
            self.phase,
            Phase::Waiting { interrupted: None, .. } | Phase::Opening { interrupted: None, .. }
        )
    }

    /// What a reader needs to know of the job.
    ///
    /// # Errors
    /// Those of [`Phase::open`].
    pub fn describe(&self) -> Result<Description> {
        let open = self.phase.open(&self.name)?;
        Ok(Description {
            spec: self.spec.clone(),
            placement: open.placement.clone(),
            epoch: self.epoch,
            version: open.version,
            job_id: self.id,
        })
    }

    /// The attempt that was decided last.
    pub fn last_decision(&self) -> Option<Attempt> {
        let Phase::Open(open) = &self.phase else { return None };
        Some(open.last.as_ref()?.decision.attempt)
    }

    /// Why the job has failed, if it has.
    pub fn failure(&self) -> Option<&str> {
        match &self.phase {
            Phase::Failed { reason, .. } => Some(reason),
            _ => None,
        }
    }

    /// What the cluster knows of the job without visiting it.
    pub(crate) fn entry(&self, common: &Common) -> Entry {
        let open = match &self.phase {
            Phase::Open(open) => Some(open),
            _ => None,
        };
        let from = self.succession.as_ref().filter(|_| self.is_new());
        Entry {
            placement: self.phase.placement_arc().cloned(),
            holders: self.phase.holders().collect(),
            deadline: self.next_deadline(common),
            predecessor: from.map(|succession| succession.from.job_id),
            interests: Interests {
                servers: matches!(self.phase, Phase::Waiting { .. }),
                descriptions: matches!(self.phase, Phase::Recovering(_)),
                replicas: open.is_some_and(|open| open.replicas.are_wanted()),
                saving: open.is_some_and(|open| open.saves.current().is_some()),
            },
        }
    }

    /// The earliest deadline of a waiting call or of the job itself, when it has to be visited.
    pub(crate) fn next_deadline(&self, common: &Common) -> Option<Now> {
        let of_phase = match &self.phase {
            Phase::Waiting { creators, interrupted, .. }
            | Phase::Opening { creators, interrupted, .. } => {
                let deadlines = creators.iter().map(|waiter| waiter.deadline);
                let interrupted = interrupted.iter().filter_map(|of| of.next_deadline());
                deadlines.chain(interrupted).min()
            }
            Phase::Open(open) => open.next_deadline(),
            Phase::Recovering(recovery) => Some(recovery.deadline()),
            Phase::Failed { .. } | Phase::Gone => None,
        };
        of_phase.into_iter().chain(self.idle_deadline(common)).min()
    }

    /// Does what is due: calls whose deadline has passed are answered, and what has been waited for
    /// too long is given up.
    pub(crate) fn expire(&mut self, cx: &mut Context<'_>) {
        self.expire_creators(cx);
        self.expire_recovery(cx);
        self.expire_interrupted(cx);
        self.expire_disconnects(cx);
        self.expire_links(cx);
        self.expire_joins(cx);
        self.expire_commits(cx);
        self.expire_stored(cx);
        self.expire_reducers(cx);
        self.expire_discards(cx);
        self.expire_rests(cx);
        self.expire_saves(cx);
        self.delete_if_idle(cx);
    }
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
    pub scrub: Scrub,
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
            scrub: Scrub::default(),
            lateness: Lateness::default(),
        }
    }

    fn next_deadline(&self) -> Option<Now> {
        let last =
            self.last.iter().flat_map(|last| last.waiters.iter().map(|waiter| waiter.deadline));
        let others = [
            self.round.next_deadline(),
            self.resting.next_deadline(),
            self.saves.next_deadline(),
            self.queue.next_deadline(),
            self.members.next_deadline(),
            self.links.due(),
        ];
        let away = self.away.values().map(|away| away.until);
        last.chain(others.into_iter().flatten()).chain(away).min()
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
        self.placement_arc().map(|placement| &**placement)
    }

    fn placement_arc(&self) -> Option<&Arc<Placement>> {
        match self {
            Self::Waiting { .. } | Self::Failed { .. } | Self::Gone => None,
            Self::Opening { plan, .. } => Some(&plan.placement),
            Self::Recovering(recovery) => Some(&recovery.plan.placement),
            Self::Open(open) => Some(&open.placement),
        }
    }

    /// The bytes that the job needs of each server, once it is placed.
    pub fn loads(&self) -> Option<&Loads> {
        match self {
            Self::Waiting { .. } | Self::Failed { .. } | Self::Gone => None,
            Self::Opening { plan, .. } => Some(&plan.loads),
            Self::Recovering(recovery) => Some(&recovery.plan.loads),
            Self::Open(open) => Some(&open.loads),
        }
    }

    /// The servers that may hold the job as it was before it returned to a checkpoint.
    pub fn holders(&self) -> impl Iterator<Item = ServerId> {
        let interrupted = match self {
            Self::Waiting { interrupted, .. } | Self::Opening { interrupted, .. } => interrupted,
            Self::Open(_) | Self::Recovering(_) | Self::Failed { .. } | Self::Gone => &None,
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
            Self::Recovering(_) | Self::Failed { .. } | Self::Gone => (Vec::new(), Vec::new()),
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
            Self::Gone => Error::UnknownJob { job: job.to_owned() },
            Self::Waiting { .. } | Self::Opening { .. } | Self::Open(_) => Error::Unavailable {
                peer: format!("job {job:?}"),
                cause: "its shard servers have not all opened it yet".to_owned(),
            },
        }
    }
}
