//! Reconstruction of a job from the descriptions by all of its servers.

use std::collections::{BTreeMap, BTreeSet};

use zeroshard_model::{Attempt, JobSpec};

use crate::{
    calls::Rested,
    commands::Command,
    decided::Decided,
    decision::Decision,
    gradient::{Gradient, Reduced, check_report},
    held::{Held, Ranks},
    ids::{JobRef, Lease, Now, ServerId},
    job::{
        Open,
        resync::{Known, resync},
    },
    members::Member,
    recovery::Recovery,
    replicas::Replicas,
    resting::Rester,
    user_data::UserData,
};

/// A job that continues.
#[derive(Debug)]
pub(crate) struct Recovered {
    pub(crate) open: Open,
    pub(crate) epoch: u64,
    /// The commands that some of the servers have not received.
    pub(crate) commands: Vec<(ServerId, Command)>,
}

impl Recovery {
    /// The job as its servers describe it together. `deadline`: when a rank without a stream is
    /// lost.
    ///
    /// # Errors
    /// A server whose description contradicts those of the others, and a text.
    pub(crate) fn rebuild(
        &self,
        job: &JobRef,
        spec: &JobSpec,
        now: Now,
        deadline: Now,
    ) -> Result<Recovered, (ServerId, String)> {
        let first = Attempt::first(0, 0);
        let top = self.held.values().map(|held| held.attempt).max().unwrap_or(first);
        let published = self.held.values().any(|held| held.published);
        let decision = self.decision_before(top.step);
        let replicas = Replicas::learn(spec, &self.plan.placement, &self.held, now);
        let mut open = Open::new(self.plan.clone(), replicas);
        open.version = published.then_some(top.step);
        open.uninitialised = match published {
            true => BTreeSet::new(),
            false => self.servers_where(|held| !held.initialised || held.attempt != top),
        };
        open.rolled_back = self.held.values().filter_map(|held| held.restored).max();
        open.round.attempt = top.number;
        for (&server, held) in self.held.iter().filter(|(_, held)| held.attempt == top) {
            let trained = self.plan.trainable.get(&server);
            let is_current = |ready: &Reduced| open.replicas.is_current(server, ready.copies);
            let ready = held.ready.clone().filter(is_current);
            if let Some(ready) = ready.filter(|_| open.awaits(server)) {
                check_report(&ready, trained).map_err(|what| (server, what))?;
                open.round.reports.insert(server, ready);
            }
            let rested = held.rested.map(|last| Rested { attempt: top, last });
            open.resting.last = open.resting.last.or(rested);
        }
        open.last = decision.and_then(|decision| self.decided(spec, decision)).map(Box::new);
        open.take_ranks(ranks(self.held.values(), top), deadline);
        if let Some(decision) = decision {
            let ranks = &decision.figures.user_data;
            open.saves.user_data = UserData::lost_with_coordinator(ranks, &open.members);
        } else if open.step() > 0 {
            // No step was made since the version was restored. It is saved where it comes from.
            open.saves.user_data = UserData { is_unread: true, ..UserData::default() };
        }
        let mut commands = Vec::new();
        for (&server, held) in &self.held {
            let known = Known { job, epoch: top.epoch, open: &open, decision };
            let lacks = resync(known, held, open.awaits(server));
            let lacks = lacks.map_err(|what| (server, what))?;
            commands.extend(lacks.into_iter().map(|command| (server, command)));
        }
        Ok(Recovered { open, epoch: top.epoch, commands })
    }

    /// If version 0 has been published: the open attempt, and the ranks in it.
    pub(crate) fn published(&self) -> Option<(Attempt, Ranks)> {
        let top = self.described().map(|held| held.attempt).max()?;
        let published = self.described().any(|held| held.published);
        published.then(|| (top, ranks(self.described(), top)))
    }

    fn servers_where(&self, test: impl Fn(&Held) -> bool) -> BTreeSet<ServerId> {
        self.held.iter().filter(|(_, held)| test(held)).map(|(&server, _)| server).collect()
    }

    /// The decision that has led to `step`.
    fn decision_before(&self, step: u64) -> Option<&Decision> {
        let decisions = self.held.values().filter_map(|held| Some(&held.decided.as_ref()?.0));
        decisions.into_iter().find(|decision| decision.attempt.step + 1 == step)
    }

    /// The decision with its report, for ranks that repeat their commits. `None` if the servers do
    /// not have all figures, which is the case if no rank can ask.
    fn decided(&self, spec: &JobSpec, decision: &Decision) -> Option<Decided> {
        let behind = self.servers_where(|held| held.attempt.step == decision.attempt.step);
        if let Some(replicated) = &decision.replicated {
            return Some(Decided::new(decision.clone(), replicated.report.clone(), behind));
        }
        let mut figures = BTreeMap::new();
        for (&server, held) in &self.held {
            let reduced = match &held.decided {
                Some((known, reduced)) if known.attempt == decision.attempt => Some(reduced),
                _ => held.ready.as_ref().filter(|_| held.attempt == decision.attempt),
            };
            if let Some(trained) = self.plan.trainable.get(&server) {
                check_report(reduced?, Some(trained)).ok()?;
                figures.insert(server, reduced?.clone());
            }
        }
        let contributes = |rank| !decision.figures.resting.contains(&rank);
        let gradient = Gradient::new(spec, &figures, contributes);
        Some(Decided::new(decision.clone(), decision.report(spec, gradient), behind))
    }
}

/// What servers know together about the ranks, of which those at the attempt `top` know the most.
fn ranks<'a>(servers: impl Iterator<Item = &'a Held> + Clone, top: Attempt) -> Ranks {
    let mut ranks = Ranks::default();
    for newest in servers.clone().filter(|held| held.attempt == top) {
        let Ranks { leases, done, left, resting } = newest.ranks.clone();
        ranks.leases.extend(leases);
        ranks.done.extend(done);
        ranks.left.extend(left);
        ranks.resting.extend(resting);
    }
    let Ranks { leases, done, left, resting } = &mut ranks;
    let all = |rank: &u32, lease: &Lease| {
        servers.clone().all(|held| held.ranks.leases.get(rank) == Some(lease))
    };
    // Of a lease that only some servers know, the worker does not know.
    leases.retain(|rank, lease| !done.contains(rank) && all(rank, lease));
    left.retain(|rank| !done.contains(rank) && !leases.contains_key(rank));
    resting.retain(|rank, _| leases.contains_key(rank));
    ranks
}

impl Open {
    fn take_ranks(&mut self, ranks: Ranks, deadline: Now) {
        let Ranks { leases, done, left, resting } = ranks;
        for (rank, lease) in leases {
            self.members.insert(rank, Member::detached(lease, deadline));
        }
        // They may have been done at an earlier version.
        let version = self.step();
        self.done = done.into_iter().map(|rank| (rank, version)).collect();
        self.left = left;
        for (rank, (since, excluded)) in resting {
            self.resting.insert(rank, Rester { since, excluded, waiters: Vec::new() });
        }
    }
}
