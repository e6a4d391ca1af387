//! Replicas: several servers hold each slice, so that the job continues when one of them is lost.
//!
//! When a primary is lost, a backup with the same content becomes the primary, in a new epoch.
//! Other servers become backups: they open the job, and copy their slices from the primaries
//! (`copies`). A step is decided when primaries and backups have its reduced gradients. Its version
//! is served when all servers have stored the decision.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use zeroshard_model::{Error, JobSpec, Placement, Restore, Server, Succession};

use super::{
    context::Context,
    events::{Action, Command, Now, OpenJob, ServerId},
    held::Held,
    history::Severity,
    placement::{Unfit, replace_lost},
    plan::{Plan, weights},
    state::{Job, Open, Phase},
};

mod copies;

/// What a job was created from: the predecessor and the checkpoint, if any.
type Origin = (Option<Arc<Succession>>, Option<Arc<Restore>>);

/// How long a job with replicas waits for a server whose control stream has broken.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// The backups of an open job.
#[derive(Debug, Default)]
pub struct Replicas {
    /// By server: the slices that it is to hold as a backup, and has not begun to copy.
    empty: BTreeMap<ServerId, BTreeSet<u32>>,
    /// By server: the number of trained slices that it holds as a backup, or is copying.
    active: BTreeMap<ServerId, usize>,
    /// The servers that were told to open the job as backups and have not done so yet, with the
    /// epochs in which they open it.
    opening: BTreeMap<ServerId, u64>,
    /// The copy in progress.
    copying: Option<Copying>,
    /// By server: the number of the last copy that it was told to make in this placement.
    told: BTreeMap<ServerId, u64>,
    /// The number of the last copy in any placement.
    last_copy: u64,
    /// The servers that could not hold the job, or that its ranks could not reach, with their
    /// incarnations.
    refused: BTreeSet<(ServerId, u64)>,
    /// The servers that have no memory for further slices.
    full: BTreeSet<ServerId>,
    /// Since when there have been slices with too few replicas.
    degraded: Option<Now>,
    /// `true` if the placement has fewer replicas of slices than the job asks for.
    is_short: bool,
    /// The servers from which the job moves away (`drains`), also if they hold no slices any more.
    pub(super) leaving: BTreeSet<ServerId>,
}

/// A change of the placement of a running job.
#[derive(Debug, Clone, Copy)]
pub(super) enum Change {
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

/// Slices that a server is copying.
#[derive(Debug)]
struct Copying {
    number: u64,
    server: ServerId,
    slices: Vec<u32>,
}

impl Replicas {
    /// The backups of a job whose servers have all their slices.
    pub(super) fn new(spec: &JobSpec, placement: &Placement) -> Self {
        let is_short = is_short(spec, placement);
        Self { active: active(spec, placement, &BTreeMap::new()), is_short, ..Self::default() }
    }

    /// Returns whether further servers could hold replicas of slices.
    pub(super) fn are_wanted(&self) -> bool {
        self.is_short || !self.full.is_empty() || !self.leaving.is_empty()
    }

    /// A server is not cordoned any more: the job does not move off it, and does not refuse it.
    pub(super) fn uncordoned(&mut self, server: ServerId) {
        self.leaving.remove(&server);
        self.refused.retain(|(refused, _)| *refused != server);
    }

    /// Returns whether slices are being copied, for which the open step waits.
    pub(super) fn is_copying(&self) -> bool {
        self.copying.is_some()
    }

    /// Returns whether a report was sent after the server had received the last command to copy
    /// slices.
    pub(super) fn is_current(&self, server: ServerId, copies: u64) -> bool {
        self.told.get(&server).copied().unwrap_or(0) == copies
    }

