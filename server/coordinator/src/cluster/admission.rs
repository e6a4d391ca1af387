//! The creation of jobs: which ones a cluster accepts, and the room that its servers have for them.

use std::collections::BTreeMap;

use zeroshard_model::{Error, Result, memory::Capacity, quota::Holder};

use crate::{
    cluster::{
        context::{Common, Context},
        jobs::Jobs,
    },
    job::{Job, Phase},
    placement::{
        free_memory::{FreeMemory, Room},
        plan::Plan,
    },
    vocabulary::{
        calls::Create,
        ids::{ServerId, Waiter},
    },
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
    pub(crate) fn free_memory(&self) -> FreeMemory {
        let used = self.index.assigned();
        let room = |(&id, all): (&ServerId, Capacity)| {
            let used = used.get(&id).copied().unwrap_or_default();
            (id, Room { all, free: all.without(used) })
        };
        let connected = self.servers.connected().iter();
        let known = connected.filter_map(|(id, known)| Some((id, known.capacity?)));
        FreeMemory(known.map(room).collect())
    }

    /// Returns whether a job with this plan fits beside the jobs that have been placed.
    pub(crate) fn has_room_for(&self, plan: &Plan) -> bool {
        self.free_memory().fit(&plan.loads)
    }
}

/// Creates a job, or waits for one that exists.
pub(crate) fn create(
    jobs: &mut Jobs,
    waiter: Waiter,
    id: u64,
    create: Create,
    cx: &mut Context<'_>,
) {
    let name = create.spec.name.clone();
    jobs.visit(&name, cx, |job, cx| job.make_way_for(create.restore.as_ref(), cx));
    if jobs.all().contains_key(&name) {
        jobs.visit(&name, cx, |job, cx| job.create_again(waiter, &create, cx));
        return;
    }
    if let Err(error) = check_number(jobs.all(), cx.common)
        .and_then(|()| check_quota(jobs.all(), &name, create.quota.as_ref()))
    {
        return cx.answer(waiter, Err(error));
    }
    let job = Job::new(waiter, id, create);
    if let Some(fork) = &job.fork
        && let Err(error) =
            jobs.find(&fork.from.job, cx.common).and_then(|from| from.as_source(fork))
    {
        return cx.answer(waiter, Err(error));
    }
    jobs.insert(job, cx.common);
    jobs.visit(&name, cx, Job::try_place);
}

/// Checks that the cluster may have another job.
///
/// # Errors
/// [`Error::LimitExceeded`].
fn check_number(jobs: &BTreeMap<String, Job>, common: &Common) -> Result<()> {
    if jobs.len() < common.limits.number {
        return Ok(());
    }
    Err(Error::LimitExceeded {
        what: "jobs of the cluster (--max-jobs of the coordinator)".to_owned(),
        limit: common.limits.number as u64,
        remedy: "delete jobs that are not needed any more; `zsctl status` lists them".to_owned(),
    })
}

/// Checks that the job `name` fits into the quota of the token of the call. The jobs of a token
/// are all jobs whose names its role permits, so that a new coordinator needs no record of
/// them.
///
/// # Errors
/// [`Error::LimitExceeded`].
fn check_quota(
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
