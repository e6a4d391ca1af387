//! The life of a job: wait for servers, place, open, initialise; fail or be deleted.
//!
//! ```text
//! Waiting --placed--> Opening --all opened--> Open --a server is lost--> Failed
//!    |                   |                     |                           |
//!    +--- nobody waits --+-- refused: gone     +---- deleted: gone --------+
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use zeroshard_model::{Error, JobSpec, Placement, Result, Server};

use super::{
    admission::{Loads, Rooms},
    cluster::Cluster,
    events::{
        Action, Command, Create, JobRef, Now, OpenJob, Placed, Placing, Reply, ServerId, Waiter,
    },
    history::Severity,
    placement::{Zones, place},
    progress::Progress,
    recovery::unknown_yet,
    replicas::Replicas,
    restore::same_checkpoint,
    state::{Job, Open, Phase},
};

/// The memory that a server needs for each slice, in bytes.
pub fn weights(spec: &JobSpec) -> Vec<u64> {
    spec.required_by_slice().into_iter().map(|required| required.bytes).collect()
}

/// The placement of a job's slices, with derived data.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    pub placement: Arc<Placement>,
    /// The trained slices of each server that has any, ascending.
    pub trainable: BTreeMap<ServerId, Vec<u32>>,
    /// The bytes that the job needs of each server.
    pub loads: Loads,
}

impl Plan {
    /// Places the slices of `spec` on `live`, which are in these zones, whatever room they have.
    /// This can take a second, and needs no state.
    ///
    /// # Errors
    /// Those of [`place`].
    pub fn new(spec: &JobSpec, live: &[Server], zones: &Zones) -> Result<Self> {
        Ok(Self::of(spec, place(None, live, zones, &weights(spec), spec.replicas as usize)?))
    }

    /// The plan with this placement.
    pub fn of(spec: &JobSpec, placement: Placement) -> Self {
        let mut trainable = BTreeMap::<ServerId, Vec<u32>>::new();
        for slice in (0..placement.slices()).filter(|&slice| spec.manifest.trains(slice)) {
            let server = placement.servers()[placement.primary(slice)].id;
            trainable.entry(server).or_default().push(slice as u32);
        }
        let mut loads = Loads::new();
        for (slice, required) in spec.required_by_slice().into_iter().enumerate() {
            for &owner in placement.owners(slice) {
                *loads.entry(placement.servers()[owner as usize].id).or_default() += required;
            }
        }
        Self { placement: Arc::new(placement), trainable, loads }
    }
}

/// A server's report that it cannot hold or continue a job: see [`Said::Failed`].
///
/// [`Said::Failed`]: super::events::Said::Failed
#[derive(Debug, Clone, Copy)]
pub(super) struct Failed<'a> {
    pub(super) epoch: u64,
    pub(super) reason: &'a str,
    pub(super) transient: bool,
}

