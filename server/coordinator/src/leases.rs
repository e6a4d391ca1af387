//! Leases: workers that take ranks, wait for them, leave, and are lost.
//!
//! Within one epoch a rank has at most one lease. When a lease ends, the epoch changes: at once,
//! or, if the rank left because it is done, before the rank is given to another worker.

use std::{collections::BTreeSet, sync::Arc};

use zeroshard_model::{Attempt, Departure, Error, JobSpec, Result};

use super::{
    cluster::Cluster,
    events::{
        Action, Attach, Caller, Command, JobRef, Join, Lease, Leave, Now, Reply, ServerId, Waiter,
    },
    history::Severity,
    members::{Joining, Member},
    recovery::unknown_yet,
    state::{Job, Open, Phase},
};

/// The maximum number of epochs by which a worker may be ahead of its servers.
pub(super) const MAX_AHEAD: u64 = 1 << 32;

/// The cause of a new epoch.
#[derive(Debug, Clone, Copy)]
pub(super) enum Cause {
    /// The rank's worker was lost.
    Lost,
    /// An operator has ended the lease, for example because the worker hangs.
    Evicted,
    /// The rank's worker cannot reach servers.
    Unreachable,
    /// The rank's worker left in order.
    Left,
    /// The rank's worker left in order and has no more data, and the other ranks continue without
    /// it.
    Done,
    /// A worker takes a rank that was done.
    Returned,
    /// After a restart of the coordinator, a worker knows a later attempt than the servers.
    Recovered,
}

impl Cluster {
    pub(super) fn join(&mut self, caller: Caller, join: Join, now: Now, out: &mut Vec<Action>) {
        if let Err(error) = self.try_join(caller, join, now, out) {
            out.push(Action::Answer(caller, Err(error)));
        }
    }

    fn try_join(
        &mut self,
        caller: Caller,
        join: Join,
        now: Now,
        out: &mut Vec<Action>,
    ) -> Result<()> {
        let (name, rank) = (join.job.clone(), join.rank);
        let job = self.job_mut(&name)?;
        check_rank(&name, rank, job.spec.world)?;
        let open = job.phase.open_mut(&name)?;
        if open.members.get(rank).is_some() {
            // A free rank has no queue: when a rank becomes free, it is given to the next worker in
            // the queue.
            open.queue.push(Waiter::new(caller, now, join.rank_wait), join);
            return Ok(());
        }
        self.admit(caller, join, now, out);
        Ok(())
    }

    /// Gives a free rank to a worker, and informs the servers.
    fn admit(&mut self, caller: Caller, join: Join, now: Now, out: &mut Vec<Action>) {
        let Join { job: name, rank, address, lease, wait, .. } = join;
        if let Some(Job { phase: Phase::Open(open), .. }) = self.jobs.get_mut(&name)
            && open.done.remove(&rank).is_some()
        {
            self.new_epoch(&name, rank, Cause::Returned, out);
        }
        let Some(Job { id, phase: Phase::Open(open), .. }) = self.jobs.get_mut(&name) else {
            return;
        };
        open.left.remove(&rank);
        let job = JobRef { name: name.clone(), id: *id };
        open.send(&Command::Grant { job, rank, lease }, out);
        let pending: BTreeSet<ServerId> = open.servers().collect();
        let joining = Some(Joining { waiter: Waiter::new(caller, now, wait), pending });
        open.members.insert(rank, Member { lease, address, joining, told: None, detached: None });
        self.finish_join(&name, lease, out);
    }

    /// A server has accepted a lease.
    pub(super) fn granted(
        &mut self,
        server: ServerId,
        job: &JobRef,
        rank: u32,
        lease: Lease,
        out: &mut Vec<Action>,
    ) {
        let Some(Job { phase: Phase::Open(open), .. }) = self.reported_job(job) else { return };
        if open.members.rank_of(lease) != Some(rank) {
            return;
        }
        if let Some(joining) = open.members.of(lease).and_then(|member| member.joining.as_mut()) {
            joining.pending.remove(&server);
            self.finish_join(&job.name, lease, out);
        }
    }

    /// Answers the Join when every server has accepted the lease.
    fn finish_join(&mut self, name: &str, lease: Lease, out: &mut Vec<Action>) {
        let Some(Job { epoch, phase: Phase::Open(open), .. }) = self.jobs.get_mut(name) else {
            return;
        };
        let Some(rank) = open.members.rank_of(lease) else { return };
        let Some(member) = open.members.of(lease) else { return };
        let Some(joining) = member.joining.take_if(|joining| joining.pending.is_empty()) else {
            return;
        };
        let address = member.address.clone();
        if address.is_some() {
            open.peers.set(rank, address);
            open.wake_all(out);
        }
        out.push(Action::Note(format!("rank {rank} of job {name:?} joined, epoch {epoch}")));
        out.push(Action::Answer(joining.waiter.caller, Ok(Reply::Joined)));
    }

