//! The ranks of a job that was open and is being restored.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use zeroshard_model::Restore;

use crate::{
    events::Action,
    held::Ranks,
    ids::{Lease, Now, ServerId, Waiter},
    learning::RECOVERY,
    members::{Cause, Member, Members, Queue},
    memberships::Peers,
};

/// How long an interrupted job waits for servers and for its slices.
pub const RESTORE_LIMIT: Duration = Duration::from_secs(3600);

/// How long an interrupted job waits for as many servers as it has had. Then it continues with the
/// connected ones, and slices stay where they are placed.
pub const SERVERS_LIMIT: Duration = Duration::from_secs(10);

/// The ranks of a job that was open and is being restored.
#[derive(Debug)]
pub struct Interrupted {
    /// The last checkpoint of the job.
    pub(crate) checkpoint: Arc<Restore>,
    pub(crate) members: Members,
    pub(crate) queue: Queue,
    pub(crate) left: BTreeSet<u32>,
    /// As in [`Open`](crate::job::Open).
    pub(crate) done: BTreeMap<u32, u64>,
    pub(crate) peers: Peers,
    /// Ranks whose lease has ended since. Those that have left in order are also in `left`.
    pub(crate) lost: Vec<u32>,
    /// The servers that may still hold the job as it was. They keep it until they open it again, or
    /// until all others have, because a new coordinator learns of the job from them.
    pub(crate) holders: BTreeSet<ServerId>,
    /// The number of servers that the job has had.
    pub(crate) servers: usize,
    /// Until when it waits for as many servers; `None` if there are too few for its replicas.
    pub(crate) settles_until: Option<Now>,
    /// After a failed try: the time of the next one, and why it has failed.
    pub(crate) retry: Option<(Now, String)>,
    pub(crate) deadline: Now,
}

impl Interrupted {
    /// The ranks of a job that a new coordinator has learned. They have no streams yet.
    pub(crate) fn detached(
        checkpoint: Arc<Restore>,
        (ranks, version): (Ranks, u64),
        holders: BTreeSet<ServerId>,
        servers: usize,
        now: Now,
    ) -> Self {
        let Ranks { leases, done, left, .. } = ranks;
        // They may have been done at an earlier version.
        let done = done.into_iter().map(|rank| (rank, version)).collect();
        let mut members = Members::default();
        for (rank, lease) in leases {
            members.insert(rank, Member::detached(lease, now + RECOVERY));
        }
        Self {
            checkpoint,
            members,
            queue: Queue::default(),
            left,
            done,
            peers: Peers::default(),
            lost: Vec::new(),
            holders,
            servers,
            settles_until: None,
            retry: None,
            deadline: now + RESTORE_LIMIT,
        }
    }

    /// The version of the checkpoint is known. Ranks that had data at this version are not done any
    /// more: the job waits for workers.
    pub(crate) fn return_to(&mut self, version: u64) {
        self.done.retain(|_, since| *since <= version);
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
        let lease = |rank| Some((rank, self.members.get(rank)?.lease));
        let leases = self.members.ranks().filter_map(lease).collect();
        (leases, self.done.keys().copied().collect(), self.left.iter().copied().collect())
    }

    /// A server may still hold the job as it was.
    pub(crate) fn holds(&mut self, server: ServerId) {
        self.holders.insert(server);
    }

    pub(crate) fn holders(&self) -> impl Iterator<Item = ServerId> {
        self.holders.iter().copied()
    }

    /// The lease of a rank has ended. A rank that has no more data counts as lost: the steps since
    /// the checkpoint need its gradients again.
    pub(crate) fn lose(&mut self, rank: u32, lease: Lease, cause: Cause) {
        if self.members.rank_of(lease) != Some(rank) {
            return self.queue.remove(rank, lease);
        }
        self.members.remove(rank);
        self.peers.set(rank, None);
        if matches!(cause, Cause::Left) {
            self.left.insert(rank);
        }
        self.lost.push(rank);
    }

    pub(crate) fn next_deadline(&self) -> Option<Now> {
        let retry_at = self.retry.as_ref().map(|(at, _)| *at);
        let times = [self.queue.next_deadline(), self.settles_until, retry_at];
        times.into_iter().flatten().chain([self.deadline]).min()
    }

    pub(crate) fn into_waiters(self) -> Vec<Waiter> {
        self.queue.into_waiters().chain(self.members.into_joining()).collect()
    }
}
