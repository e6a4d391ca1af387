//! Replicas: a job whose slices are on several servers goes on when a server is lost.
//!
//! A backup of each slice that the lost server was the primary of becomes the primary, in a new
//! epoch. Other servers become backups: they open the job, and copy their slices from the
//! primaries a few at a time, so that a step waits for one part at most. A step is decided when
//! the backups, too, have its reduced gradients, and its version is served when all servers have
//! stored the decision.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use zeroshard_proto::{Error, JobSpec, Placement, Server};

use super::{
    cluster::Cluster,
    events::{Action, Command, JobRef, Now, OpenJob, ServerId},
    jobs::{Plan, weights},
    placement::replace_lost,
    recovery::Held,
    state::{Job, Open, Phase},
};

/// How long a job with replicas waits for a server whose control stream has broken.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// The memory of the slices that are copied in one part, in bytes.
const COPY_BYTES: u64 = 64 << 20;

/// The backups of an open job.
#[derive(Debug, Default)]
pub(crate) struct Replicas {
    /// The slices of which a server is a backup without content.
    empty: BTreeMap<ServerId, BTreeSet<u32>>,
    /// The number of trained slices of which a server is a backup with content, or copies it.
    active: BTreeMap<ServerId, usize>,
    /// The servers that have not opened the job yet.
    opening: BTreeSet<ServerId>,
    /// The copy in progress.
    copy: Option<Copy>,
    /// The number of the last copy that each server was told of in this placement.
    told: BTreeMap<ServerId, u64>,
    last_copy: u64,
    /// The servers, with their incarnations, that could not hold the job.
    refused: BTreeSet<(ServerId, u64)>,
    /// Since when slices have too few servers.
    degraded: Option<Now>,
}

/// A server copies slices.
#[derive(Debug)]
struct Copy {
    number: u64,
    server: ServerId,
    slices: Vec<u32>,
}

impl Replicas {
    /// The backups of a job all of whose servers have their slices.
    pub(super) fn new(spec: &JobSpec, placement: &Placement) -> Self {
        Self { active: active(spec, placement, &BTreeMap::new()), ..Self::default() }
    }

    /// Whether slices are being copied, for which the open step waits.
    pub(super) fn is_copying(&self) -> bool {
        self.copy.is_some()
    }

    /// Whether the step waits for the report of a server about slices of which it is a backup.
    pub(super) fn awaits(&self, server: ServerId) -> bool {
        self.active.get(&server).is_some_and(|&slices| slices > 0)
    }

    /// Whether a report follows the last copy that the server was told of.
    pub(super) fn is_current(&self, server: ServerId, copies: u64) -> bool {
        self.told.get(&server).copied().unwrap_or(0) == copies
    }

    /// What the servers of a job describe, of which those in `held` have answered.
    pub(super) fn learn(
        spec: &JobSpec,
        placement: &Placement,
        held: &BTreeMap<ServerId, Held>,
        now: Now,
    ) -> Self {
        let (mut empty, mut told) = (BTreeMap::new(), BTreeMap::new());
        for (&server, held) in held {
            let before: BTreeMap<usize, bool> = held.plan.placement.slices_of(server).collect();
            let lacks = |&slice: &usize| {
                held.empty.contains(&(slice as u32)) || !before.contains_key(&slice)
            };
            let slices = placement.slices_of(server).map(|(slice, _)| slice).filter(lacks);
            let slices: BTreeSet<u32> = slices.map(|slice| slice as u32).collect();
            if !slices.is_empty() {
                empty.insert(server, slices);
            }
            if *held.plan.placement == *placement {
                told.insert(server, held.copies);
            }
        }
        let last_copy = held.values().map(|held| held.copies).max().unwrap_or(0);
        let active = active(spec, placement, &empty);
        let degraded = (!empty.is_empty()).then_some(now);
        Self { empty, active, told, last_copy, degraded, ..Self::default() }
    }

