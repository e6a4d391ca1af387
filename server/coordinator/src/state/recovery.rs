//! A job that a new coordinator learns from the descriptions by its servers.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
};

use zeroshard_model::{Attempt, Server};

use crate::{
    placement::plan::Plan,
    vocabulary::{
        gradient::Reduced,
        ids::{Lease, Now, ServerId},
        job_report::{JobReport, Ranks},
    },
};

/// A job that at least one of its servers has described.
#[derive(Debug)]
pub struct Recovery {
    plan: Plan,
    reports: BTreeMap<ServerId, JobReport>,
    /// The descriptions by servers that have disconnected since.
    away: BTreeMap<ServerId, JobReport>,
    /// Servers of a job with replicas that will not come back, and why.
    lost: BTreeMap<ServerId, String>,
    /// The attempts of descriptions that were out of date. A server that repeats one is at fault.
    doubted: BTreeMap<ServerId, Attempt>,
    /// The workers that have asked to continue, by rank: the lease, and the epoch that it knows.
    asked: BTreeMap<u32, (Lease, u64)>,
    deadline: Now,
}

impl Recovery {
    /// Begins with the description by one server.
    pub(crate) fn new(server: ServerId, report: JobReport, deadline: Now) -> Self {
        Self {
            plan: report.plan.clone(),
            reports: BTreeMap::from([(server, report)]),
            away: BTreeMap::new(),
            lost: BTreeMap::new(),
            doubted: BTreeMap::new(),
            asked: BTreeMap::new(),
            deadline,
        }
    }

    /// Returns whether a server that is connected has described the job.
    pub(crate) fn is_held_by(&self, server: ServerId) -> bool {
        self.reports.contains_key(&server)
    }

    /// A server has all initial parameters since it has described the job.
    pub(crate) fn initialised(&mut self, server: ServerId, epoch: u64) {
        if let Some(report) = self.reports.get_mut(&server).filter(|of| of.attempt.epoch == epoch) {
            report.initialised = true;
        }
    }

    /// A server has all gradients of the attempt since it has described the job.
    pub(crate) fn ready(&mut self, server: ServerId, attempt: Attempt, reduced: Reduced) {
        if let Some(report) = self.reports.get_mut(&server).filter(|of| of.attempt == attempt) {
            report.ready = Some(reduced);
        }
    }

    /// Returns the latest placement that a server has described.
    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns the descriptions by connected servers.
    pub(crate) fn reports(&self) -> &BTreeMap<ServerId, JobReport> {
        &self.reports
    }

    /// Returns the servers that will not come back, and why.
    pub(crate) fn lost(&self) -> &BTreeMap<ServerId, String> {
        &self.lost
    }

    /// Gives up servers, for the given reasons.
    pub(crate) fn give_up(&mut self, servers: impl IntoIterator<Item = (ServerId, String)>) {
        self.lost.extend(servers);
    }

    /// Records that the description by a server contradicts the others. Returns `true` the first
    /// time: the description may only be out of date.
    pub(crate) fn doubt(&mut self, server: ServerId, attempt: Attempt) -> bool {
        self.doubted.insert(server, attempt) != Some(attempt)
    }

    /// Records that the worker of a rank asks to continue. `epoch`: the latest that it knows.
    pub(crate) fn asked_by(&mut self, rank: u32, lease: Lease, epoch: u64) {
        self.asked.insert(rank, (lease, epoch));
    }

    pub(crate) fn deadline(&self) -> Now {
        self.deadline
    }

    /// Compares a description with an earlier one. Returns the server of the earlier one and the
    /// first part of the job that differs.
    pub(crate) fn difference(&self, report: &JobReport) -> Option<(ServerId, String)> {
        let (&server, first) = self.reports.first_key_value()?;
        if first.spec.name != report.spec.name || *first.spec != *report.spec {
            let part = first.spec.difference(&report.spec).unwrap_or_else(|| "options".to_owned());
            return Some((server, format!("specifications of the job: {part}")));
        }
        // A server of a job with replicas, or that was restored, may have missed the latest
        // placement.
        let can_move = report.spec.replicas > 1 || report.spec.is_restored_on_loss();
        if first.plan != report.plan && !can_move {
            return Some((server, "placements of its slices".to_owned()));
        }
        let differs = first.fork != report.fork;
        differs.then(|| (server, "predecessors of the job".to_owned()))
    }

    /// The servers that are not lost and have not described the job yet.
    pub(crate) fn missing(&self) -> impl Iterator<Item = &Server> {
        let is_known = |id| self.reports.contains_key(id) || self.lost.contains_key(id);
        self.plan.placement.servers().iter().filter(move |of| !is_known(&of.id))
    }

    /// Returns whether a worker has ever taken a rank: without one, the job has no state to lose.
    pub(crate) fn was_used(&self) -> bool {
        let used = |report: &JobReport| report.published || report.ranks != Ranks::default();
        self.described().any(used)
    }

    /// The descriptions by servers, also by servers that are not connected any more.
    pub(crate) fn described(&self) -> impl Iterator<Item = &JobReport> + Clone {
        self.reports.values().chain(self.away.values())
    }

    /// Adds the description by a server. The placement of the latest epoch is that of the job.
    pub(crate) fn take(&mut self, server: ServerId, report: JobReport) {
        if self.described().all(|other| other.attempt.epoch < report.attempt.epoch) {
            let earlier = mem::replace(&mut self.plan, report.plan.clone());
            // Another process of a lost server may be in the later placement.
            let listed = |of: &&Server| self.plan.placement.servers().contains(of);
            let same: BTreeSet<ServerId> =
                earlier.placement.servers().iter().filter(listed).map(|of| of.id).collect();
            self.lost.retain(|lost, _| same.contains(lost));
        }
        self.lost.remove(&server);
        self.away.remove(&server);
        self.reports.insert(server, report);
    }

    /// Returns whether each slice has its content on a server that has described the job.
    pub(crate) fn has_every_slice(&self) -> bool {
        let reports = self.reports.iter().filter(|(server, _)| !self.lost.contains_key(server));
        let full: BTreeMap<ServerId, BTreeSet<u32>> =
            reports.map(|(&server, report)| (server, report.full_slices(server))).collect();
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
        let Some(top) = self.reports.values().map(|report| report.attempt).max() else {
            return false;
        };
        let line = self.reports.values().map(|report| report.line.number).max().unwrap_or(0);
        self.reports.values().any(|report| {
            let is_earlier = report.attempt.epoch < top.epoch;
            let is_moved = report.spec.replicas <= 1 && report.plan != self.plan;
            let is_left = report.line.number < line || report.attempt.step > top.step;
            report.restoring || is_earlier && (is_moved || is_left)
        })
    }

    /// Drops the descriptions by servers that are lost, or are not in the latest placement. Returns
    /// these servers.
    pub(crate) fn drop_others(&mut self) -> Vec<ServerId> {
        let Self { plan, reports, lost, .. } = self;
        let listed: BTreeSet<ServerId> =
            plan.placement.servers().iter().map(|server| server.id).collect();
        let other = |server: &ServerId, _: &mut JobReport| {
            !listed.contains(server) || lost.contains_key(server)
        };
        reports.extract_if(.., other).map(|(server, _)| server).collect()
    }

    /// The server is lost again.
    pub(crate) fn lose(&mut self, server: ServerId) {
        self.away.extend(self.reports.remove_entry(&server));
    }
}
