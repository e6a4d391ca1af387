//! Reconstruction of a job from the descriptions by all of its servers.

use std::collections::{BTreeMap, BTreeSet};

use zeroshard_model::{Attempt, JobSpec, RecentSteps};

use crate::{
    job::{
        Open,
        resync::{Known, resync},
    },
    state::{
        decided::Decided, departed::Departed, members::Member, recovery::Recovery,
        replicas::Replicas, version::Version,
    },
    vocabulary::{
        calls::Rested,
        commands::{Begins, Command},
        decision::Decision,
        gradient::{Gradient, Reduced, check_report},
        ids::{JobRef, Lease, Now, ServerId},
        job_report::{JobReport, Ranks},
    },
};

/// A job that continues.
#[derive(Debug)]
pub(crate) struct Recovered {
    pub(crate) open: Open,
    pub(crate) epoch: u64,
    /// The commands that some of the servers have not received.
    pub(crate) commands: Vec<(ServerId, Command)>,
    /// The figures of the steps up to the last decision, if there was one since the servers opened
    /// the job.
    pub(crate) recent: Option<RecentSteps>,
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
        let top = self.reports().values().map(|report| report.attempt).max().unwrap_or(first);
        let published = self.reports().values().any(|report| report.published);
        let decision = self.decision_before(top.step);
        let replicas = Replicas::learn(spec, &self.plan().placement, self.reports(), now);
        let mut open = Open::new(self.plan().clone(), replicas);
        let lacks =
            |report: &JobReport| !published && (!report.initialised || report.attempt != top);
        open.version = Version::learned(
            published.then_some(top.step),
            self.servers_where(lacks),
            decision.and_then(|decision| self.decided(spec, decision)),
            self.reports().values().filter_map(|report| report.restored).max(),
        );
        open.round.open_attempt(top.number);
        for (&server, report) in self.reports().iter().filter(|(_, report)| report.attempt == top) {
            let trained = self.plan().trainable.get(&server);
            let is_current = |ready: &Reduced| open.replicas.is_current(server, ready.copies);
            let ready = report.ready.clone().filter(is_current);
            if let Some(ready) = ready.filter(|_| open.awaits(server)) {
                check_report(&ready, trained, spec.world).map_err(|what| (server, what))?;
                open.round.report(server, ready);
            }
            if let Some(last) = report.rested.filter(|_| open.uneven_inputs.ended(top).is_none()) {
                open.uneven_inputs.set_ended(Rested { attempt: top, last });
            }
        }
        open.take_ranks(ranks(self.reports().values(), top), deadline);
        let recent = decision.map(|decision| decision.figures.recent.clone());
        if let Some(decision) = decision {
            open.saves.learned(&decision.figures.user_data, &open.members);
        } else if open.step() > 0 {
            // No step was made since the version was restored.
            open.saves.learned_restored();
        }
        let mut commands = Vec::new();
        for (&server, report) in self.reports() {
            let known = Known { job, epoch: top.epoch, open: &open, decision };
            let lacks = resync(known, report, open.awaits(server));
            let lacks = lacks.map_err(|what| (server, what))?;
            commands.extend(lacks.into_iter().map(|command| (server, command)));
        }
        Ok(Recovered { open, epoch: top.epoch, commands, recent })
    }

    /// If version 0 has been published: the open attempt, and the ranks in it.
    pub(crate) fn published(&self) -> Option<(Attempt, Ranks)> {
        let top = self.described().map(|report| report.attempt).max()?;
        let published = self.described().any(|report| report.published);
        published.then(|| (top, ranks(self.described(), top)))
    }

    fn servers_where(&self, test: impl Fn(&JobReport) -> bool) -> BTreeSet<ServerId> {
        self.reports()
            .iter()
            .filter(|(_, report)| test(report))
            .map(|(&server, _)| server)
            .collect()
    }

    /// The decision that has led to `step`.
    fn decision_before(&self, step: u64) -> Option<&Decision> {
        let decisions =
            self.reports().values().filter_map(|report| Some(&report.decided.as_ref()?.0));
        decisions.into_iter().find(|decision| decision.attempt.step + 1 == step)
    }

    /// The decision with its report, for ranks that repeat their commits. `None` if the servers do
    /// not have all figures, which is the case if no rank can ask.
    fn decided(&self, spec: &JobSpec, decision: &Decision) -> Option<Decided> {
        let behind = self.servers_where(|report| report.attempt.step == decision.attempt.step);
        if let Some(replicated) = &decision.replicated {
            return Some(Decided::new(
                decision.clone(),
                replicated.report.clone(),
                behind,
                Vec::new(),
            ));
        }
        let mut figures = BTreeMap::new();
        for (&server, report) in self.reports() {
            let reduced = match &report.decided {
                Some((known, reduced)) if known.attempt == decision.attempt => Some(reduced),
                _ => report.ready.as_ref().filter(|_| report.attempt == decision.attempt),
            };
            if let Some(trained) = self.plan().trainable.get(&server) {
                check_report(reduced?, Some(trained), spec.world).ok()?;
                figures.insert(server, reduced?.clone());
            }
        }
        let contributes = |rank| !decision.figures.resting.contains(&rank);
        let gradient = Gradient::new(spec, &figures, contributes);
        Some(Decided::new(decision.clone(), decision.report(spec, gradient), behind, Vec::new()))
    }
}

/// What servers know together about the ranks, of which those at the attempt `top` know the most.
fn ranks<'a>(servers: impl Iterator<Item = &'a JobReport> + Clone, top: Attempt) -> Ranks {
    let mut ranks = Ranks::default();
    for newest in servers.clone().filter(|report| report.attempt == top) {
        let Ranks { leases, done, left, resting } = newest.ranks.clone();
        ranks.leases.extend(leases);
        ranks.done.extend(done);
        ranks.left.extend(left);
        ranks.resting.extend(resting);
    }
    let Ranks { leases, done, left, resting } = &mut ranks;
    let all = |rank: &u32, lease: &Lease| {
        servers.clone().all(|report| report.ranks.leases.get(rank) == Some(lease))
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
        self.departed = Departed::learned(left, done, self.step());
        for (rank, (since, excluded)) in resting {
            self.uneven_inputs.insert(rank, Begins { since, excluded }, Vec::new());
        }
    }
}
