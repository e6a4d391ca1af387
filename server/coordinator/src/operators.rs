//! Commands of operators: cordon and uncordon servers, and evict ranks. (`drains` empties servers.)
//!
//! A cordoned server receives no new slices. Its process keeps this state for later coordinators.

use zeroshard_model::{Error, Result, Server, name::server_id};

use super::{
    cluster::Cluster,
    events::{Action, Caller, Command, Lease, Now, Reply, ServerId},
    leases::Cause,
    state::Phase,
};

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

    pub(super) fn set_cordoned(
        &mut self,
        server: &str,
        cordoned: bool,
        now: Now,
        out: &mut Vec<Action>,
    ) -> Result<Server> {
        let server = self.find_server(server)?;
        let Some(known) = self.servers.get_mut(&server.id) else { return Ok(server) };
        if known.cordoned != cordoned {
            known.cordoned = cordoned;
            out.push(Action::Command(server.id, Command::Cordon { cordoned }));
            let what = if cordoned { "cordoned" } else { "no longer cordoned" };
            out.push(Action::Note(format!("{} is {what}", self.name(server.id))));
        }
        if !cordoned {
            self.cancel_drain(server.id);
            self.accept_again(server.id);
            let names: Vec<String> = self.jobs.keys().cloned().collect();
            for name in names {
                self.try_place(&name, now, out);
                self.restore_redundancy(&name, now, out);
            }
        }
        Ok(server)
    }

    /// The connected server with this address, id or name.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is none, or [`Error::Unavailable`] while it may connect to a new
    /// coordinator.
    fn find_server(&self, name: &str) -> Result<Server> {
        self.live().into_iter().find(|server| is_named(server, name)).ok_or_else(|| {
            if self.is_learning() {
                return Error::Unavailable {
                    peer: format!("shard server {name:?}"),
                    cause: "the coordinator was started, and the server has not connected".into(),
                };
            }
            let expected = "the address, the id or the name (--id) of a connected shard server; \
                            `zsctl status` lists them";
            Error::invalid("shard server", format!("{name:?}"), expected)
        })
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
        self.expel(job, rank, lease, Cause::Evicted, now, out);
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

/// Returns whether an operator means this server: by its address, by the name that `--id` gave it,
/// or by its id in hexadecimal digits, as logs and tables show it, or in decimal digits, as in the
/// API.
pub(super) fn is_named(server: &Server, name: &str) -> bool {
    let ids = [10, 16].map(|radix| ServerId::from_str_radix(name, radix).ok());
    server.address == name || server.id == server_id(name) || ids.contains(&Some(server.id))
}
