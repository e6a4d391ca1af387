//! Commands of operators that concern a job: they evict its ranks, and let it use servers again.
//! (`drains` empties servers.)

use zeroshard_model::{Error, Result};

use crate::{
    cluster::context::Context,
    job::{Job, Phase},
    state::members::Cause,
    vocabulary::{
        calls::Reply,
        events::Action,
        ids::{Caller, Lease, ServerId},
    },
};

impl Job {
    /// Ends the lease of a rank whose worker hangs.
    pub(crate) fn evict(&mut self, caller: Caller, rank: u32, cx: &mut Context<'_>) {
        let lease = match self.lease_of(rank) {
            Ok(lease) => lease,
            Err(error) => return cx.push(Action::Answer(caller, Err(error))),
        };
        cx.note(format!("rank {rank} of job {:?} was evicted by an operator", self.name));
        self.expel(rank, lease, Cause::Evicted, cx);
        cx.push(Action::Answer(caller, Ok(Reply::Evicted { epoch: self.epoch })));
    }

    /// The lease of a rank.
    ///
    /// # Errors
    /// [`Error::Invalid`] if no worker holds the rank.
    fn lease_of(&self, rank: u32) -> Result<Lease> {
        let lease = match &self.phase {
            Phase::Open(open) => open.members.get(rank).map(|member| member.lease),
            Phase::Waiting { interrupted: Some(interrupted), .. }
            | Phase::Opening { interrupted: Some(interrupted), .. } => interrupted.lease_of(rank),
            _ => None,
        };
        lease.ok_or_else(|| {
            Error::refused(format!(
                "no worker holds rank {rank} of job {:?}; `zsctl status --json` lists the ranks",
                self.name
            ))
        })
    }

    /// A server is not cordoned any more: the job does not move off it. It may use this server
    /// again, and may have waited for one.
    pub(crate) fn uncordoned(&mut self, server: ServerId, cx: &mut Context<'_>) {
        if let Phase::Open(open) = &mut self.phase {
            open.replicas.uncordoned(server);
        }
        self.try_place(cx);
        self.restore_redundancy(cx);
    }
}
