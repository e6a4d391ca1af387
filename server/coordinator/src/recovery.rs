//! Recovery: a coordinator that has just started learns the jobs from their servers.
//!
//! The servers keep their jobs without a coordinator, and describe them to the next one (`Held`).
//! When every server of a job's placement has done so, the job continues where the commands of the
//! last coordinator have left it. A job with replicas continues without servers whose process has
//! ended. Each server has received the first part of the same commands, so
//! the servers at the latest attempt know the most, and the others are told what they lack
//! (`catch_up`):
//! - A decision, an epoch, an attempt, and a rank that is done, has left or rests stand if any
//!   server knows them.
//! - A lease stands if all servers know it: its worker was not told of it before.
//! - The open attempt continues with the gradients that have arrived. The ranks keep their leases,
//!   open a new stream within [`RECOVERY`], and repeat their calls.
//!
//! A server whose stream to a living coordinator has broken describes its jobs as well (`absence`).

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    time::Duration,
};

use zeroshard_model::{Attempt, Error, Server, listing::some_of};

use super::{
    cluster::Cluster,
    events::{
        Action, Attach, Command, FailedThere, JobRef, Lease, Link, Now, Said, ServerId, Waiter,
    },
    held::{Held, Ranks},
    jobs::Plan,
    leases::MAX_AHEAD,
    progress::Progress,
    rebuild::Recovered,
    state::{Job, Phase},
};

/// How long a job waits for its servers, and then for its ranks. A server notices that the host of
/// the coordinator is gone after 30 s at most (`KEEPALIVE_INTERVAL` and `KEEPALIVE_TIMEOUT`), dials
/// for 5 s (`CONNECT_TIMEOUT`), and describes its jobs in 8 s (`DESCRIPTION_LIMIT`). Calls of
/// clients wait for 60 s by default.
pub const RECOVERY: Duration = Duration::from_secs(45);

/// The part of [`LEARNING`] in which servers of an earlier coordinator may return after the first
/// new one. They dial again after half a second (`shard::RECONNECT`).
pub const SETTLING: Duration = Duration::from_secs(1);

/// How long a coordinator that has just started waits before it places new jobs, and tells those
/// who are not members of a job that it does not exist: a server may describe a job of that name.
/// Servers of a coordinator whose process has ended dial again at once. Members of a job know that
/// it exists, and wait for [`RECOVERY`].
pub const LEARNING: Duration = Duration::from_secs(10);

/// A job some of whose servers have described it.
#[derive(Debug)]
pub struct Recovery {
    pub(super) plan: Plan,
    pub(super) held: BTreeMap<ServerId, Held>,
    /// The descriptions by servers whose streams have broken since.
    away: BTreeMap<ServerId, Held>,
    /// Servers of a job with replicas that will not come back, and why.
    pub(super) lost: BTreeMap<ServerId, String>,
    /// The attempts of descriptions that were out of date. A server that repeats one is at fault.
    doubted: BTreeMap<ServerId, Attempt>,
    /// The workers that have asked to continue, by rank: the lease, and the epoch that it knows.
    asked: BTreeMap<u32, (Lease, u64)>,
    deadline: Now,
}

impl Recovery {
    pub(super) fn deadline(&self) -> Now {
        self.deadline
    }

    /// The first part of the job in which another server's description differs, and that server.
    fn difference(&self, held: &Held) -> Option<(ServerId, String)> {
        let (&server, first) = self.held.first_key_value()?;
        if first.spec.name != held.spec.name || *first.spec != *held.spec {
            let part = first.spec.difference(&held.spec).unwrap_or_else(|| "options".to_owned());
            return Some((server, format!("specifications of the job: {part}")));
        }
        // A server of a job with replicas, or that was restored, may have missed the latest
        // placement.
        let can_move = held.spec.replicas > 1 || held.spec.is_restored_on_loss();
        if first.plan != held.plan && !can_move {
            return Some((server, "placements of its slices".to_owned()));
        }
        let differs = first.succession != held.succession;
        differs.then(|| (server, "predecessors of the job".to_owned()))
    }

    /// The servers that are not lost and have not described the job yet.
    pub(super) fn missing(&self) -> impl Iterator<Item = &Server> {
        let is_known = |id| self.held.contains_key(id) || self.lost.contains_key(id);
        self.plan.placement.servers().iter().filter(move |of| !is_known(&of.id))
    }

    /// Returns whether a worker has ever taken a rank: without one, the job has no state to lose.
    pub(super) fn was_used(&self) -> bool {
        let used = |held: &Held| held.published || held.ranks != Ranks::default();
        self.described().any(used)
    }

