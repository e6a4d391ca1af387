//! Leases: workers that take ranks, wait for them, leave, and are lost.
//!
//! Within one epoch a rank has at most one lease. When a lease ends, the epoch changes: at once,
//! or, if the rank left because it is done, before the rank is given to another worker.

use std::collections::BTreeSet;

use zeroshard_model::{Attempt, Departure, Error, Result};

use crate::{
    cluster::{context::Context, startup::unknown_yet},
    job::{Job, Phase},
    state::members::{Cause, Joining, Member},
    vocabulary::{
        calls::{Attach, Join, Leave, Reply, check_rank},
        commands::Command,
        events::Action,
        ids::{Caller, Lease, ServerId, Waiter},
    },
};

/// The maximum number of epochs by which a worker may be ahead of its servers.
pub(crate) const MAX_AHEAD: u64 = 1 << 32;

impl Job {
    pub(crate) fn join(&mut self, caller: Caller, join: Join, cx: &mut Context<'_>) {
        if let Err(error) = self.try_join(caller, join, cx) {
            cx.push(Action::Answer(caller, Err(error)));
        }
    }

    fn try_join(&mut self, caller: Caller, join: Join, cx: &mut Context<'_>) -> Result<()> {
        let rank = join.rank;
        check_rank(&self.name, rank, self.spec.world)?;
        let open = self.phase.open_mut(&self.name)?;
        if open.members.get(rank).is_some() {
            // A free rank has no queue: when a rank becomes free, it is given to the next worker in
            // the queue.
            open.queue.push(Waiter::new(caller, cx.now, join.rank_wait), join);
            return Ok(());
        }
        self.admit(caller, join, cx);
        Ok(())
    }

    /// Gives a free rank to a worker, and informs the servers.
    fn admit(&mut self, caller: Caller, join: Join, cx: &mut Context<'_>) {
        let Join { rank, address, lease, wait, .. } = join;
        let job = self.reference();
        let Phase::Open(open) = &mut self.phase else { return };
        if open.departed.rejoin(rank) {
            self.new_epoch(rank, Cause::Returned, cx);
        }
        let Phase::Open(open) = &mut self.phase else { return };
        open.send(&Command::Grant { job, rank, lease }, cx.out);
        let pending: BTreeSet<ServerId> = open.servers().collect();
        let joining = Some(Joining { waiter: Waiter::new(caller, cx.now, wait), pending });
        open.members.insert(rank, Member { lease, address, joining, told: None, detached: None });
        self.finish_join(lease, cx);
    }

    /// A server has accepted a lease.
    pub(crate) fn granted(
        &mut self,
        server: ServerId,
        rank: u32,
        lease: Lease,
        cx: &mut Context<'_>,
    ) {
        let Phase::Open(open) = &mut self.phase else { return };
        if open.members.rank_of(lease) != Some(rank) {
            return;
        }
        if let Some(joining) = open.members.of(lease).and_then(|member| member.joining.as_mut()) {
            joining.pending.remove(&server);
            self.finish_join(lease, cx);
        }
    }

    /// Answers the Join when every server has accepted the lease.
    fn finish_join(&mut self, lease: Lease, cx: &mut Context<'_>) {
        let Self { name, epoch, phase: Phase::Open(open), .. } = self else { return };
        let Some(rank) = open.members.rank_of(lease) else { return };
        let Some(member) = open.members.of(lease) else { return };
        let Some(joining) = member.joining.take_if(|joining| joining.pending.is_empty()) else {
            return;
        };
        let address = member.address.clone();
        if address.is_some() {
            open.peers.set(rank, address);
            open.wake_all(cx.out);
        }
        cx.note(format!("rank {rank} of job {name:?} joined, epoch {epoch}"));
        cx.answer(joining.waiter, Ok(Reply::Joined));
    }

    /// A worker continues its lease with a new stream.
    pub(crate) fn attach(&mut self, caller: Caller, attach: Attach, cx: &mut Context<'_>) {
        if let Err(error) = self.try_attach(caller, &attach, cx) {
            return cx.push(Action::Answer(caller, Err(error)));
        }
        cx.push(Action::Answer(caller, Ok(Reply::Joined)));
        self.attached_data(&attach, cx);
        self.move_ahead(&attach, cx);
        self.advance(cx);
    }