impl Cluster {
    pub(super) fn create(
        &mut self,
        waiter: Waiter,
        id: u64,
        create: Create,
        out: &mut Vec<Action>,
    ) {
        let Create { spec, succession, restore, quota } = create;
        let name = spec.name.clone();
        self.make_way_for_restored(&name, restore.as_ref(), out);
        let room = self.check_number_of_jobs();
        let room = room.and_then(|()| self.check_quota(&name, quota.as_ref()));
        let Some(job) = self.jobs.get_mut(&name) else {
            if let Err(error) = room {
                return out.push(Action::Answer(waiter.caller, Err(error)));
            }
            let succession = succession.map(Arc::new);
            if let Some(Err(error)) = succession.as_ref().map(|succession| self.source(succession))
            {
                return out.push(Action::Answer(waiter.caller, Err(error)));
            }
            let creators = vec![waiter];
            let phase = Phase::Waiting { creators, placing: false, interrupted: None };
            let (spec, unused_since) = (Arc::new(spec), waiter.since);
            let restore = restore.map(Arc::new);
            let (learned, progress) = (None, Progress::default());
            let job = Job {
                spec,
                id,
                epoch: 0,
                unused_since,
                succession,
                restore,
                learned,
                progress,
                phase,
            };
            self.jobs.insert(name.clone(), job);
            return self.try_place(&name, waiter.since, out);
        };
        let other =
            || (job.succession.as_deref() != succession.as_ref()).then(|| "predecessor".to_owned());
        let checkpoint = || {
            let is_other = !same_checkpoint(job.restore.as_deref(), restore.as_ref());
            is_other.then(|| "checkpoint to start from".to_owned())
        };
        if let Some(difference) = job.spec.difference(&spec).or_else(other).or_else(checkpoint) {
            return out.push(Action::Answer(
                waiter.caller,
                Err(Error::JobExists { job: name, difference }),
            ));
        }
        match &mut job.phase {
            Phase::Waiting { creators, .. } | Phase::Opening { creators, .. } => {
                creators.push(waiter)
            }
            Phase::Open(_) => {
                let reply = Reply::Created { epoch: job.epoch, job_id: job.id };
                out.push(Action::Answer(waiter.caller, Ok(reply)));
            }
            Phase::Recovering(_) => {
                out.push(Action::Answer(waiter.caller, Err(unknown_yet(&name))));
            }
            Phase::Failed { reason, .. } => {
                let reason = format!("{reason}; delete the job before creating it again");
                out.push(Action::Answer(
                    waiter.caller,
                    Err(Error::JobFailed { job: name, reason }),
                ));
            }
        }
    }

    /// Requests a placement from the driver, if enough servers are connected.
    pub(super) fn try_place(&mut self, name: &str, now: Now, out: &mut Vec<Action>) {
        // Another server may hold the job, or a later checkpoint be almost complete.
        let live = self.placeable();
        let (connected, waits) = (live.len(), self.is_learning() || self.completes(name));
        let Some(Job { spec, id, restore, phase, .. }) = self.jobs.get_mut(name) else { return };
        let Phase::Waiting { placing, interrupted, .. } = phase else { return };
        if waits || *placing {
            return;
        }
        let is_ready = match interrupted {
            Some(interrupted) => {
                interrupted.may_be_placed(connected, spec.replicas as usize, now, out)
            }
            None => connected >= spec.min_servers as usize,
        };
        if !is_ready {
            return;
        }
        *placing = true;
        // A job that returns to a checkpoint has memory on its servers already.
        let is_new = interrupted.is_none();
        let restore = match interrupted {
            Some(interrupted) => Some(interrupted.checkpoint.clone()),
            None => restore.clone(),
        };
        let (job, spec) = (JobRef { name: name.to_owned(), id: *id }, spec.clone());
        let rooms = if is_new { self.rooms() } else { Rooms::default() };
        let zones = self.zones.clone();
        let returns = !is_new;
        out.push(Action::Place(Placing { job, spec, live, zones, rooms, restore, returns }));
    }

