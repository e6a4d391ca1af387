//! Recovery: a coordinator that has just started learns the jobs from their servers.
//!
//! The servers keep their jobs without a coordinator, and describe them to the next one
//! (`JobReport`).
//! When every server of a job's placement has done so, the job continues where the commands of the
//! last coordinator have left it. A job with replicas continues without servers whose process has
//! ended. Each server has received the first part of the same commands, so
//! the servers at the latest attempt know the most, and the others are told what they lack
//! (`resync`):
//! - A decision, an epoch, an attempt, and a rank that is done, has left or rests stand if any
//!   server knows them.
//! - A lease stands if all servers know it: its worker was not told of it before.
//! - The open attempt continues with the gradients that have arrived. The ranks keep their leases,
//!   open a new stream within [`RECOVERY`], and repeat their calls.
//!
//! A server whose stream to a living coordinator has broken describes its jobs as well
//! (`disconnects`).

use std::{collections::BTreeMap, mem};

use zeroshard_model::{Server, listing::some_of};

use crate::{
    cluster::{
        context::{Consequence, Context},
        index::Name,
        startup::{RECOVERY, unknown_yet},
    },
    job::{Job, Phase, leases::MAX_AHEAD, rebuild::Recovered},
    state::{progress::Progress, recovery::Recovery},
    vocabulary::{
        calls::Attach,
        commands::{Command, FailedThere},
        events::Action,
        ids::{Link, Now, ServerId},
        job_report::JobReport,
    },
};

impl Job {
    /// A job that a server has described to a new coordinator.
    pub(crate) fn recovering(server: ServerId, report: JobReport, now: Now) -> Self {
        Self {
            name: Name::from(report.spec.name.as_str()),
            spec: report.spec.clone(),
            id: report.id,
            epoch: 0,
            line: report.line.clone(),
            recent: report.recent.clone(),
            unused_since: now,
            fork: report.fork.clone(),
            restore: report.restore.clone(),
            learned: Some(report.age()),
            progress: Progress::default(),
            phase: Phase::Recovering(Box::new(Recovery::new(server, report, now + RECOVERY))),
        }
    }

    /// A server has connected, and describes the job. One that the job does not need is told to
    /// close it.
    pub(crate) fn described(&mut self, server: ServerId, report: JobReport, cx: &mut Context<'_>) {
        match &mut self.phase {
            Phase::Recovering(recovery) => {
                self.learned = self.learned.max(Some(report.age()));
                if report.line.number > self.line.number {
                    self.line = report.line.clone();
                }
                self.recent = mem::take(&mut self.recent).with_spikes_of(&report.recent);
                if let Some((other, difference)) = recovery.difference(&report) {
                    let [one, other] = [other, server].map(|server| cx.name(server));
                    let reason = format!("{one} and {other} describe different {difference}");
                    self.fail(&reason, cx);
                    return cx.command(server, Command::Close(self.reference()));
                }
                recovery.take(server, report);
            }
            Phase::Open(open) if open.disconnects.contains(server) => {
                self.rejoin(server, &report, cx);
            }
            // It will be told to open the job again, or to close it once all others have.
            Phase::Waiting { interrupted: Some(interrupted), .. }
            | Phase::Opening { interrupted: Some(interrupted), .. } => {
                interrupted.held_by([server]);
                cx.common.epochs.skip(report.attempt.epoch);
            }
            _ => cx.command(server, Command::Close(self.reference())),
        }
    }

    /// Returns whether the job was learned from descriptions that are older than this one.
    pub(crate) fn is_older_than(&self, report: &JobReport) -> bool {
        self.learned.is_some_and(|learned| learned < report.age())
    }

    /// Returns whether another coordinator has made steps or epochs of the open job since.
    pub(crate) fn lacks_what(&self, report: &JobReport) -> bool {
        let Phase::Open(open) = &self.phase else { return false };
        self.is_older_than(report)
            && open.version.rolled_back().is_none()
            && (open.step() < report.attempt.step || self.epoch < report.attempt.epoch)
    }

