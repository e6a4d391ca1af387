//! The ranks of a job that was open and is being restored.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use zeroshard_model::{Line, Restore};

use crate::{
    cluster::startup::RECOVERY,
    state::{
        departed::Departed,
        members::{Cause, Member, Members, Queue},
        memberships::Peers,
    },
    vocabulary::{
        events::Action,
        ids::{Lease, Now, ServerId, Waiter, expire},
        job_report::Ranks,
    },
};

/// How long an interrupted job waits for servers and for its slices.
pub const RESTORE_LIMIT: Duration = Duration::from_secs(3600);

/// How long an interrupted job waits for as many servers as it has had. Then it continues with the
/// connected ones, and slices stay where they are placed.
pub const SERVERS_LIMIT: Duration = Duration::from_secs(10);

/// The ranks of a job that was open and is being restored.
#[derive(Debug)]
pub struct Interrupted {
    /// The checkpoint to which the job returns.
    checkpoint: Arc<Restore>,
    /// After a rewind: the current line, with the batches that the next one skips.
    line: Option<Arc<Line>>,
    /// The calls that wait for the rewind.
    callers: Vec<Waiter>,
    returning: Returning,
    /// Ranks whose lease has ended since. Those that have left in order are also in `departed`.
    lost: Vec<u32>,
    /// The servers that may still hold the job as it was. They keep it until they open it again, or
    /// until all others have, because a new coordinator learns of the job from them.
    holders: BTreeSet<ServerId>,
    /// The number of servers that the job has had.
    servers: usize,
    /// Until when it waits for as many servers; `None` if there are too few for its replicas.
    settles_until: Option<Now>,
    /// After a failed try: the time of the next one, and why it has failed.
    retry: Option<(Now, String)>,
    deadline: Now,
}

/// The state of ranks that an open job keeps while it is restored. The fields are those of
/// [`Open`](crate::job::Open).
#[derive(Debug, Default)]
pub(crate) struct Returning {
    pub(crate) members: Members,
    pub(crate) queue: Queue,
    pub(crate) departed: Departed,
    pub(crate) peers: Peers,
}

impl Interrupted {
    /// Interrupts a job that was open on `servers`.
    pub(crate) fn new(
        checkpoint: Arc<Restore>,
        returning: Returning,
        servers: BTreeSet<ServerId>,
        now: Now,
    ) -> Self {
        Self {
            checkpoint,
            line: None,
            callers: Vec::new(),
            returning,
            lost: Vec::new(),
            servers: servers.len(),
            holders: servers,
            settles_until: None,
            retry: None,
            deadline: now + RESTORE_LIMIT,
        }
    }

    /// The ranks of a job that a new coordinator has learned. They have no streams yet.
    pub(crate) fn detached(
        checkpoint: Arc<Restore>,
        (ranks, version): (Ranks, u64),
        holders: BTreeSet<ServerId>,
        servers: usize,
        now: Now,
    ) -> Self {
        let Ranks { leases, done, left, .. } = ranks;
        let mut members = Members::default();
        for (rank, lease) in leases {
            members.insert(rank, Member::detached(lease, now + RECOVERY));
        }
        let departed = Departed::learned(left, done, version);
        let returning = Returning { members, departed, ..Returning::default() };
        Self { servers, ..Self::new(checkpoint, returning, holders, now) }
    }

    /// Ends the interruption. Returns the state of the ranks, the ranks whose leases have ended
    /// since, and the servers that may still hold the old state of the job.
    pub(crate) fn end(self) -> (Returning, Vec<(u32, Cause)>, BTreeSet<ServerId>) {
        let Self { returning, lost, holders, .. } = self;
        let has_left = |rank| returning.departed.has_left(rank);
        let cause = |rank| if has_left(rank) { Cause::Left } else { Cause::Lost };
        let lost = lost.into_iter().map(|rank| (rank, cause(rank))).collect();
        (returning, lost, holders)
    }

    /// Marks the return as a rewind. `line`: the current one, with the batches that the next one
    /// skips. `caller`: the call that waits for it, if there is one.
    pub(crate) fn requested(self, line: Line, caller: Option<Waiter>) -> Self {
        Self { line: Some(Arc::new(line)), callers: caller.into_iter().collect(), ..self }
    }

    /// Returns the checkpoint to which the job returns.
    pub(crate) fn checkpoint(&self) -> Arc<Restore> {
        self.checkpoint.clone()
    }

    /// After a rewind: returns the current line, with the batches that the next one skips.
    pub(crate) fn line(&self) -> Option<&Arc<Line>> {
        self.line.as_ref()
    }

    /// Takes the calls that wait for the rewind.
    pub(crate) fn take_callers(&mut self) -> Vec<Waiter> {
        std::mem::take(&mut self.callers)
    }

