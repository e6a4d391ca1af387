//! Recovery: a coordinator that has just started learns the jobs from their servers.
//!
//! The servers keep their jobs without a coordinator, and describe them to the next one (`Held`).
//! When every server of a job's placement has done so, the job continues where the commands of the
//! last coordinator have left it:
//! - A decision that any server has stands, and is sent to those that do not have it.
//! - Where only some servers know of a lease or of its end, the rank is lost: a new epoch begins.
//! - Otherwise the open attempt continues with the gradients that have arrived. The ranks keep
//!   their leases, open a new stream within [`RECOVERY`], and repeat their calls.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use zeroshard_proto::{Error, JobSpec, Restore, Succession};

use super::{
    cluster::Cluster,
    commit::check_report,
    decisions::{Decided, Decision},
    events::{Action, Command, JobRef, Lease, Now, Said, ServerId},
    jobs::Plan,
    leases::Cause,
    members::Member,
    reduce::{Gradient, Reduced},
    resting::Rester,
    state::{Job, Open, Phase},
};
use crate::{attempt::Attempt, listing::some_of};

/// How long a job waits for its servers, and then for its ranks.
pub(crate) const RECOVERY: Duration = Duration::from_secs(10);

/// A job as one of its servers describes it.
#[derive(Debug, Clone)]
pub(crate) struct Held {
    pub(crate) id: u64,
    pub(crate) spec: Arc<JobSpec>,
    pub(crate) plan: Plan,
    pub(crate) succession: Option<Arc<Succession>>,
    pub(crate) restore: Option<Arc<Restore>>,
    /// The open attempt.
    pub(crate) attempt: Attempt,
    /// Whether version 0 is published.
    pub(crate) published: bool,
    /// Before that: whether the server has all initial parameters of its slices.
    pub(crate) initialised: bool,
    pub(crate) ranks: Ranks,
    /// The gradients of the open attempt, if they are complete.
    pub(crate) ready: Option<Reduced>,
    /// The decision about the previous step, and the gradients that it is about.
    pub(crate) decided: Option<(Decision, Reduced)>,
}

/// What a server knows about the ranks of a job.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Ranks {
    pub(crate) leases: BTreeMap<u32, Lease>,
    /// Ranks that have no more data.
    pub(crate) done: BTreeSet<u32>,
    /// Ranks that have left in order.
    pub(crate) left: BTreeSet<u32>,
    /// For each rank that rests, the step since when, and whether means exclude it.
    pub(crate) resting: BTreeMap<u32, (u64, bool)>,
}

/// A job some of whose servers have described it.
#[derive(Debug)]
pub(crate) struct Recovery {
    pub(super) plan: Plan,
    held: BTreeMap<ServerId, Held>,
    deadline: Now,
}

impl Recovery {
    pub(super) fn deadline(&self) -> Now {
        self.deadline
    }

    /// The server is lost again.
    pub(super) fn forget(&mut self, server: ServerId) {
        self.held.remove(&server);
    }
}

impl Cluster {
    /// A server has described the jobs that it holds. It has followed another coordinator before if
    /// it `is_new` here; a job that this coordinator has dropped is closed.
    pub(super) fn take_over(
        &mut self,
        server: ServerId,
        held: Vec<Held>,
        is_new: bool,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        for held in held {
            let job = JobRef { name: held.spec.name.clone(), id: held.id };
            if is_new {
                self.make_way_for(&job, out);
            }
            match self.jobs.get_mut(&job.name) {
                None if is_new => {
                    out.push(Action::Tick(now + RECOVERY));
                    self.jobs.insert(job.name.clone(), Job::recovering(server, held, now));
                }
                Some(Job { id, phase: Phase::Recovering(recovery), .. }) if *id == job.id => {
                    recovery.held.insert(server, held);
                }
                _ => out.push(Action::Command(server, Command::Close(job))),
            }
        }
        let recovering = |job: &&Job| matches!(job.phase, Phase::Recovering(_));
        let names: Vec<String> =
            self.jobs.values().filter(recovering).map(|job| job.spec.name.clone()).collect();
        for name in names {
            self.try_recover(&name, now, out);
        }
    }

