//! The life of a job: wait for servers, place, open, initialise; fail or be deleted.
//!
//! ```text
//! Waiting --enough servers--> Opening --all opened--> Open --a server is lost--> Failed
//!    |                           |                     |                           |
//!    +--- deadline: gone         +--- refusal: gone    +---- delete: gone ---------+
//! ```

use std::{collections::BTreeSet, sync::Arc};

use zeroshard_proto::{
    Error, JobSpec, Placement, Result,
    pb::{self, server_command::Command},
};

use super::{
    cluster::Cluster,
    placement::place,
    state::{Action, Caller, Job, Lease, Now, Open, Phase, Reply, ServerId, Waiter},
};
use crate::listing::some_of;

/// Bytes that the servers need for each slice: f32 master weights; where it trains, f32 optimizer state and
/// a gradient accumulator; and a copy in the published dtype where that is not f32.
pub(crate) fn weights(spec: &JobSpec) -> Vec<u64> {
    let weight = |slice: &zeroshard_proto::SliceSpec| {
        let tensor = &spec.manifest.tensors()[slice.tensor];
        let state = spec.groups.get(tensor.group as usize).map_or(0, |group| group.state().len());
        let trained = if tensor.trains() { 4 * state + 4 } else { 0 };
        let published = if tensor.dtype == zeroshard_proto::DType::F32 { 0 } else { tensor.dtype.size() };
        ((4 + trained + published) * slice.numel) as u64
    };
    spec.manifest.slices().iter().map(weight).collect()
}

impl Cluster {
    pub(super) fn create(&mut self, waiter: Waiter, spec: JobSpec, out: &mut Vec<Action>) {
        let name = spec.name.clone();
        let Some(job) = self.jobs.get_mut(&name) else {
            let phase = Phase::Waiting { creators: vec![waiter] };
            self.jobs.insert(name.clone(), Job { spec: Arc::new(spec), epoch: 0, phase });
            return self.try_place(&name, out);
        };
        if let Some(difference) = job.spec.difference(&spec) {
            return out.push(Action::Answer(waiter.caller, Err(Error::JobExists { job: name, difference })));
        }
        match &mut job.phase {
            Phase::Waiting { creators } | Phase::Opening { creators, .. } => creators.push(waiter),
            Phase::Open(open) => {
                let epoch = job.epoch.max(open.opened);
                out.push(Action::Answer(waiter.caller, Ok(Reply::Created { epoch })));
            }
            Phase::Failed { reason } => {
                let reason = format!("{reason}; delete it to start afresh");
                out.push(Action::Answer(waiter.caller, Err(Error::JobFailed { job: name, reason })));
            }
        }
    }

    /// Waiting -> Opening, if there are servers enough.
    pub(super) fn try_place(&mut self, name: &str, out: &mut Vec<Action>) {
        let live = self.live();
        let Some(Job { spec, phase: Phase::Waiting { creators }, .. }) = self.jobs.get_mut(name) else {
            return;
        };
        if live.len() < spec.min_servers as usize {
            return;
        }
        let (spec, creators) = (spec.clone(), std::mem::take(creators));
        let placement = match place(None, &live, &weights(&spec), spec.replicas as usize) {
            Ok(placement) => Arc::new(placement),
            Err(error) => {
                self.jobs.remove(name);
                out.extend(creators.iter().map(|w| Action::Answer(w.caller, Err(error.clone()))));
                return;
            }
        };
        let epoch = self.next_epoch();
        out.push(Action::Note(format!(
            "job {name:?} is placed on {} of {} servers, epoch {epoch}: {} slices",
            placement.servers().len(),
            live.len(),
            placement.slices()
        )));
        for server in placement.servers() {
            let open = pb::OpenJob {
                spec: Some(spec.as_ref().into()),
                epoch,
                placement: Some(placement.as_ref().into()),
                job_id: 0,
            };
            out.push(Action::Command(server.id, Command::Open(open)));
        }
        let pending = placement.servers().iter().map(|server| server.id).collect();
        let phase = Phase::Opening { placement, pending, creators };
        self.jobs.insert(name.to_owned(), Job { spec, epoch, phase });
        self.open_if_all_are(name, out);
    }