    /// Another coordinator has had the open job meanwhile, so it is learned again. Its servers keep
    /// it. Its ranks keep their leases, and open new streams.
    pub(crate) fn learn_again(&mut self, cx: &mut Context<'_>) {
        let unknown = unknown_yet(&self.name);
        let (waiters, leases) = mem::replace(&mut self.phase, Phase::Gone).into_waiting();
        cx.refuse(waiters, &unknown);
        for lease in leases {
            cx.push(Action::End(lease, Some(unknown.clone())));
        }
    }

    /// Continues a job that all of its servers have described.
    pub(crate) fn try_recover(&mut self, cx: &mut Context<'_>) {
        let Self { spec, id, phase: Phase::Recovering(recovery), .. } = &*self else { return };
        let mut is_complete = true;
        let has_replicas = spec.replicas > 1;
        let mut lost = BTreeMap::new();
        for server in recovery.plan().placement.servers() {
            match cx.common.servers.get(server.id) {
                _ if recovery.lost().contains_key(&server.id) => {}
                None => is_complete = false,
                Some(known) if known.incarnation != server.incarnation && has_replicas => {
                    lost.insert(server.id, "it was restarted".to_owned());
                }
                Some(known) if has_replicas && !recovery.is_held_by(server.id) => {
                    lost.insert(server.id, known.lacks(*id));
                }
                Some(known) if known.incarnation != server.incarnation => {
                    let server = server.id;
                    return self.give_up(server, "it was restarted", cx);
                }
                Some(known) if !recovery.is_held_by(server.id) => {
                    let failed = known.failed.get(id).cloned();
                    return self.recover_without(server.id, failed, cx);
                }
                Some(_) => {}
            }
        }
        let waits = cx.common.startup.is_learning();
        let Phase::Recovering(recovery) = &mut self.phase else { return };
        recovery.give_up(lost);
        // A server that is not back yet may describe a later placement, without the lost servers.
        let is_latest = recovery.lost().is_empty() || recovery.is_latest();
        let is_certain = !has_replicas || is_latest && recovery.has_every_slice();
        if is_complete && (is_certain || !waits) {
            self.recover(cx);
        }
    }

    /// A worker asks to continue with a job that is being learned or restored. A restoration must
    /// begin in an epoch that it does not know.
    pub(crate) fn asked_by(&mut self, attach: &Attach, cx: &mut Context<'_>) {
        let Attach { rank, lease, attempt, .. } = attach;
        let known = attempt.epoch;
        let Self { spec, epoch, phase, .. } = self;
        let is_possible = known <= epoch.saturating_add(MAX_AHEAD);
        match phase {
            Phase::Recovering(recovery) if *rank < spec.world => {
                recovery.asked_by(*rank, *lease, known);
                self.try_recover(cx);
            }
            Phase::Waiting { interrupted: Some(interrupted), .. }
                if is_possible && interrupted.rank_of(*lease) == Some(*rank) =>
            {
                cx.common.epochs.skip(known);
            }
            Phase::Opening { interrupted: Some(interrupted), .. }
                if is_possible && known >= *epoch && interrupted.rank_of(*lease) == Some(*rank) =>
            {
                cx.common.epochs.skip(known);
                let reason = format!("rank {rank} knows a later epoch, {known}");
                self.interrupt(&reason, cx);
            }
            _ => {}
        }
    }

    /// A server of a job without replicas does not hold the job. If the job did not fail there,
    /// either it was deleted, or the server was never told to read its checkpoint. In both cases
    /// the job returns to the checkpoint; if it was deleted, its caller deletes it again, or it is
    /// disposed of because nobody uses it.
    fn recover_without(
        &mut self,
        server: ServerId,
        failed: Option<FailedThere>,
        cx: &mut Context<'_>,
    ) {
        let server = cx.name(server);
        match failed {
            // It could not read the checkpoint to which the last coordinator returned the job.
            Some(FailedThere { reason, transient: true }) => {
                self.interrupt_or_fail(&format!("{server}: {reason}"), cx);
            }
            Some(FailedThere { reason, .. }) => {
                self.fail(&format!("{server}: {reason}"), cx);
            }
            None if self.interrupt(&format!("{server} does not hold it"), cx) => {}
            None => self.remove("it was closed", cx),
        }
    }

