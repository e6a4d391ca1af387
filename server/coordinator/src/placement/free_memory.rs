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
};

use crate::{
    placement::{
        Zones, place_within,
        plan::{Loads, Plan},
    },
    vocabulary::ids::ServerId,
};

/// The room of the servers that have a known limit.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FreeMemory(pub(crate) BTreeMap<ServerId, Room>);

/// The room of a server.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Room {
    pub(crate) all: Capacity,
    pub(crate) free: Capacity,
}

impl FreeMemory {
    /// Returns the free memory of a server; `None` if it has no known limit.
    pub fn free(&self, server: ServerId) -> Option<Capacity> {
        Some(self.0.get(&server)?.free)
    }

    pub(crate) fn fit(&self, loads: &Loads) -> bool {
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
    pub fn within(
        spec: &JobSpec,
        live: &[Server],
        zones: &Zones,
        free_memory: &FreeMemory,
    ) -> Result<Self> {
        free_memory.check(spec, live)?;
        let balanced = Self::new(spec, live, zones)?;
        if free_memory.fit(&balanced.loads) {
            return Ok(balanced);
        }
        let slices = spec.required_by_slice();
        let free = |server| free_memory.free(server);
        match place_within(live, zones, free, &slices, spec.replicas as usize) {
            Ok(placement) => Ok(Self::of(spec, placement?)),
            Err(slice) => Err(free_memory.refusal(spec, live, Some(slices[slice]))),
        }
    }
}