    pub(super) fn opened(&mut self, server: ServerId, name: &str, epoch: u64, out: &mut Vec<Action>) {
        if let Some(Job { epoch: current, phase: Phase::Opening { pending, .. }, .. }) =
            self.jobs.get_mut(name)
            && *current == epoch
        {
            pending.remove(&server);
            self.open_if_all_are(name, out);
        }
    }

    /// Opening -> Open, when every server has made room.
    fn open_if_all_are(&mut self, name: &str, out: &mut Vec<Action>) {
        let Some(job) = self.jobs.get_mut(name) else { return };
        let Phase::Opening { placement, pending, creators } = &mut job.phase else { return };
        if !pending.is_empty() {
            return;
        }
        let epoch = job.epoch;
        let created = |waiter: Waiter| Action::Answer(waiter.caller, Ok(Reply::Created { epoch }));
        out.extend(std::mem::take(creators).into_iter().map(created));
        job.phase = Phase::Open(Open::new(&job.spec, placement.clone(), epoch));
    }

    pub(super) fn initialised(
        &mut self,
        server: ServerId,
        name: &str,
        epoch: u64,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        let Some(Job { spec, epoch: current, phase: Phase::Open(open) }) = self.jobs.get_mut(name) else {
            return;
        };
        // A report of an older epoch is about parameters that the server has dropped with that epoch.
        if epoch != *current || !open.uninitialised.remove(&server) {
            return;
        }
        if open.uninitialised.is_empty() {
            open.version = Some(0);
            open.tell_all(spec, *current, out);
            out.push(Action::Note(format!("job {name:?} has all its initial parameters")));
            self.decide(name, now, out);
        }
    }

    pub(super) fn failed_on(
        &mut self,
        server: ServerId,
        name: &str,
        epoch: u64,
        reason: &str,
        out: &mut Vec<Action>,
    ) {
        // Of an earlier job of this name: nobody waits for it.
        let opened = |job: &Job| match &job.phase {
            Phase::Open(open) => Some(open.opened),
            Phase::Opening { .. } => Some(job.epoch),
            Phase::Waiting { .. } | Phase::Failed { .. } => None,
        };
        if self.jobs.get(name).and_then(opened).is_some_and(|opened| opened <= epoch) {
            let reason = format!("{}: {reason}", self.name(server));
            self.fail(name, &reason, out);
        }
    }

    /// Opening -> gone, Open -> Failed: everybody who waits is told, and the servers drop their slices.
    pub(super) fn fail(&mut self, name: &str, reason: &str, out: &mut Vec<Action>) {
        let Some(mut job) = self.jobs.remove(name) else { return };
        out.push(Action::Note(format!("job {name:?} failed: {reason}")));
        let failed = Phase::Failed { reason: reason.to_owned() };
        let phase = std::mem::replace(&mut job.phase, failed);
        // A job that never opened has nothing to lose: it can be created again at once.
        if matches!(phase, Phase::Open(_)) {
            self.jobs.insert(name.to_owned(), job);
        } else {
            out.push(Action::Forgotten { job: name.to_owned() });
        }
        self.dissolve(name, phase, reason, out);
    }

    pub(super) fn delete(&mut self, caller: Caller, name: &str, out: &mut Vec<Action>) {
        let Some(job) = self.jobs.remove(name) else {
            let error = Error::UnknownJob { job: name.to_owned() };
            return out.push(Action::Answer(caller, Err(error)));
        };
        self.dissolve(name, job.phase, "deleted", out);
        out.push(Action::Forgotten { job: name.to_owned() });
        out.push(Action::Note(format!("job {name:?} is deleted")));
        out.push(Action::Answer(caller, Ok(Reply::Deleted)));
    }

    /// Has the servers that are left drop the job, and ends every call and stream.
    fn dissolve(&self, name: &str, phase: Phase, reason: &str, out: &mut Vec<Action>) {
        if let Some(placement) = phase.placement() {
            let live = placement.servers().iter().filter(|server| self.servers.contains_key(&server.id));
            let close =
                |id| Action::Command(id, Command::Close(pb::CloseJob { job: name.to_owned(), job_id: 0 }));
            out.extend(live.map(|server| close(server.id)));
        }
        let error = || Error::JobFailed { job: name.to_owned(), reason: reason.to_owned() };
        let (waiters, members) = phase.into_waiting();
        out.extend(waiters.into_iter().map(|waiter| Action::Answer(waiter.caller, Err(error()))));
        out.extend(members.into_iter().map(|lease| Action::End(lease, Some(error()))));
    }

