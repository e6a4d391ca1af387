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
};

use zeroshard_model::{Attempt, Server, listing::some_of};

use super::{
    context::{Consequence, Context},
    events::{Action, Attach, Command, FailedThere, Lease, Link, Now, ServerId},
    held::{Held, Ranks},
    index::Name,
    learning::{RECOVERY, unknown_yet},
    leases::MAX_AHEAD,
    plan::Plan,
    progress::Progress,
    rebuild::Recovered,
    reduce::Reduced,
    state::{Job, Phase},
};

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
    /// That of a job that one server has described.
    fn new(server: ServerId, held: Held, deadline: Now) -> Self {
        Self {
            plan: held.plan.clone(),
            held: BTreeMap::from([(server, held)]),
            away: BTreeMap::new(),
            lost: BTreeMap::new(),
            doubted: BTreeMap::new(),
            asked: BTreeMap::new(),
            deadline,
        }
    }

    /// Returns whether a server that is connected has described the job.
    pub(super) fn is_held_by(&self, server: ServerId) -> bool {
        self.held.contains_key(&server)
    }

    /// A server has all initial parameters since it has described the job.
    pub(super) fn initialised(&mut self, server: ServerId, epoch: u64) {
        if let Some(held) = self.held.get_mut(&server).filter(|of| of.attempt.epoch == epoch) {
            held.initialised = true;
        }
    }

    /// A server has all gradients of the attempt since it has described the job.
    pub(super) fn ready(&mut self, server: ServerId, attempt: Attempt, reduced: Reduced) {
        if let Some(held) = self.held.get_mut(&server).filter(|of| of.attempt == attempt) {
            held.ready = Some(reduced);
        }
    }

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

impl Job {
    /// A job that a server has described to a new coordinator.
    pub(super) fn recovering(server: ServerId, held: Held, now: Now) -> Self {
        Self {
            name: Name::from(held.spec.name.as_str()),
            spec: held.spec.clone(),
            id: held.id,
            epoch: 0,
            unused_since: now,
            succession: held.succession.clone(),
            restore: held.restore.clone(),
            learned: Some(held.age()),
            progress: Progress::default(),
            phase: Phase::Recovering(Box::new(Recovery::new(server, held, now + RECOVERY))),
        }
    }

    /// A server has connected, and describes the job. One that the job does not need is told to
    /// close it.
    pub(super) fn described(&mut self, server: ServerId, held: Held, cx: &mut Context<'_>) {
        match &mut self.phase {
            Phase::Recovering(recovery) => {
                self.learned = self.learned.max(Some(held.age()));
                if let Some((other, difference)) = recovery.difference(&held) {
                    let [one, other] = [other, server].map(|server| cx.name(server));
                    let reason = format!("{one} and {other} describe different {difference}");
                    self.fail(&reason, cx);
                    return cx.command(server, Command::Close(self.reference()));
                }
                recovery.take(server, held);
            }
            Phase::Open(open) if open.away.contains_key(&server) => {
                self.rejoin(server, &held, cx);
            }
            // It will be told to open the job again, or to close it once all others have.
            Phase::Waiting { interrupted: Some(interrupted), .. }
            | Phase::Opening { interrupted: Some(interrupted), .. } => {
                interrupted.holds(server);
                cx.common.epochs.skip(held.attempt.epoch);
            }
            _ => cx.command(server, Command::Close(self.reference())),
        }
    }

    /// Returns whether the job was learned from descriptions that are older than this one.
    pub(super) fn is_older_than(&self, held: &Held) -> bool {
        self.learned.is_some_and(|learned| learned < held.age())
    }

    /// Returns whether another coordinator has made steps or epochs of the open job since.
    pub(super) fn lacks_what(&self, held: &Held) -> bool {
        let Phase::Open(open) = &self.phase else { return false };
        self.is_older_than(held)
            && open.rolled_back.is_none()
            && (open.step() < held.attempt.step || self.epoch < held.attempt.epoch)
    }

