//! Tiers: the arrays of slices that do not fit in the memory of the backend are in host memory (on
//! a server with a GPU) or on disk.
//!
//! `plan` decides where each array is. `array` is an array in any tier; `paged` is one outside of
//! memory, where its bytes have a `form`, and `working` has the buffers in which it is changed by
//! chunks. `steps` takes slices to the next version piece by piece. `scratch` is the room outside
//! of memory: a file, or host memory (`host`); `free` has its free parts, and `traffic` the
//! counters of its bytes.
//!
//! Slices know only that they have arrays, and that access to an array can fail.

mod array;
mod form;
mod free;
mod host;
mod paged;
mod plan;
mod scratch;
mod steps;
mod traffic;
mod working;

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
};

use zeroshard_model::{Error, JobSpec, Result, memory::Capacity};

use crate::budget::{Budget, Space};
pub use array::{Array, Writing};
pub use form::Form;
use paged::{Paged, Shared};
pub use plan::{Kind, Places, Sizes, Tier};
use plan::{Shortage, plan};
use scratch::Scratch;
use steps::Steps;
pub use steps::{Arrays, Next};
pub use traffic::{Counter, Traffic};
use working::Working;
use zeroshard_kernels::Backend;

/// The memory of working buffers, in bytes: 16 arrays of the largest slices.
const WORKING_BYTES: usize = 256 << 20;

/// The budgets of a server for the arrays of slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// The maximum number of bytes in the memory of the backend.
    pub memory: u64,
    /// On a server with a GPU: the maximum number of bytes in host memory.
    pub host: Option<u64>,
    /// The flag that limits host memory.
    pub option: &'static str,
    /// The directory of the scratch file, and the maximum number of bytes in it.
    pub disk: Option<(PathBuf, u64)>,
    /// The fastest tier for the state of optimizers.
    pub fastest_of_state: Tier,
}

impl Limits {
    /// The room for the arrays of slices on a server with this number of devices.
    pub fn capacity(&self, devices: usize) -> Capacity {
        let memory = self.memory.saturating_mul(devices as u64);
        let disk = self.disk.as_ref().map_or(0, |(_, bytes)| *bytes);
        let outside = self.host.unwrap_or_default().saturating_add(disk);
        Capacity { bytes: memory.saturating_add(outside), memory }
    }
}

/// The tiers of a device. Devices of one server share host memory and the disk.
pub struct Tiers<B: Backend> {
    /// The budget of each tier.
    budgets: [Arc<Budget>; 3],
    outside: Option<Outside<B>>,
    /// `true` if the memory of the backend is that of a GPU.
    has_gpu: bool,
    /// The flag that limits host memory.
    option: &'static str,
    fastest_of_state: Tier,
    working: Arc<Working<B, Shared<B>>>,
    /// Held while the arrays of a job are distributed.
    placing: Arc<Mutex<()>>,
}

/// The tiers outside of the memory of the backend.
struct Outside<B: Backend> {
    host: Arc<Scratch>,
    disk: Option<Arc<Scratch>>,
    steps: Steps<B>,
}

/// Slices whose arrays have been distributed.
#[derive(Debug)]
pub struct Placed {
    /// The tiers of the arrays of each slice.
    pub places: Vec<Places>,
    /// The parts of the budgets, while the slices exist.
    pub spaces: [Space; 3],
}

impl<B: Backend> Tiers<B> {
    /// Creates the scratch file, if there is a directory for it, and the tiers of each device of a
    /// server. `traffic`: the counters of host memory and of the disk.
    ///
    /// # Errors
    /// [`Error::Storage`] if the file cannot be created; [`Error::OutOfMemory`].
    pub fn new(
        devices: &[Arc<B>],
        limits: &Limits,
        traffic: [Traffic; 2],
    ) -> Result<Vec<Arc<Self>>> {
        let [of_host, of_disk] = traffic;
        let file = limits.disk.as_ref().map(|(directory, _)| {
            Scratch::create(directory, of_disk).map_err(|error| Error::Storage {
                action: "create a scratch file (--disk) in".to_owned(),
                url: directory.display().to_string(),
                cause: error.to_string(),
            })
        });
        let scratch = (Scratch::in_host_memory(of_host), file.transpose()?);
        Self::on(devices, limits, &scratch, WORKING_BYTES)
    }

