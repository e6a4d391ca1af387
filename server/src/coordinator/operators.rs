//! Commands of operators: cordon, uncordon and drain servers, and evict ranks.
//!
//! A cordoned server receives no new slices. Its process keeps this state for later coordinators.
//! Draining a server cordons it, and continues its jobs on their backups as if the server had been
//! lost, but only if every slice remains on a server and the other servers have room for new
//! backups. A drain request moves the slices that can be moved immediately, and the client repeats
//! it.

use zeroshard_proto::{Error, Result, Server};

use super::{
    cluster::Cluster,
    events::{Action, Caller, Command, Lease, Now, Reply, ServerId},
    leases::Cause,
    state::{Job, Open, Phase},
};

/// The progress of draining a server.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Drained {
    pub(crate) server: Server,
    pub(crate) stays: Vec<Stays>,
    /// The number of slices, over all jobs, with too few replicas.
    pub(crate) degraded: u64,
}

/// A job that has slices on a server that is being drained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stays {
    pub(crate) job: String,
    pub(crate) reason: String,
    /// Whether a later request can succeed without an action of the operator.
    pub(crate) transient: bool,
}

impl Cluster {
    /// Cordons a server, or uncordons it.
    pub(super) fn cordon(
        &mut self,
        caller: Caller,
        server: &str,
        cordoned: bool,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        let answer = self.set_cordoned(server, cordoned, now, out).map(Reply::Cordoned);
        out.push(Action::Answer(caller, answer));
    }

    fn set_cordoned(
        &mut self,
        server: &str,
        cordoned: bool,
        now: Now,
        out: &mut Vec<Action>,
    ) -> Result<Server> {
        let server = self.find_server(server)?;
        let Some(known) = self.servers.get_mut(&server.id) else { return Ok(server) };
        if known.cordoned == cordoned {
            return Ok(server);
        }
        known.cordoned = cordoned;
        out.push(Action::Command(server.id, Command::Cordon { cordoned }));
        let what = if cordoned { "cordoned" } else { "no longer cordoned" };
        out.push(Action::Note(format!("shard server {} is {what}", server.address)));
        if !cordoned {
            let names: Vec<String> = self.jobs.keys().cloned().collect();
            for name in names {
                self.try_place(&name, now, out);
                self.restore_redundancy(&name, now, out);
            }
        }
        Ok(server)
    }

    /// The connected server with this address or id.
    fn find_server(&self, name: &str) -> Result<Server> {
        // Logs show ids in hexadecimal digits, and tables show them in decimal digits.
        let ids = [10, 16].map(|radix| ServerId::from_str_radix(name, radix).ok());
        let is_named = |server: &Server| server.address == name || ids.contains(&Some(server.id));
        self.live().into_iter().find(is_named).ok_or_else(|| {
            let expected = "the address or the id of a connected shard server; `zsctl status` \
                            lists them";
            Error::invalid("shard server", format!("{name:?}"), expected)
        })
    }

    /// Cordons a server, and moves the slices that can be moved immediately.
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

    /// Continues a job without the server, unless a slice would be lost.
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
        let gone = format!("shard server {} is being drained", server.address);
        if found.spec.replicas > 1 {
            if let Some((reason, transient)) = self.keeps(found, open, server.id) {
                return stays(&job, reason, transient);
            }
            return match self.fail_over(&job, server.id, &gone, now, out) {
                true => Ok(()),
                false => stays(&job, "the server holds the only copy of a slice".to_owned(), true),
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

    /// Ends the lease of a rank whose worker hangs.
    pub(super) fn evict(
        &mut self,
        caller: Caller,
        job: &str,
        rank: u32,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        let lease = match self.lease_of(job, rank) {
            Ok(lease) => lease,
            Err(error) => return out.push(Action::Answer(caller, Err(error))),
        };
        out.push(Action::Note(format!("rank {rank} of job {job:?} was evicted by an operator")));
        let lost = Error::LeaseLost { job: job.to_owned(), rank };
        out.push(Action::End(lease, Some(lost)));
        self.end_any_lease(job, rank, lease, Cause::Evicted, now, out);
        let epoch = self.jobs.get(job).map_or(0, |job| job.epoch);
        out.push(Action::Answer(caller, Ok(Reply::Evicted { epoch })));
    }

    /// The lease of a rank.
    ///
    /// # Errors
    /// [`Error::UnknownJob`]; [`Error::Invalid`] if no worker holds the rank.
    fn lease_of(&self, job: &str, rank: u32) -> Result<Lease> {
        let member = match &self.job(job)?.phase {
            Phase::Open(open) => open.members.get(rank),
            Phase::Waiting { interrupted: Some(interrupted), .. }
            | Phase::Opening { interrupted: Some(interrupted), .. } => {
                interrupted.members.get(rank)
            }
            _ => None,
        };
        member.map(|member| member.lease).ok_or_else(|| {
            let what = format!("rank of job {job:?}");
            let expected = "a rank that a worker holds; `zsctl status --json` lists them";
            Error::invalid(what, rank, expected)
        })
    }
}
