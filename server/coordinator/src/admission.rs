//! Which jobs a cluster accepts, and the room that its servers have for them.

use std::collections::BTreeMap;

use zeroshard_model::{Error, Result, memory::Capacity, quota::Holder};

use crate::{
    context::Common,
    ids::ServerId,
    job::{Job, Phase},
    plan::Plan,
    rooms::{Room, Rooms},
};

/// The number of bytes that a job needs on all servers together.
pub(crate) fn required(job: &Job) -> u64 {
    match (&job.phase, job.phase.loads()) {
        (_, Some(loads)) => loads.values().map(|load| load.bytes).fold(0, u64::saturating_add),
        (Phase::Failed { .. } | Phase::Gone, None) => 0,
        (_, None) => job.spec.required_with_replicas().bytes,
    }
}

impl Common {
    /// The room of the connected servers.
    pub(crate) fn rooms(&self) -> Rooms {
        let used = self.index.assigned();
        let room = |(&id, all): (&ServerId, Capacity)| {
            let used = used.get(&id).copied().unwrap_or_default();
            (id, Room { all, free: all.without(used) })
        };
        let connected = self.servers.connected().iter();
        let known = connected.filter_map(|(id, known)| Some((id, known.capacity?)));
        Rooms(known.map(room).collect())
    }

    /// Returns whether a job with this plan fits beside the jobs that have been placed.
    pub(crate) fn has_room_for(&self, plan: &Plan) -> bool {
        self.rooms().fit(&plan.loads)
    }
}

/// Checks that the job `name` fits into the quota of the token of the call. The jobs of a token
/// are all jobs whose names its role permits, so that a new coordinator needs no record of
/// them.
///
/// # Errors
/// [`Error::LimitExceeded`].
pub(crate) fn check_quota(
    jobs: &BTreeMap<String, Job>,
    name: &str,
    quota: Option<&(Holder, u64)>,
) -> Result<()> {
    let Some((Holder { role, quota }, bytes)) = quota else { return Ok(()) };
    let own = || jobs.iter().filter(|(name, _)| role.may_train(name));
    let refuse = |what: String, limit: u64, remedy: &str| {
        let remedy = format!("{remedy}, or ask the operator of the cluster for a higher limit");
        Err(Error::LimitExceeded { what, limit, remedy })
    };
    if let Some(limit) = quota.jobs.filter(|&limit| own().count() >= limit as usize) {
        let what = format!("jobs of role {role} (`jobs` in the file of tokens)");
        return refuse(what, limit.into(), "delete jobs that are not needed any more");
    }
    let Some(limit) = quota.memory else { return Ok(()) };
    let used = own().map(|(_, job)| required(job)).fold(0, u64::saturating_add);
    if used.saturating_add(*bytes) <= limit {
        return Ok(());
    }
    let what = format!(
        "bytes of memory of the jobs of role {role} (`memory` in the file of tokens), of which \
         {used} are used and job {name:?} needs {bytes} more"
    );
    refuse(what, limit, "make the job smaller, or delete another one")
}