    /// A worker may have asked for the job before a server has described it. It asks again.
    fn make_way_for(&mut self, job: &JobRef, out: &mut Vec<Action>) {
        let is_new =
            |job: &&Job| matches!(job.phase, Phase::Waiting { .. } | Phase::Opening { .. });
        if self.jobs.get(&job.name).filter(is_new).is_none() {
            return;
        }
        if let Some(Job { id, phase, .. }) = self.jobs.remove(&job.name) {
            self.dissolve(&job.name, id, phase, &unknown_yet(&job.name), out);
        }
    }

    /// Whether servers may still describe jobs: the coordinator has just started, and servers of an
    /// earlier one have registered, or none at all.
    pub(super) fn is_learning(&self) -> bool {
        self.learns_until.is_some() && self.has_returning != Some(false)
    }

    /// Ends the time in which servers may describe jobs.
    pub(super) fn expire_learning(&mut self, now: Now, out: &mut Vec<Action>) {
        if self.learns_until.take_if(|until| *until <= now).is_some() {
            let names: Vec<String> = self.jobs.keys().cloned().collect();
            for name in names {
                self.try_place(&name, out);
            }
        }
    }

    /// Continues a job that all of its servers have described.
    fn try_recover(&mut self, name: &str, now: Now, out: &mut Vec<Action>) {
        let Some(Job { phase: Phase::Recovering(recovery), .. }) = self.jobs.get(name) else {
            return;
        };
        let mut is_complete = true;
        for server in recovery.plan.placement.servers() {
            match self.servers.get(&server.id) {
                None => is_complete = false,
                Some(known) if known.incarnation != server.incarnation => {
                    let reason = format!("{} was restarted", self.name(server.id));
                    return self.fail(name, &reason, now, out);
                }
                // It has closed the job, so the job was deleted or has failed.
                Some(_) if !recovery.held.contains_key(&server.id) => {
                    return self.remove(name, "it was closed", out);
                }
                Some(_) => {}
            }
        }
        if is_complete {
            self.recover(name, now, out);
        }
    }

    fn recover(&mut self, name: &str, now: Now, out: &mut Vec<Action>) {
        let Some(Job { spec, id, phase: Phase::Recovering(recovery), .. }) = self.jobs.get(name)
        else {
            return;
        };
        let job = JobRef { name: name.to_owned(), id: *id };
        let Recovered { open, epoch, commands, lost } =
            match recovery.rebuild(&job, spec, now + RECOVERY) {
                Ok(recovered) => recovered,
                Err(reason) => return self.fail(name, &reason, now, out),
            };
        out.push(Action::Note(format!(
            "job {name:?} continues at step {} in epoch {epoch}, with {} of {} ranks",
            open.step(),
            open.members.len(),
            spec.world
        )));
        out.extend(commands.into_iter().map(|(server, command)| Action::Command(server, command)));
        out.push(Action::Tick(now + RECOVERY));
        self.see_epoch(epoch);
        if let Some(job) = self.jobs.get_mut(name) {
            (job.epoch, job.phase) = (epoch, Phase::Open(Box::new(open)));
        }
        for rank in lost {
            self.new_epoch(name, rank, Cause::Recovered, out);
        }
        self.publish_if_initialised(name, out);
        self.unused_from(name, now, out);
        self.advance(name, now, out);
    }

    /// Notes what a server says about a job after it has described the job.
    pub(super) fn amend(&mut self, server: ServerId, said: &Said, now: Now, out: &mut Vec<Action>) {
        let (Said::Ready { job, .. } | Said::Initialised { job, .. } | Said::Failed { job, .. }) =
            said
        else {
            return;
        };
        let name = self.name(server);
        let Some(Job { phase: Phase::Recovering(recovery), .. }) = self.reported_job(job) else {
            return;
        };
        let Some(held) = recovery.held.get_mut(&server) else { return };
        match said {
            Said::Ready { attempt, reduced, .. } if *attempt == held.attempt => {
                held.ready = Some(reduced.clone());
            }
            Said::Initialised { epoch, .. } if *epoch == held.attempt.epoch => {
                held.initialised = true;
            }
            Said::Failed { reason, .. } => {
                let reason = format!("{name}: {reason}");
                self.fail(&job.name, &reason, now, out);
            }
            _ => {}
        }
    }

