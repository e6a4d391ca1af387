//! The workers of a job: those that hold a rank, and those that wait for one.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::{
    state::memberships::Told,
    vocabulary::{
        calls::Join,
        ids::{Lease, Now, ServerId, Waiter},
    },
};

/// The cause of a new epoch.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Cause {
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

/// A worker that holds a rank.
#[derive(Debug)]
pub struct Member {
    pub lease: Lease,
    /// The address at which its peers reach it, if it has one.
    pub address: Option<String>,
    /// Its Join, until the servers have accepted the lease.
    pub joining: Option<Joining>,
    /// `None` before its first membership.
    pub told: Option<Told>,
    /// When the rank is lost, if it has no stream since the coordinator was restarted.
    pub detached: Option<Now>,
}

impl Member {
    /// A member that has no stream.
    pub(crate) fn detached(lease: Lease, deadline: Now) -> Self {
        Self { lease, address: None, joining: None, told: None, detached: Some(deadline) }
    }

    fn deadline(&self) -> Option<Now> {
        let joining = self.joining.as_ref().map(|joining| joining.waiter.deadline);
        joining.into_iter().chain(self.detached).min()
    }
}

/// A Join that waits for servers.
#[derive(Debug)]
pub struct Joining {
    pub waiter: Waiter,
    /// Servers that have not accepted the lease yet.
    pub pending: BTreeSet<ServerId>,
}

/// The workers of a job, by rank and by lease.
#[derive(Debug, Default)]
pub struct Members {
    ranks: BTreeMap<u32, Member>,
    /// INVARIANT: the leases of `ranks`.
    leases: HashMap<Lease, u32>,
}

impl Members {
    pub(crate) fn insert(&mut self, rank: u32, member: Member) {
        self.leases.insert(member.lease, rank);
        self.ranks.insert(rank, member);
    }

    pub(crate) fn remove(&mut self, rank: u32) -> Option<Member> {
        let member = self.ranks.remove(&rank)?;
        self.leases.remove(&member.lease);
        Some(member)
    }

    pub(crate) fn get(&self, rank: u32) -> Option<&Member> {
        self.ranks.get(&rank)
    }

    pub(crate) fn get_mut(&mut self, rank: u32) -> Option<&mut Member> {
        self.ranks.get_mut(&rank)
    }

    pub(crate) fn rank_of(&self, lease: Lease) -> Option<u32> {
        self.leases.get(&lease).copied()
    }

    /// The member that holds `lease`.
    pub(crate) fn of(&mut self, lease: Lease) -> Option<&mut Member> {
        self.ranks.get_mut(self.leases.get(&lease)?)
    }

    pub(crate) fn len(&self) -> usize {
        self.ranks.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    /// The ranks, ascending.
    pub fn ranks(&self) -> impl Iterator<Item = u32> + '_ {
        self.ranks.keys().copied()
    }

    /// The ranks with their leases.
    pub(crate) fn by_rank(&self) -> impl Iterator<Item = (u32, Lease)> + '_ {
        self.ranks.iter().map(|(&rank, member)| (rank, member.lease))
    }

    /// The leases, by rank.
    pub(crate) fn leases(&self) -> impl Iterator<Item = Lease> + '_ {
        self.ranks.values().map(|member| member.lease)
    }

    /// The Joins that wait for servers.
    pub(crate) fn into_joining(self) -> impl Iterator<Item = Waiter> {
        self.ranks.into_values().filter_map(|member| Some(member.joining?.waiter))
    }

    /// Removes members that are still joining, and returns their calls.
    pub(crate) fn give_up_joining(&mut self) -> Vec<Waiter> {
        let joining = self.ranks.extract_if(.., |_, member| member.joining.is_some());
        let joining = joining.filter_map(|(_, Member { lease, joining, .. })| {
            self.leases.remove(&lease);
            Some(joining?.waiter)
        });
        joining.collect()
    }

    /// Members without a stream are lost at this time, and not before.
    pub(crate) fn wait_for_streams_until(&mut self, deadline: Now) {
        for member in self.ranks.values_mut().filter(|member| member.detached.is_some()) {
            member.detached = Some(deadline);
        }
    }

    pub(crate) fn next_deadline(&self) -> Option<Now> {
        self.ranks.values().filter_map(Member::deadline).min()
    }

    /// The ranks whose Join has reached its deadline, and those that have not attached in time.
    pub(crate) fn expired(&self, now: Now) -> Vec<u32> {
        let late = |member: &Member| member.deadline().is_some_and(|deadline| deadline <= now);
        self.ranks.iter().filter(|(_, member)| late(member)).map(|(&rank, _)| rank).collect()
    }
}

/// Joins that wait for the end of an earlier lease: by rank, in order of arrival. INVARIANT: no
/// empty lists.
#[derive(Debug, Default)]
pub struct Queue(BTreeMap<u32, Vec<(Waiter, Join)>>);

impl Queue {
    pub(crate) fn push(&mut self, waiter: Waiter, join: Join) {
        self.0.entry(join.rank).or_default().push((waiter, join));
    }

    pub(crate) fn pop(&mut self, rank: u32) -> Option<(Waiter, Join)> {
        let first = self.0.get_mut(&rank)?.remove(0);
        self.tidy(rank);
        Some(first)
    }

    pub(crate) fn remove(&mut self, rank: u32, lease: Lease) {
        if let Some(joins) = self.0.get_mut(&rank) {
            joins.retain(|(_, join)| join.lease != lease);
            self.tidy(rank);
        }
    }

    /// The ranks for which Joins wait.
    pub(crate) fn ranks(&self) -> impl Iterator<Item = u32> {
        self.0.keys().copied()
    }

    fn tidy(&mut self, rank: u32) {
        if self.0.get(&rank).is_some_and(Vec::is_empty) {
            self.0.remove(&rank);
        }
    }

    /// Removes the Joins whose deadline has passed, and returns them with their ranks.
    pub(crate) fn expire(&mut self, now: Now) -> Vec<(Waiter, u32)> {
        let mut expired = Vec::new();
        self.0.retain(|&rank, joins| {
            let late = joins.extract_if(.., |(waiter, _)| waiter.deadline <= now);
            expired.extend(late.map(|(waiter, _)| (waiter, rank)));
            !joins.is_empty()
        });
        expired
    }

    pub(crate) fn into_waiters(self) -> impl Iterator<Item = Waiter> {
        self.0.into_values().flatten().map(|(waiter, _)| waiter)
    }

    pub(crate) fn next_deadline(&self) -> Option<Now> {
        self.0.values().flatten().map(|(waiter, _)| waiter.deadline).min()
    }
}
