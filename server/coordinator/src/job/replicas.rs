//! Replicas: several servers hold each slice, so that the job continues when one of them is lost.
//!
//! When a primary is lost, a backup with the same content becomes the primary, in a new epoch.
//! Other servers become backups: they open the job, and copy their slices from the primaries
//! (`copies`). A step is decided when primaries and backups have its reduced gradients. Its version
//! is served when all servers have stored the decision.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use zeroshard_model::{Error, JobSpec, Restore, Server, Succession};

use crate::{
    commands::{Command, OpenJob},
    context::Context,
    events::Action,
    history::Severity,
    ids::ServerId,
    job::{Job, Open, Phase},
    placement::{Unfit, replace_lost},
    plan::{Plan, weights},
    replicas::{Replicas, active, empty, is_short, slices_on},
};

/// What a job was created from: the predecessor and the checkpoint, if any.
type Origin = (Option<Arc<Succession>>, Option<Arc<Restore>>);

/// A change of the placement of a running job.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Change {
    /// The job continues without a server that was lost. Aborts the open step.
    Lost(ServerId),
    /// More servers are connected. Aborts the open step.
    More,
    /// Slices are to be copied from servers that are being drained. No rank has begun the step.
    Copy,
    /// A server that is being drained is released. No rank has begun the step.
    Release(ServerId),
}

impl Change {
    /// The server that the placement loses.
    fn without(self) -> Option<ServerId> {
        match self {
            Self::Lost(server) | Self::Release(server) => Some(server),
            Self::More | Self::Copy => None,
        }
    }
}

impl Open {
    /// The number of slices with fewer replicas than the job asks for. Those on a server that is
    /// away do not count, because it may have died.
    pub fn degraded_slices(&self, spec: &JobSpec) -> usize {
        let (wanted, replicas) = (spec.replicas as usize, &self.replicas);
        let all = self.placement.replicas();
        if all < wanted {
            return self.placement.slices();
        }
        let is_whole = replicas.empty.is_empty() && !replicas.is_copying();
        if all == wanted && is_whole && self.away.is_empty() && !self.placement.is_uneven() {
            return 0;
        }
        let is_present = |holder: &ServerId| !self.away.contains_key(holder);
        let present = |slice: usize| self.holders(slice).filter(is_present).count();
        (0..self.placement.slices()).filter(|&slice| present(slice) < wanted).count()
    }

    /// The servers that have the content of a slice.
    pub(crate) fn holders(&self, slice: usize) -> impl Iterator<Item = ServerId> + '_ {
        let servers = self.placement.servers();
        let owners = self.placement.owners(slice).iter().map(|&owner| servers[owner as usize].id);
        owners.filter(move |&server| self.replicas.has(server, slice as u32))
    }

    /// Returns whether a slice is to have more servers, beside those that are being drained.
    pub(crate) fn lacks_servers(&self, spec: &JobSpec, slice: usize) -> bool {
        let servers = self.placement.servers();
        let owners = self.placement.owners(slice).iter().map(|&owner| servers[owner as usize].id);
        let stays = |server: &ServerId| {
            let has_refused =
                self.replicas.full.contains(server) && !self.replicas.has(*server, slice as u32);
            !self.replicas.leaving.contains(server) && !has_refused
        };
        owners.filter(stays).count() < spec.replicas as usize
    }

    /// Returns whether the open step waits for a report of the server.
    pub(crate) fn awaits(&self, server: ServerId) -> bool {
        let as_backup = self.replicas.active.get(&server).is_some_and(|&slices| slices > 0);
        as_backup || self.trainable.contains_key(&server)
    }

    /// The servers that each slice has left without the server `lost`, those with its content
    /// first. `None` if a slice has no server with its content left.
    pub(crate) fn kept_without(&self, lost: Option<ServerId>) -> Option<Vec<Vec<Server>>> {
        let servers = self.placement.servers();
        let kept = |slice: usize| {
            let owners = self.placement.owners(slice).iter().map(|&owner| &servers[owner as usize]);
            let left = owners.filter(|server| Some(server.id) != lost);
            let (whole, mut empty): (Vec<Server>, Vec<Server>) =
                left.cloned().partition(|server| self.replicas.has(server.id, slice as u32));
            empty.retain(|server| !self.replicas.full.contains(&server.id));
            let has_content = !whole.is_empty() || self.version.is_none();
            has_content.then(|| [whole, empty].concat())
        };
        (0..self.placement.slices()).map(kept).collect()
    }
}

impl Job {
    /// The number of slices of an open job with too few replicas.
    pub fn degraded_slices(&self) -> u64 {
        match &self.phase {
            Phase::Open(open) => open.degraded_slices(&self.spec) as u64,
            _ => 0,
        }
    }

