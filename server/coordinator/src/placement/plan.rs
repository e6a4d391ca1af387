//! The placement of a job's slices, with what follows from it.

use std::{collections::BTreeMap, sync::Arc};

use zeroshard_model::{JobSpec, Placement, Result, Server, memory::Required};

use crate::{
    placement::{Zones, place},
    vocabulary::ids::ServerId,
};

/// The bytes that a job needs of each server.
pub type Loads = BTreeMap<ServerId, Required>;

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
