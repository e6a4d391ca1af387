//! Draining: the jobs of a server move to other servers, so that it can be stopped.
//!
//! A job with replicas copies the slices of the server to other servers first, and releases the
//! server when each of its slices has all its replicas elsewhere. Meanwhile the server counts as
//! any other, so that the loss of another one loses nothing. The placement changes between two
//! steps: no rank has begun the next one, so no step is aborted. A job without replicas returns to
//! its last checkpoint, if the operator permits it.
//!
//! The client repeats its request until no job is left on the server. The move continues without
//! it, until the server is no longer cordoned.

use zeroshard_model::{JobSpec, Server, listing::some_of};

use crate::{
    cluster::context::{Common, Context},
    job::{Job, Open, Phase, replicas::Change},
    vocabulary::{calls::Stays, ids::ServerId},
};

impl Job {
    /// Moves the job off the server, unless a slice would be lost.
    ///
    /// # Errors
    /// Why the job still has slices there.
    pub(crate) fn move_off(
        &mut self,
        server: &Server,
        restore: bool,
        cx: &mut Context<'_>,
    ) -> Result<(), Stays> {
        let job = self.spec.name.clone();
        let stays = |reason: String, transient: bool| Err(Stays { job, reason, transient });
        let Phase::Open(open) = &self.phase else {
            let waits_for = self.wait(cx.common).map(|wait| wait.reason).unwrap_or_default();
            return stays(format!("it is not open: it waits for {waits_for}"), true);
        };
        let gone = format!("{} is being drained", cx.name(server.id));
        if self.spec.replicas > 1 {
            if !open.replicas.leaving().contains(&server.id)
                && let Some((reason, transient)) = self.keeps(open, server.id, cx.common)
            {
                return stays(reason, transient);
            }
            return match self.copy_then_release(server.id, cx) {
                None => Ok(()),
                Some((reason, transient)) => stays(reason, transient),
            };
        }
        let reason = match self.spec.is_restored_on_loss() {
            false => {
                "it has no replicas and does not return to checkpoints (on_loss): wait until it \
                      ends, or save it, delete it and restore it (zsctl checkpoint)"
            }
            true if !restore => {
                "it has no replicas, but it can return to its last checkpoint: \
                                 repeat with --restore"
            }
            true if open.saves.last().is_none() => {
                "no checkpoint has been completed since the coordinator started: save the job \
                 first (zsctl checkpoint save)"
            }
            true if self.interrupt(&gone, cx) => {
                let reason = "it is being restored from its last checkpoint on other servers";
                return stays(reason.to_owned(), true);
            }
            true => "its initial parameters are not complete",
        };
        stays(reason.to_owned(), false)
    }

    /// The reason why a job with replicas needs the server, and whether this can change without an
    /// action of the operator.
    fn keeps(&self, open: &Open, server: ServerId, common: &Common) -> Option<(String, bool)> {
        if !open.version.is_published() {
            return Some(("its initial parameters are being uploaded".to_owned(), true));
        }
        if let Some(away) = open.disconnects.first() {
            return Some((
                format!("it waits for the return of {}", common.servers.name(away)),
                true,
            ));
        }
        let degraded = open.degraded_slices(&self.spec);
        if degraded > 0 {
            let reason = format!("{degraded} of its slices have too few replicas");
            return Some((reason, open.replicas.is_copying()));
        }
        let others = common.servers.placeable().into_iter().filter(|other| other.id != server);
        let others: Vec<Server> = others.collect();
        let (needed, found) = (self.spec.replicas as usize, others.len());
        if found < needed {
            let reason = format!(
                "its {needed} replicas need {needed} other servers that are not cordoned, but only \
                 {found} are connected: start another shard server"
            );
            return Some((reason, false));
        }
        let load = open.plan.loads.get(&server).copied().unwrap_or_default();
        let free_memory = common.free_memory();
        let free = others.iter().try_fold(0u64, |sum, other| {
            Some(sum.saturating_add(free_memory.free(other.id)?.bytes))
        });
        let free = free.filter(|&free| free < load.bytes)?;
        let reason = format!(
            "it needs {} bytes on the server, but the other servers have only {free} bytes free: \
             start another shard server",
            load.bytes
        );
        Some((reason, false))
    }

