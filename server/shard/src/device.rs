//! The devices of a server. All arrays of a slice are on one of them, so that no operation has
//! operands of two devices.

use std::sync::Arc;

use zeroshard_kernels::{Backend, DeviceName};
use zeroshard_model::{Error, JobSpec, Result};
use zeroshard_shm::Arena;

use super::budget::{Budget, Space};
use crate::tier::{Places, Sizes, Tiers};

/// A device.
pub struct Device<B: Backend> {
    pub backend: Arc<B>,
    /// Its tiers, if there are budgets for the arrays of slices.
    pub tiers: Option<Arc<Tiers<B>>>,
    /// The bytes of its slices, in all tiers.
    slices: Arc<Budget>,
}

impl<B: Backend> Device<B> {
    pub fn new(backend: Arc<B>, tiers: Option<Arc<Tiers<B>>>) -> Self {
        Self { backend, tiers, slices: Budget::new(u64::MAX) }
    }
}

/// Where the arrays of a slice are.
pub struct Home<'a, B: Backend> {
    pub device: &'a Device<B>,
    /// The tiers of the arrays.
    pub places: Places,
    /// Where the published parameters are, if they are in memory.
    pub arena: Option<&'a Arc<Arena>>,
}

impl<B: Backend> Clone for Home<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Home<'_, B> {}

/// Chooses devices and tiers for slices of a job, so that all devices have about the same number of
/// bytes. A device that is lost gets no slices, unless all are. Returns the home of each slice, and
/// the parts of the budgets that they take.
///
/// # Errors
/// Those of [`Tiers::place`]; [`Error::Invalid`] if the job's state is to be outside of the memory
/// of a GPU, and the server has nothing else.
pub fn place<'a, B: Backend>(
    devices: &'a [Device<B>],
    job: &JobSpec,
    slices: &[usize],
) -> Result<(Vec<Home<'a, B>>, Vec<Space>)> {
    let mut usable: Vec<_> = devices.iter().filter(|of| !of.backend.is_lost()).collect();
    if usable.is_empty() {
        usable = devices.iter().collect();
    }
    let keeps_all_on_gpu =
        |of: &&Device<B>| of.tiers.is_none() && of.backend.device() != DeviceName::Cpu;
    if let Some(gpu) = devices.iter().find(keeps_all_on_gpu).filter(|_| job.offload) {
        let name = gpu.backend.device();
        return Err(Error::refused(format!(
            "job {:?} has offload, but a server has all slices on {name}; start it with \
             --device-memory, and --host-memory or --disk",
            job.name
        )));
    }
    let (mut of_device, mut spaces) = (vec![Vec::new(); usable.len()], Vec::new());
    for (position, &slice) in slices.iter().enumerate() {
        let numbered = usable.iter().enumerate();
        let (number, device) =
            numbered.min_by_key(|(_, of)| of.slices.used()).expect("there is a device");
        spaces.extend(device.slices.take(Sizes::of(job, slice).bytes()));
        of_device[number].push(position);
    }
    let mut homes = vec![None; slices.len()];
    for (device, positions) in usable.into_iter().zip(of_device) {
        let here: Vec<usize> = positions.iter().map(|&position| slices[position]).collect();
        let places = match &device.tiers {
            Some(tiers) => {
                let placed = tiers.place(job, &here)?;
                spaces.extend(placed.spaces);
                placed.places
            }
            None => vec![Places::default(); here.len()],
        };
        for (position, places) in positions.into_iter().zip(places) {
            homes[position] = Some(Home { device, places, arena: None });
        }
    }
    Ok((homes.into_iter().flatten().collect(), spaces))
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