    /// The slices of which a server is a backup without content.
    #[cfg(test)]
    pub(super) fn empty_on(&self, server: ServerId) -> BTreeSet<u32> {
        self.empty.get(&server).cloned().unwrap_or_default()
    }

    /// Whether a server of a slice has its content.
    fn has(&self, server: ServerId, slice: u32) -> bool {
        let lacks = |slices: &BTreeSet<u32>| slices.contains(&slice);
        let copies = |copy: &Copy| copy.server == server && copy.slices.contains(&slice);
        !self.empty.get(&server).is_some_and(lacks) && !self.copy.as_ref().is_some_and(copies)
    }
}

/// The number of trained slices of which each server is a backup with content.
fn active(
    spec: &JobSpec,
    placement: &Placement,
    empty: &BTreeMap<ServerId, BTreeSet<u32>>,
) -> BTreeMap<ServerId, usize> {
    let mut active = BTreeMap::new();
    for slice in (0..placement.slices()).filter(|&slice| spec.manifest.trains(slice)) {
        for &backup in &placement.owners(slice)[1..] {
            let server = placement.servers()[backup as usize].id;
            if !empty.get(&server).is_some_and(|slices| slices.contains(&(slice as u32))) {
                *active.entry(server).or_default() += 1;
            }
        }
    }
    active
}

impl Open {
    /// The number of slices that fewer servers have than the job asks for.
    pub(super) fn degraded_slices(&self, spec: &JobSpec) -> usize {
        if self.placement.replicas() < spec.replicas as usize {
            return self.placement.slices();
        }
        let replicas = &self.replicas;
        let copying = replicas.copy.iter().flat_map(|copy| &copy.slices);
        let slices: BTreeSet<u32> =
            replicas.empty.values().flatten().chain(copying).copied().collect();
        slices.len()
    }

    /// Whether the open step waits for a report of the server.
    pub(super) fn awaits(&self, server: ServerId) -> bool {
        self.trainable.contains_key(&server) || self.replicas.awaits(server)
    }

    /// The servers that keep each slice when `lost` is gone: those with content first. `None` if a
    /// slice is lost with it.
    fn kept_without(&self, lost: Option<ServerId>) -> Option<Vec<Vec<Server>>> {
        let servers = self.placement.servers();
        let kept = |slice: usize| {
            let owners = self.placement.owners(slice).iter().map(|&owner| &servers[owner as usize]);
            let left = owners.filter(|server| Some(server.id) != lost);
            let (full, empty): (Vec<Server>, Vec<Server>) =
                left.cloned().partition(|server| self.replicas.has(server.id, slice as u32));
            let has_content = !full.is_empty() || self.version.is_none();
            has_content.then(|| [full, empty].concat())
        };
        (0..self.placement.slices()).map(kept).collect()
    }
}

impl Cluster {
    /// Goes on without a server of a job with replicas, in a new epoch. Returns `false` if a slice
    /// was lost with the server.
    pub(super) fn fail_over(
        &mut self,
        name: &str,
        lost: ServerId,
        gone: &str,
        now: Now,
        out: &mut Vec<Action>,
    ) -> bool {
        let Some(Job { spec, phase: Phase::Open(open), .. }) = self.jobs.get(name) else {
            return false;
        };
        if spec.replicas <= 1 || open.placement.servers().len() <= 1 {
            return false;
        }
        let Some(kept) = open.kept_without(Some(lost)) else { return false };
        out.push(Action::Note(format!("{gone}; job {name:?} goes on with its backups")));
        self.change_placement(name, Some(lost), kept, now, out);
        true
    }

