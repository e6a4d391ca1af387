//! The callers of CreateJob, which wait until their job is open.

use zeroshard_model::JobVersion;

use crate::{
    cluster::context::{Common, Context},
    job::{Job, Phase},
    vocabulary::ids::{Caller, Waiter, expire},
};

impl Job {
    /// Answers creators at their deadline. A job that has never been open and has no waiting
    /// creator is removed.
    pub(crate) fn expire_creators(&mut self, cx: &mut Context<'_>) {
        let Some(creators) = self.creators() else { return };
        let expired = expire([creators], cx.now);
        cx.time_out(expired, |common| self.creators_wait_for(common));
        self.remove_if_unwanted(cx);
    }

    /// A caller has disconnected: that of CreateJob, or a rank that waited for an answer.
    pub(crate) fn caller_gone(&mut self, caller: Caller, rank: Option<u32>, cx: &mut Context<'_>) {
        match (rank, &mut self.phase) {
            (Some(rank), Phase::Open(open)) => open.forget_caller(rank, caller),
            (Some(_), _) => {}
            (None, _) => {
                if let Some(creators) = self.creators() {
                    creators.retain(|waiter| waiter.caller != caller);
                    self.remove_if_unwanted(cx);
                }
            }
        }
    }

    fn remove_if_unwanted(&mut self, cx: &mut Context<'_>) {
        if self.is_new() && self.creators().is_some_and(|creators| creators.is_empty()) {
            self.remove("nobody waits for its creation any more", cx);
        }
    }

    /// The calls that wait for the job to open; `None` once it has opened or failed.
    fn creators(&mut self) -> Option<&mut Vec<Waiter>> {
        match &mut self.phase {
            Phase::Waiting { creators, .. } | Phase::Opening { creators, .. } => Some(creators),
            Phase::Open(_) | Phase::Recovering(_) | Phase::Failed { .. } | Phase::Gone => None,
        }
    }

    /// Describes what a job that is being created or restored waits for, for messages.
    pub(crate) fn creators_wait_for(&self, common: &Common) -> String {
        let (name, servers) = (&self.name, &common.servers);
        match &self.phase {
            Phase::Waiting { placing: false, .. } if common.saves.completes(name) => {
                format!("the manifest of an earlier save of job {name:?} to be written")
            }
            Phase::Waiting { .. }
                if common.startup.is_learning()
                    && servers.connected().len() >= self.spec.min_servers as usize =>
            {
                format!("shard servers that may hold a job {name:?} of the last coordinator")
            }
            Phase::Waiting { placing: false, interrupted: Some(interrupted), .. } => {
                let connected = servers.placeable().len();
                let waits_for = interrupted.waits_for(connected, self.spec.replicas);
                format!(
                    "job {name:?} to be restored from its last checkpoint, and before that {waits_for}"
                )
            }
            Phase::Waiting { placing: false, .. } => {
                let (connected, needed) = (servers.placeable().len(), self.spec.min_servers);
                let cordoned = match servers.connected().len() - connected {
                    0 => String::new(),
                    cordoned => format!(", and {cordoned} more are cordoned"),
                };
                format!(
                    "shard servers for job {name:?}: {connected} of {needed} are connected{cordoned}"
                )
            }
            Phase::Waiting { placing: true, .. } => format!("the placement of job {name:?}"),
            Phase::Opening { pending, .. } => {
                let copy = self.fork.as_ref().map_or(String::new(), |fork| {
                    let JobVersion { job, version, .. } = &fork.from;
                    format!(", and to copy version {version} of job {job:?}")
                });
                let (servers, epoch) = (servers.names_of(pending), self.epoch);
                format!("{servers} to allocate memory for job {name:?} (epoch {epoch}){copy}")
            }
            Phase::Open(_) | Phase::Recovering(_) | Phase::Failed { .. } | Phase::Gone => {
                String::new()
            }
        }
    }
}
