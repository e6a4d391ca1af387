//! A job that a new coordinator learns from the descriptions by its servers.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
};

use zeroshard_model::{Attempt, Server};

use crate::{
    gradient::Reduced,
    held::{Held, Ranks},
    ids::{Lease, Now, ServerId},
    plan::Plan,
};

/// A job some of whose servers have described it.
#[derive(Debug)]
pub struct Recovery {
    pub(crate) plan: Plan,
    pub(crate) held: BTreeMap<ServerId, Held>,
    /// The descriptions by servers whose streams have broken since.
    away: BTreeMap<ServerId, Held>,
    /// Servers of a job with replicas that will not come back, and why.
    pub(crate) lost: BTreeMap<ServerId, String>,
    /// The attempts of descriptions that were out of date. A server that repeats one is at fault.
    pub(crate) doubted: BTreeMap<ServerId, Attempt>,
    /// The workers that have asked to continue, by rank: the lease, and the epoch that it knows.
    pub(crate) asked: BTreeMap<u32, (Lease, u64)>,
    pub(crate) deadline: Now,
}

impl Recovery {
    /// That of a job that one server has described.
    pub(crate) fn new(server: ServerId, held: Held, deadline: Now) -> Self {
        Self {
            plan: held.plan.clone(),
            held: BTreeMap::from([(server, held)]),
            away: BTreeMap::new(),
            lost: BTreeMap::new(),
            doubted: BTreeMap::new(),
            asked: BTreeMap::new(),
            deadline,
        }
    }

    /// Returns whether a server that is connected has described the job.
    pub(crate) fn is_held_by(&self, server: ServerId) -> bool {
        self.held.contains_key(&server)
    }

    /// A server has all initial parameters since it has described the job.
    pub(crate) fn initialised(&mut self, server: ServerId, epoch: u64) {
        if let Some(held) = self.held.get_mut(&server).filter(|of| of.attempt.epoch == epoch) {
            held.initialised = true;
        }
    }

    /// A server has all gradients of the attempt since it has described the job.
    pub(crate) fn ready(&mut self, server: ServerId, attempt: Attempt, reduced: Reduced) {
        if let Some(held) = self.held.get_mut(&server).filter(|of| of.attempt == attempt) {
            held.ready = Some(reduced);
        }
    }

    pub(crate) fn deadline(&self) -> Now {
        self.deadline
    }

    /// The first part of the job in which another server's description differs, and that server.
    pub(crate) fn difference(&self, held: &Held) -> Option<(ServerId, String)> {
        let (&server, first) = self.held.first_key_value()?;
        if first.spec.name != held.spec.name || *first.spec != *held.spec {
            let part = first.spec.difference(&held.spec).unwrap_or_else(|| "options".to_owned());
            return Some((server, format!("specifications of the job: {part}")));
        }
        // A server of a job with replicas, or that was restored, may have missed the latest
        // placement.
        let can_move = held.spec.replicas > 1 || held.spec.is_restored_on_loss();
        if first.plan != held.plan && !can_move {
            return Some((server, "placements of its slices".to_owned()));
        }
        let differs = first.succession != held.succession;
        differs.then(|| (server, "predecessors of the job".to_owned()))
    }

    /// The servers that are not lost and have not described the job yet.
    pub(crate) fn missing(&self) -> impl Iterator<Item = &Server> {
        let is_known = |id| self.held.contains_key(id) || self.lost.contains_key(id);
        self.plan.placement.servers().iter().filter(move |of| !is_known(&of.id))
    }

    /// Returns whether a worker has ever taken a rank: without one, the job has no state to lose.
    pub(crate) fn was_used(&self) -> bool {
        let used = |held: &Held| held.published || held.ranks != Ranks::default();
        self.described().any(used)
    }

    /// The descriptions by servers, also by servers that are not connected any more.
    pub(crate) fn described(&self) -> impl Iterator<Item = &Held> + Clone {
        self.held.values().chain(self.away.values())
    }

    /// Adds the description by a server. The placement of the latest epoch is that of the job.
    pub(crate) fn take(&mut self, server: ServerId, held: Held) {
        if self.described().all(|other| other.attempt.epoch < held.attempt.epoch) {
            let earlier = mem::replace(&mut self.plan, held.plan.clone());
            // Another process of a lost server may be in the later placement.
            let listed = |of: &&Server| self.plan.placement.servers().contains(of);
            let same: BTreeSet<ServerId> =
                earlier.placement.servers().iter().filter(listed).map(|of| of.id).collect();
            self.lost.retain(|lost, _| same.contains(lost));
        }
        self.lost.remove(&server);
        self.away.remove(&server);
        self.held.insert(server, held);
    }

    /// Returns whether each slice has its content on a server that has described the job.
    pub(crate) fn has_every_slice(&self) -> bool {
        let held = self.held.iter().filter(|(server, _)| !self.lost.contains_key(server));
        let full: BTreeMap<ServerId, BTreeSet<u32>> =
            held.map(|(&server, held)| (server, held.full_slices(server))).collect();
        let placement = &self.plan.placement;
        let is_full = |slice: usize| {
            let owners =
                placement.owners(slice).iter().map(|&at| &placement.servers()[at as usize]);
            let mut found = owners.filter_map(|server| full.get(&server.id));
            found.any(|slices| slices.contains(&(slice as u32)))
        };
        (0..placement.slices()).all(is_full)
    }

    /// Returns whether the workers of all ranks have asked to continue, and none knows a later
    /// epoch than the servers. Then no step was made in a later placement: its ranks would know its
    /// epoch.
    pub(crate) fn is_latest(&self) -> bool {
        let Some((latest, Ranks { leases, .. })) = self.published() else { return false };
        let confirms = |(rank, lease): (&u32, &Lease)| {
            self.asked.get(rank).is_some_and(|(by, known)| by == lease && *known <= latest.epoch)
        };
        !leases.is_empty() && leases.iter().all(confirms)
    }

    /// Returns whether a server was reading the checkpoint to which the job returns, or describes
    /// the job as it was before: the last coordinator has died before all servers had read it.
    pub(crate) fn is_half_restored(&self) -> bool {
        let Some(top) = self.held.values().map(|held| held.attempt).max() else { return false };
        self.held.values().any(|held| {
            let is_earlier = held.attempt.epoch < top.epoch;
            let is_moved = held.spec.replicas <= 1 && held.plan != self.plan;
            held.restoring || is_earlier && (is_moved || held.attempt.step > top.step)
        })
    }

    /// Drops the descriptions by servers that are lost, or are not in the latest placement. Returns
    /// these servers.
    pub(crate) fn drop_others(&mut self) -> Vec<ServerId> {
        let Self { plan, held, lost, .. } = self;
        let listed: BTreeSet<ServerId> =
            plan.placement.servers().iter().map(|server| server.id).collect();
        let other =
            |server: &ServerId, _: &mut Held| !listed.contains(server) || lost.contains_key(server);
        held.extract_if(.., other).map(|(server, _)| server).collect()
    }

    /// The server is lost again.
    pub(crate) fn lose(&mut self, server: ServerId) {
        self.away.extend(self.held.remove_entry(&server));
    }
}