    /// Gives slices that have too few servers further ones, because a server has connected.
    pub(super) fn restore_redundancy(&mut self, name: &str, now: Now, out: &mut Vec<Action>) {
        let Some(Job { spec, phase: Phase::Open(open), .. }) = self.jobs.get(name) else { return };
        if open.placement.replicas() >= spec.replicas as usize || open.version.is_none() {
            return;
        }
        let known = |server: &Server| open.placement.servers().contains(server);
        let refused =
            |server: &Server| open.replicas.refused.contains(&(server.id, server.incarnation));
        let is_new = self.live().iter().any(|server| !known(server) && !refused(server));
        if let Some(kept) = open.kept_without(None).filter(|_| is_new) {
            self.change_placement(name, None, kept, now, out);
        }
    }

    /// Begins an epoch in which the slices are on the servers `kept`, and on others of those that
    /// are connected where these are too few.
    fn change_placement(
        &mut self,
        name: &str,
        lost: Option<ServerId>,
        kept: Vec<Vec<Server>>,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        let live = self.live();
        let Some(Job { spec, id, phase: Phase::Open(open), .. }) = self.jobs.get_mut(name) else {
            return;
        };
        let refused = &open.replicas.refused;
        let live: Vec<Server> = live
            .into_iter()
            .filter(|server| !refused.contains(&(server.id, server.incarnation)))
            .collect();
        let placed = replace_lost(&kept, &live, &weights(spec), spec.replicas as usize);
        let placement = match placed {
            Ok(placement) => placement,
            Err(error) => return self.fail(name, &error.to_string(), now, out),
        };
        let (spec, job) = (spec.clone(), JobRef { name: name.to_owned(), id: *id });
        let before = open.placement.clone();
        let empty = open.lacking(&placement);
        let Plan { placement, trainable } = Plan::of(&spec, placement);
        let Open { replicas, .. } = &mut **open;
        let is_whole = empty.is_empty() && placement.replicas() >= spec.replicas as usize;
        *replicas = Replicas {
            active: active(&spec, &placement, &empty),
            empty,
            last_copy: replicas.last_copy,
            refused: std::mem::take(&mut replicas.refused),
            degraded: replicas.degraded.or((!is_whole).then_some(now)),
            ..Replicas::default()
        };
        (open.placement, open.trainable) = (placement, trainable);
        if let Some(lost) = lost {
            open.away.remove(&lost);
            if open.servers().all(|server| server != lost) {
                out.push(Action::Command(lost, Command::Close(job.clone())));
            }
            self.give_up_on(name, lost, now, out);
        }
        self.enter_placement(name, job, &before, lost, out);
        self.serve_version(name, out);
        self.copy_next(name, out);
        self.probe_missing(out);
    }

    /// Nothing waits any more for a server that is lost, beside gradients.
    fn give_up_on(&mut self, name: &str, lost: ServerId, now: Now, out: &mut Vec<Action>) {
        self.save_without(lost, name, "it was lost", now, out);
        let Some(Job { id, phase: Phase::Open(open), .. }) = self.jobs.get_mut(name) else {
            return;
        };
        let job = JobRef { name: name.to_owned(), id: *id };
        if let Some(last) = &mut open.last {
            last.without(lost, out);
        }
        let lease = |rank| Some((rank, open.members.get(rank)?.lease));
        let leases: Vec<_> = open.members.ranks().filter_map(lease).collect();
        for (rank, lease) in leases {
            self.granted(lost, &job, rank, lease, out);
        }
    }

