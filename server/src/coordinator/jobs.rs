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

use zeroshard_proto::{
    DType, Error, JobSpec, Placement, Result, Server, SliceSpec,
    pb::{self, serve_response::Command},
};

use super::{
    cluster::Cluster,
    events::{Action, Caller, JobRef, Now, OpenJob, Placing, Reply, ServerId, Waiter},
    placement::place,
    state::{Job, Open, Phase},
};

/// The memory that the servers need for each slice, in bytes: f32 master weights; for a trained
/// slice, f32 optimizer state and a gradient accumulator; and a copy in the published dtype if it
/// is not f32.
pub(crate) fn weights(spec: &JobSpec) -> Vec<u64> {
    let weight = |slice: &SliceSpec| {
        let tensor = &spec.manifest.tensors()[slice.tensor];
        let state = spec.groups.get(tensor.group as usize).map_or(0, |group| group.state().len());
        let trained = if tensor.trains() { 4 * state + 4 } else { 0 };
        let published = if tensor.dtype == DType::F32 { 0 } else { tensor.dtype.size() };
        ((4 + trained + published) * slice.numel) as u64
    };
    spec.manifest.slices().iter().map(weight).collect()
}

/// The placement of a job's slices, with derived data.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Plan {
    pub(crate) placement: Arc<Placement>,
    /// The trained slices of each server that has any, ascending.
    pub(crate) trainable: BTreeMap<ServerId, Vec<u32>>,
}

impl Plan {
    /// Places the slices of `spec` on `live`. This can take a second, and needs no state.
    ///
    /// # Errors
    /// Those of [`place`].
    pub(crate) fn new(spec: &JobSpec, live: &[Server]) -> Result<Self> {
        let placement = place(None, live, &weights(spec), spec.replicas as usize)?;
        let mut trainable = BTreeMap::<ServerId, Vec<u32>>::new();
        for slice in (0..placement.slices()).filter(|&slice| spec.manifest.trains(slice)) {
            let server = placement.servers()[placement.primary(slice)].id;
            trainable.entry(server).or_default().push(slice as u32);
        }
        Ok(Self { placement: Arc::new(placement), trainable })
    }
}

impl Cluster {
    pub(super) fn create(&mut self, waiter: Waiter, id: u64, spec: JobSpec, out: &mut Vec<Action>) {
        let name = spec.name.clone();
        let Some(job) = self.jobs.get_mut(&name) else {
            let phase = Phase::Waiting { creators: vec![waiter], placing: false };
            let (spec, unused_since) = (Arc::new(spec), waiter.since);
            self.jobs.insert(name.clone(), Job { spec, id, epoch: 0, unused_since, phase });
            return self.try_place(&name, out);
        };
        if let Some(difference) = job.spec.difference(&spec) {
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
            Phase::Failed { reason } => {
                let reason = format!("{reason}; delete the job before creating it again");
                out.push(Action::Answer(
                    waiter.caller,
                    Err(Error::JobFailed { job: name, reason }),
                ));
            }
        }
    }

    /// Requests a placement from the driver, if enough servers are connected.
    pub(super) fn try_place(&mut self, name: &str, out: &mut Vec<Action>) {
        let enough = self.servers.len();
        let Some(Job { spec, id, phase: Phase::Waiting { placing, .. }, .. }) =
            self.jobs.get_mut(name)
        else {
            return;
        };
        if *placing || enough < spec.min_servers as usize {
            return;
        }
        *placing = true;
        let (job, spec) = (JobRef { name: name.to_owned(), id: *id }, spec.clone());
        out.push(Action::Place(Placing { job, spec, live: self.live() }));
    }