    /// Returns whether the job runs, and every slice has all its replicas on servers that are
    /// connected.
    pub fn is_redundant(&self) -> bool {
        matches!(&self.phase, Phase::Open(open) if open.version.is_some())
            && self.degraded_slices() == 0
    }

    /// Returns whether a server counts as one that has the content of a slice of the job, once that
    /// runs.
    pub fn has_content(&self, server: ServerId, slice: u32) -> bool {
        match &self.phase {
            Phase::Open(open) => open.replicas.has(server, slice),
            _ => true,
        }
    }

    /// Continues a job with replicas without the server `lost`, in a new epoch. Returns `false` if
    /// that is not possible, because the server had the only copy of a slice.
    pub(crate) fn fail_over(&mut self, lost: ServerId, gone: &str, cx: &mut Context<'_>) -> bool {
        let Self { spec, phase: Phase::Open(open), .. } = self else { return false };
        if spec.replicas <= 1 || open.placement.servers().len() <= 1 {
            return false;
        }
        let Some(kept) = open.kept_without(Some(lost)) else { return false };
        // Memory may be free again: without this server they are asked once more.
        open.replicas.full.clear();
        // If the other servers have all initial parameters, the ranks may have been told so.
        open.uninitialised.remove(&lost);
        self.publish_if_initialised(cx);
        let text = format!("{gone}; job {:?} continues with its backups", self.name);
        cx.alarm(Severity::Warning, text);
        self.change_placement(Change::Lost(lost), kept, cx);
        true
    }

    /// Adds backups of slices for which the job has had too few servers with enough memory so far,
    /// if another server is connected now.
    pub(crate) fn restore_redundancy(&mut self, cx: &mut Context<'_>) {
        let Self { spec, phase: Phase::Open(open), .. } = self else { return };
        let (placement, replicas) = (&open.placement, &open.replicas);
        let refused = replicas.full.iter().filter_map(|server| replicas.empty.get(server));
        let refused = refused.flatten().map(|&slice| slice as usize);
        let mut lacking: Vec<usize> =
            (0..placement.slices()).filter(|&slice| open.lacks_servers(spec, slice)).collect();
        lacking.extend(refused);
        lacking.dedup_by_key(|slice| placement.owners(*slice));
        let can_hold = |server: &Server, slice: usize| {
            let mut owners = placement.owners(slice).iter();
            owners.all(|&owner| placement.servers()[owner as usize] != *server)
        };
        let mut live = cx.common.servers.placeable();
        live.retain(|server| !replicas.cannot_hold(server));
        let is_possible =
            lacking.iter().any(|&slice| live.iter().any(|server| can_hold(server, slice)));
        if open.version.is_some()
            && is_possible
            && let Some(kept) = open.kept_without(None)
        {
            self.change_placement(Change::More, kept, cx);
        }
    }

    /// Begins an epoch in which each slice stays on the servers `kept`. If these are fewer than the
    /// job asks for, connected servers become backups.
    pub(crate) fn change_placement(
        &mut self,
        change: Change,
        kept: Vec<Vec<Server>>,
        cx: &mut Context<'_>,
    ) {
        let lost = change.without();
        let spec = self.spec.clone();
        let Phase::Open(open) = &mut self.phase else { return };
        open.replicas.leaving.retain(|server| Some(*server) != lost);
        let mut live = cx.common.servers.placeable();
        live.retain(|of| !open.replicas.refused.contains(&(of.id, of.incarnation)));
        let zones = cx.common.servers.zones();
        let unfit = Unfit { full: &open.replicas.full, leaving: &open.replicas.leaving };
        let placed =
            replace_lost(&kept, &live, zones, unfit, &weights(&spec), spec.replicas as usize);
        let placement = match placed {
            Ok(placement) => placement,
            Err(error) => return self.fail(&error.to_string(), cx),
        };
        // A server that has lost the job may be connected, and get slices again.
        let before = open.placement.servers().iter().filter(|server| Some(server.id) != lost);
        let before: Vec<Server> = before.cloned().collect();
        let held: HashMap<&Server, BTreeSet<u32>> =
            before.iter().map(|server| (server, slices_on(&open.placement, server.id))).collect();
        let is_full = open.version.is_none(); // all parameters are uploaded again
        let empty = empty(&placement, |server, slice| {
            let held = held.get(server).is_some_and(|held| held.contains(&slice));
            is_full || held && open.replicas.has(server.id, slice)
        });
        let Plan { placement, trainable, loads } = Plan::of(&spec, placement);
        let Open { replicas, .. } = &mut **open;
        *replicas = Replicas {
            active: active(&spec, &placement, &empty),
            empty,
            last_copy: replicas.last_copy,
            refused: std::mem::take(&mut replicas.refused),
            full: std::mem::take(&mut replicas.full),
            degraded: replicas.degraded,
            is_short: is_short(&spec, &placement),
            leaving: std::mem::take(&mut replicas.leaving),
            ..Replicas::default()
        };
        (open.placement, open.trainable, open.loads) = (placement, trainable, loads);
        if open.degraded_slices(&spec) > 0 {
            open.replicas.degraded.get_or_insert(cx.now);
        }
        if let Some(lost) = lost {
            open.away.remove(&lost);
            if open.servers().all(|server| server != lost) {
                cx.command(lost, Command::Close(self.reference()));
            }
            self.wait_no_more_for(lost, cx);
        }
        self.enter_placement(&before, change, cx);
        self.serve_version(cx);
        self.copy_next(cx);
        self.probe_missing(cx);
    }