    /// The descriptions by servers, also by servers that are not connected any more.
    pub(super) fn described(&self) -> impl Iterator<Item = &Held> + Clone {
        self.held.values().chain(self.away.values())
    }

    /// Adds the description by a server. The placement of the latest epoch is that of the job.
    fn take(&mut self, server: ServerId, held: Held) {
        if self.described().all(|other| other.attempt.epoch < held.attempt.epoch) {
            let earlier = mem::replace(&mut self.plan, held.plan.clone());
            // Another process of a lost server may be in the later placement.
            let listed = |of: &&Server| self.plan.placement.servers().contains(of);
            let same: BTreeSet<ServerId> =
                earlier.placement.servers().iter().filter(listed).map(|of| of.id).collect();
            self.lost.retain(|lost, _| same.contains(lost));
        }
        self.lost.remove(&server);
        self.away.remove(&server);
        self.held.insert(server, held);
    }

    /// Returns whether each slice has its content on a server that has described the job.
    fn has_every_slice(&self) -> bool {
        let held = self.held.iter().filter(|(server, _)| !self.lost.contains_key(server));
        let full: BTreeMap<ServerId, BTreeSet<u32>> =
            held.map(|(&server, held)| (server, held.full_slices(server))).collect();
        let placement = &self.plan.placement;
        let is_full = |slice: usize| {
            let owners =
                placement.owners(slice).iter().map(|&at| &placement.servers()[at as usize]);
            let mut found = owners.filter_map(|server| full.get(&server.id));
            found.any(|slices| slices.contains(&(slice as u32)))
        };
        (0..placement.slices()).all(is_full)
    }

    /// Returns whether the workers of all ranks have asked to continue, and none knows a later
    /// epoch than the servers. Then no step was made in a later placement: its ranks would know its
    /// epoch.
    fn is_latest(&self) -> bool {
        let Some((latest, Ranks { leases, .. })) = self.published() else { return false };
        let confirms = |(rank, lease): (&u32, &Lease)| {
            self.asked.get(rank).is_some_and(|(by, known)| by == lease && *known <= latest.epoch)
        };
        !leases.is_empty() && leases.iter().all(confirms)
    }

    /// Returns whether a server was reading the checkpoint to which the job returns, or describes
    /// the job as it was before: the last coordinator has died before all servers had read it.
    fn is_half_restored(&self) -> bool {
        let Some(top) = self.held.values().map(|held| held.attempt).max() else { return false };
        self.held.values().any(|held| {
            let is_earlier = held.attempt.epoch < top.epoch;
            let is_moved = held.spec.replicas <= 1 && held.plan != self.plan;
            held.restoring || is_earlier && (is_moved || held.attempt.step > top.step)
        })
    }

    /// Drops the descriptions by servers that are lost, or are not in the latest placement. Returns
    /// these servers.
    fn drop_others(&mut self) -> Vec<ServerId> {
        let Self { plan, held, lost, .. } = self;
        let listed: BTreeSet<ServerId> =
            plan.placement.servers().iter().map(|server| server.id).collect();
        let other =
            |server: &ServerId, _: &mut Held| !listed.contains(server) || lost.contains_key(server);
        held.extract_if(.., other).map(|(server, _)| server).collect()
    }

