//! Tiers: the arrays of slices that do not fit in memory are on disk.
//!
//! `plan` decides which arrays those are. `array` is an array in either tier; `paged` is one on
//! disk, and `working` has the buffers in which it is changed by chunks. `steps` takes slices to
//! the next version piece by piece. `scratch` is the file, and `free` its free parts.
//!
//! Slices know only that they have arrays, and that access to an array can fail.

mod array;
mod free;
mod paged;
mod plan;
mod scratch;
mod steps;
mod working;

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
};

use tokio::runtime::{Handle, RuntimeFlavor};
use zeroshard_proto::{Error, JobSpec, Result};

use crate::{
    backend::Backend,
    budget::{Budget, Space},
    metrics::Traffic,
};
pub(crate) use array::{Array, Writing};
pub(crate) use paged::Paged;
pub(crate) use plan::{Kind, OnDisk};
use plan::{Shortage, Sizes, plan};
use scratch::Scratch;
use steps::Steps;
pub(crate) use steps::{Arrays, Next};
use working::Working;

/// The memory of working buffers, in bytes: 16 arrays of the largest slices.
const WORKING_BYTES: usize = 256 << 20;

/// The budgets of a server for the arrays of slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Limits {
    /// The maximum number of bytes in memory.
    pub(crate) memory: u64,
    /// The directory of the scratch file, and the maximum number of bytes in it.
    pub(crate) disk: Option<(PathBuf, u64)>,
}

/// The tiers of a server.
pub(crate) struct Tiers<B: Backend> {
    memory: Arc<Budget>,
    disk: Option<Disk<B>>,
    working: Working<B>,
    /// Held while the arrays of a job are distributed.
    placing: Mutex<()>,
}

struct Disk<B: Backend> {
    budget: Arc<Budget>,
    scratch: Arc<Scratch>,
    steps: Steps<B>,
}

/// Slices whose arrays have been distributed.
pub(crate) struct Placed {
    /// The arrays on disk, of each slice.
    pub(crate) on_disk: Vec<OnDisk>,
    /// The parts of the budgets, while the slices exist.
    pub(crate) spaces: [Space; 2],
}

impl<B: Backend> Tiers<B> {
    /// Creates the scratch file, if there is a directory for it.
    ///
    /// # Errors
    /// [`Error::Storage`] if the file cannot be created; [`Error::OutOfMemory`].
    pub(crate) fn new(backend: &B, limits: Limits, traffic: Traffic) -> Result<Arc<Self>> {
        let disk = match limits.disk {
            None => None,
            Some((directory, bytes)) => {
                let scratch = Scratch::create(&directory, traffic);
                let scratch = scratch.map_err(|error| Error::Storage {
                    action: "create a scratch file (--disk) in".to_owned(),
                    url: directory.display().to_string(),
                    cause: error.to_string(),
                })?;
                Some((scratch, bytes))
            }
        };
        Self::on(backend, limits.memory, disk, WORKING_BYTES)
    }

    fn on(
        backend: &B,
        memory: u64,
        disk: Option<(Arc<Scratch>, u64)>,
        working: usize,
    ) -> Result<Arc<Self>> {
        let disk = disk.map(|(scratch, bytes)| {
            Ok::<_, Error>(Disk {
                budget: Budget::new(bytes),
                scratch,
                steps: Steps::new(backend)?,
            })
        });
        Ok(Arc::new(Self {
            memory: Budget::new(memory),
            disk: disk.transpose()?,
            working: Working::new(working),
            placing: Mutex::new(()),
        }))
    }

    fn scratch(&self) -> Option<&Arc<Scratch>> {
        self.disk.as_ref().map(|disk| &disk.scratch)
    }

    /// The threads for slices on disk.
    pub(crate) fn steps(&self) -> Option<&Steps<B>> {
        self.disk.as_ref().map(|disk| &disk.steps)
    }

    /// The bytes in memory and on disk.
    pub(crate) fn used(&self) -> [u64; 2] {
        [self.memory.used(), self.disk.as_ref().map_or(0, |disk| disk.budget.used())]
    }

    /// Distributes the arrays of slices of a job over the tiers.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with the budgets if they do not fit.
    pub(crate) fn place(&self, job: &JobSpec, slices: &[usize]) -> Result<Placed> {
        let sizes: Vec<Sizes> = slices.iter().map(|&index| Sizes::of(job, index)).collect();
        let _placing = self.placing.lock().expect("no holder of the lock panics");
        // Only this function takes from the budgets.
        let free = |budget: &Budget| budget.limit() - budget.used();
        let none = Budget::new(0);
        let disk = self.disk.as_ref().map_or(&none, |disk| &disk.budget);
        let placed = plan(&sizes, free(&self.memory), free(disk));
        let placed = placed.map_err(|Shortage { required, fixed }| {
            let (memory, limit) = (free(&self.memory), self.memory.limit());
            let on_disk = match &self.disk {
                None => "there is no --disk".to_owned(),
                Some(_) => format!("--disk-bytes has {} of {} free", free(disk), disk.limit()),
            };
            let must = match fixed {
                0 => String::new(),
                fixed => format!(", of which {fixed} bytes can only be in memory"),
            };
            Error::OutOfMemory {
                what: format!(
                    "the slices of job {:?} on this server{must}: --host-memory has {memory} of \
                     {limit} free, and {on_disk}",
                    job.name
                ),
                bytes: required,
            }
        })?;
        let taken = "the plan fits in what is free";
        let spaces =
            [self.memory.take(placed.memory).expect(taken), disk.take(placed.disk).expect(taken)];
        Ok(Placed { on_disk: placed.on_disk, spaces })
    }
}

/// Runs work that waits for the disk. On a thread of a runtime with several threads, the other
/// tasks of this thread continue on another one.
fn blocking<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}

#[cfg(test)]
#[path = "tests.rs"]
pub(crate) mod tests;
