//! The callers of CreateJob, which wait until their job is open.

use zeroshard_model::JobVersion;

use super::{
    cluster::Cluster,
    events::{Action, Caller, Now, Waiter},
    state::{Job, Phase},
};

impl Cluster {
    /// Answers creators at their deadline. A job that has never been open and has no waiting
    /// creator is removed.
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
        let is_new = match self.jobs.get(name).map(|job| &job.phase) {
            Some(Phase::Waiting { interrupted, .. } | Phase::Opening { interrupted, .. }) => {
                interrupted.is_none()
            }
            _ => false,
        };
        if is_new && self.creators(name).is_some_and(|creators| creators.is_empty()) {
            self.remove(name, "nobody waits for its creation any more", out);
        }
    }

    /// The calls that wait for the job to open; `None` once it has opened or failed.
    fn creators(&mut self, name: &str) -> Option<&mut Vec<Waiter>> {
        match &mut self.jobs.get_mut(name)?.phase {
            Phase::Waiting { creators, .. } | Phase::Opening { creators, .. } => Some(creators),
            Phase::Open(_) | Phase::Recovering(_) | Phase::Failed { .. } => None,
        }
    }

    /// Describes what a job that is being created or restored waits for, for messages.
    pub(super) fn creators_wait_for(&self, name: &str) -> String {
        match self.jobs.get(name) {
            Some(Job { phase: Phase::Waiting { placing: false, .. }, .. })
                if self.completes(name) =>
            {
                format!("the manifest of an earlier save of job {name:?} to be written")
            }
            Some(Job { spec, phase: Phase::Waiting { .. }, .. })
                if self.is_learning() && self.servers.len() >= spec.min_servers as usize =>
            {
                format!("shard servers that may hold a job {name:?} of the last coordinator")
            }
            Some(Job {
                spec,
                phase: Phase::Waiting { placing: false, interrupted: Some(interrupted), .. },
                ..
            }) => {
                let waits_for = interrupted.waits_for(self.placeable().len(), spec.replicas);
                format!(
                    "job {name:?} to be restored from its last checkpoint, and before that {waits_for}"
                )
            }
            Some(Job { spec, phase: Phase::Waiting { placing: false, .. }, .. }) => {
                let (connected, needed) = (self.placeable().len(), spec.min_servers);
                let cordoned = match self.servers.len() - connected {
                    0 => String::new(),
                    cordoned => format!(", and {cordoned} more are cordoned"),
                };
                format!(
                    "shard servers for job {name:?}: {connected} of {needed} are connected{cordoned}"
                )
            }
            Some(Job { phase: Phase::Waiting { placing: true, .. }, .. }) => {
                format!("the placement of job {name:?}")
            }
            Some(Job { epoch, succession, phase: Phase::Opening { pending, .. }, .. }) => {
                let copy = succession.as_ref().map_or(String::new(), |succession| {
                    let JobVersion { job, version, .. } = &succession.from;
                    format!(", and to copy version {version} of job {job:?}")
                });
                let servers = self.names_of(pending);
                format!("{servers} to allocate memory for job {name:?} (epoch {epoch}){copy}")
            }
            _ => String::new(),
        }
    }
}