    /// The server is lost again.
    pub(super) fn lose(&mut self, server: ServerId) {
        self.away.extend(self.held.remove_entry(&server));
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
        let ids: BTreeSet<u64> = held.iter().map(|held| held.id).collect();
        for held in held {
            let job = JobRef { name: held.spec.name.clone(), id: held.id };
            if is_new {
                self.make_way_for(&job, &held, server, now, out);
            }
            match self.jobs.get_mut(&job.name) {
                None if is_new => {
                    out.push(Action::Tick(now + RECOVERY));
                    self.jobs.insert(job.name.clone(), Job::recovering(server, held, now));
                }
                Some(Job { id, learned, phase: Phase::Recovering(recovery), .. })
                    if *id == job.id =>
                {
                    *learned = (*learned).max(Some(held.age()));
                    if let Some((other, difference)) = recovery.difference(&held) {
                        let [one, other] = [other, server].map(|server| self.name(server));
                        let reason = format!("{one} and {other} describe different {difference}");
                        self.fail(&job.name, &reason, now, out);
                        out.push(Action::Command(server, Command::Close(job)));
                        continue;
                    }
                    recovery.take(server, held);
                }
                Some(Job { id, phase: Phase::Open(open), .. })
                    if *id == job.id && open.away.contains_key(&server) =>
                {
                    self.rejoin(server, &job, &held, now, out);
                }
                // It will be told to open the job again, or to close it once all others have.
                Some(Job {
                    id,
                    phase:
                        Phase::Waiting { interrupted: Some(interrupted), .. }
                        | Phase::Opening { interrupted: Some(interrupted), .. },
                    ..
                }) if *id == job.id => {
                    interrupted.holds(server);
                    self.skip_epochs(held.attempt.epoch);
                }
                _ => out.push(Action::Command(server, Command::Close(job))),
            }
        }
        self.abandoned_by(server, &ids, now, out);
        let recovering = |job: &&Job| matches!(job.phase, Phase::Recovering(_));
        let names: Vec<String> =
            self.jobs.values().filter(recovering).map(|job| job.spec.name.clone()).collect();
        for name in names {
            self.try_recover(&name, now, out);
        }
        // After the server was told to close what it holds of an earlier placement.
        let names: Vec<String> = self.jobs.keys().cloned().collect();
        for name in names {
            self.restore_redundancy(&name, now, out);
        }
        self.probe_missing(out);
    }

    /// A worker may have asked for the job before a server has described it. It asks again.
    /// And a server that was away may have described an earlier job of the name, or this job
    /// without steps and epochs that another coordinator has made since.
    fn make_way_for(
        &mut self,
        job: &JobRef,
        held: &Held,
        server: ServerId,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        let Some(found) = self.jobs.get(&job.name) else { return };
        let is_earlier = found.learned.is_some_and(|learned| learned < held.age());
        let error = match &found.phase {
            Phase::Waiting { interrupted: None, .. } | Phase::Opening { interrupted: None, .. } => {
                unknown_yet(&job.name)
            }
            _ if found.id != job.id && is_earlier => Error::JobReplaced { job: job.name.clone() },
            Phase::Open(open)
                if is_earlier
                    && open.rolled_back.is_none()
                    && (open.step() < held.attempt.step || found.epoch < held.attempt.epoch) =>
            {
                return self.learn_again(&job.name, server, now, out);
            }
            _ => return,
        };
        if let Some(Job { id, phase, .. }) = self.jobs.remove(&job.name) {
            self.dissolve(&job.name, id, phase, &error, out);
        }
    }

    /// Another coordinator has had an open job meanwhile. Its servers keep it, and those other than
    /// `server` describe it again. Its ranks keep their leases, and open new streams.
    fn learn_again(&mut self, name: &str, server: ServerId, now: Now, out: &mut Vec<Action>) {
        let Some(Job { phase, .. }) = self.jobs.remove(name) else { return };
        let connected = |of: &Server| Some((of.id, self.servers.get(&of.id)?.stream));
        let placed = phase.placement().into_iter().flat_map(|placement| placement.servers());
        let connected: Vec<(ServerId, u64)> = placed.filter_map(connected).collect();
        let (waiters, leases) = phase.into_waiting();
        let answer = |waiter: Waiter| Action::Answer(waiter.caller, Err(unknown_yet(name)));
        out.extend(waiters.into_iter().map(answer));
        out.extend(leases.into_iter().map(|lease| Action::End(lease, Some(unknown_yet(name)))));
        let cause = format!("another coordinator has had job {name:?} meanwhile");
        for (server, stream) in connected.into_iter().filter(|(other, _)| *other != server) {
            self.server_lost(Link { server, stream }, &cause, now, out);
        }
    }

    /// Returns whether servers may still describe jobs: the coordinator has just started, and
    /// servers of an earlier one have registered, or have had no time to.
    pub fn is_learning(&self) -> bool {
        let has_settled = self.settles_until.is_none() && self.has_returning == Some(false);
        self.learns_until.is_some() && !has_settled
    }

    /// Ends the time in which servers may describe jobs.
    pub(super) fn expire_learning(&mut self, now: Now, out: &mut Vec<Action>) {
        self.members_wait_until.take_if(|until| *until <= now);
        let has_settled = self.settles_until.take_if(|until| *until <= now).is_some();
        if has_settled | self.learns_until.take_if(|until| *until <= now).is_some() {
            let names: Vec<String> = self.jobs.keys().cloned().collect();
            for name in names {
                self.try_place(&name, now, out);
                self.try_recover(&name, now, out);
            }
        }
    }