    /// Begins a new epoch if a worker knows a later attempt than the servers: it was told of it,
    /// and the coordinator died before a server was.
    fn move_ahead(&mut self, attach: &Attach, cx: &mut Context<'_>) {
        let Phase::Open(open) = &self.phase else { return };
        if is_ahead(attach.attempt, open.attempt(self.epoch)) {
            let world = self.spec.world;
            cx.common.epochs.see(attach.attempt.epoch);
            self.new_epoch(world, Cause::Recovered, cx);
        }
    }

    fn try_attach(&mut self, caller: Caller, attach: &Attach, cx: &mut Context<'_>) -> Result<()> {
        let Attach { job, rank, address, lease, attempt, .. } = attach;
        let Self { epoch, phase, .. } = self;
        let limit = epoch.saturating_add(MAX_AHEAD);
        let open = phase.open_mut(&job.name)?;
        if open.members.rank_of(*lease) != Some(*rank) {
            return Err(Error::LeaseLost { job: job.name.clone(), rank: *rank });
        }
        if attempt.epoch > limit {
            let what = format!("epoch that rank {rank} of job {:?} knows", job.name);
            return Err(Error::invalid(what, attempt.epoch, format!("at most {limit}")));
        }
        if *attempt > open.attempt(*epoch) && !open.disconnects.is_empty() {
            // Another coordinator may have decided about steps since, with these servers. A worker
            // that is only one step ahead may have made that step with them, too.
            let peer = format!("job {:?}", job.name);
            let cause = format!(
                "rank {rank} knows a later attempt, and shard servers that may know it as well are \
                 not connected"
            );
            return Err(Error::Unavailable { peer, cause });
        }
        let Some(member) = open.members.of(*lease) else { return Ok(()) };
        if member.detached.take().is_none() {
            let peer = format!("rank {rank} of job {:?}", job.name);
            let cause = "its earlier connection has not ended yet".to_owned();
            return Err(Error::Unavailable { peer, cause });
        }
        (member.address, member.told) = (address.clone(), None);
        cx.push(Action::Attached(*lease, caller));
        if address.is_some() {
            open.peers.set(*rank, address.clone());
            open.wake_all(cx.out);
        }
        Ok(())
    }

    /// A worker gives its rank back. An unknown lease has already ended.
    /// The answer follows when the servers know it.
    pub(crate) fn leave(&mut self, waiter: Waiter, leave: &Leave, cx: &mut Context<'_>) {
        let &Leave { lease, done, .. } = leave;
        if matches!(self.phase, Phase::Recovering(_)) {
            return cx.answer(waiter, Err(unknown_yet(&self.name)));
        }
        let absent = done && self.spec.departure == Departure::Absent;
        let cause = if absent { Cause::Done } else { Cause::Left };
        let rank = match &mut self.phase {
            Phase::Open(open) => open.members.rank_of(lease),
            Phase::Waiting { interrupted: Some(interrupted), .. }
            | Phase::Opening { interrupted: Some(interrupted), .. } => {
                if let Some(rank) = interrupted.rank_of(lease) {
                    interrupted.lose(rank, lease, cause);
                    cx.push(Action::End(lease, None));
                }
                None
            }
            _ => None,
        };
        // The job may be deleted when its last rank leaves.
        let servers = self.servers(cx.common);
        if let Some(rank) = rank {
            cx.note(format!("rank {rank} of job {:?} left", self.name));
            cx.push(Action::End(lease, None));
            self.end_lease(rank, cause, cx);
        }
        let what = format!("the end of a lease of job {:?}", self.name);
        cx.common.answer_when_received(vec![waiter], Reply::Left, servers, what, cx.out);
    }

    /// A worker's stream has ended, or its Join was given up.
    pub(crate) fn lease_ended(&mut self, rank: u32, lease: Lease, cx: &mut Context<'_>) {
        self.end_any_lease(rank, lease, Cause::Lost, cx);
    }

    /// Ends the lease of a rank, and tells its worker.
    pub(crate) fn expel(&mut self, rank: u32, lease: Lease, cause: Cause, cx: &mut Context<'_>) {
        let lost = Error::LeaseLost { job: self.spec.name.clone(), rank };
        cx.push(Action::End(lease, Some(lost)));
        self.end_any_lease(rank, lease, cause, cx);
    }

