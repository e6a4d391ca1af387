//! The end of a job: it fails, is deleted, or is given up before it was open.

use std::{collections::BTreeSet, mem};

use zeroshard_model::{Error, Result, Server};

use crate::{
    cluster::context::{Common, Consequence, Context},
    job::{Job, Phase},
    operators::history::Severity,
    placement::fork::Source,
    vocabulary::{
        calls::Reply,
        commands::Command,
        events::Action,
        ids::{Now, ServerId, Waiter},
    },
};

impl Job {
    /// A server cannot hold or continue the job, which it has opened in this epoch or an earlier
    /// one. `transient`: it may be able to open the job later. `source` is the predecessor of a job
    /// that is being created from it.
    pub(crate) fn failed_on(
        &mut self,
        server: ServerId,
        epoch: u64,
        reason: &str,
        transient: bool,
        source: Option<Result<Source>>,
        cx: &mut Context<'_>,
    ) {
        let reason = format!("{}: {reason}", cx.name(server));
        if let Phase::Recovering(recovery) = &self.phase
            && recovery.is_held_by(server)
        {
            return self.fail(&reason, cx);
        }
        if self.has_opened_since(server, epoch) || self.refuse_on(server, &reason, cx) {
            return;
        }
        match &self.phase {
            // A server that has been replaced may not know it yet.
            Phase::Open(open) if open.servers().all(|id| id != server) => {}
            Phase::Open(_) => self.fail(&reason, cx),
            Phase::Opening { interrupted: Some(_), .. } if transient => {
                self.restore_again(&reason, cx);
            }
            Phase::Opening { interrupted: Some(_), .. } => self.fail(&reason, cx),
            // What the server could not copy may be gone.
            Phase::Opening { .. } => match source {
                Some(Err(gone)) => self.abandon(&gone, cx),
                _ => self.fail(&reason, cx),
            },
            _ => {}
        }
    }

    /// Returns whether a server has been told to open the job again since this epoch, so that its
    /// report of a failure is about the job as it was before.
    fn has_opened_since(&self, server: ServerId, epoch: u64) -> bool {
        let opened = match &self.phase {
            Phase::Opening { .. } => Some(self.epoch),
            Phase::Open(open) => {
                let restored = open.version.rolled_back().map(|(first, _)| first);
                open.replicas.opens_in(server).max(restored)
            }
            Phase::Waiting { .. } | Phase::Recovering(_) | Phase::Failed { .. } | Phase::Gone => {
                None
            }
        };
        opened.is_some_and(|opened| epoch < opened)
    }

    /// Opening -> gone, Open -> Failed: all waiting calls are answered, and the servers close the
    /// job.
    pub(crate) fn fail(&mut self, reason: &str, cx: &mut Context<'_>) {
        if matches!(self.phase, Phase::Gone) {
            return;
        }
        cx.alarm(Severity::Error, format!("job {:?} failed: {reason}", self.name));
        let failed = Phase::Failed { reason: reason.to_owned(), is_damaged: false };
        let phase = mem::replace(&mut self.phase, failed);
        // A job that never opened has no state to lose: it can be created again at once.
        let has_state = match &phase {
            Phase::Open(_)
            | Phase::Waiting { interrupted: Some(_), .. }
            | Phase::Opening { interrupted: Some(_), .. } => true,
            Phase::Recovering(recovery) => recovery.was_used(),
            _ => false,
        };
        match has_state {
            true => self.idle_from_now(cx),
            false => {
                self.phase = Phase::Gone;
                cx.push(Action::Forgotten { job: self.spec.name.clone() });
            }
        }
        let error = Error::JobFailed { job: self.spec.name.clone(), reason: reason.to_owned() };
        self.dissolve(phase, &error, cx);
    }

    /// Deletes the job, if it has this id or the id is 0. The answer follows when its servers know
    /// it.
    pub(crate) fn delete(&mut self, waiter: Waiter, id: u64, cx: &mut Context<'_>) {
        if id != 0 && id != self.id {
            return cx.answer(waiter, Err(Error::JobReplaced { job: self.spec.name.clone() }));
        }
        let servers = self.servers(cx.common);
        self.remove("deleted", cx);
        cx.note(format!("job {:?} is deleted", self.name));
        let what = format!("the deletion of job {:?}", self.name);
        // After the jobs that were being created from this one have been closed.
        let reply = Reply::Deleted;
        cx.consequences.push(Consequence::Answer { waiter, reply, servers, what });
    }

    /// The servers that may have slices of the job.
    pub(crate) fn servers(&self, common: &Common) -> BTreeSet<ServerId> {
        if let Phase::Failed { .. } | Phase::Waiting { .. } = self.phase {
            // Some of them may not have received the commands to close it.
            return common.servers.connected().keys().copied().collect();
        }
        let placed = self.phase.placement().into_iter().flat_map(|placement| placement.servers());
        placed.map(|server| server.id).chain(self.phase.holders()).collect()
    }

    /// Any phase -> gone.
    pub(crate) fn remove(&mut self, reason: &str, cx: &mut Context<'_>) {
        let error = Error::JobFailed { job: self.spec.name.clone(), reason: reason.to_owned() };
        self.end(&error, cx);
    }

    /// Ends the creation of the job.
    pub(crate) fn abandon(&mut self, error: &Error, cx: &mut Context<'_>) {
        cx.note(format!("job {:?} was not created: {error}", self.name));
        self.end(error, cx);
    }

    /// Ends the job, whose claims on checkpoints end with it.
    fn end(&mut self, error: &Error, cx: &mut Context<'_>) {
        cx.push(self.end_claims());
        self.give_way(error, cx);
        cx.push(Action::Forgotten { job: self.spec.name.clone() });
    }

    /// Ends the job here, for another job of its name or for its own return.
    pub(crate) fn give_way(&mut self, error: &Error, cx: &mut Context<'_>) {
        let phase = mem::replace(&mut self.phase, Phase::Gone);
        self.dissolve(phase, error, cx);
    }

    /// Tells the connected servers of the placement to close the job, and ends every call and
    /// stream, and the creation of jobs that were taking over from it.
    fn dissolve(&self, phase: Phase, error: &Error, cx: &mut Context<'_>) {
        let is_live = |server: &&Server| {
            let known = cx.common.servers.get(server.id);
            known.is_some_and(|known| known.incarnation == server.incarnation)
        };
        let placed = phase.placement().into_iter().flat_map(|placement| placement.servers());
        let live = placed.filter(is_live).map(|server| server.id);
        // Commands to servers that are lost are dropped.
        let holding: BTreeSet<ServerId> = live.chain(phase.holders()).collect();
        for server in holding {
            cx.command(server, Command::Close(self.reference()));
        }
        if matches!(phase, Phase::Waiting { .. } | Phase::Opening { .. }) {
            // Its predecessor may be of no more use.
            cx.push(Action::Tick(Now::ZERO));
        }
        let (waiters, leases) = phase.into_waiting();
        cx.refuse(waiters, error);
        for lease in leases {
            cx.push(Action::End(lease, Some(error.clone())));
        }
        cx.consequences.push(Consequence::Ended { job_id: self.id, error: error.clone() });
    }
}