    /// Waiting -> Opening.
    pub(super) fn placed(
        &mut self,
        job: &JobRef,
        placed: Result<Placed>,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        let live = self.live();
        let Some(Job { spec, id, succession, restore, phase, .. }) = self.reported_job(job) else {
            return;
        };
        let Phase::Waiting { placing, interrupted, .. } = phase else { return };
        *placing = false;
        if let (Some(interrupted), Ok(Placed { checkpoint: Some(found), .. })) =
            (&mut *interrupted, &placed)
        {
            interrupted.return_to(found.version);
        }
        let is_new = interrupted.is_none();
        let ranks = interrupted.as_ref().map(|interrupted| interrupted.ranks());
        let (leases, done, left) = ranks.unwrap_or_default();
        let requested = restore.clone();
        let (spec, job_id, name) = (spec.clone(), *id, job.name.as_str());
        let succession = succession.clone();
        // A job that returns to its own checkpoint does not need its predecessor.
        let predecessor = succession.as_ref().filter(|_| interrupted.is_none());
        let source = predecessor.map(|succession| self.source(succession)).transpose();
        let (Placed { plan, checkpoint, user_data }, source) = match (placed, source) {
            (Err(error), _) | (_, Err(error)) => return self.cannot_open(name, &error, now, out),
            (Ok(placed), Ok(source)) => (placed, source),
        };
        let is_live = plan.placement.servers().iter().all(|server| live.contains(server));
        if !is_live || is_new && !self.has_room_for(&plan) {
            // A server has been lost, or another job been placed meanwhile.
            return self.try_place(name, now, out);
        }
        let epoch = self.next_epoch();
        out.push(Action::Note(format!(
            "job {name:?} is placed on {} of {} servers, epoch {epoch}: {} slices",
            plan.placement.servers().len(),
            live.len(),
            plan.placement.slices()
        )));
        let pending: BTreeSet<ServerId> =
            plan.placement.servers().iter().map(|server| server.id).collect();
        for &server in &pending {
            let (spec, placement) = (spec.clone(), plan.placement.clone());
            let open = OpenJob {
                spec,
                placement,
                job_id,
                epoch,
                server,
                succession: succession.clone(),
                source: source.clone(),
                checkpoint: checkpoint.clone(),
                requested: requested.clone(),
                leases: leases.clone(),
                done: done.clone(),
                left: left.clone(),
                version: None,
                decision: None,
            };
            out.push(Action::Command(server, Command::Open(open)));
        }
        if let Some(job) = self.jobs.get_mut(name)
            && let Phase::Waiting { creators, interrupted, .. } = &mut job.phase
        {
            job.epoch = epoch;
            let (creators, interrupted) = (std::mem::take(creators), interrupted.take());
            let restored = checkpoint.map(|of| Box::new((of, user_data)));
            job.phase = Phase::Opening { plan, restored, pending, creators, interrupted };
        }
        self.open_if_all_are(name, now, out);
    }

    pub(super) fn opened(
        &mut self,
        server: ServerId,
        job: &JobRef,
        epoch: u64,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        if self.opened_as_backup(server, job, out) {
            return;
        }
        // A job that returns to a checkpoint may be opened more than once.
        if let Some(Job { epoch: current, phase: Phase::Opening { pending, .. }, .. }) =
            self.reported_job(job)
            && *current == epoch
        {
            pending.remove(&server);
            self.open_if_all_are(&job.name, now, out);
        }
    }

    /// Opening -> Open, when every server has allocated its memory.
    fn open_if_all_are(&mut self, name: &str, now: Now, out: &mut Vec<Action>) {
        let Some(job) = self.jobs.get_mut(name) else { return };
        let Phase::Opening { plan, restored, pending, creators, interrupted } = &mut job.phase
        else {
            return;
        };
        if !pending.is_empty() {
            return;
        }
        let reply = Reply::Created { epoch: job.epoch, job_id: job.id };
        let created = |waiter: Waiter| Action::Answer(waiter.caller, Ok(reply.clone()));
        out.extend(std::mem::take(creators).into_iter().map(created));
        let replicas = Replicas::new(&job.spec, &plan.placement);
        let mut open = Open::new(plan.clone(), replicas);
        if let Some(restored) = restored.take() {
            let (checkpoint, user_data) = *restored;
            open.restored(checkpoint, user_data);
        }
        let interrupted = interrupted.take();
        job.phase = Phase::Open(Box::new(open));
        if job.succession.is_some() {
            // Its predecessor may be of no more use.
            out.push(Action::Tick(now));
        }
        if let Some(interrupted) = interrupted {
            self.resume(name, *interrupted, now, out);
        }
        self.unused_from(name, now, out);
    }

