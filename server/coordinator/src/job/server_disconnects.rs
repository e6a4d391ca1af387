//! Disconnects: the control stream of a server has broken, and the server may come back.
//!
//! Its open jobs wait for it (see `patience`). When the same process connects again, it describes
//! its jobs, receives the commands that it has missed (`resync`), and its jobs continue. If its
//! process has ended, they do not wait: it was restarted, another server has its address, or its
//! address refuses connections (`probe`). They continue with their backups (`replicas`), return to
//! their last checkpoint (`restore`), or fail.

use std::{collections::BTreeSet, time::Duration};

use zeroshard_model::{JobSpec, Placement, Server, listing::some_of};

use crate::{
    cluster::{context::Context, startup::RECOVERY},
    job::{
        Job, Phase,
        resync::{Known, resync},
    },
    vocabulary::{events::Action, ids::ServerId, job_report::JobReport},
};

impl Job {
    /// The control stream of a server with slices of the job has ended. `gone` describes that.
    pub(crate) fn server_lost(
        &mut self,
        server: ServerId,
        cause: &str,
        gone: &str,
        cx: &mut Context<'_>,
    ) {
        if !self.phase.uses(server) {
            return;
        }
        let until = cx.now + patience(&self.spec);
        match &mut self.phase {
            Phase::Recovering(recovery) => recovery.lose(server),
            Phase::Open(open) => {
                open.disconnects.begin(server, cause, until);
                cx.push(Action::Tick(until));
                self.save_without(server, cause, cx);
            }
            _ => {
                let reason = format!("{gone} while the job was being opened");
                self.interrupt_or_fail(&reason, cx);
            }
        }
    }

    /// A server whose control stream has ended was about to stop: the job does not wait for its
    /// return.
    pub(crate) fn server_stopped(&mut self, server: ServerId, cx: &mut Context<'_>) {
        if let Phase::Open(open) = &self.phase
            && open.disconnects.contains(server)
        {
            self.give_up(server, "it was stopped", cx);
        }
    }

    /// The server with this id, if the job has slices there and is open or being recovered.
    pub(crate) fn awaited(&self, server: ServerId) -> Option<&Server> {
        let (Phase::Open(_) | Phase::Recovering(_)) = &self.phase else { return None };
        self.phase.placement()?.servers().iter().find(|of| of.id == server)
    }

    /// Dials the servers that the job waits for.
    pub(crate) fn probe_missing(&self, cx: &mut Context<'_>) {
        let placed = self.phase.placement().into_iter().flat_map(|placement| placement.servers());
        for server in placed.filter(|server| !cx.common.servers.is_connected(server.id)) {
            cx.out.push(Action::Probe(server.clone()));
        }
    }

    /// A server that was away describes the job, of which it holds slices.
    pub(crate) fn rejoin(&mut self, server: ServerId, report: &JobReport, cx: &mut Context<'_>) {
        let (job, name) = (self.reference(), cx.name(server));
        let Phase::Open(open) = &mut self.phase else { return };
        let decision = open.version.last().map(|last| last.decision().clone());
        let known = Known { job: &job, epoch: self.epoch, open, decision: decision.as_ref() };
        let commands = match resync(known, report, open.awaits(server)) {
            Ok(commands) => commands,
            Err(what) => return self.fail(&format!("{name} {what}"), cx),
        };
        open.disconnects.end(server);
        cx.note(format!("job {:?} continues with {name}", self.name));
        self.note_redundancy(cx);
        for command in commands {
            cx.command(server, command);
        }
        self.save_without(server, "it was away when the save began", cx);
        // What it may have said in vain.
        for (&rank, &lease) in &report.ranks.leases {
            self.granted(server, rank, lease, cx);
        }
        if report.initialised {
            self.initialised(server, report.attempt.epoch, cx);
        }
        if let Some(stored) = decision.map(|decision| decision.attempt)
            && report.attempt.step > stored.step
        {
            self.stored(server, stored.epoch, stored.step, cx);
        }
        if let Some(ready) = report.ready.clone() {
            self.ready(server, report.attempt, ready, cx);
        }
        self.copy_again(server, cx);
        self.copy_next(cx);
        self.serve_version(cx);
    }