    /// Moves a job with replicas off the server. Returns why it still has slices there, and whether
    /// this can change without an action of the operator.
    fn copy_then_release(
        &mut self,
        server: ServerId,
        cx: &mut Context<'_>,
    ) -> Option<(String, bool)> {
        let Phase::Open(open) = &mut self.phase else { return None };
        open.replicas.leave(server);
        if open.members.is_empty() {
            self.continue_drains(cx);
        }
        match &self.phase {
            Phase::Open(open) if self.phase.uses(server) => {
                Some(self.drain_waits_for(open, server, cx.common))
            }
            _ => None,
        }
    }

    /// The next change of placement by which servers are drained, if the last one has been
    /// completed. No rank has begun the open step.
    pub(crate) fn continue_drains(&mut self, cx: &mut Context<'_>) {
        let Self { name, spec, phase: Phase::Open(open), .. } = self else { return };
        if !open.replicas.are_wanted() {
            return;
        }
        let is_calm =
            open.disconnects.is_empty() && open.uneven_inputs.len() == 0 && open.round.is_empty();
        if !is_calm || !open.version.is_published() || !open.is_stored() {
            return;
        }
        let wanted = spec.replicas as usize;
        let mut leaving = open.replicas.leaving().iter().copied();
        let spare = leaving.find(|&server| {
            let others = |slice| open.holders(slice).filter(|&holder| holder != server).count();
            open.saves.awaits(server).is_none()
                && (0..open.plan.placement.slices()).all(|slice| others(slice) >= wanted)
        });
        if let Some(server) = spare
            && let Some(kept) = open.kept_without(Some(server))
        {
            cx.note(format!(
                "job {name:?} has copied its slices from {}, and releases it",
                cx.name(server)
            ));
            return self.change_placement(Change::Release(server), kept, cx);
        }
        let live = cx.common.servers.placeable();
        let lacks =
            (0..open.plan.placement.slices()).any(|slice| can_copy(&live, open, spec, slice));
        if lacks && let Some(kept) = open.kept_without(None) {
            self.change_placement(Change::Copy, kept, cx);
        }
    }

    /// What a job waits for that is being moved off the server, and whether this can change without
    /// an action of the operator.
    fn drain_waits_for(&self, open: &Open, server: ServerId, common: &Common) -> (String, bool) {
        let (spec, live) = (&self.spec, common.servers.placeable());
        let wanted = spec.replicas as usize;
        let others = |slice| open.holders(slice).filter(|&holder| holder != server).count();
        let slices: Vec<usize> =
            open.plan.placement.slices_of(server).map(|(slice, _)| slice).collect();
        let copied = slices.iter().filter(|&&slice| others(slice) >= wanted).count();
        let of = format!("{copied} of {} slices have been copied", slices.len());
        let lacking = slices.iter().filter(|&&slice| open.lacks_servers(spec, slice)).count();
        if let Some(away) = open.disconnects.first() {
            return (
                format!("{of}; it waits for the return of {}", common.servers.name(away)),
                true,
            );
        }
        if lacking > 0 && !slices.iter().any(|&slice| can_copy(&live, open, spec, slice)) {
            let reason = format!(
                "{of}, but no other server has room for {lacking} slices: start another shard \
                 server"
            );
            return (reason, false);
        }
        if lacking == 0 && copied < slices.len() {
            return (of, true);
        }
        if open.uneven_inputs.len() > 0 {
            return (format!("{of}; it waits until no rank rests"), true);
        }
        if open.saves.awaits(server).is_some() {
            return (format!("{of}; it waits for the end of a save"), true);
        }
        let lacks = some_of(self.step_lacks(open, common));
        (format!("{of}; it waits for the end of step {}: {lacks}", open.step()), true)
    }
}

/// Returns whether a slice is to have another server, and one of the `live` ones can hold it.
fn can_copy(live: &[Server], open: &Open, spec: &JobSpec, slice: usize) -> bool {
    open.lacks_servers(spec, slice)
        && live.iter().any(|server| {
            let owners = open.plan.placement.owners(slice);
            let is_owner = |&at: &u32| open.plan.placement.servers()[at as usize].id == server.id;
            !open.replicas.cannot_hold(server) && !owners.iter().any(is_owner)
        })
}
