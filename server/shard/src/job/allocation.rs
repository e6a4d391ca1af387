//! The memory for the slices of a job on this server.

use std::sync::OnceLock;

use tokio_util::sync::CancellationToken;
use zeroshard_kernels::{Backend, has_headroom};
use zeroshard_model::{Attempt, Error, JobSpec, Placement, Result, geometry::Contributions};

use super::closed_error;
use crate::{
    budget::Space,
    device::{self, Device},
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
/// [`Error::Invalid`] for a placement of another number of slices.
pub(super) fn check_placement(spec: &JobSpec, placement: &Placement) -> Result<()> {
    let (found, expected) = (placement.slices(), spec.manifest.slices().len());
    if found != expected {
        let what = format!("placement of job {:?}", spec.name);
        return Err(Error::invalid(what, format!("{found} slices"), format!("{expected} slices")));
    }
    Ok(())
}