    /// Another coordinator has had the open job meanwhile, so it is learned again. Its servers keep
    /// it. Its ranks keep their leases, and open new streams.
    pub(super) fn learn_again(&mut self, cx: &mut Context<'_>) {
        let unknown = unknown_yet(&self.name);
        let (waiters, leases) = mem::replace(&mut self.phase, Phase::Gone).into_waiting();
        cx.refuse(waiters, &unknown);
        for lease in leases {
            cx.push(Action::End(lease, Some(unknown.clone())));
        }
    }

    /// Continues a job that all of its servers have described.
    pub(super) fn try_recover(&mut self, cx: &mut Context<'_>) {
        let Self { spec, id, phase: Phase::Recovering(recovery), .. } = &*self else { return };
        let mut is_complete = true;
        let has_replicas = spec.replicas > 1;
        let mut lost = BTreeMap::new();
        for server in recovery.plan.placement.servers() {
            match cx.common.servers.get(server.id) {
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
                    return self.give_up(server, "it was restarted", cx);
                }
                Some(known) if !recovery.held.contains_key(&server.id) => {
                    let failed = known.failed.get(id).cloned();
                    return self.recover_without(server.id, failed, cx);
                }
                Some(_) => {}
            }
        }
        let waits = cx.common.learning.is_learning();
        let Phase::Recovering(recovery) = &mut self.phase else { return };
        recovery.lost.extend(lost);
        // A server that is not back yet may describe a later placement, without the lost servers.
        let is_latest = recovery.lost.is_empty() || recovery.is_latest();
        let is_certain = !has_replicas || is_latest && recovery.has_every_slice();
        if is_complete && (is_certain || !waits) {
            self.recover(cx);
        }
    }

    /// A worker asks to continue with a job that is being learned or restored. A restoration must
    /// begin in an epoch that it does not know.
    pub(super) fn asked_by(&mut self, attach: &Attach, cx: &mut Context<'_>) {
        let Attach { rank, lease, attempt, .. } = attach;
        let known = attempt.epoch;
        let Self { spec, epoch, phase, .. } = self;
        let is_possible = known <= epoch.saturating_add(MAX_AHEAD);
        match phase {
            Phase::Recovering(recovery) if *rank < spec.world => {
                recovery.asked.insert(*rank, (*lease, known));
                self.try_recover(cx);
            }
            Phase::Waiting { interrupted: Some(interrupted), .. }
                if is_possible && interrupted.members.rank_of(*lease) == Some(*rank) =>
            {
                cx.common.epochs.skip(known);
            }
            Phase::Opening { interrupted: Some(interrupted), .. }
                if is_possible
                    && known >= *epoch
                    && interrupted.members.rank_of(*lease) == Some(*rank) =>
            {
                cx.common.epochs.skip(known);
                let reason = format!("rank {rank} knows a later epoch, {known}");
                self.interrupt(&reason, cx);
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
        server: ServerId,
        failed: Option<FailedThere>,
        cx: &mut Context<'_>,
    ) {
        let server = cx.name(server);
        match failed {
            // It could not read the checkpoint to which the last coordinator returned the job.
            Some(FailedThere { reason, transient: true }) => {
                self.interrupt_or_fail(&format!("{server}: {reason}"), cx);
            }
            Some(FailedThere { reason, .. }) => {
                self.fail(&format!("{server}: {reason}"), cx);
            }
            None if self.interrupt(&format!("{server} does not hold it"), cx) => {}
            None => self.remove("it was closed", cx),
        }
    }

    fn recover(&mut self, cx: &mut Context<'_>) {
        let job = self.reference();
        let Self { name, spec, phase: Phase::Recovering(recovery), .. } = self else { return };
        let is_published = recovery.described().any(|held| held.published);
        if spec.replicas > 1 && is_published && !recovery.has_every_slice() {
            let servers = recovery.plan.placement.servers().iter();
            let lost = servers.filter_map(|of| Some((&of.address, recovery.lost.get(&of.id)?)));
            let lost = lost.map(|(address, why)| format!("shard server {address}: {why}"));
            let lost: Vec<String> = lost.collect();
            let reason = format!("all servers of a slice were lost ({})", some_of(lost));
            return self.interrupt_or_fail(&reason, cx);
        }
        for server in recovery.drop_others() {
            cx.command(server, Command::Close(job.clone()));
        }
        if recovery.is_half_restored() {
            let reason = "the coordinator was lost while the job was being restored";
            return self.interrupt_or_fail(reason, cx);
        }
        let recovered = match recovery.rebuild(&job, spec, cx.now, cx.now + RECOVERY) {
            Ok(recovered) => recovered,
            Err((server, what)) => return self.contradicted(server, &what, cx),
        };
        let lost = recovery.lost.clone();
        let Recovered { mut open, epoch, commands } = recovered;
        if spec.replicas > 1 {
            open.uninitialised.retain(|server| !lost.contains_key(server));
        }
        cx.note(format!(
            "job {name:?} continues at step {} in epoch {epoch}, with {} of {} ranks",
            open.step(),
            open.members.len(),
            spec.world
        ));
        for (server, command) in commands {
            cx.command(server, command);
        }
        cx.push(Action::Tick(cx.now + RECOVERY));
        cx.common.epochs.see(epoch);
        (self.epoch, self.phase) = (epoch, Phase::Open(Box::new(open)));
        self.publish_if_initialised(cx);
        if self.return_without_data(cx) {
            return;
        }
        for (server, why) in lost {
            self.give_up(server, &why, cx);
        }
        self.serve_version(cx);
        self.copy_next(cx);
        self.unused_from_now(cx);
        self.advance(cx);
    }

    /// The description by a server does not fit those by the others. If it is older, the server may
    /// have followed another coordinator since: it is dismissed, and describes its jobs again.
    fn contradicted(&mut self, server: ServerId, what: &str, cx: &mut Context<'_>) {
        let Phase::Recovering(recovery) = &mut self.phase else { return };
        let Some(attempt) = recovery.held.get(&server).map(|held| held.attempt) else { return };
        let is_old = recovery.held.values().any(|other| other.attempt.step > attempt.step)
            && recovery.doubted.insert(server, attempt) != Some(attempt);
        let stream = cx.common.servers.get(server).map(|known| known.stream);
        match stream.filter(|_| is_old) {
            Some(stream) => {
                let cause = format!("its description of job {:?} is out of date", self.name);
                let link = Link { server, stream };
                cx.consequences.push(Consequence::Dismiss { link, cause });
            }
            None => self.fail(&format!("{} {what}", cx.name(server)), cx),
        }
    }

    /// At its deadline, a job with replicas continues without the servers that have not described
    /// it. Another job returns to its last checkpoint or, if its policy does not ask for it, fails.
    pub(super) fn expire_recovery(&mut self, cx: &mut Context<'_>) {
        let Self { spec, phase: Phase::Recovering(recovery), .. } = self else { return };
        if recovery.deadline > cx.now {
            return;
        }
        let why = format!("did not connect within {RECOVERY:?} of the coordinator's start");
        let Recovery { plan, held, lost, .. } = &mut **recovery;
        let servers = plan.placement.servers().iter();
        let late = servers.filter(|of| !held.contains_key(&of.id) && !lost.contains_key(&of.id));
        if spec.replicas > 1 {
            let late: Vec<_> = late.map(|server| (server.id, format!("it {why}"))).collect();
            lost.extend(late);
            return self.recover(cx);
        }
        let late: Vec<Server> = late.cloned().collect();
        let late = late.iter().map(|of| cx.common.servers.name_at(of.id, &of.address));
        let reason = format!("{} {why}", some_of(late));
        self.interrupt_or_fail(&reason, cx);
    }
}