    fn recover(&mut self, cx: &mut Context<'_>) {
        let job = self.reference();
        let Self { name, spec, phase: Phase::Recovering(recovery), .. } = self else { return };
        let is_published = recovery.described().any(|report| report.published);
        if spec.replicas > 1 && is_published && !recovery.has_every_slice() {
            let servers = recovery.plan().placement.servers().iter();
            let lost = servers.filter_map(|of| Some((&of.address, recovery.lost().get(&of.id)?)));
            let lost = lost.map(|(address, why)| format!("shard server {address}: {why}"));
            let lost: Vec<String> = lost.collect();
            let reason = format!("all servers of a slice were lost ({})", some_of(lost));
            return self.interrupt_or_fail(&reason, cx);
        }
        for server in recovery.drop_others() {
            cx.command(server, Command::Close(job.clone()));
        }
        if recovery.is_half_restored() {
            let reason = "the coordinator was lost while the job was being restored";
            return self.interrupt_or_fail(reason, cx);
        }
        let recovered = match recovery.rebuild(&job, spec, cx.now, cx.now + RECOVERY) {
            Ok(recovered) => recovered,
            Err((server, what)) => return self.contradicted(server, &what, cx),
        };
        let lost = recovery.lost().clone();
        let Recovered { mut open, epoch, commands, recent } = recovered;
        if spec.replicas > 1 {
            lost.keys().for_each(|&server| _ = open.version.initialised(server));
        }
        cx.note(format!(
            "job {name:?} continues at step {} in epoch {epoch}, with {} of {} ranks",
            open.step(),
            open.members.len(),
            spec.world
        ));
        for (server, command) in commands {
            cx.command(server, command);
        }
        cx.push(Action::Tick(cx.now + RECOVERY));
        cx.common.epochs.see(epoch);
        (self.epoch, self.phase) = (epoch, Phase::Open(Box::new(open)));
        if let Some(recent) = recent {
            self.recent = recent;
        }
        self.publish_if_initialised(cx);
        if self.return_without_data(cx) {
            return;
        }
        for (server, why) in lost {
            self.give_up(server, &why, cx);
        }
        self.serve_version(cx);
        self.copy_next(cx);
        self.idle_from_now(cx);
        self.advance(cx);
    }

    /// The description by a server does not fit those by the others. If it is older, the server may
    /// have followed another coordinator since: it is dismissed, and describes its jobs again.
    fn contradicted(&mut self, server: ServerId, what: &str, cx: &mut Context<'_>) {
        let Phase::Recovering(recovery) = &mut self.phase else { return };
        let Some(attempt) = recovery.reports().get(&server).map(|report| report.attempt) else {
            return;
        };
        let is_old = recovery.reports().values().any(|other| other.attempt.step > attempt.step)
            && recovery.doubt(server, attempt);
        let stream = cx.common.servers.get(server).map(|known| known.stream);
        match stream.filter(|_| is_old) {
            Some(stream) => {
                let cause = format!("its description of job {:?} is out of date", self.name);
                let link = Link { server, stream };
                cx.consequences.push(Consequence::Dismiss { link, cause });
            }
            None => self.fail(&format!("{} {what}", cx.name(server)), cx),
        }
    }

    /// At its deadline, a job with replicas continues without the servers that have not described
    /// it. Another job returns to its last checkpoint or, if its policy does not ask for it, fails.
    pub(crate) fn expire_recovery(&mut self, cx: &mut Context<'_>) {
        let Self { spec, phase: Phase::Recovering(recovery), .. } = self else { return };
        if recovery.deadline() > cx.now {
            return;
        }
        let why = format!("did not connect within {RECOVERY:?} of the coordinator's start");
        let late: Vec<Server> = recovery.missing().cloned().collect();
        if spec.replicas > 1 {
            recovery.give_up(late.iter().map(|server| (server.id, format!("it {why}"))));
            return self.recover(cx);
        }
        let late = late.iter().map(|of| cx.common.servers.name_at(of.id, &of.address));
        let reason = format!("{} {why}", some_of(late));
        self.interrupt_or_fail(&reason, cx);
    }
}