    /// Tells the servers of the new placement, and begins the epoch.
    fn enter_placement(
        &mut self,
        name: &str,
        job: JobRef,
        before: &Placement,
        lost: Option<ServerId>,
        out: &mut Vec<Action>,
    ) {
        let cause = match lost {
            Some(server) => format!("shard server {server:016x} was lost"),
            None => "a shard server has joined".to_owned(),
        };
        let error = |step, epoch| Error::StepAborted {
            job: name.to_owned(),
            step,
            epoch,
            cause: cause.clone(),
        };
        let announce = |spec: &Arc<JobSpec>, open: &mut Open, epoch, out: &mut Vec<Action>| {
            let placement = open.placement.clone();
            for server in placement.servers() {
                let command = match before.servers().contains(server) {
                    true => {
                        let (job, placement) = (job.clone(), placement.clone());
                        Command::NewPlacement { job, epoch, placement }
                    }
                    false => {
                        open.replicas.opening.insert(server.id);
                        Command::Open(open.as_backup(spec, job.id, epoch, server.id))
                    }
                };
                out.push(Action::Command(server.id, command));
                let is_new = open.replicas.opening.contains(&server.id);
                let done = |&rank: &u32| Command::RankDone { job: job.clone(), rank };
                let done = open.done.iter().filter(|_| is_new).map(done);
                out.extend(done.map(|command| Action::Command(server.id, command)));
            }
        };
        self.enter_epoch(name, announce, error, out);
    }

    /// Continues with the slices of a server that has opened the job. Returns whether it was told
    /// to, as a backup.
    pub(super) fn opened_as_backup(
        &mut self,
        server: ServerId,
        job: &JobRef,
        out: &mut Vec<Action>,
    ) -> bool {
        let Some(Job { phase: Phase::Open(open), .. }) = self.reported_job(job) else {
            return false;
        };
        let was_opening = open.replicas.opening.remove(&server);
        if was_opening {
            self.copy_next(&job.name, out);
        }
        was_opening
    }

    /// A server cannot hold a job with replicas. Returns whether the job goes on without it.
    pub(super) fn refused_by(
        &mut self,
        server: ServerId,
        job: &JobRef,
        reason: &str,
        now: Now,
        out: &mut Vec<Action>,
    ) -> bool {
        let incarnation = self.servers.get(&server).map_or(0, |known| known.incarnation);
        let Some(Job { spec, phase: Phase::Open(open), .. }) = self.reported_job(job) else {
            return false;
        };
        if spec.replicas <= 1 || !open.servers().any(|id| id == server) {
            return false;
        }
        open.replicas.refused.insert((server, incarnation));
        self.fail_over(&job.name, server, reason, now, out)
    }

    /// Tells a server to copy the next slices without content, unless a step can be decided first.
    pub(super) fn copy_next(&mut self, name: &str, out: &mut Vec<Action>) {
        let Some(Job { spec, id, phase: Phase::Open(open), .. }) = self.jobs.get_mut(name) else {
            return;
        };
        let voters = open.active(spec.world);
        let is_busy = open.replicas.is_copying()
            || open.round.agreed(voters).is_some()
            || open.last.as_ref().is_some_and(|last| !last.is_stored());
        let Some(version) = open.version.filter(|_| !is_busy) else { return };
        let Some((server, slices)) = open.next_copy(spec) else { return };
        let replicas = &mut open.replicas;
        replicas.last_copy += 1;
        let number = replicas.last_copy;
        let trained = slices.iter().filter(|&&slice| spec.manifest.trains(slice as usize)).count();
        *replicas.active.entry(server).or_default() += trained;
        replicas.told.insert(server, number);
        replicas.copy = Some(Copy { number, server, slices: slices.clone() });
        open.round.reports.remove(&server);
        let job = JobRef { name: name.to_owned(), id: *id };
        let command = Command::Copy { job, number, version, slices };
        out.push(Action::Command(server, command));
    }

    /// Repeats the command to copy slices for a server that was away: it may have missed it, or
    /// have answered in vain.
    pub(super) fn copy_again(&self, server: ServerId, job: &JobRef, out: &mut Vec<Action>) {
        let Some(Job { phase: Phase::Open(open), .. }) = self.jobs.get(&job.name) else { return };
        let copy = open.replicas.copy.as_ref().filter(|copy| copy.server == server);
        if let Some((Copy { number, slices, .. }, version)) = copy.zip(open.version) {
            let (job, number, slices) = (job.clone(), *number, slices.clone());
            let command = Command::Copy { job, number, version, slices };
            out.push(Action::Command(server, command));
        }
    }