    /// Ends a lease, whatever the phase of the job.
    fn end_any_lease(&mut self, rank: u32, lease: Lease, cause: Cause, cx: &mut Context<'_>) {
        let open = match &mut self.phase {
            Phase::Open(open) => open,
            Phase::Waiting { interrupted: Some(interrupted), .. }
            | Phase::Opening { interrupted: Some(interrupted), .. } => {
                return interrupted.lose(rank, lease, cause);
            }
            _ => return,
        };
        if open.members.rank_of(lease) == Some(rank) {
            self.end_lease(rank, cause, cx);
        } else {
            open.queue.remove(rank, lease);
        }
    }

    /// Frees the rank, and gives it to the next worker in the queue.
    fn end_lease(&mut self, rank: u32, cause: Cause, cx: &mut Context<'_>) {
        if self.without_data_of(rank, cause, cx) {
            return;
        }
        let job = self.reference();
        let Phase::Open(open) = &mut self.phase else { return };
        let Some(member) = open.members.remove(rank) else { return };
        let lost = Error::LeaseLost { job: job.name.clone(), rank };
        match member.joining {
            Some(joining) => cx.answer(joining.waiter, Err(lost.clone())),
            None if member.address.is_some() => {
                open.peers.set(rank, None);
                open.wake_all(cx.out);
            }
            None => {}
        }
        match cause {
            Cause::Done => open.departed.finish(rank, open.step()),
            Cause::Left => open.departed.leave(rank),
            Cause::Lost
            | Cause::Evicted
            | Cause::Unreachable
            | Cause::Returned
            | Cause::Recovered => {}
        }
        if matches!(cause, Cause::Done) && open.version.is_published() {
            let waiters =
                open.round.forget_rank(rank).into_iter().chain(open.uneven_inputs.forget(rank));
            cx.refuse(waiters, &lost);
        } else {
            // Before version 0, the epoch also changes for a rank that is done: the servers may
            // have only a part of its uploads, so all ranks upload again.
            self.new_epoch(rank, cause, cx);
        }
        let Phase::Open(open) = &mut self.phase else { return };
        if matches!(cause, Cause::Done) {
            open.send(&Command::RankDone { job, rank }, cx.out);
        }
        self.admit_next(rank, cx);
        self.advance(cx);
        self.idle_from_now(cx);
    }

    /// Gives a free rank to the next worker in the queue.
    pub(crate) fn admit_next(&mut self, rank: u32, cx: &mut Context<'_>) {
        let Phase::Open(open) = &mut self.phase else { return };
        if let Some((waiter, join)) = open.queue.pop(rank) {
            self.admit(waiter.caller, join, cx);
        }
    }

    /// Refuses Joins whose rank has not become free in time, and those whose lease the servers have
    /// not accepted in time. Ranks that have not attached in time are lost.
    pub(crate) fn expire_joins(&mut self, cx: &mut Context<'_>) {
        let epoch = self.epoch;
        let Phase::Open(open) = &mut self.phase else { return };
        for (waiter, rank) in open.queue.expire(cx.now) {
            cx.answer(waiter, Err(Error::RankTaken { job: self.spec.name.clone(), rank }));
        }
        for rank in open.members.expired(cx.now) {
            let Phase::Open(open) = &mut self.phase else { return };
            let Some(member) = open.members.get_mut(rank) else { continue };
            if member.detached.is_some() {
                self.end_lease(rank, Cause::Lost, cx);
                continue;
            }
            let Some(Joining { waiter, pending }) = member.joining.take() else { continue };
            // The address was not announced to any peer.
            member.address = None;
            cx.time_out(vec![waiter], |common| {
                let (servers, name) = (common.servers.names_of(&pending), &self.name);
                format!(
                    "{servers} to accept the lease of rank {rank} of job {name:?} (epoch {epoch})"
                )
            });
            self.end_lease(rank, Cause::Lost, cx);
        }
    }
}

/// Returns whether a worker knows a later attempt than the servers. It may open an attempt at a
/// later step before the open one is decided.
fn is_ahead(theirs: Attempt, current: Attempt) -> bool {
    theirs.epoch > current.epoch || theirs > current && theirs.step == current.step
}
