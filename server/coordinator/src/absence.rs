//! Absence: the control stream of a server has broken, and the server may come back.
//!
//! Its open jobs wait for it (see `patience`). When the same process connects again, it describes
//! its jobs, receives the commands that it has missed (`catch_up`), and its jobs continue. If its
//! process has ended, they do not wait: it was restarted, another server has its address, or its
//! address refuses connections (`probe`). They continue with their backups (`replicas`), return to
//! their last checkpoint (`restore`), or fail.

use std::{collections::BTreeSet, time::Duration};

use zeroshard_model::{JobSpec, Placement, Server, listing::some_of};

use super::{
    catch_up::{Known, catch_up},
    cluster::Cluster,
    events::{Action, JobRef, Now, ServerId},
    held::Held,
    recovery::RECOVERY,
    replicas,
    state::{Job, Open, Phase},
};

/// A server of an open job that is not connected.
#[derive(Debug)]
pub struct Away {
    /// Why its control stream has ended.
    cause: String,
    /// When the job fails.
    pub(super) until: Now,
}

impl Open {
    /// The job waits for the server.
    pub(super) fn miss(
        &mut self,
        server: ServerId,
        cause: &str,
        until: Now,
        out: &mut Vec<Action>,
    ) {
        self.away.insert(server, Away { cause: cause.to_owned(), until });
        out.push(Action::Tick(until));
    }
}

impl Cluster {
    /// A server that was away describes a job of which it holds slices.
    pub(super) fn rejoin(
        &mut self,
        server: ServerId,
        job: &JobRef,
        held: &Held,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        let name = self.name(server);
        let Some(Job { epoch, phase: Phase::Open(open), .. }) = self.reported_job(job) else {
            return;
        };
        let decision = open.last.as_ref().map(|last| last.decision.clone());
        let known = Known { job, epoch: *epoch, open, decision: decision.as_ref() };
        let commands = match catch_up(known, held, open.awaits(server)) {
            Ok(commands) => commands,
            Err(what) => return self.fail(&job.name, &format!("{name} {what}"), now, out),
        };
        open.away.remove(&server);
        out.push(Action::Note(format!("job {:?} continues with {name}", job.name)));
        self.note_redundancy(&job.name, now, out);
        out.extend(commands.into_iter().map(|command| Action::Command(server, command)));
        self.save_without(server, &job.name, "it was away when the save began", now, out);
        // What it may have said in vain.
        for (&rank, &lease) in &held.ranks.leases {
            self.granted(server, job, rank, lease, out);
        }
        if held.initialised {
            self.initialised(server, job, held.attempt.epoch, now, out);
        }
        if let Some(stored) = decision.map(|decision| decision.attempt)
            && held.attempt.step > stored.step
        {
            self.stored(server, job, stored.epoch, stored.step, now, out);
        }
        if let Some(ready) = held.ready.clone() {
            self.ready(server, job, held.attempt, ready, now, out);
        }
        self.copy_again(server, job, out);
        self.copy_next(&job.name, out);
        self.serve_version(&job.name, out);
    }

    /// A server has connected. Fails the jobs that wait for slices that it does not hold any more,
    /// or for an earlier process: `held` are the ids of the jobs that it holds.
    pub(super) fn abandoned_by(
        &mut self,
        server: ServerId,
        held: &BTreeSet<u64>,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        let Some(known) = self.servers.get(&server) else { return };
        let (incarnation, address) = (known.incarnation, &known.address);
        let cause = |server: ServerId, job: &Job, open: &Open| {
            let of = open.placement.servers().iter().find(|of| {
                open.away.contains_key(&of.id) && (of.id == server || of.address == *address)
            })?;
            if of.id != server {
                Some((of.id, "another server connected with its address".to_owned()))
            } else if of.incarnation != incarnation {
                Some((of.id, "it was restarted".to_owned()))
            } else if !held.contains(&job.id) {
                Some((of.id, known.lacks(job.id)))
            } else {
                None
            }
        };
        let hit = |(name, job): (&String, &Job)| match &job.phase {
            Phase::Open(open) => cause(server, job, open).map(|why| (name.clone(), why)),
            _ => None,
        };
        let hit: Vec<_> = self.jobs.iter().filter_map(hit).collect();
        for (name, (server, why)) in hit {
            self.give_up(&name, server, &why, now, out);
        }
    }

    /// The address of a server that is not connected refuses connections: its process has ended.
    pub(super) fn refused(&mut self, server: &Server, now: Now, out: &mut Vec<Action>) {
        if self.servers.contains_key(&server.id) {
            return;
        }
        let waits = |job: &&Job| match &job.phase {
            Phase::Open(open) => {
                open.away.contains_key(&server.id) && open.placement.servers().contains(server)
            }
            Phase::Recovering(recovery) => recovery.plan.placement.servers().contains(server),
            _ => false,
        };
        let names: Vec<String> =
            self.jobs.values().filter(waits).map(|job| job.spec.name.clone()).collect();
        for name in names {
            let why = "its address refuses connections";
            self.give_up(&name, server.id, why, now, out);
        }
    }

    /// Gives up a server that has been away for too long.
    pub(super) fn expire_absence(&mut self, name: &str, now: Now, out: &mut Vec<Action>) {
        let Some(Job { spec, phase: Phase::Open(open), .. }) = self.jobs.get(name) else { return };
        if let Some(&server) = open.away.iter().find(|(_, away)| away.until <= now).map(|of| of.0) {
            let patience = patience(spec);
            let why = format!("it did not connect again within {patience:?}");
            self.give_up(name, server, &why, now, out);
        }
    }

    /// A server with slices of the job will not come back. The job continues with its backups.
    /// Without them it returns to its last checkpoint or, if its policy does not ask for it, fails.
    pub(super) fn give_up(
        &mut self,
        name: &str,
        server: ServerId,
        why: &str,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        if let Some(Job { spec, phase: Phase::Recovering(recovery), .. }) = self.jobs.get_mut(name)
            && spec.replicas > 1
        {
            recovery.lost.insert(server, why.to_owned());
            return self.try_recover(name, now, out);
        }
        let Some(job) = self.jobs.get(name) else { return };
        let Some(placement) = job.phase.placement() else { return };
        let found = placement.servers().iter().find(|of| of.id == server);
        let address = found.map_or("", |of| &of.address);
        let mut reason = format!("{} was lost (", self.name_at(server, address));
        if let Phase::Open(open) = &job.phase
            && let Some(away) = open.away.get(&server).filter(|away| away.cause != why)
        {
            reason += &format!("{}; ", away.cause);
        }
        reason += &format!("{why}); it held {}", held_by(server, &job.spec, placement));
        if !self.fail_over(name, server, &reason, now, out) {
            self.interrupt_or_fail(name, &reason, now, out);
        }
    }
}

/// How long a job waits for a server whose control stream has broken.
pub(super) fn patience(spec: &JobSpec) -> Duration {
    if spec.replicas > 1 { replicas::PATIENCE } else { RECOVERY }
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
