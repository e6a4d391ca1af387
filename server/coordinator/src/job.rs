//! A job in any phase. What it does is in the files of `job`, one for each subject.

pub(crate) mod attempts;
pub(crate) mod broken_links;
pub(crate) mod commit;
pub(crate) mod copies;
pub(crate) mod creators;
pub(crate) mod drains;
pub(crate) mod endings;
pub(crate) mod epochs;
pub(crate) mod fork;
pub(crate) mod idle;
pub(crate) mod leases;
pub(crate) mod memberships;
pub(crate) mod metrics_view;
pub(crate) mod opening;
pub(crate) mod operators;
pub(crate) mod progress;
pub(crate) mod rebuild;
pub(crate) mod recovery;
pub(crate) mod reduce;
pub(crate) mod replicas;
pub(crate) mod restore;
pub(crate) mod resync;
pub(crate) mod rewind;
pub(crate) mod save;
pub(crate) mod scrub;
pub(crate) mod server_disconnects;
pub(crate) mod spikes;
pub(crate) mod step_decision;
pub(crate) mod uneven_inputs;
pub(crate) mod user_data;

use std::{collections::BTreeSet, mem, sync::Arc};

use zeroshard_model::{
    Attempt, Error, Fork, JobSpec, Line, Placement, RecentSteps, Restore, Result, Server,
};

use crate::{
    cluster::{
        context::{Common, Context},
        index::{Entry, Interests, Name},
        startup::unknown_yet,
    },
    operators::metrics_view::Lateness,
    placement::plan::{Loads, Plan},
    state::{
        broken_links::BrokenLinks,
        departed::Departed,
        interrupted::Interrupted,
        members::{Members, Queue},
        memberships::Peers,
        progress::Progress,
        recovery::Recovery,
        replicas::Replicas,
        round::Round,
        saves::Saves,
        scrub::Scrub,
        server_disconnects::Disconnects,
        uneven_inputs::UnevenInputs,
        user_data::UserData,
        version::Version,
    },
    vocabulary::{
        calls::Turn,
        commands::{Checkpoint, Command},
        events::Action,
        ids::{JobRef, Lease, Now, ServerId, Waiter},
        job_report::Age,
    },
};