    /// Continues a job that all of its servers have described.
    pub(super) fn try_recover(&mut self, name: &str, now: Now, out: &mut Vec<Action>) {
        let Some(Job { spec, id, phase: Phase::Recovering(recovery), .. }) = self.jobs.get(name)
        else {
            return;
        };
        let mut is_complete = true;
        let has_replicas = spec.replicas > 1;
        let mut lost = BTreeMap::new();
        for server in recovery.plan.placement.servers() {
            match self.servers.get(&server.id) {
                _ if recovery.lost.contains_key(&server.id) => {}
                None => is_complete = false,
                Some(known) if known.incarnation != server.incarnation && has_replicas => {
                    lost.insert(server.id, "it was restarted".to_owned());
                }
                Some(known) if has_replicas && !recovery.held.contains_key(&server.id) => {
                    lost.insert(server.id, known.lacks(*id));
                }
                Some(known) if known.incarnation != server.incarnation => {
                    let server = server.id;
                    return self.give_up(name, server, "it was restarted", now, out);
                }
                Some(known) if !recovery.held.contains_key(&server.id) => {
                    let failed = known.failed.get(id).cloned();
                    return self.recover_without(name, server.id, failed, now, out);
                }
                Some(_) => {}
            }
        }
        let waits = self.is_learning();
        let Some(Job { phase: Phase::Recovering(recovery), .. }) = self.jobs.get_mut(name) else {
            return;
        };
        recovery.lost.extend(lost);
        // A server that is not back yet may describe a later placement, without the lost servers.
        let is_latest = recovery.lost.is_empty() || recovery.is_latest();
        let is_certain = !has_replicas || is_latest && recovery.has_every_slice();
        if is_complete && (is_certain || !waits) {
            self.recover(name, now, out);
        }
    }

    /// A worker asks to continue with a job that is being learned or restored. A restoration must
    /// begin in an epoch that it does not know.
    pub(super) fn asked_by(&mut self, attach: &Attach, now: Now, out: &mut Vec<Action>) {
        let Attach { job, rank, lease, attempt, .. } = attach;
        let known = attempt.epoch;
        let Some(Job { spec, epoch, phase, .. }) = self.reported_job(job) else { return };
        let is_possible = known <= epoch.saturating_add(MAX_AHEAD);
        match phase {
            Phase::Recovering(recovery) if *rank < spec.world => {
                recovery.asked.insert(*rank, (*lease, known));
                self.try_recover(&job.name, now, out);
            }
            Phase::Waiting { interrupted: Some(interrupted), .. }
                if is_possible && interrupted.members.rank_of(*lease) == Some(*rank) =>
            {
                self.skip_epochs(known);
            }
            Phase::Opening { interrupted: Some(interrupted), .. }
                if is_possible
                    && known >= *epoch
                    && interrupted.members.rank_of(*lease) == Some(*rank) =>
            {
                self.skip_epochs(known);
                let reason = format!("rank {rank} knows a later epoch, {known}");
                self.interrupt(&job.name, &reason, now, out);
            }
            _ => {}
        }
    }

    /// A server of a job without replicas does not hold the job. If the job did not fail there,
    /// either it was deleted, or the server was never told to read its checkpoint. In both cases
    /// the job returns to the checkpoint; if it was deleted, its caller deletes it again, or it is
    /// disposed of because nobody uses it.
    fn recover_without(
        &mut self,
        name: &str,
        server: ServerId,
        failed: Option<FailedThere>,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        let server = self.name(server);
        match failed {
            // It could not read the checkpoint to which the last coordinator returned the job.
            Some(FailedThere { reason, transient: true }) => {
                self.interrupt_or_fail(name, &format!("{server}: {reason}"), now, out);
            }
            Some(FailedThere { reason, .. }) => {
                self.fail(name, &format!("{server}: {reason}"), now, out);
            }
            None if self.interrupt(name, &format!("{server} does not hold it"), now, out) => {}
            None => self.remove(name, "it was closed", out),
        }
    }