    /// Tells creators at their deadline; a job that nobody waits for any more, and that is not open, goes.
    pub(super) fn expire_creators(&mut self, now: Now, out: &mut Vec<Action>) {
        let names: Vec<String> = self.jobs.keys().cloned().collect();
        for name in names {
            let waiting_for = self.creators_wait_for(&name);
            let Some(Job { phase: Phase::Waiting { creators } | Phase::Opening { creators, .. }, .. }) =
                self.jobs.get_mut(&name)
            else {
                continue;
            };
            let (expired, rest): (Vec<_>, Vec<_>) = creators.drain(..).partition(|w| w.deadline <= now);
            *creators = rest;
            let over = creators.is_empty();
            let timeout = |w: Waiter| Action::Answer(w.caller, Err(w.timeout(now, waiting_for.clone())));
            out.extend(expired.into_iter().map(timeout));
            if over && let Some(job) = self.jobs.remove(&name) {
                self.dissolve(&name, job.phase, "nobody waits for it", out);
                out.push(Action::Forgotten { job: name });
            }
        }
    }

    fn creators_wait_for(&self, name: &str) -> String {
        match self.jobs.get(name) {
            Some(Job { spec, phase: Phase::Waiting { .. }, .. }) => {
                format!("servers for job {name:?}: {} of {} are there", self.servers.len(), spec.min_servers)
            }
            Some(Job { epoch, phase: Phase::Opening { pending, .. }, .. }) => {
                let names: Vec<String> = pending.iter().map(|&server| self.name(server)).collect();
                format!("{} to make room for job {name:?} (epoch {epoch})", names.join(", "))
            }
            _ => String::new(),
        }
    }
}

impl Phase {
    fn placement(&self) -> Option<&Placement> {
        match self {
            Self::Waiting { .. } | Self::Failed { .. } => None,
            Self::Opening { placement, .. } => Some(placement),
            Self::Open(open) => Some(&open.placement),
        }
    }

    /// Whether the server holds, or is about to hold, slices.
    pub(super) fn uses(&self, server: ServerId) -> bool {
        self.placement().is_some_and(|placement| placement.servers().iter().any(|s| s.id == server))
    }

    /// Everybody who waits, and the leases.
    pub(super) fn into_waiting(self) -> (Vec<Waiter>, Vec<Lease>) {
        match self {
            Self::Waiting { creators } | Self::Opening { creators, .. } => (creators, Vec::new()),
            Self::Open(mut open) => {
                let leases = open.members.into_values().map(|member| member.lease);
                (open.round.drop_all(), leases.collect())
            }
            Self::Failed { .. } => (Vec::new(), Vec::new()),
        }
    }

    pub(super) fn open(&self, job: &str) -> Result<&Open> {
        match self {
            Self::Open(open) => Ok(open),
            other => Err(other.not_open(job)),
        }
    }

    /// Why calls about the job's steps cannot be answered.
    pub(super) fn not_open(&self, job: &str) -> Error {
        match self {
            Self::Failed { reason } => Error::JobFailed { job: job.to_owned(), reason: reason.clone() },
            Self::Waiting { .. } | Self::Opening { .. } | Self::Open(_) => Error::Unavailable {
                peer: format!("job {job:?}"),
                cause: "its servers are not all there yet".to_owned(),
            },
        }
    }
}

/// Tensors of which `server` holds slices: for messages.
pub(super) fn held_by(server: ServerId, spec: &JobSpec, placement: &Placement) -> String {
    let slices: Vec<usize> = placement.primary_slices(server).collect();
    let tensors: BTreeSet<usize> = slices.iter().map(|&slice| spec.manifest.slices()[slice].tensor).collect();
    let names = tensors.into_iter().map(|tensor| format!("{:?}", spec.manifest.tensors()[tensor].name));
    format!("{} of {} slices, of the tensors {}", slices.len(), placement.slices(), some_of(names))
}