    /// Removes the calls whose deadline has come, and returns them.
    pub(crate) fn expire_callers(&mut self, now: Now) -> Vec<Waiter> {
        expire([&mut self.callers], now)
    }

    /// Returns the lease of a rank that has a worker.
    pub(crate) fn lease_of(&self, rank: u32) -> Option<Lease> {
        Some(self.returning.members.get(rank)?.lease)
    }

    /// Returns the rank of a lease.
    pub(crate) fn rank_of(&self, lease: Lease) -> Option<u32> {
        self.returning.members.rank_of(lease)
    }

    /// Records that a try has failed. The next one begins at `retry_at`.
    pub(crate) fn failed(&mut self, retry_at: Now, why: &str) {
        self.retry = Some((retry_at, why.to_owned()));
    }

    /// Ends the pause after a failed try, if it is over.
    pub(crate) fn end_pause(&mut self, now: Now) {
        self.retry.take_if(|(at, _)| *at <= now);
    }

    /// Returns `true` if the time for the restoration is over.
    pub(crate) fn is_late(&self, now: Now) -> bool {
        self.deadline <= now
    }

    /// Removes the joins whose deadline has come.
    pub(crate) fn expire_joins(&mut self, now: Now) -> Vec<Waiter> {
        let expired = self.returning.queue.expire(now);
        expired.into_iter().map(|(waiter, _)| waiter).collect()
    }

    /// Returns the leases of all ranks.
    pub(crate) fn leases(&self) -> impl Iterator<Item = Lease> + '_ {
        self.returning.members.leases()
    }

    /// The version of the checkpoint is known. Ranks that had data at this version are not done any
    /// more: the job waits for workers.
    pub(crate) fn return_to(&mut self, version: u64) {
        self.returning.departed.return_to(version);
    }

    /// Returns whether the job may be placed on the `connected` servers. It needs one for each of
    /// its `replicas`, and waits for a while for as many as it has had.
    pub(crate) fn may_be_placed(
        &mut self,
        connected: usize,
        replicas: usize,
        now: Now,
        out: &mut Vec<Action>,
    ) -> bool {
        if self.retry.is_some() || connected < replicas.max(1) {
            self.settles_until = None;
            return false;
        }
        let settles_until = *self.settles_until.get_or_insert(now + SERVERS_LIMIT);
        let may_be_placed = connected >= self.servers || settles_until <= now;
        if may_be_placed {
            self.settles_until = None;
        } else {
            out.push(Action::Tick(settles_until));
        }
        may_be_placed
    }

    /// Describes what the job waits for before it is placed, for messages.
    pub(crate) fn waits_for(&self, connected: usize, replicas: u32) -> String {
        match (&self.retry, self.settles_until) {
            (Some((_, failure)), _) => {
                format!("another try, because the last one failed: {failure}")
            }
            (_, Some(_)) => format!("shard servers: {connected} of {} are connected", self.servers),
            (_, None) => format!("shard servers: {connected} of {replicas} are connected"),
        }
    }

    /// The leases of the ranks, the ranks that have no more data, and those that have left, for the
    /// servers.
    pub(crate) fn ranks(&self) -> (Vec<(u32, Lease)>, Vec<u32>, Vec<u32>) {
        let Returning { members, departed, .. } = &self.returning;
        (members.by_rank().collect(), departed.done().collect(), departed.left().collect())
    }

    /// Adds servers that may still hold the old state of the job.
    pub(crate) fn held_by(&mut self, servers: impl IntoIterator<Item = ServerId>) {
        self.holders.extend(servers);
    }

    pub(crate) fn holders(&self) -> impl Iterator<Item = ServerId> {
        self.holders.iter().copied()
    }

    /// The lease of a rank has ended. A rank that has no more data counts as lost: the steps since
    /// the checkpoint need its gradients again.
    pub(crate) fn lose(&mut self, rank: u32, lease: Lease, cause: Cause) {
        let Returning { members, queue, departed, peers } = &mut self.returning;
        if members.rank_of(lease) != Some(rank) {
            return queue.remove(rank, lease);
        }
        members.remove(rank);
        peers.set(rank, None);
        if matches!(cause, Cause::Left) {
            departed.leave(rank);
        }
        self.lost.push(rank);
    }

    pub(crate) fn next_deadline(&self) -> Option<Now> {
        let retry_at = self.retry.as_ref().map(|(at, _)| *at);
        let callers = self.callers.iter().map(|caller| caller.deadline).min();
        let times = [self.returning.queue.next_deadline(), self.settles_until, retry_at, callers];
        times.into_iter().flatten().chain([self.deadline]).min()
    }

    pub(crate) fn into_waiters(self) -> Vec<Waiter> {
        let Returning { members, queue, .. } = self.returning;
        queue.into_waiters().chain(members.into_joining()).chain(self.callers).collect()
    }
}