    /// A worker continues its lease with a new stream.
    pub(super) fn attach(
        &mut self,
        caller: Caller,
        attach: Attach,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        self.asked_by(&attach, now, out);
        if let Err(error) = self.try_attach(caller, &attach, out) {
            return out.push(Action::Answer(caller, Err(error)));
        }
        out.push(Action::Answer(caller, Ok(Reply::Joined)));
        self.attached_data(&attach, out);
        self.move_ahead(&attach, out);
        self.advance(&attach.job.name, now, out);
    }

    /// Begins a new epoch if a worker knows a later attempt than the servers: it was told of it,
    /// and the coordinator died before a server was.
    fn move_ahead(&mut self, attach: &Attach, out: &mut Vec<Action>) {
        let name = &attach.job.name;
        let Some(Job { spec, epoch, phase: Phase::Open(open), .. }) = self.jobs.get(name) else {
            return;
        };
        if is_ahead(attach.attempt, open.attempt(*epoch)) {
            let world = spec.world;
            self.see_epoch(attach.attempt.epoch);
            self.new_epoch(name, world, Cause::Recovered, out);
        }
    }

    fn try_attach(&mut self, caller: Caller, attach: &Attach, out: &mut Vec<Action>) -> Result<()> {
        let Attach { job, rank, address, lease, attempt, .. } = attach;
        let Job { epoch, phase, .. } = self.member_job(job)?;
        let limit = epoch.saturating_add(MAX_AHEAD);
        let open = phase.open_mut(&job.name)?;
        if open.members.rank_of(*lease) != Some(*rank) {
            return Err(Error::LeaseLost { job: job.name.clone(), rank: *rank });
        }
        if attempt.epoch > limit {
            let what = format!("epoch that rank {rank} of job {:?} knows", job.name);
            return Err(Error::invalid(what, attempt.epoch, format!("at most {limit}")));
        }
        if is_ahead(*attempt, open.attempt(*epoch)) && !open.away.is_empty() {
            // Another coordinator may have decided about steps since, with these servers.
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
        out.push(Action::Attached(*lease, caller));
        if address.is_some() {
            open.peers.set(*rank, address.clone());
            open.wake_all(out);
        }
        Ok(())
    }

    /// A worker gives its rank back. An unknown lease has already ended.
    /// The answer follows when the servers know it.
    pub(super) fn leave(&mut self, waiter: Waiter, leave: &Leave, now: Now, out: &mut Vec<Action>) {
        let &Leave { ref job, lease, done } = leave;
        let found = match self.member_job(job) {
            Ok(found) => found,
            Err(error) => return out.push(Action::Answer(waiter.caller, Err(error))),
        };
        if matches!(found.phase, Phase::Recovering(_)) {
            return out.push(Action::Answer(waiter.caller, Err(unknown_yet(&job.name))));
        }
        let absent = done && found.spec.departure == Departure::Absent;
        let cause = if absent { Cause::Done } else { Cause::Left };
        let rank = match &mut found.phase {
            Phase::Open(open) => open.members.rank_of(lease),
            Phase::Waiting { interrupted: Some(interrupted), .. }
            | Phase::Opening { interrupted: Some(interrupted), .. } => {
                if let Some(rank) = interrupted.members.rank_of(lease) {
                    interrupted.lose(rank, lease, cause);
                    out.push(Action::End(lease, None));
                }
                None
            }
            _ => None,
        };
        // The job may be deleted when its last rank leaves.
        let servers = self.servers_of(&job.name);
        if let Some(rank) = rank {
            out.push(Action::Note(format!("rank {rank} of job {:?} left", job.name)));
            out.push(Action::End(lease, None));
            self.end_lease(&job.name, rank, cause, now, out);
        }
        let what = format!("the end of a lease of job {:?}", job.name);
        self.answer_when_received(vec![waiter], Reply::Left, servers, what, out);
    }

    /// A worker's stream has ended, or its Join was given up.
    pub(super) fn lease_ended(
        &mut self,
        name: &str,
        rank: u32,
        lease: Lease,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        self.end_any_lease(name, rank, lease, Cause::Lost, now, out);
    }

    /// Ends the lease of a rank, and tells its worker.
    pub(super) fn expel(
        &mut self,
        name: &str,
        rank: u32,
        lease: Lease,
        cause: Cause,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        let lost = Error::LeaseLost { job: name.to_owned(), rank };
        out.push(Action::End(lease, Some(lost)));
        self.end_any_lease(name, rank, lease, cause, now, out);
    }

    /// Ends a lease, whatever the phase of the job.
    pub(super) fn end_any_lease(
        &mut self,
        name: &str,
        rank: u32,
        lease: Lease,
        cause: Cause,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        let open = match self.jobs.get_mut(name).map(|job| &mut job.phase) {
            Some(Phase::Open(open)) => open,
            Some(
                Phase::Waiting { interrupted: Some(interrupted), .. }
                | Phase::Opening { interrupted: Some(interrupted), .. },
            ) => return interrupted.lose(rank, lease, cause),
            _ => return,
        };
        if open.members.rank_of(lease) == Some(rank) {
            self.end_lease(name, rank, cause, now, out);
        } else {
            open.queue.remove(rank, lease);
        }
    }

    /// Frees the rank, and gives it to the next worker in the queue.
    fn end_lease(&mut self, name: &str, rank: u32, cause: Cause, now: Now, out: &mut Vec<Action>) {
        if self.without_data_of(name, rank, cause, now, out) {
            return;
        }
        let Some(Job { phase: Phase::Open(open), .. }) = self.jobs.get_mut(name) else { return };
        let Some(member) = open.members.remove(rank) else { return };
        let lost = |waiter: Waiter| {
            let error = Error::LeaseLost { job: name.to_owned(), rank };
            Action::Answer(waiter.caller, Err(error))
        };
        match member.joining {
            Some(joining) => out.push(lost(joining.waiter)),
            None if member.address.is_some() => {
                open.peers.set(rank, None);
                open.wake_all(out);
            }
            None => {}
        }
        match cause {
            Cause::Done => {
                open.done.insert(rank, open.step());
            }
            Cause::Left => {
                open.left.insert(rank);
            }
            Cause::Lost
            | Cause::Evicted
            | Cause::Unreachable
            | Cause::Returned
            | Cause::Recovered => {}
        }
        if matches!(cause, Cause::Done) && open.version.is_some() {
            let waiters = open.round.forget_rank(rank).into_iter().chain(open.resting.forget(rank));
            out.extend(waiters.map(lost));
        } else {
            // Before version 0, the epoch also changes for a rank that is done: the servers may
            // have only a part of its uploads, so all ranks upload again.
            self.new_epoch(name, rank, cause, out);
        }
        let Some(Job { id, phase: Phase::Open(open), .. }) = self.jobs.get_mut(name) else {
            return;
        };
        if matches!(cause, Cause::Done) {
            let job = JobRef { name: name.to_owned(), id: *id };
            open.send(&Command::RankDone { job, rank }, out);
        }
        self.admit_next(name, rank, now, out);
        self.advance(name, now, out);
        self.unused_from(name, now, out);
    }

    /// Gives a free rank to the next worker in the queue.
    pub(super) fn admit_next(&mut self, name: &str, rank: u32, now: Now, out: &mut Vec<Action>) {
        let Some(Job { phase: Phase::Open(open), .. }) = self.jobs.get_mut(name) else { return };
        if let Some((waiter, join)) = open.queue.pop(rank) {
            self.admit(waiter.caller, join, now, out);
        }
    }

    /// Drops the gradients of the open step on the servers, because they may contain a part of the
    /// rank's gradients.
    pub(super) fn new_epoch(&mut self, name: &str, rank: u32, cause: Cause, out: &mut Vec<Action>) {
        let Some(Job { id, .. }) = self.jobs.get(name) else { return };
        let job = JobRef { name: name.to_owned(), id: *id };
        let left = matches!(cause, Cause::Left);
        let announce = |_: &Arc<JobSpec>, open: &mut Open, epoch, out: &mut Vec<Action>| {
            open.send(&Command::NewEpoch { job, epoch, rank, left }, out);
        };
        let error = |step, epoch| {
            let job = name.to_owned();
            let cause = match cause {
                Cause::Left => return Error::RankLeft { job, rank, step },
                Cause::Lost => format!("rank {rank} was lost"),
                Cause::Evicted => format!("rank {rank} was evicted by an operator"),
                Cause::Unreachable => format!("rank {rank} cannot reach its shard servers"),
                Cause::Done => format!("rank {rank} left before version 0"),
                Cause::Returned => format!("rank {rank} joined again"),
                Cause::Recovered => "the coordinator was restarted".to_owned(),
            };
            Error::StepAborted { job, step, epoch, cause }
        };
        self.enter_epoch(name, announce, error, out);
        if matches!(cause, Cause::Lost) {
            let text = format!("rank {rank} of job {name:?} was lost");
            out.push(Action::Alarm(Severity::Warning, text));
        }
    }

    /// Begins an epoch: the open attempt and all rests end. `announce` tells the servers. `error`
    /// is the one for waiting calls, of a step in the epoch.
    pub(super) fn enter_epoch(
        &mut self,
        name: &str,
        announce: impl FnOnce(&Arc<JobSpec>, &mut Open, u64, &mut Vec<Action>),
        error: impl Fn(u64, u64) -> Error,
        out: &mut Vec<Action>,
    ) {
        let new = self.next_epoch();
        let Some(job) = self.jobs.get_mut(name) else { return };
        let Job { spec, id, epoch, progress, phase: Phase::Open(open), .. } = job else { return };
        let (attempt, began) = (open.attempt(*epoch), progress.since());
        *epoch = new;
        let ended = error(open.step(), new);
        // At the end of training, ranks leave in order, and none has committed the open step.
        let is_interrupted = open.version.is_some()
            && !(open.round.is_empty() && matches!(ended, Error::RankLeft { .. }));
        progress.disturbed(ended);
        let (job, step) = (JobRef { name: name.to_owned(), id: *id }, open.step());
        if open.version.is_none() {
            open.uninitialised = open.servers().collect();
        }
        // The servers come first: when a worker learns of the epoch, the command to the servers has
        // been sent.
        let (rested, mut waiters) = open.resting.end();
        for rank in rested {
            open.send(&Command::RankRests { job: job.clone(), rank, begins: None }, out);
        }
        announce(spec, open, new, out);
        // Ranks compute and push before the first of them commits.
        if !open.round.is_empty() || is_interrupted && !open.members.is_empty() {
            out.push(Action::Aborted { job: name.to_owned() });
        }
        if is_interrupted {
            out.push(Action::Interrupted { job, attempt, began });
        }
        waiters.extend(open.round.drop_all());
        let answer = |waiter: Waiter| Action::Answer(waiter.caller, Err(error(step, new)));
        out.extend(waiters.into_iter().map(answer));
        open.wake_all(out);
    }

    /// Begins an epoch between two steps: no rank has begun the open step, and none rests, so
    /// nothing ends. `announce` tells the servers.
    pub(super) fn enter_epoch_between_steps(
        &mut self,
        name: &str,
        announce: impl FnOnce(&Arc<JobSpec>, &mut Open, u64, &mut Vec<Action>),
        out: &mut Vec<Action>,
    ) {
        let new = self.next_epoch();
        let Some(Job { spec, epoch, phase: Phase::Open(open), .. }) = self.jobs.get_mut(name)
        else {
            return;
        };
        *epoch = new;
        announce(spec, open, new, out);
        open.wake_all(out);
    }

    /// Refuses Joins whose rank has not become free in time, and those whose lease the servers have
    /// not accepted in time. Ranks that have not attached in time are lost.
    pub(super) fn expire_joins(&mut self, name: &str, now: Now, out: &mut Vec<Action>) {
        let Some(Job { epoch, phase: Phase::Open(open), .. }) = self.jobs.get_mut(name) else {
            return;
        };
        let epoch = *epoch;
        for (waiter, rank) in open.queue.expire(now) {
            let taken = Error::RankTaken { job: name.to_owned(), rank };
            out.push(Action::Answer(waiter.caller, Err(taken)));
        }
        for rank in open.members.expired(now) {
            let Some(Job { phase: Phase::Open(open), .. }) = self.jobs.get_mut(name) else {
                return;
            };
            let Some(member) = open.members.get_mut(rank) else { continue };
            if member.detached.is_some() {
                self.end_lease(name, rank, Cause::Lost, now, out);
                continue;
            }
            let Some(Joining { waiter, pending }) = member.joining.take() else { continue };
            // The address was not announced to any peer.
            member.address = None;
            let servers = self.names_of(&pending);
            let waiting_for = format!(
                "{servers} to accept the lease of rank {rank} of job {name:?} (epoch {epoch})"
            );
            out.push(Action::Answer(waiter.caller, Err(waiter.timeout(now, waiting_for))));
            self.end_lease(name, rank, Cause::Lost, now, out);
        }
    }
}

/// Returns whether a worker knows a later attempt than the servers. It may open an attempt at a
/// later step before the open one is decided.
fn is_ahead(theirs: Attempt, current: Attempt) -> bool {
    theirs.epoch > current.epoch || theirs > current && theirs.step == current.step
}

/// Checks the range of a rank.
///
/// # Errors
/// [`Error::Invalid`] for a rank that is not less than the world size.
pub(super) fn check_rank(job: &str, rank: u32, world: u32) -> Result<()> {
    if rank < world {
        return Ok(());
    }
    let expected = format!("less than the world size, {world}");
    Err(Error::invalid(format!("rank of job {job:?}"), rank, expected))
}
