//! Departures: a shard server or this coordinator is about to stop. Jobs that would be lost are
//! saved first, if they have a checkpoint policy.
//!
//! A departing server keeps its jobs until the coordinator releases it, or until its time limit has
//! passed. Jobs with replicas are not saved, because their backups take over when the server has
//! stopped. A coordinator that stops saves all jobs: it has no state of jobs itself, but all
//! processes of the cluster may be stopping at the same time.

use super::{
    cluster::Cluster,
    events::{Action, Command, Now, ServerId},
    state::{Job, Phase},
};

impl Cluster {
    /// A server is about to stop. No further slices are placed on it.
    pub(super) fn departing(&mut self, server: ServerId, now: Now, out: &mut Vec<Action>) {
        out.push(Action::Note(format!("{} is about to stop", self.name(server))));
        self.departing.insert(server, false);
        let is_only_there = |job: &&Job| job.spec.replicas <= 1 && job.phase.uses(server);
        self.save_all(is_only_there, now, out);
    }

    /// Returns whether the server has said that it is about to stop.
    pub fn is_departing(&self, server: ServerId) -> bool {
        self.departing.contains_key(&server)
    }

    /// The control stream of a departing server has ended: its jobs do not wait for its return.
    pub(super) fn departed(&mut self, server: ServerId, now: Now, out: &mut Vec<Action>) {
        let waits =
            |job: &&Job| matches!(&job.phase, Phase::Open(open) if open.away.contains_key(&server));
        let names: Vec<String> =
            self.jobs.values().filter(waits).map(|job| job.spec.name.clone()).collect();
        for name in names {
            self.give_up(&name, server, "it was stopped", now, out);
        }
    }

    /// This coordinator is about to stop.
    pub(super) fn stopping(&mut self, now: Now, out: &mut Vec<Action>) {
        self.save_all(|_| true, now, out);
    }

    /// Returns whether no job is being saved.
    pub fn is_settled(&self) -> bool {
        let saves = |job: &Job| match &job.phase {
            Phase::Open(open) => open.saves.current().is_some(),
            _ => false,
        };
        !self.jobs.values().any(saves)
    }

    fn save_all(&mut self, which: impl Fn(&&Job) -> bool, now: Now, out: &mut Vec<Action>) {
        let names: Vec<String> =
            self.jobs.values().filter(which).map(|job| job.spec.name.clone()).collect();
        for name in names {
            self.save_last(&name, now, out);
        }
    }

    /// Releases the departing servers of which no job is being saved.
    pub(super) fn release(&mut self, out: &mut Vec<Action>) {
        let saves = |server: ServerId| {
            self.jobs.values().any(|job| match &job.phase {
                phase @ Phase::Open(open) => phase.uses(server) && open.saves.current().is_some(),
                _ => false,
            })
        };
        let released =
            self.departing.iter().filter(|&(&server, is_released)| !is_released && !saves(server));
        let released: Vec<ServerId> = released.map(|(&server, _)| server).collect();
        for server in released {
            self.departing.insert(server, true);
            out.push(Action::Command(server, Command::Release));
        }
    }
}