    /// Waiting -> Opening.
    pub(super) fn placed(
        &mut self,
        job: &JobRef,
        plan: Result<Plan>,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        let live = self.live();
        let Some(Job { spec, id, phase: Phase::Waiting { creators, placing }, .. }) =
            self.reported_job(job)
        else {
            return;
        };
        *placing = false;
        let (spec, job_id, name) = (spec.clone(), *id, job.name.as_str());
        let plan = match plan {
            Ok(plan) if plan.placement.servers().iter().all(|server| live.contains(server)) => plan,
            // A server has been lost meanwhile.
            Ok(_) => return self.try_place(name, out),
            Err(error) => {
                out.extend(
                    creators.drain(..).map(|w| Action::Answer(w.caller, Err(error.clone()))),
                );
                self.jobs.remove(name);
                return out.push(Action::Forgotten { job: name.to_owned() });
            }
        };
        let creators = std::mem::take(creators);
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
            let placement = plan.placement.clone();
            out.push(Action::Open(
                server,
                OpenJob { spec: spec.clone(), placement, job_id, epoch },
            ));
        }
        if let Some(job) = self.jobs.get_mut(name) {
            job.epoch = epoch;
            job.phase = Phase::Opening { plan, pending, creators };
        }
        self.open_if_all_are(name, now, out);
    }

    pub(super) fn opened(
        &mut self,
        server: ServerId,
        job: &JobRef,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        if let Some(Job { phase: Phase::Opening { pending, .. }, .. }) = self.reported_job(job) {
            pending.remove(&server);
            self.open_if_all_are(&job.name, now, out);
        }
    }

    /// Opening -> Open, when every server has allocated its memory.
    fn open_if_all_are(&mut self, name: &str, now: Now, out: &mut Vec<Action>) {
        let Some(job) = self.jobs.get_mut(name) else { return };
        let Phase::Opening { plan, pending, creators } = &mut job.phase else { return };
        if !pending.is_empty() {
            return;
        }
        let reply = Reply::Created { epoch: job.epoch, job_id: job.id };
        let created = |waiter: Waiter| Action::Answer(waiter.caller, Ok(reply.clone()));
        out.extend(std::mem::take(creators).into_iter().map(created));
        job.phase = Phase::Open(Box::new(Open::new(plan.clone())));
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
        if epoch != *current
            || !open.uninitialised.remove(&server)
            || !open.uninitialised.is_empty()
        {
            return;
        }
        open.version = Some(0);
        for server in open.servers() {
            let publish = pb::Publish { job: job.name.clone(), job_id: job.id, epoch };
            out.push(Action::Command(server, Command::Publish(publish)));
        }
        open.wake_all(out);
        out.push(Action::Note(format!("job {:?} has all its initial parameters", job.name)));
        self.advance(&job.name, now, out);
    }

    pub(super) fn failed_on(
        &mut self,
        server: ServerId,
        job: &JobRef,
        reason: &str,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        if let Some(Job { phase: Phase::Opening { .. } | Phase::Open(_), .. }) =
            self.reported_job(job)
        {
            let reason = format!("{}: {reason}", self.name(server));
            self.fail(&job.name, &reason, now, out);
        }
    }

    /// Opening -> gone, Open -> Failed: all waiting calls are answered, and the servers close the
    /// job.
    pub(super) fn fail(&mut self, name: &str, reason: &str, now: Now, out: &mut Vec<Action>) {
        let Some(mut job) = self.jobs.remove(name) else { return };
        out.push(Action::Note(format!("job {name:?} failed: {reason}")));
        let failed = Phase::Failed { reason: reason.to_owned() };
        let (id, phase) = (job.id, std::mem::replace(&mut job.phase, failed));
        // A job that never opened has no state to lose: it can be created again at once.
        if matches!(phase, Phase::Open(_)) {
            self.jobs.insert(name.to_owned(), job);
            self.unused_from(name, now, out);
        } else {
            out.push(Action::Forgotten { job: name.to_owned() });
        }
        self.dissolve(&JobRef { name: name.to_owned(), id }, phase, reason, out);
    }

    pub(super) fn delete(&mut self, caller: Caller, job: &JobRef, out: &mut Vec<Action>) {
        let name = job.name.clone();
        let error = match self.jobs.get(&name) {
            None => Some(Error::UnknownJob { job: name.clone() }),
            Some(found) if job.id != 0 && job.id != found.id => {
                Some(Error::JobReplaced { job: name.clone() })
            }
            Some(_) => None,
        };
        if let Some(error) = error {
            return out.push(Action::Answer(caller, Err(error)));
        }
        self.remove(&name, "deleted", out);
        out.push(Action::Note(format!("job {name:?} is deleted")));
        out.push(Action::Answer(caller, Ok(Reply::Deleted)));
    }

    /// Any phase -> gone.
    pub(super) fn remove(&mut self, name: &str, reason: &str, out: &mut Vec<Action>) {
        let Some(job) = self.jobs.remove(name) else { return };
        self.dissolve(&JobRef { name: name.to_owned(), id: job.id }, job.phase, reason, out);
        out.push(Action::Forgotten { job: name.to_owned() });
    }

    /// Tells the connected servers of the placement to close the job, and ends every call and
    /// stream.
    fn dissolve(&self, job: &JobRef, phase: Phase, reason: &str, out: &mut Vec<Action>) {
        if let Some(placement) = phase.placement() {
            let live =
                placement.servers().iter().filter(|server| self.servers.contains_key(&server.id));
            let close = pb::CloseJob { job: job.name.clone(), job_id: job.id };
            out.extend(
                live.map(|server| Action::Command(server.id, Command::Close(close.clone()))),
            );
        }
        let error = || Error::JobFailed { job: job.name.clone(), reason: reason.to_owned() };
        let (waiters, members) = phase.into_waiting();
        out.extend(waiters.into_iter().map(|waiter| Action::Answer(waiter.caller, Err(error()))));
        out.extend(members.into_iter().map(|lease| Action::End(lease, Some(error()))));
    }

    /// Answers creators at their deadline. A job that is not open and has no waiting creator is
    /// removed.
    pub(super) fn expire_creators(&mut self, now: Now, out: &mut Vec<Action>) {
        let names: Vec<String> = self.jobs.keys().cloned().collect();
        for name in names {
            let waiting_for = self.creators_wait_for(&name);
            let Some(creators) = self.creators(&name) else { continue };
            let expired = creators.extract_if(.., |waiter| waiter.deadline <= now);
            out.extend(
                expired.map(|w| Action::Answer(w.caller, Err(w.timeout(now, waiting_for.clone())))),
            );
            self.remove_if_unwanted(&name, out);
        }
    }

    /// A caller of CreateJob has disconnected.
    pub(super) fn creator_gone(&mut self, name: &str, caller: Caller, out: &mut Vec<Action>) {
        if let Some(creators) = self.creators(name) {
            creators.retain(|waiter| waiter.caller != caller);
            self.remove_if_unwanted(name, out);
        }
    }

    fn remove_if_unwanted(&mut self, name: &str, out: &mut Vec<Action>) {
        if self.creators(name).is_some_and(|creators| creators.is_empty()) {
            self.remove(name, "nobody waits for its creation any more", out);
        }
    }

    /// The calls that wait for the job to open; `None` once it has opened or failed.
    fn creators(&mut self, name: &str) -> Option<&mut Vec<Waiter>> {
        match &mut self.jobs.get_mut(name)?.phase {
            Phase::Waiting { creators, .. } | Phase::Opening { creators, .. } => Some(creators),
            Phase::Open(_) | Phase::Failed { .. } => None,
        }
    }

    fn creators_wait_for(&self, name: &str) -> String {
        match self.jobs.get(name) {
            Some(Job { spec, phase: Phase::Waiting { placing: false, .. }, .. }) => {
                let (connected, needed) = (self.servers.len(), spec.min_servers);
                format!("shard servers for job {name:?}: {connected} of {needed} are connected")
            }
            Some(Job { phase: Phase::Waiting { placing: true, .. }, .. }) => {
                format!("the placement of job {name:?}")
            }
            Some(Job { epoch, phase: Phase::Opening { pending, .. }, .. }) => {
                format!(
                    "{} to allocate memory for job {name:?} (epoch {epoch})",
                    self.names(pending)
                )
            }
            _ => String::new(),
        }
    }
}