    pub(super) fn initialised(
        &mut self,
        server: ServerId,
        job: &JobRef,
        epoch: u64,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        let Some(Job { epoch: current, phase: Phase::Open(open), .. }) = self.reported_job(job)
        else {
            return;
        };
        // A report of an older epoch is about parameters that the server has dropped with that
        // epoch.
        if epoch != *current || !open.uninitialised.remove(&server) {
            return;
        }
        self.publish_if_initialised(&job.name, out);
        self.advance(&job.name, now, out);
    }

    /// Publishes version 0 when every server has its initial parameters.
    pub(super) fn publish_if_initialised(&mut self, name: &str, out: &mut Vec<Action>) {
        let Some(Job { id, epoch, phase: Phase::Open(open), .. }) = self.jobs.get_mut(name) else {
            return;
        };
        if open.version.is_some() || !open.uninitialised.is_empty() {
            return;
        }
        open.version = Some(0);
        let job = JobRef { name: name.to_owned(), id: *id };
        open.send(&Command::Publish { job, epoch: *epoch }, out);
        open.wake_all(out);
        out.push(Action::Note(format!("job {name:?} has all its initial parameters")));
    }

    pub(super) fn failed_on(
        &mut self,
        server: ServerId,
        job: &JobRef,
        failure: Failed<'_>,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        let Failed { epoch, reason, transient } = failure;
        if self.has_opened_since(server, job, epoch) {
            return;
        }
        let reason = format!("{}: {reason}", self.name(server));
        if self.refused_by(server, job, &reason, now, out) {
            return;
        }
        match self.reported_job(job) {
            // A server that has been replaced may not know it yet.
            Some(Job { phase: Phase::Open(open), .. }) if open.servers().all(|id| id != server) => {
            }
            Some(Job { phase: Phase::Open(_), .. }) => self.fail(&job.name, &reason, now, out),
            Some(Job { phase: Phase::Opening { interrupted: Some(_), .. }, .. }) if transient => {
                self.restore_again(&job.name, &reason, now, out);
            }
            Some(Job { phase: Phase::Opening { interrupted: Some(_), .. }, .. }) => {
                self.fail(&job.name, &reason, now, out);
            }
            Some(Job { phase: Phase::Opening { .. }, succession, .. }) => {
                // What the server could not copy may be gone.
                let succession = succession.clone();
                match succession.map(|succession| self.source(&succession)) {
                    Some(Err(gone)) => self.abandon(&job.name, &gone, out),
                    _ => self.fail(&job.name, &reason, now, out),
                }
            }
            _ => {}
        }
    }

    /// Returns whether a server has been told to open the job again since this epoch, so that its
    /// report of a failure is about the job as it was before.
    fn has_opened_since(&mut self, server: ServerId, job: &JobRef, epoch: u64) -> bool {
        let Some(Job { epoch: current, phase, .. }) = self.reported_job(job) else { return false };
        let opened = match phase {
            Phase::Opening { .. } => Some(*current),
            Phase::Open(open) => {
                let restored = open.rolled_back.map(|(first, _)| first);
                open.replicas.opens_in(server).max(restored)
            }
            Phase::Waiting { .. } | Phase::Recovering(_) | Phase::Failed { .. } => None,
        };
        opened.is_some_and(|opened| epoch < opened)
    }

    /// Opening -> gone, Open -> Failed: all waiting calls are answered, and the servers close the
    /// job.
    pub(super) fn fail(&mut self, name: &str, reason: &str, now: Now, out: &mut Vec<Action>) {
        let Some(mut job) = self.jobs.remove(name) else { return };
        let text = format!("job {name:?} failed: {reason}");
        out.push(Action::Alarm(Severity::Error, text));
        let failed = Phase::Failed { reason: reason.to_owned(), is_damaged: false };
        let (id, phase) = (job.id, std::mem::replace(&mut job.phase, failed));
        // A job that never opened has no state to lose: it can be created again at once.
        let has_state = match &phase {
            Phase::Open(_)
            | Phase::Waiting { interrupted: Some(_), .. }
            | Phase::Opening { interrupted: Some(_), .. } => true,
            Phase::Recovering(recovery) => recovery.was_used(),
            _ => false,
        };
        if has_state {
            self.jobs.insert(name.to_owned(), job);
            self.unused_from(name, now, out);
        } else {
            out.push(Action::Forgotten { job: name.to_owned() });
        }
        let error = Error::JobFailed { job: name.to_owned(), reason: reason.to_owned() };
        self.dissolve(name, id, phase, &error, out);
    }