    /// Fails the job at its deadline, if servers have not described it.
    pub(super) fn expire_recovery(&mut self, name: &str, now: Now, out: &mut Vec<Action>) {
        let Some(Job { phase: Phase::Recovering(recovery), .. }) = self.jobs.get(name) else {
            return;
        };
        if recovery.deadline > now {
            return;
        }
        let servers = recovery.plan.placement.servers().iter();
        let late = servers.filter(|server| !recovery.held.contains_key(&server.id));
        let late: Vec<_> = late.map(|server| format!("shard server {}", server.address)).collect();
        let late = some_of(late);
        let reason =
            format!("{late} did not connect within {RECOVERY:?} of the coordinator's start");
        self.fail(name, &reason, now, out);
    }
}

impl Job {
    fn recovering(server: ServerId, held: Held, now: Now) -> Self {
        let (id, spec, succession) = (held.id, held.spec.clone(), held.succession.clone());
        let restore = held.restore.clone();
        let (plan, deadline) = (held.plan.clone(), now + RECOVERY);
        let recovery = Recovery { plan, held: BTreeMap::from([(server, held)]), deadline };
        let phase = Phase::Recovering(Box::new(recovery));
        Self { spec, id, epoch: 0, unused_since: now, succession, restore, phase }
    }
}

/// A job that continues.
#[derive(Debug)]
struct Recovered {
    open: Open,
    epoch: u64,
    /// What the last coordinator has not sent to all servers.
    commands: Vec<(ServerId, Command)>,
    /// Ranks for which a new epoch begins. The world size stands for none.
    lost: Vec<u32>,
}

impl Recovery {
    /// The job as its servers describe it together. `deadline`: when a rank without a stream is
    /// lost.
    ///
    /// # Errors
    /// A text, if the descriptions contradict each other.
    fn rebuild(&self, job: &JobRef, spec: &JobSpec, deadline: Now) -> Result<Recovered, String> {
        let step = self.held.values().map(|held| held.attempt.step).max().unwrap_or(0);
        let decision = self.decision_before(step);
        let mut attempts = BTreeMap::new();
        let mut commands = Vec::new();
        let published = self.held.values().any(|held| held.published);
        for (&server, held) in &self.held {
            let mut attempt = held.attempt;
            if published && !held.published {
                let publish = Command::Publish { job: job.clone(), epoch: attempt.epoch };
                commands.push((server, publish));
            }
            if attempt.step != step {
                if !self.plan.trainable.contains_key(&server) {
                    // The decision did not wait for it, so it may lack more than the decision.
                    attempt = decision.map_or(attempt, |decision| decision.attempt);
                    commands.push((server, Command::NewAttempt { job: job.clone(), attempt }));
                }
                let decision = decision.filter(|d| d.attempt == attempt);
                let Some(decision) = decision.cloned() else {
                    return Err(format!(
                        "shard server {server:016x} is at {attempt:?} while another is at step \
                         {step}; this is a bug"
                    ));
                };
                if held.ready.is_none() && self.plan.trainable.contains_key(&server) {
                    return Err(format!(
                        "shard server {server:016x} lacks gradients of step {} that was decided; \
                         this is a bug",
                        step - 1
                    ));
                }
                attempt = Attempt::first(attempt.epoch, step);
                commands.push((server, Command::Decide { job: job.clone(), decision }));
            }
            attempts.insert(server, attempt);
        }
        let top = attempts.values().copied().max().unwrap_or(Attempt::first(0, 0));
        for (&server, &attempt) in &attempts {
            if attempt.epoch == top.epoch && attempt < top {
                let next = Command::NewAttempt { job: job.clone(), attempt: top };
                commands.push((server, next));
            }
        }
        let (ranks, mut lost) = self.ranks(spec.world);
        if lost.is_empty() && attempts.values().any(|attempt| attempt.epoch != top.epoch) {
            lost.push(spec.world);
        }
        let mut open = Open::new(self.plan.clone());
        open.version = published.then_some(step);
        open.uninitialised = match published {
            true => BTreeSet::new(),
            false => self.servers_where(|held| !held.initialised || held.attempt != top),
        };
        open.round.attempt = top.number;
        for (&server, held) in self.held.iter().filter(|(_, held)| held.attempt == top) {
            let trained = self.plan.trainable.get(&server);
            if let Some(ready) = held.ready.clone().filter(|_| trained.is_some()) {
                check_report(&ready, trained)?;
                open.round.reports.insert(server, ready);
            }
        }
        open.last = decision.and_then(|decision| self.decided(spec, decision)).map(Box::new);
        open.take_ranks(ranks, deadline);
        Ok(Recovered { open, epoch: top.epoch, commands, lost })
    }