    fn recover(&mut self, name: &str, now: Now, out: &mut Vec<Action>) {
        let Some(Job { spec, id, phase: Phase::Recovering(recovery), .. }) =
            self.jobs.get_mut(name)
        else {
            return;
        };
        let job = JobRef { name: name.to_owned(), id: *id };
        let is_published = recovery.described().any(|held| held.published);
        if spec.replicas > 1 && is_published && !recovery.has_every_slice() {
            let servers = recovery.plan.placement.servers().iter();
            let lost = servers.filter_map(|of| Some((&of.address, recovery.lost.get(&of.id)?)));
            let lost = lost.map(|(address, why)| format!("shard server {address}: {why}"));
            let lost: Vec<String> = lost.collect();
            let reason = format!("all servers of a slice were lost ({})", some_of(lost));
            return self.interrupt_or_fail(name, &reason, now, out);
        }
        for server in recovery.drop_others() {
            out.push(Action::Command(server, Command::Close(job.clone())));
        }
        if recovery.is_half_restored() {
            let reason = "the coordinator was lost while the job was being restored";
            return self.interrupt_or_fail(name, reason, now, out);
        }
        let recovered = match recovery.rebuild(&job, spec, now, now + RECOVERY) {
            Ok(recovered) => recovered,
            Err((server, what)) => return self.contradicted(name, server, &what, now, out),
        };
        let lost = recovery.lost.clone();
        let Recovered { mut open, epoch, commands } = recovered;
        if spec.replicas > 1 {
            open.uninitialised.retain(|server| !lost.contains_key(server));
        }
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
        self.publish_if_initialised(name, out);
        if self.return_without_data(name, now, out) {
            return;
        }
        for (server, why) in lost {
            self.give_up(name, server, &why, now, out);
        }
        self.serve_version(name, out);
        self.copy_next(name, out);
        self.unused_from(name, now, out);
        self.advance(name, now, out);
    }

    /// The description by a server does not fit those by the others. If it is older, the server may
    /// have followed another coordinator since: it is dismissed, and describes its jobs again.
    fn contradicted(
        &mut self,
        name: &str,
        server: ServerId,
        what: &str,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        let Some(Job { phase: Phase::Recovering(recovery), .. }) = self.jobs.get_mut(name) else {
            return;
        };
        let Some(attempt) = recovery.held.get(&server).map(|held| held.attempt) else { return };
        let is_old = recovery.held.values().any(|other| other.attempt.step > attempt.step)
            && recovery.doubted.insert(server, attempt) != Some(attempt);
        let stream = self.servers.get(&server).map(|known| known.stream);
        match stream.filter(|_| is_old) {
            Some(stream) => {
                let cause = format!("its description of job {name:?} is out of date");
                self.server_lost(Link { server, stream }, &cause, now, out);
            }
            None => {
                let reason = format!("{} {what}", self.name(server));
                self.fail(name, &reason, now, out);
            }
        }
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

    /// At its deadline, a job with replicas continues without the servers that have not described
    /// it. Another job returns to its last checkpoint or, if its policy does not ask for it, fails.
    pub(super) fn expire_recovery(&mut self, name: &str, now: Now, out: &mut Vec<Action>) {
        let Some(Job { spec, phase: Phase::Recovering(recovery), .. }) = self.jobs.get_mut(name)
        else {
            return;
        };
        if recovery.deadline > now {
            return;
        }
        let why = format!("did not connect within {RECOVERY:?} of the coordinator's start");
        let Recovery { plan, held, lost, .. } = &mut **recovery;
        let servers = plan.placement.servers().iter();
        let late = servers.filter(|of| !held.contains_key(&of.id) && !lost.contains_key(&of.id));
        if spec.replicas > 1 {
            let late: Vec<_> = late.map(|server| (server.id, format!("it {why}"))).collect();
            lost.extend(late);
            return self.recover(name, now, out);
        }
        let late: Vec<Server> = late.cloned().collect();
        let late = late.iter().map(|of| self.name_at(of.id, &of.address));
        let reason = format!("{} {why}", some_of(late));
        self.interrupt_or_fail(name, &reason, now, out);
    }
}

impl Job {
    fn recovering(server: ServerId, held: Held, now: Now) -> Self {
        let (id, spec, succession) = (held.id, held.spec.clone(), held.succession.clone());
        let restore = held.restore.clone();
        let (plan, deadline, learned) = (held.plan.clone(), now + RECOVERY, Some(held.age()));
        let held = BTreeMap::from([(server, held)]);
        let (away, lost, doubted) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let asked = BTreeMap::new();
        let recovery = Recovery { plan, held, away, lost, doubted, asked, deadline };
        let phase = Phase::Recovering(Box::new(recovery));
        let progress = Progress::default();
        let unused_since = now;
        Self { spec, id, epoch: 0, unused_since, succession, restore, learned, progress, phase }
    }
}

/// The error for a member's call about a job that a new coordinator may still learn.
pub(super) fn unknown_yet(job: &str) -> Error {
    Error::Unavailable {
        peer: format!("job {job:?}"),
        cause: "the coordinator was started and its shard servers have not all connected".into(),
    }
}