    fn on(
        devices: &[Arc<B>],
        limits: &Limits,
        (host, disk): &(Arc<Scratch>, Option<Arc<Scratch>>),
        working: usize,
    ) -> Result<Vec<Arc<Self>>> {
        let on_disk = limits.disk.as_ref().map_or(0, |(_, bytes)| *bytes);
        let bytes = [limits.host.unwrap_or_default(), on_disk];
        let shared = bytes.map(Budget::new);
        let placing = Arc::new(Mutex::new(()));
        let of_device = |device: &Arc<B>| {
            let [of_host, of_disk] = shared.clone();
            let outside = match bytes {
                [0, 0] => None,
                _ => {
                    let (host, disk) = (host.clone(), disk.clone());
                    Some(Outside { host, disk, steps: Steps::new(&**device)? })
                }
            };
            Ok(Arc::new(Self {
                budgets: [Budget::new(limits.memory), of_host, of_disk],
                outside,
                has_gpu: limits.host.is_some(),
                option: limits.option,
                fastest_of_state: limits.fastest_of_state,
                working: Arc::new(Working::new(working)),
                placing: placing.clone(),
            }))
        };
        devices.iter().map(of_device).collect()
    }

    /// An array of slice number `slice` in a tier outside of memory; `filled`: the value of the
    /// elements, 0 for 8-bit state.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Storage`].
    pub fn paged(
        &self,
        tier: Tier,
        slice: u32,
        form: Form,
        filled: Option<f32>,
    ) -> Result<Array<B>> {
        let outside = self.outside.as_ref();
        let scratch = outside.and_then(|outside| match tier {
            Tier::Memory => None,
            Tier::Host => Some(&outside.host),
            Tier::Disk => outside.disk.as_ref(),
        });
        let scratch = scratch.expect("the plan uses only tiers that have a budget");
        Ok(Array::Paged(Arc::new(Paged::new(&self.working, scratch, slice, form, filled)?)))
    }

    /// The threads for slices with arrays outside of memory.
    pub fn steps(&self) -> Option<&Steps<B>> {
        self.outside.as_ref().map(|outside| &outside.steps)
    }

    /// The bytes in the memory of a GPU, in host memory, and on disk.
    pub fn used(&self) -> [u64; 3] {
        let [memory, host, disk] = self.budgets.each_ref().map(|budget| budget.used());
        match self.has_gpu {
            true => [memory, host, disk],
            false => [0, memory, disk],
        }
    }

    /// The budgets of the tiers, in the order of [`Self::used`].
    pub fn limits(&self) -> [u64; 3] {
        let [memory, host, disk] = self.budgets.each_ref().map(|budget| budget.limit());
        match self.has_gpu {
            true => [memory, host, disk],
            false => [0, memory, disk],
        }
    }

    /// Distributes the arrays of slices of a job over the tiers.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with the budgets if they do not fit.
    pub fn place(&self, job: &JobSpec, slices: &[usize]) -> Result<Placed> {
        let sizes: Vec<Sizes> = slices.iter().map(|&index| Sizes::of(job, index)).collect();
        let _placing = self.placing.lock().expect("no holder of the lock panics");
        // Only this function takes from the budgets.
        let free = self.budgets.each_ref().map(|budget| budget.limit() - budget.used());
        let fastest_of_state = match job.offload && self.has_gpu {
            true => self.fastest_of_state.max(Tier::Host),
            false => self.fastest_of_state,
        };
        let placed = plan(&sizes, free, fastest_of_state);
        let leaves_memory = fastest_of_state > Tier::Memory;
        let placed = placed.map_err(|shortage| self.refusal(&job.name, leaves_memory, shortage))?;
        let spaces = std::array::from_fn(|tier| {
            let taken = self.budgets[tier].take(placed.bytes[tier]);
            taken.expect("the plan fits in what is free")
        });
        Ok(Placed { places: placed.places, spaces })
    }

    /// The error for a job whose slices do not fit. `leaves_memory`: its state is not to be in the
    /// memory of the GPU.
    fn refusal(&self, job: &str, leaves_memory: bool, shortage: Shortage) -> Error {
        let Shortage { required, fixed, state } = shortage;
        let in_memory = (fixed > 0).then(|| format!("{fixed} bytes can only be in memory"));
        let outside = (leaves_memory && state > 0).then(|| {
            format!(
                "{state} bytes cannot be in the memory of the GPU (--state-tier host, or offload \
                 of the job)"
            )
        });
        let parts: Vec<String> = in_memory.into_iter().chain(outside).collect();
        let must = match parts.is_empty() {
            true => String::new(),
            false => format!(", of which {}", parts.join(" and ")),
        };
        let has = |option: &str, budget: &Budget| {
            format!("{option} has {} of {} free", budget.limit() - budget.used(), budget.limit())
        };
        let [memory, host, disk] = &self.budgets;
        let budgets = match self.has_gpu {
            true => format!("{}, {}", has("--device-memory", memory), has("--host-memory", host)),
            false => has(self.option, memory),
        };
        let on_disk = match disk.limit() {
            0 => "there is no --disk".to_owned(),
            _ => has("--disk-bytes", disk),
        };
        Error::OutOfMemory {
            what: format!(
                "the slices of job {job:?} on this server{must}: {budgets}, and {on_disk}"
            ),
            bytes: required,
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
pub(crate) mod tests;