    /// The backups according to the descriptions by the servers of `placement`.
    pub(super) fn learn(
        spec: &JobSpec,
        placement: &Placement,
        held: &BTreeMap<ServerId, Held>,
        now: Now,
    ) -> Self {
        let full: BTreeMap<ServerId, BTreeSet<u32>> =
            held.iter().map(|(&server, held)| (server, held.full_slices(server))).collect();
        let empty = empty(placement, |server, slice| {
            // What has become of a server without a description is not known here.
            full.get(&server.id).is_none_or(|full| full.contains(&slice))
        });
        let current = held.iter().filter(|(_, held)| *held.plan.placement == *placement);
        let degraded = (!empty.is_empty()).then_some(now);
        Self {
            active: active(spec, placement, &empty),
            empty,
            told: current.map(|(&server, held)| (server, held.copies)).collect(),
            last_copy: held.values().map(|held| held.copies).max().unwrap_or(0),
            degraded,
            is_short: is_short(spec, placement),
            ..Self::default()
        }
    }

    /// The epoch in which a server opens the job as a backup, if it has not done so yet.
    pub(super) fn opens_in(&self, server: ServerId) -> Option<u64> {
        self.opening.get(&server).copied()
    }

    /// The slices that a server has not begun to copy.
    #[cfg(test)]
    pub(super) fn empty_on(&self, server: ServerId) -> BTreeSet<u32> {
        self.empty.get(&server).cloned().unwrap_or_default()
    }

    /// Returns whether a server has refused the job, or further slices of it.
    pub(super) fn cannot_hold(&self, server: &Server) -> bool {
        self.refused.contains(&(server.id, server.incarnation)) || self.full.contains(&server.id)
    }

    /// Returns whether one of the servers of a slice has its content.
    pub(super) fn has(&self, server: ServerId, slice: u32) -> bool {
        let lacks = |slices: &BTreeSet<u32>| slices.contains(&slice);
        let copies = |copy: &Copying| copy.server == server && copy.slices.contains(&slice);
        !self.empty.get(&server).is_some_and(lacks) && !self.copying.as_ref().is_some_and(copies)
    }
}

/// Returns whether a placement has fewer replicas of slices than the job asks for.
fn is_short(spec: &JobSpec, placement: &Placement) -> bool {
    placement.replicas() < spec.replicas as usize || placement.is_uneven()
}

/// The slices that a server holds, or is to hold.
fn slices_on(placement: &Placement, server: ServerId) -> BTreeSet<u32> {
    placement.slices_of(server).map(|(slice, _)| slice as u32).collect()
}

/// By server: its slices that it does not have according to `has`.
fn empty(
    placement: &Placement,
    has: impl Fn(&Server, u32) -> bool,
) -> BTreeMap<ServerId, BTreeSet<u32>> {
    let empty = |server: &Server| {
        let mut slices = slices_on(placement, server.id);
        slices.retain(|&slice| !has(server, slice));
        (server.id, slices)
    };
    let empty = placement.servers().iter().map(empty);
    empty.filter(|(_, slices)| !slices.is_empty()).collect()
}

/// By server: the number of trained slices that it holds as a backup.
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
    pub(super) fn holders(&self, slice: usize) -> impl Iterator<Item = ServerId> + '_ {
        let servers = self.placement.servers();
        let owners = self.placement.owners(slice).iter().map(|&owner| servers[owner as usize].id);
        owners.filter(move |&server| self.replicas.has(server, slice as u32))
    }

    /// Returns whether a slice is to have more servers, beside those that are being drained.
    pub(super) fn lacks_servers(&self, spec: &JobSpec, slice: usize) -> bool {
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
    pub(super) fn awaits(&self, server: ServerId) -> bool {
        let as_backup = self.replicas.active.get(&server).is_some_and(|&slices| slices > 0);
        as_backup || self.trainable.contains_key(&server)
    }

    /// The servers that each slice has left without the server `lost`, those with its content
    /// first. `None` if a slice has no server with its content left.
    pub(super) fn kept_without(&self, lost: Option<ServerId>) -> Option<Vec<Vec<Server>>> {
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
    pub(super) fn fail_over(&mut self, lost: ServerId, gone: &str, cx: &mut Context<'_>) -> bool {
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
    pub(super) fn restore_redundancy(&mut self, cx: &mut Context<'_>) {
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
    pub(super) fn change_placement(
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
    pub(super) fn refuse_on(
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
    pub(super) fn serve_version(&mut self, cx: &mut Context<'_>) {
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