/// A job in any phase.
#[derive(Debug)]
pub struct Job {
    /// The name in the spec.
    pub(crate) name: Name,
    pub spec: Arc<JobSpec>,
    /// Random, never 0.
    pub id: u64,
    /// 0 until the job is placed.
    pub epoch: u64,
    /// The line of its versions.
    pub line: Arc<Line>,
    /// The figures of the steps before the open one, for the policy on spikes.
    pub(crate) recent: RecentSteps,
    /// The time when the last lease ended; before the first lease, the time when workers could
    /// first join; or the time when the job failed. It has no meaning while a rank has a lease.
    pub unused_since: Now,
    /// How it continues from another job, if it does.
    pub fork: Option<Arc<Fork>>,
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
    pub line: u64,
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
            placement: open.plan.placement.clone(),
            epoch: self.epoch,
            version: open.version.current(),
            line: self.line.number,
            job_id: self.id,
        })
    }

    /// The attempt that was decided last.
    pub fn last_decision(&self) -> Option<Attempt> {
        let Phase::Open(open) = &self.phase else { return None };
        Some(open.version.last()?.decision().attempt)
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
        let from = self.fork.as_ref().filter(|_| self.is_new());
        Entry {
            placement: self.phase.plan().map(|plan| plan.placement.clone()),
            holders: self.phase.holders().collect(),
            deadline: self.next_deadline(common),
            predecessor: from.map(|fork| fork.from.job_id),
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

    /// Answers calls at their deadlines, and gives up what the job has waited for too long.
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
    pub plan: Plan,
    pub version: Version,
    pub members: Members,
    /// Joins that wait for the end of an earlier lease.
    pub queue: Queue,
    pub departed: Departed,
    pub uneven_inputs: UnevenInputs,
    pub peers: Peers,
    pub round: Round,
    pub saves: Saves,
    pub disconnects: Disconnects,
    /// The links from ranks to servers that do not work.
    pub broken_links: BrokenLinks,
    pub replicas: Replicas,
    pub scrub: Scrub,
    pub lateness: Lateness,
    /// The attempt at a step that is a spike, while the driver searches for a checkpoint.
    pub spike: Option<Attempt>,
}

impl Open {
    pub fn new(plan: Plan, replicas: Replicas) -> Self {
        let servers = plan.placement.servers().iter().map(|server| server.id).collect();
        Self {
            version: Version::awaited(servers),
            plan,
            members: Members::default(),
            queue: Queue::default(),
            departed: Departed::default(),
            uneven_inputs: UnevenInputs::default(),
            peers: Peers::default(),
            round: Round::default(),
            saves: Saves::default(),
            disconnects: Disconnects::default(),
            broken_links: BrokenLinks::default(),
            replicas,
            scrub: Scrub::default(),
            lateness: Lateness::default(),
            spike: None,
        }
    }

    fn next_deadline(&self) -> Option<Now> {
        let deadlines = [
            self.round.next_deadline(),
            self.uneven_inputs.next_deadline(),
            self.saves.next_deadline(),
            self.queue.next_deadline(),
            self.members.next_deadline(),
            self.broken_links.due(),
            self.version.next_deadline(),
            self.disconnects.next_deadline(),
        ];
        deadlines.into_iter().flatten().min()
    }

    /// The open step. It can be pushed and committed before the initial parameters are complete.
    pub fn step(&self) -> u64 {
        self.version.current().unwrap_or(0)
    }

    /// The version from which the current line began, if it is known.
    pub(crate) fn began_from(&self) -> Option<u64> {
        let rolled_back = self.version.rolled_back().map(|(_, version)| version);
        rolled_back.or_else(|| self.saves.origin().map(|of| of.version.version))
    }

    /// The open attempt, in the job's current epoch.
    pub fn attempt(&self, epoch: u64) -> Attempt {
        Attempt { epoch, step: self.step(), number: self.round.attempt() }
    }

    /// The ids of the servers of the placement.
    pub fn servers(&self) -> impl Iterator<Item = ServerId> + '_ {
        self.plan.placement.servers().iter().map(|server| server.id)
    }

    /// The servers of the placement that are not connected.
    pub fn away(&self) -> impl Iterator<Item = &Server> {
        let servers = self.plan.placement.servers().iter();
        servers.filter(|server| self.disconnects.contains(server.id))
    }

    /// Sends `command` to every server of the placement.
    pub fn send(&self, command: &Command, out: &mut Vec<Action>) {
        out.extend(self.servers().map(|server| Action::Command(server, command.clone())));
    }

    /// Drops the calls about steps and saves, and returns them.
    pub(crate) fn drop_calls(&mut self) -> Vec<Waiter> {
        let mut waiters = self.round.drop_all();
        waiters.extend(mem::take(&mut self.version).into_waiters());
        waiters.extend(self.uneven_inputs.end().1);
        waiters.extend(mem::take(&mut self.saves).into_waiters());
        waiters
    }

    /// Wakes the streams of all members to look for changes.
    pub fn wake_all(&self, out: &mut Vec<Action>) {
        out.extend(self.members.leases().map(Action::Wake));
    }

    /// The number of ranks that take part in the open step.
    pub fn active(&self, world: u32) -> usize {
        world as usize - self.departed.done().len() - self.uneven_inputs.len()
    }

    /// Returns whether every rank has left in order or has no more data.
    pub fn has_ended(&self, world: u32) -> bool {
        self.members.is_empty() && self.departed.len() == world as usize
    }

    /// Returns whether the rank takes part in the open step: it is neither done nor resting.
    pub fn takes_part(&self, rank: u32) -> bool {
        !self.departed.is_done(rank) && !self.uneven_inputs.contains(rank)
    }

    /// The ranks below `world` that take part and have not called: those with a worker, and those
    /// without.
    pub fn missing(&self, world: u32, has_called: impl Fn(u32) -> bool) -> (Vec<u32>, Vec<u32>) {
        let missing = (0..world).filter(|&rank| !has_called(rank) && self.takes_part(rank));
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
        if let Some((_, version)) =
            self.version.rolled_back().filter(|(epoch, _)| attempt.epoch < *epoch)
        {
            return Err(Error::RolledBack { job: job.name.clone(), version });
        }
        if let Some(since) = self.uneven_inputs.since(rank) {
            return Err(Error::refused(format!(
                "rank {rank} of job {:?} has rested since step {since}; it takes part again when \
                 every rank rests",
                job.name
            )));
        }
        if let Some(rank) = self.departed.left().next() {
            return Err(Error::RankLeft { job: job.name.clone(), rank, step: self.step() });
        }
        if attempt == current { Ok(()) } else { Err(attempt.refusal(&job.name, current)) }
    }
}

impl Phase {
    /// The placement with what follows from it, once there is one.
    fn plan(&self) -> Option<&Plan> {
        match self {
            Self::Waiting { .. } | Self::Failed { .. } | Self::Gone => None,
            Self::Opening { plan, .. } => Some(plan),
            Self::Recovering(recovery) => Some(recovery.plan()),
            Self::Open(open) => Some(&open.plan),
        }
    }

    pub fn placement(&self) -> Option<&Placement> {
        self.plan().map(|plan| &*plan.placement)
    }

    /// The bytes that the job needs of each server, once it is placed.
    pub fn loads(&self) -> Option<&Loads> {
        self.plan().map(|plan| &plan.loads)
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
                    leases.extend(interrupted.leases());
                    creators.extend(interrupted.into_waiters());
                }
                (creators, leases)
            }
            Self::Open(mut open) => {
                let mut waiters = open.drop_calls();
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