    /// A server has copied slices.
    pub(super) fn copied(
        &mut self,
        server: ServerId,
        job: &JobRef,
        number: u64,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        let Some(Job { spec, phase: Phase::Open(open), .. }) = self.reported_job(job) else {
            return;
        };
        let is_it = |copy: &mut Copy| (copy.server, copy.number) == (server, number);
        if open.replicas.copy.take_if(is_it).is_none() {
            return;
        }
        if open.replicas.empty.is_empty()
            && open.placement.replicas() >= spec.replicas as usize
            && let Some(since) = open.replicas.degraded.take()
        {
            let after = now.saturating_sub(since);
            out.push(Action::Redundant { after });
            let seconds = after.as_secs_f64();
            out.push(Action::Note(format!(
                "job {:?} has all its replicas again after {seconds:.1} s",
                job.name
            )));
        }
        self.advance(&job.name, now, out);
        self.copy_next(&job.name, out);
    }

    /// Lets the servers of a job with replicas send the current version, if all of them have stored
    /// the decision that leads to it.
    pub(super) fn serve_version(&mut self, name: &str, out: &mut Vec<Action>) {
        let Some(Job { spec, id, phase: Phase::Open(open), .. }) = self.jobs.get(name) else {
            return;
        };
        let is_stored = open.last.as_ref().is_none_or(|last| last.is_stored());
        if let Some(version) = open.version.filter(|_| spec.replicas > 1 && is_stored) {
            let job = JobRef { name: name.to_owned(), id: *id };
            open.send(&Command::ServeVersion { job, version }, out);
        }
    }
}

impl Open {
    /// The slices that the servers of another placement do not have yet.
    fn lacking(&self, placement: &Placement) -> BTreeMap<ServerId, BTreeSet<u32>> {
        let mut empty = BTreeMap::<_, BTreeSet<u32>>::new();
        if self.version.is_none() {
            return empty;
        }
        for server in placement.servers() {
            let is_known = self.placement.servers().contains(server);
            let before: BTreeSet<usize> = match is_known {
                true => self.placement.slices_of(server.id).map(|(slice, _)| slice).collect(),
                false => BTreeSet::new(),
            };
            for (slice, _) in placement.slices_of(server.id) {
                if !before.contains(&slice) || !self.replicas.has(server.id, slice as u32) {
                    empty.entry(server.id).or_default().insert(slice as u32);
                }
            }
        }
        empty
    }

    /// The job for a server that becomes a backup.
    fn as_backup(&self, spec: &Arc<JobSpec>, job_id: u64, epoch: u64, server: ServerId) -> OpenJob {
        let lease = |rank| Some((rank, self.members.get(rank)?.lease));
        OpenJob {
            spec: spec.clone(),
            placement: self.placement.clone(),
            job_id,
            epoch,
            server,
            source: None,
            checkpoint: None,
            requested: None,
            leases: self.members.ranks().filter_map(lease).collect(),
            version: self.version,
        }
    }

    /// The slices that a server can copy next, about [`COPY_BYTES`] of them, and the server.
    fn next_copy(&mut self, spec: &JobSpec) -> Option<(ServerId, Vec<u32>)> {
        let Self { replicas, away, .. } = self;
        let can =
            |server: &ServerId| !replicas.opening.contains(server) && !away.contains_key(server);
        let (&server, slices) = replicas.empty.iter_mut().find(|(server, _)| can(server))?;
        let (weights, mut bytes) = (weights(spec), 0);
        let fits = |slice: &u32| {
            let is_first = bytes == 0;
            bytes += weights[*slice as usize].max(1);
            is_first || bytes <= COPY_BYTES
        };
        let chosen: Vec<u32> = slices.iter().copied().take_while(fits).collect();
        slices.retain(|slice| !chosen.contains(slice));
        if slices.is_empty() {
            replicas.empty.remove(&server);
        }
        Some((server, chosen))
    }
}
