//! The memory for the slices of a job on this server.

use std::sync::{Arc, OnceLock};

use rustix::process::Resource;
use tokio_util::sync::CancellationToken;
use zeroshard_kernels::{Backend, has_headroom};
use zeroshard_model::{Attempt, Error, JobSpec, Placement, Result, geometry::Contributions};
use zeroshard_shm::Arena;

use super::closed_error;
use crate::{
    budget::Space,
    device::{self, Device, Home},
    fair::Share,
    slice::{Role, Slice},
};

/// The bytes of slices after which the memory that is left is checked.
const UNCHECKED: u64 = 16 << 20;

/// Slices to be allocated.
pub(super) struct Allocation<'a, B: Backend> {
    pub(super) devices: &'a [Device<B>],
    pub(super) spec: &'a JobSpec,
    pub(super) closed: &'a CancellationToken,
    /// Where the published parameters are.
    pub(super) arena: Option<&'a Arc<Arena>>,
    pub(super) slices: &'a [OnceLock<Slice<B>>],
    /// `true` if the memory is provided at once.
    pub(super) populates: bool,
    /// The share of the job in the thread that populates its memory.
    pub(super) memory: &'a Share,
    /// `true` if the slices do without [`super::Safeguard::Ledger`].
    pub(super) lacks_ledger: bool,
}

impl<B: Backend> Allocation<'_, B> {
    /// Allocates those of the slices `wanted` that do not exist yet: all of them, or none after an
    /// error. `wanted`: indices, and whether this server is the primary. If `is_empty`, the job
    /// runs already, and the slices have no content. Returns the parts of the budgets that they
    /// take.
    ///
    /// # Errors
    /// Those of [`super::Job::open`].
    pub(super) fn allocate(
        &self,
        mut wanted: Vec<(usize, bool)>,
        attempt: Attempt,
        is_empty: bool,
    ) -> Result<Vec<Space>> {
        let Self { spec, slices, .. } = *self;
        wanted.retain(|(index, _)| slices[*index].get().is_none());
        // The order of steps.
        wanted.sort_unstable();
        let numbers: Vec<usize> = wanted.iter().map(|(index, _)| *index).collect();
        let (homes, spaces) = device::place(self.devices, spec, &numbers)?;
        let mut unchecked = 0;
        let mut last: Option<(usize, Contributions)> = None;
        let mut allocated = Vec::with_capacity(wanted.len());
        for ((index, is_primary), home) in wanted.into_iter().zip(homes) {
            if self.closed.is_cancelled() {
                return Err(closed_error(&spec.name));
            }
            let cut = spec.manifest.slices()[index];
            // Most slices follow another slice of the same tensor.
            let same = last.take_if(|(tensor, _)| *tensor == cut.tensor);
            let (_, contributions) =
                last.insert(same.unwrap_or_else(|| (cut.tensor, spec.contributions(cut.tensor))));
            let role = if is_primary { Role::Primary } else { Role::Backup };
            let home = Home { arena: self.arena, ..home };
            let slice = Slice::allocate(home, spec, index, contributions, attempt, role)?;
            unchecked += spec.arrays(index).required().bytes;
            if unchecked >= UNCHECKED {
                check_headroom(spec, unchecked)?;
                unchecked = 0;
            }
            if self.populates {
                let _turn = self.memory.blocking_turn(cut.numel as u64);
                slice.populate();
                slice.populate_sum();
            }
            if is_empty {
                slice.begin_empty(attempt);
            }
            if self.lacks_ledger {
                slice.drop_ledger();
            }
            allocated.push((index, slice));
        }
        for (index, slice) in allocated {
            _ = slices[index].set(slice);
        }
        Ok(spaces)
    }
}

/// The number of versions of a job's published parameters for which an arena has addresses: the
/// current one, the gradient whose place the next one takes, and those that readers hold.
const VERSIONS: usize = 5;

/// An arena for the published parameters of a job; `None` if the system has none, or limits the
/// addresses of this process.
pub(super) fn arena_of(spec: &JobSpec) -> Option<Arc<Arena>> {
    if rustix::process::getrlimit(Resource::As).current.is_some() {
        return None;
    }
    let slices = spec.manifest.slices().iter().enumerate();
    let bytes = slices.map(|(index, slice)| {
        let bytes = slice.numel * spec.manifest.tensor_of(index).dtype.size();
        bytes.next_multiple_of(zeroshard_shm::PAGE)
    });
    let len = bytes.fold(0_usize, usize::saturating_add).checked_mul(VERSIONS)?;
    let arena = (len > 0).then(|| Arena::create("zeroshard parameters", len))?;
    arena.ok()
}

/// Checks that the other jobs can still allocate what they need for their calls.
///
/// # Errors
/// [`Error::OutOfMemory`].
fn check_headroom(spec: &JobSpec, bytes: u64) -> Result<()> {
    if has_headroom() {
        return Ok(());
    }
    Err(Error::OutOfMemory {
        what: format!("slices of job {:?}, because nothing would be left for calls", spec.name),
        bytes,
    })
}

/// # Errors
/// [`Error::Refused`] for a placement of another number of slices.
pub(super) fn check_placement(spec: &JobSpec, placement: &Placement) -> Result<()> {
    let (found, expected) = (placement.slices(), spec.manifest.slices().len());
    if found != expected {
        let name = &spec.name;
        return Err(Error::refused(format!(
            "the placement of job {name:?} has {found} slices instead of {expected}"
        )));
    }
    Ok(())
}