    /// A save, a decision and joins do not wait for a lost server any more.
    fn wait_no_more_for(&mut self, lost: ServerId, cx: &mut Context<'_>) {
        self.save_without(lost, "it was lost", cx);
        let epoch = self.epoch;
        let Phase::Open(open) = &mut self.phase else { return };
        if let Some(last) = &mut open.last {
            last.without(lost, epoch, cx.out);
        }
        let lease = |rank| Some((rank, open.members.get(rank)?.lease));
        let leases: Vec<_> = open.members.ranks().filter_map(lease).collect();
        for (rank, lease) in leases {
            self.granted(lost, rank, lease, cx);
        }
    }

    /// Tells the servers of the new placement, of which those in `before` have the job, and begins
    /// the epoch.
    fn enter_placement(&mut self, before: &[Server], change: Change, cx: &mut Context<'_>) {
        let (job, spec) = (self.reference(), self.spec.clone());
        let cause = match change {
            Change::Lost(server) => format!("{} was lost", cx.name(server)),
            _ => "a shard server has joined".to_owned(),
        };
        let error = |step, epoch| Error::StepAborted {
            job: job.name.clone(),
            step,
            epoch,
            cause: cause.clone(),
        };
        let origin = (self.succession.clone(), self.restore.clone());
        let announce = |open: &mut Open, epoch, out: &mut Vec<Action>| {
            let placement = open.placement.clone();
            for server in placement.servers() {
                if before.contains(server) {
                    let (job, placement) = (job.clone(), placement.clone());
                    let command = Command::NewPlacement { job, epoch, placement };
                    out.push(Action::Command(server.id, command));
                    continue;
                }
                open.replicas.opening.insert(server.id, epoch);
                let command =
                    Command::Open(open.as_backup(&spec, &origin, (job.id, epoch), server.id));
                out.push(Action::Command(server.id, command));
            }
        };
        match change {
            Change::Lost(_) | Change::More => self.enter_epoch(announce, error, cx),
            Change::Copy | Change::Release(_) => self.enter_epoch_between_steps(announce, cx),
        }
    }

    /// Continues a job with replicas without a connected server, which gets no slices of the job
    /// until it is restarted or uncordoned. Returns whether the job has replicas and continues.
    pub(crate) fn refuse_on(
        &mut self,
        server: ServerId,
        reason: &str,
        cx: &mut Context<'_>,
    ) -> bool {
        let incarnation = cx.common.servers.get(server).map_or(0, |known| known.incarnation);
        let Self { spec, phase: Phase::Open(open), .. } = self else { return false };
        if spec.replicas <= 1 || !open.servers().any(|id| id == server) {
            return false;
        }
        open.replicas.refused.insert((server, incarnation));
        self.fail_over(server, reason, cx)
    }

    /// Allows the servers of a job with replicas to serve the current version, if all of them have
    /// stored the decision that leads to it.
    pub(crate) fn serve_version(&mut self, cx: &mut Context<'_>) {
        let Phase::Open(open) = &self.phase else { return };
        let is_ready = self.spec.replicas > 1 && open.is_stored();
        if let Some(version) = open.version.filter(|_| is_ready) {
            let job = self.reference();
            open.send(&Command::ServeVersion { job, version }, cx.out);
        }
    }
}

impl Open {
    /// The job for a server that becomes a backup.
    fn as_backup(
        &self,
        spec: &Arc<JobSpec>,
        (succession, requested): &Origin,
        (job_id, epoch): (u64, u64),
        server: ServerId,
    ) -> OpenJob {
        let lease = |rank| Some((rank, self.members.get(rank)?.lease));
        OpenJob {
            spec: spec.clone(),
            placement: self.placement.clone(),
            job_id,
            epoch,
            server,
            succession: succession.clone(),
            source: None,
            checkpoint: None,
            requested: requested.clone(),
            leases: self.members.ranks().filter_map(lease).collect(),
            done: self.done.keys().copied().collect(),
            left: self.left.iter().copied().collect(),
            version: self.version,
            decision: self.last.as_ref().map(|last| Box::new(last.decision.clone())),
        }
    }
}