    fn servers_where(&self, test: impl Fn(&Held) -> bool) -> BTreeSet<ServerId> {
        self.held.iter().filter(|(_, held)| test(held)).map(|(&server, _)| server).collect()
    }

    /// The decision that has led to `step`.
    fn decision_before(&self, step: u64) -> Option<&Decision> {
        let decisions = self.held.values().filter_map(|held| Some(&held.decided.as_ref()?.0));
        decisions.into_iter().find(|decision| decision.attempt.step + 1 == step)
    }

    /// The decision with its report, for ranks that repeat their commits. `None` if the servers do
    /// not have all figures, which is the case if no rank can ask.
    fn decided(&self, spec: &JobSpec, decision: &Decision) -> Option<Decided> {
        let mut figures = BTreeMap::new();
        for (&server, held) in &self.held {
            let reduced = match &held.decided {
                Some((known, reduced)) if known.attempt == decision.attempt => Some(reduced),
                _ => held.ready.as_ref().filter(|_| held.attempt == decision.attempt),
            };
            if let Some(trained) = self.plan.trainable.get(&server) {
                check_report(reduced?, Some(trained)).ok()?;
                figures.insert(server, reduced?.clone());
            }
        }
        let contributes = |rank| !decision.figures.resting.contains(&rank);
        let gradient = Gradient::new(spec, &figures, contributes);
        let behind = self.servers_where(|held| held.attempt.step == decision.attempt.step);
        Some(Decided::new(decision.report(spec, gradient), decision.attempt.epoch, behind))
    }

    /// What all servers know alike about the ranks, and the ranks about which they differ.
    fn ranks(&self, world: u32) -> (Ranks, Vec<u32>) {
        let all: Vec<&Ranks> = self.held.values().map(|held| &held.ranks).collect();
        let Some(&first) = all.first() else { return (Ranks::default(), Vec::new()) };
        if all.iter().all(|other| *other == first) {
            return (first.clone(), Vec::new());
        }
        let of = |ranks: &Ranks, rank: u32| {
            let lease = ranks.leases.get(&rank).copied();
            (lease, ranks.done.contains(&rank), ranks.left.contains(&rank))
        };
        let differ = |rank: &u32| all.iter().any(|ranks| of(ranks, *rank) != of(first, *rank));
        let mut lost: Vec<u32> = (0..world).filter(differ).collect();
        let mut ranks = first.clone();
        for rank in &lost {
            ranks.leases.remove(rank);
            ranks.done.remove(rank);
            ranks.left.remove(rank);
        }
        if all.iter().any(|other| other.resting != first.resting) {
            // Some servers count zeros for ranks that rest; a new epoch ends all rests.
            ranks.resting = all.iter().flat_map(|other| other.resting.clone()).collect();
            if lost.is_empty() {
                lost.push(world);
            }
        }
        (ranks, lost)
    }
}

impl Open {
    fn take_ranks(&mut self, ranks: Ranks, deadline: Now) {
        let Ranks { leases, done, left, resting } = ranks;
        for (rank, lease) in leases {
            self.members.insert(rank, Member::detached(lease, deadline));
        }
        (self.done, self.left) = (done, left);
        for (rank, (since, excluded)) in resting {
            self.resting.insert(rank, Rester { since, excluded, waiters: Vec::new() });
        }
    }
}

/// The error for a member's call about a job that a new coordinator may still learn.
pub(super) fn unknown_yet(job: &str) -> Error {
    Error::Unavailable {
        peer: format!("job {job:?}"),
        cause: "the coordinator was started and its shard servers have not all connected".into(),
    }
}
