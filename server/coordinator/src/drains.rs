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

use zeroshard_model::{Error, JobSpec, Server, listing::some_of};

use super::{
    cluster::Cluster,
    events::{Action, Caller, Now, Reply, ServerId},
    replicas::Change,
    state::{Job, Open, Phase},
};

/// The progress of draining a server.
#[derive(Debug, Clone, PartialEq)]
pub struct Drained {
    pub server: Server,
    pub stays: Vec<Stays>,
    /// The number of slices, over all jobs, with too few replicas.
    pub degraded: u64,
}

/// A job that has slices on a server that is being drained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stays {
    pub job: String,
    pub reason: String,
    /// `true` if a later request can succeed without an action of the operator.
    pub transient: bool,
}

impl Cluster {
    /// Cordons a server, and begins or continues to move its slices to other servers.
    pub(super) fn drain(
        &mut self,
        caller: Caller,
        server: &str,
        restore: bool,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        let server = match self.set_cordoned(server, true, now, out) {
            Ok(server) => server,
            Err(error) if let Some(missing) = self.find_missing(server) => {
                return self.drain_missing(caller, missing, error, out);
            }
            Err(error) => return out.push(Action::Answer(caller, Err(error))),
        };
        let holds = |job: &&Job| {
            job.phase.uses(server.id) || job.phase.holders().any(|holder| holder == server.id)
        };
        let jobs = self.jobs.values().filter(holds).map(|job| job.spec.name.clone());
        let jobs: Vec<String> = jobs.collect();
        let stays = jobs
            .into_iter()
            .filter_map(|job| self.move_off(job, &server, restore, now, out).err())
            .collect();
        let degraded = |job: &Job| match &job.phase {
            Phase::Open(open) => open.degraded_slices(&job.spec) as u64,
            _ => 0,
        };
        let degraded = self.jobs.values().map(degraded).sum();
        let drained = Drained { server, stays, degraded };
        out.push(Action::Answer(caller, Ok(Reply::Drained(drained))));
    }

    /// Misses a lost server no more, if no job waits for it.
    fn drain_missing(
        &mut self,
        caller: Caller,
        server: Server,
        error: Error,
        out: &mut Vec<Action>,
    ) {
        if self.jobs.values().any(|job| job.phase.uses(server.id)) {
            return out.push(Action::Answer(caller, Err(error)));
        }
        self.missing.remove(&server.id);
        let name = self.name_at(server.id, &server.address);
        out.push(Action::Note(format!("{name} is not missed any more")));
        let drained = Drained { server, stays: Vec::new(), degraded: 0 };
        out.push(Action::Answer(caller, Ok(Reply::Drained(drained))));
    }

    /// Moves a job off the server, unless a slice would be lost.
    fn move_off(
        &mut self,
        job: String,
        server: &Server,
        restore: bool,
        now: Now,
        out: &mut Vec<Action>,
    ) -> Result<(), Stays> {
        let stays = |job: &String, reason: String, transient: bool| {
            Err(Stays { job: job.clone(), reason, transient })
        };
        let Some(found) = self.jobs.get(&job) else { return Ok(()) };
        let open = match &found.phase {
            Phase::Open(open) => open,
            _ => {
                let waits_for = self.wait_of(found).map(|wait| wait.reason).unwrap_or_default();
                return stays(&job, format!("it is not open: it waits for {waits_for}"), true);
            }
        };
        let gone = format!("{} is being drained", self.name(server.id));
        if found.spec.replicas > 1 {
            if !open.replicas.leaving.contains(&server.id)
                && let Some((reason, transient)) = self.keeps(found, open, server.id)
            {
                return stays(&job, reason, transient);
            }
            return match self.copy_then_release(&job, server.id, now, out) {
                None => Ok(()),
                Some((reason, transient)) => stays(&job, reason, transient),
            };
        }
        let reason = match found.spec.is_restored_on_loss() {
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
            true if self.interrupt(&job, &gone, now, out) => {
                let reason = "it is being restored from its last checkpoint on other servers";
                return stays(&job, reason.to_owned(), true);
            }
            true => "its initial parameters are not complete",
        };
        stays(&job, reason.to_owned(), false)
    }