    /// Deletes a job. The answer follows when its servers know it.
    pub(super) fn delete(&mut self, waiter: Waiter, job: &JobRef, out: &mut Vec<Action>) {
        let name = job.name.clone();
        let error = match self.jobs.get(&name) {
            None => Some(self.unknown(&name)),
            Some(found) if job.id != 0 && job.id != found.id => {
                Some(Error::JobReplaced { job: name.clone() })
            }
            Some(_) => None,
        };
        if let Some(error) = error {
            return out.push(Action::Answer(waiter.caller, Err(error)));
        }
        let servers = self.servers_of(&name);
        self.remove(&name, "deleted", out);
        out.push(Action::Note(format!("job {name:?} is deleted")));
        let what = format!("the deletion of job {name:?}");
        self.answer_when_received(vec![waiter], Reply::Deleted, servers, what, out);
    }

    /// The servers that may have slices of a job.
    pub(super) fn servers_of(&self, name: &str) -> Vec<ServerId> {
        let phase = self.jobs.get(name).map(|job| &job.phase);
        if let Some(Phase::Failed { .. } | Phase::Waiting { .. }) = phase {
            // Some of them may not have received the commands to close it.
            return self.servers.keys().copied().collect();
        }
        let placement = phase.and_then(Phase::placement);
        let servers = placement.into_iter().flat_map(|placement| placement.servers());
        let holders = phase.into_iter().flat_map(Phase::holders);
        let servers: BTreeSet<ServerId> = servers.map(|server| server.id).chain(holders).collect();
        servers.into_iter().collect()
    }

    /// Any phase -> gone.
    pub(super) fn remove(&mut self, name: &str, reason: &str, out: &mut Vec<Action>) {
        let Some(job) = self.jobs.remove(name) else { return };
        out.push(job.end_claims());
        let error = Error::JobFailed { job: name.to_owned(), reason: reason.to_owned() };
        self.dissolve(name, job.id, job.phase, &error, out);
        out.push(Action::Forgotten { job: name.to_owned() });
    }

    /// Tells the connected servers of the placement to close the job, and ends every call and
    /// stream, and the creation of jobs that were taking over from it.
    pub(super) fn dissolve(
        &mut self,
        name: &str,
        id: u64,
        phase: Phase,
        error: &Error,
        out: &mut Vec<Action>,
    ) {
        let is_live = |server: &&Server| {
            let known = self.servers.get(&server.id);
            known.is_some_and(|known| known.incarnation == server.incarnation)
        };
        let placed = phase.placement().into_iter().flat_map(|placement| placement.servers());
        let live = placed.filter(is_live).map(|server| server.id);
        // Commands to servers that are lost are dropped.
        let holding: BTreeSet<ServerId> = live.chain(phase.holders()).collect();
        let close = Command::Close(JobRef { name: name.to_owned(), id });
        out.extend(holding.into_iter().map(|server| Action::Command(server, close.clone())));
        if matches!(phase, Phase::Waiting { .. } | Phase::Opening { .. }) {
            // Its predecessor may be of no more use.
            out.push(Action::Tick(Now::ZERO));
        }
        let (waiters, members) = phase.into_waiting();
        let answer = |waiter: Waiter| Action::Answer(waiter.caller, Err(error.clone()));
        out.extend(waiters.into_iter().map(answer));
        out.extend(members.into_iter().map(|lease| Action::End(lease, Some(error.clone()))));
        let successors: Vec<String> = self.successors(id).map(str::to_owned).collect();
        for successor in successors {
            self.abandon(&successor, error, out);
        }
    }
}
