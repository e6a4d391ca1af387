//! The memory of shard servers: which jobs fit on them.
//!
//! A server reports its room when it registers. What is free of it follows from the placements of
//! the jobs, which a new coordinator learns from the servers, so nothing is counted that could
//! become wrong. Servers that do not report their room have no known limit.

use std::collections::BTreeMap;

use zeroshard_model::{
    Error, JobSpec, Result, Server,
    listing::some_of,
    memory::{Capacity, Required},
    quota::Holder,
};

use super::{
    context::Common,
    events::ServerId,
    placement::{Zones, place_within},
    plan::Plan,
    state::{Job, Phase},
};

/// The bytes that a job needs of each server.
pub type Loads = BTreeMap<ServerId, Required>;

/// The room of the servers that have a known limit.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rooms(BTreeMap<ServerId, Room>);

/// The room of a server.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Room {
    all: Capacity,
    free: Capacity,
}

impl Rooms {
    /// Returns the free memory of a server; `None` if it has no known limit.
    pub fn free(&self, server: ServerId) -> Option<Capacity> {
        Some(self.0.get(&server)?.free)
    }

    fn fit(&self, loads: &Loads) -> bool {
        loads.iter().all(|(&server, load)| self.free(server).is_none_or(|free| load.fits(free)))
    }

    /// Checks that the sum of what is free on the `live` servers suffices for a job, which takes
    /// no more time for a large job than for a small one of as many tensors.
    fn check(&self, spec: &JobSpec, live: &[Server]) -> Result<()> {
        let Some(free) = self.sum(live) else { return Ok(()) };
        match spec.required_with_replicas().fits(free) {
            true => Ok(()),
            false => Err(self.refusal(spec, live, None)),
        }
    }

    /// Returns the free memory of all servers together; `None` if one of them has no known limit.
    fn sum(&self, live: &[Server]) -> Option<Capacity> {
        live.iter().try_fold(Capacity::default(), |sum, server| {
            let free = self.free(server.id)?;
            let bytes = sum.bytes.saturating_add(free.bytes);
            Some(Capacity { bytes, memory: sum.memory.saturating_add(free.memory) })
        })
    }

    /// The error for a job that does not fit. `slice`: a slice for which no server has room,
    /// although the sum of all servers suffices.
    fn refusal(&self, spec: &JobSpec, live: &[Server], slice: Option<Required>) -> Error {
        let Required { bytes, fixed } = spec.required_with_replicas();
        let free = self.sum(live).unwrap_or(Capacity { bytes: u64::MAX, memory: u64::MAX });
        let servers = live.iter().map(|server| match self.0.get(&server.id) {
            Some(Room { all, free }) => {
                format!("{}: {} of {}", server.address, free.bytes, all.bytes)
            }
            None => format!("{}: no limit", server.address),
        });
        let servers = some_of(servers);
        let in_memory = || {
            format!(
                "; {fixed} bytes can only be in the memory of the devices, where {} are free",
                free.memory
            )
        };
        let servers = match slice {
            Some(slice) => format!(
                "{servers}; no server has room for a further slice of {} bytes",
                slice.bytes
            ),
            None if fixed > free.memory => servers + &in_memory(),
            None => servers,
        };
        Error::InsufficientMemory { job: spec.name.clone(), bytes, free: free.bytes, servers }
    }
}

impl Plan {
    /// Places the slices of `spec` on `live`, which are in these zones, where they have room. This
    /// can take a second for a job that fits, and needs no state.
    ///
    /// # Errors
    /// [`Error::InsufficientMemory`], before the tensors are cut into slices if the sum of all
    /// servers does not suffice; those of [`Self::new`].
    pub fn within(spec: &JobSpec, live: &[Server], zones: &Zones, rooms: &Rooms) -> Result<Self> {
        rooms.check(spec, live)?;
        let balanced = Self::new(spec, live, zones)?;
        if rooms.fit(&balanced.loads) {
            return Ok(balanced);
        }
        let slices = spec.required_by_slice();
        let free = |server| rooms.free(server);
        match place_within(live, zones, free, &slices, spec.replicas as usize) {
            Ok(placement) => Ok(Self::of(spec, placement?)),
            Err(slice) => Err(rooms.refusal(spec, live, Some(slices[slice]))),
        }
    }
}

/// The number of bytes that a job needs on all servers together.
fn required(job: &Job) -> u64 {
    match (&job.phase, job.phase.loads()) {
        (_, Some(loads)) => loads.values().map(|load| load.bytes).fold(0, u64::saturating_add),
        (Phase::Failed { .. } | Phase::Gone, None) => 0,
        (_, None) => job.spec.required_with_replicas().bytes,
    }
}

impl Common {
    /// The room of the connected servers.
    pub(super) fn rooms(&self) -> Rooms {
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
    pub(super) fn has_room_for(&self, plan: &Plan) -> bool {
        self.rooms().fit(&plan.loads)
    }
}

/// Checks that the job `name` fits into the quota of the token of the call. The jobs of a token
/// are all jobs whose names its role permits, so that a new coordinator needs no record of
/// them.
///
/// # Errors
/// [`Error::LimitExceeded`].
pub(super) fn check_quota(
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