    /// A server has connected, which holds the job or does not. Gives up the server of the job that
    /// has its id or its address, if that has lost the job, or is another process.
    pub(crate) fn abandoned_by(&mut self, server: &Server, holds: bool, cx: &mut Context<'_>) {
        let Phase::Open(open) = &self.phase else { return };
        let is_it = |of: &Server| of.id == server.id || of.address == server.address;
        let Some(of) = open.away().find(|&of| is_it(of)) else { return };
        let why = if of.id != server.id {
            "another server connected with its address".to_owned()
        } else if of.incarnation != server.incarnation {
            "it was restarted".to_owned()
        } else if let Some(known) = cx.common.servers.get(server.id)
            && !holds
        {
            known.lacks(self.id)
        } else {
            return;
        };
        self.give_up(of.id, &why, cx);
    }

    /// The address of a server that is not connected refuses connections: its process has ended.
    pub(crate) fn refused_at(&mut self, server: &Server, cx: &mut Context<'_>) {
        let waits = match &self.phase {
            Phase::Open(open) => open.away().any(|of| of == server),
            Phase::Recovering(recovery) => recovery.plan().placement.servers().contains(server),
            _ => false,
        };
        if waits {
            self.give_up(server.id, "its address refuses connections", cx);
        }
    }

    /// Gives up a server that has been away for too long.
    pub(crate) fn expire_disconnects(&mut self, cx: &mut Context<'_>) {
        let Phase::Open(open) = &self.phase else { return };
        if let Some(server) = open.disconnects.overdue(cx.now) {
            let patience = patience(&self.spec);
            self.give_up(server, &format!("it did not connect again within {patience:?}"), cx);
        }
    }

    /// A server with slices of the job will not come back. The job continues with its backups.
    /// Without them it returns to its last checkpoint or, if its policy does not ask for it, fails.
    pub(crate) fn give_up(&mut self, server: ServerId, why: &str, cx: &mut Context<'_>) {
        if let Phase::Recovering(recovery) = &mut self.phase
            && self.spec.replicas > 1
        {
            recovery.give_up([(server, why.to_owned())]);
            return self.try_recover(cx);
        }
        let Some(placement) = self.phase.placement() else { return };
        let found = placement.servers().iter().find(|of| of.id == server);
        let address = found.map_or("", |of| &of.address);
        let mut reason = format!("{} was lost (", cx.common.servers.name_at(server, address));
        if let Phase::Open(open) = &self.phase
            && let Some(cause) = open.disconnects.cause(server).filter(|&cause| cause != why)
        {
            reason += &format!("{cause}; ");
        }
        reason += &format!("{why}); it held {}", held_by(server, &self.spec, placement));
        if !self.fail_over(server, &reason, cx) {
            self.interrupt_or_fail(&reason, cx);
        }
    }
}

/// How long a job waits for a server whose control stream has broken.
pub(crate) fn patience(spec: &JobSpec) -> Duration {
    if spec.replicas > 1 { PATIENCE } else { RECOVERY }
}

/// Describes the tensors of which `server` holds slices, for messages.
fn held_by(server: ServerId, spec: &JobSpec, placement: &Placement) -> String {
    let slices: Vec<usize> = placement.primary_slices(server).collect();
    let tensors: BTreeSet<usize> =
        slices.iter().map(|&slice| spec.manifest.slices()[slice].tensor).collect();
    let names =
        tensors.into_iter().map(|tensor| format!("{:?}", spec.manifest.tensors()[tensor].name));
    format!("{} of {} slices, of the tensors {}", slices.len(), placement.slices(), some_of(names))
}

/// How long a job with replicas waits for a server whose control stream has broken.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