    /// The reason why a job with replicas needs the server, and whether this can change without an
    /// action of the operator.
    fn keeps(&self, job: &Job, open: &Open, server: ServerId) -> Option<(String, bool)> {
        if open.version.is_none() {
            return Some(("its initial parameters are being uploaded".to_owned(), true));
        }
        if let Some(&away) = open.away.keys().next() {
            return Some((format!("it waits for the return of {}", self.name(away)), true));
        }
        let degraded = open.degraded_slices(&job.spec);
        if degraded > 0 {
            let reason = format!("{degraded} of its slices have too few replicas");
            return Some((reason, open.replicas.is_copying()));
        }
        let others = self.placeable().into_iter().filter(|other| other.id != server);
        let others: Vec<Server> = others.collect();
        let (needed, found) = (job.spec.replicas as usize, others.len());
        if found < needed {
            let reason = format!(
                "its {needed} replicas need {needed} other servers that are not cordoned, but only \
                 {found} are connected: start another shard server"
            );
            return Some((reason, false));
        }
        let load = open.loads.get(&server).copied().unwrap_or_default();
        let rooms = self.rooms();
        let free = others
            .iter()
            .try_fold(0u64, |sum, other| Some(sum.saturating_add(rooms.free(other.id)?.bytes)));
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
        name: &str,
        server: ServerId,
        now: Now,
        out: &mut Vec<Action>,
    ) -> Option<(String, bool)> {
        let Some(Job { phase: Phase::Open(open), .. }) = self.jobs.get_mut(name) else {
            return None;
        };
        open.replicas.leaving.insert(server);
        if open.members.is_empty() {
            self.continue_drains(name, now, out);
        }
        let job = self.jobs.get(name).filter(|job| job.phase.uses(server))?;
        let Phase::Open(open) = &job.phase else { return None };
        Some(self.drain_waits_for(job, open, server))
    }

    /// The next change of placement by which servers are drained, if the last one has been
    /// completed. No rank has begun the open step.
    pub(super) fn continue_drains(&mut self, name: &str, now: Now, out: &mut Vec<Action>) {
        let Some(Job { spec, phase: Phase::Open(open), .. }) = self.jobs.get(name) else { return };
        let is_calm = open.away.is_empty() && open.resting.len() == 0 && open.round.is_empty();
        if !is_calm || open.version.is_none() || !open.is_stored() {
            return;
        }
        let wanted = spec.replicas as usize;
        let mut leaving = open.replicas.leaving.iter().copied();
        let spare = leaving.find(|&server| {
            let others = |slice| open.holders(slice).filter(|&holder| holder != server).count();
            !open.saves.awaits(server)
                && (0..open.placement.slices()).all(|slice| others(slice) >= wanted)
        });
        if let Some(server) = spare
            && let Some(kept) = open.kept_without(Some(server))
        {
            out.push(Action::Note(format!(
                "job {name:?} has copied its slices from {}, and releases it",
                self.name(server)
            )));
            return self.change_placement(name, Change::Release(server), kept, now, out);
        }
        let lacks = (0..open.placement.slices()).any(|slice| self.can_copy(open, spec, slice));
        if lacks && let Some(kept) = open.kept_without(None) {
            self.change_placement(name, Change::Copy, kept, now, out);
        }
    }

    /// Returns whether a slice is to have another server, and there is one.
    fn can_copy(&self, open: &Open, spec: &JobSpec, slice: usize) -> bool {
        open.lacks_servers(spec, slice)
            && self.placeable().iter().any(|server| {
                let owners = open.placement.owners(slice);
                let is_owner = |&at: &u32| open.placement.servers()[at as usize].id == server.id;
                !open.replicas.cannot_hold(server) && !owners.iter().any(is_owner)
            })
    }

    /// What a job waits for that is being moved off the server, and whether this can change without
    /// an action of the operator.
    fn drain_waits_for(&self, job: &Job, open: &Open, server: ServerId) -> (String, bool) {
        let wanted = job.spec.replicas as usize;
        let others = |slice| open.holders(slice).filter(|&holder| holder != server).count();
        let slices: Vec<usize> = open.placement.slices_of(server).map(|(slice, _)| slice).collect();
        let copied = slices.iter().filter(|&&slice| others(slice) >= wanted).count();
        let of = format!("{copied} of {} slices have been copied", slices.len());
        let lacking = slices.iter().filter(|&&slice| open.lacks_servers(&job.spec, slice)).count();
        if let Some(&away) = open.away.keys().next() {
            return (format!("{of}; it waits for the return of {}", self.name(away)), true);
        }
        if lacking > 0 && !slices.iter().any(|&slice| self.can_copy(open, &job.spec, slice)) {
            let reason = format!(
                "{of}, but no other server has room for {lacking} slices: start another shard \
                 server"
            );
            return (reason, false);
        }
        if lacking == 0 && copied < slices.len() {
            return (of, true);
        }
        if open.resting.len() > 0 {
            return (format!("{of}; it waits until no rank rests"), true);
        }
        if open.saves.awaits(server) {
            return (format!("{of}; it waits for the end of a save"), true);
        }
        let lacks = some_of(self.step_lacks(job, open));
        (format!("{of}; it waits for the end of step {}: {lacks}", open.step()), true)
    }

    /// Jobs do not move off the server any more.
    pub(super) fn cancel_drain(&mut self, server: ServerId) {
        for job in self.jobs.values_mut() {
            if let Phase::Open(open) = &mut job.phase {
                open.replicas.leaving.remove(&server);
            }
        }
    }
}
