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

use zeroshard_model::{Error, Fork, JobSpec, Line, RecentSteps, Restore, Server};

use crate::{
    cluster::context::Context,
    job::{Job, Open, Phase},
    operators::history::Severity,
    placement::{
        plan::{Plan, weights},
        replace_lost,
    },
    state::replicas::{empty, slices_on},
    vocabulary::{
        commands::{Command, OpenJob},
        events::Action,
        ids::ServerId,
    },
};

/// What a job was created from: the predecessor and the checkpoint, if any, and its line.
type Origin = (Option<Arc<Fork>>, Option<Arc<Restore>>, Arc<Line>, RecentSteps);

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
        let all = self.plan.placement.replicas();
        if all < wanted {
            return self.plan.placement.slices();
        }
        if all == wanted
            && replicas.are_whole()
            && self.disconnects.is_empty()
            && !self.plan.placement.is_uneven()
        {
            return 0;
        }
        let is_present = |holder: &ServerId| !self.disconnects.contains(*holder);
        let present = |slice: usize| self.holders(slice).filter(is_present).count();
        (0..self.plan.placement.slices()).filter(|&slice| present(slice) < wanted).count()
    }

    /// The servers that have the content of a slice.
    pub(crate) fn holders(&self, slice: usize) -> impl Iterator<Item = ServerId> + '_ {
        let servers = self.plan.placement.servers();
        let owners =
            self.plan.placement.owners(slice).iter().map(|&owner| servers[owner as usize].id);
        owners.filter(move |&server| self.replicas.has(server, slice as u32))
    }

    /// Returns whether a slice is to have more servers, beside those that are being drained.
    pub(crate) fn lacks_servers(&self, spec: &JobSpec, slice: usize) -> bool {
        let servers = self.plan.placement.servers();
        let owners =
            self.plan.placement.owners(slice).iter().map(|&owner| servers[owner as usize].id);
        let stays = |server: &ServerId| {
            let has_refused =
                self.replicas.is_full(*server) && !self.replicas.has(*server, slice as u32);
            !self.replicas.leaving().contains(server) && !has_refused
        };
        owners.filter(stays).count() < spec.replicas as usize
    }

    /// Returns whether the open step waits for a report of the server.
    pub(crate) fn awaits(&self, server: ServerId) -> bool {
        self.replicas.is_active(server) || self.plan.trainable.contains_key(&server)
    }

    /// The servers that each slice has left without the server `lost`, those with its content
    /// first. `None` if a slice has no server with its content left.
    pub(crate) fn kept_without(&self, lost: Option<ServerId>) -> Option<Vec<Vec<Server>>> {
        let servers = self.plan.placement.servers();
        let kept = |slice: usize| {
            let owners =
                self.plan.placement.owners(slice).iter().map(|&owner| &servers[owner as usize]);
            let left = owners.filter(|server| Some(server.id) != lost);
            let (whole, mut empty): (Vec<Server>, Vec<Server>) =
                left.cloned().partition(|server| self.replicas.has(server.id, slice as u32));
            empty.retain(|server| !self.replicas.is_full(server.id));
            let has_content = !whole.is_empty() || !self.version.is_published();
            has_content.then(|| [whole, empty].concat())
        };
        (0..self.plan.placement.slices()).map(kept).collect()
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
        matches!(&self.phase, Phase::Open(open) if open.version.is_published())
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
        if spec.replicas <= 1 || open.plan.placement.servers().len() <= 1 {
            return false;
        }
        let Some(kept) = open.kept_without(Some(lost)) else { return false };
        // Memory may be free again: without this server they are asked once more.
        open.replicas.ask_full_again();
        // If the other servers have all initial parameters, the ranks may have been told so.
        open.version.initialised(lost);
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
        let (placement, replicas) = (&open.plan.placement, &open.replicas);
        let mut lacking: Vec<usize> =
            (0..placement.slices()).filter(|&slice| open.lacks_servers(spec, slice)).collect();
        lacking.extend(replicas.without_memory());
        lacking.dedup_by_key(|slice| placement.owners(*slice));
        let can_hold = |server: &Server, slice: usize| {
            let mut owners = placement.owners(slice).iter();
            owners.all(|&owner| placement.servers()[owner as usize] != *server)
        };
        let mut live = cx.common.servers.placeable();
        live.retain(|server| !replicas.cannot_hold(server));
        let is_possible =
            lacking.iter().any(|&slice| live.iter().any(|server| can_hold(server, slice)));
        if open.version.is_published()
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
        if let Some(lost) = lost {
            open.replicas.left(lost);
        }
        let mut live = cx.common.servers.placeable();
        live.retain(|of| !open.replicas.has_refused(of));
        let zones = cx.common.servers.zones();
        let (unfit, wanted) = (open.replicas.unfit(), spec.replicas as usize);
        let placed = replace_lost(&kept, &live, zones, unfit, &weights(&spec), wanted);
        let placement = match placed {
            Ok(placement) => placement,
            Err(error) => return self.fail(&error.to_string(), cx),
        };
        // A server that has lost the job may be connected, and get slices again.
        let before = open.plan.placement.servers().iter().filter(|server| Some(server.id) != lost);
        let before: Vec<Server> = before.cloned().collect();
        let held: HashMap<&Server, BTreeSet<u32>> = before
            .iter()
            .map(|server| (server, slices_on(&open.plan.placement, server.id)))
            .collect();
        let is_full = !open.version.is_published(); // all parameters are uploaded again
        let empty = empty(&placement, |server, slice| {
            let holds = held.get(server).is_some_and(|slices| slices.contains(&slice));
            is_full || holds && open.replicas.has(server.id, slice)
        });
        open.plan = Plan::of(&spec, placement);
        open.replicas = open.replicas.moved(&spec, &open.plan.placement, empty);
        if open.degraded_slices(&spec) > 0 {
            open.replicas.degrade(cx.now);
        }
        if let Some(lost) = lost {
            open.disconnects.end(lost);
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
        if let Some(last) = open.version.last_mut() {
            last.without(lost, epoch, cx.out);
        }
        let leases: Vec<_> = open.members.by_rank().collect();
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
        let origin =
            (self.fork.clone(), self.restore.clone(), self.line.clone(), self.recent.clone());
        let announce = |open: &mut Open, epoch, out: &mut Vec<Action>| {
            let placement = open.plan.placement.clone();
            for server in placement.servers() {
                if before.contains(server) {
                    let (job, placement) = (job.clone(), placement.clone());
                    let command = Command::NewPlacement { job, epoch, placement };
                    out.push(Action::Command(server.id, command));
                    continue;
                }
                open.replicas.open(server.id, epoch);
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
        open.replicas.refuse(server, incarnation);
        self.fail_over(server, reason, cx)
    }

    /// Allows the servers of a job with replicas to serve the current version, if all of them have
    /// stored the decision that leads to it.
    pub(crate) fn serve_version(&mut self, cx: &mut Context<'_>) {
        let Phase::Open(open) = &self.phase else { return };
        let is_ready = self.spec.replicas > 1 && open.is_stored();
        if let Some(version) = open.version.current().filter(|_| is_ready) {
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
        (fork, requested, line, recent): &Origin,
        (job_id, epoch): (u64, u64),
        server: ServerId,
    ) -> OpenJob {
        OpenJob {
            spec: spec.clone(),
            placement: self.plan.placement.clone(),
            job_id,
            epoch,
            line: line.clone(),
            recent: recent.clone(),
            server,
            fork: fork.clone(),
            source: None,
            checkpoint: None,
            requested: requested.clone(),
            leases: self.members.by_rank().collect(),
            done: self.departed.done().collect(),
            left: self.departed.left().collect(),
            version: self.version.current(),
            decision: self.version.last().map(|last| Box::new(last.decision().clone())),
        }
    }
}
