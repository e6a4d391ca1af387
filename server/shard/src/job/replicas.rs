//! A job with replicas: the slices of which this server is a backup, and placements that change.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, atomic::Ordering},
};

use tokio::sync::watch;
use zeroshard_model::{Error, Placement, Result};

use super::{Allocation, Job, Ready, Safeguard, check_placement, progress::Decided};
use crate::{
    events::JobEvent,
    slice::{Role, Slice},
};
use zeroshard_kernels::Backend;
use zeroshard_model::Attempt;

/// Slices by the position of their primary in the placement, with a number of elements.
pub(crate) type ByPrimary = BTreeMap<usize, Vec<(u32, usize)>>;

impl<B: Backend, D: Send + Sync> Job<B, D> {
    /// The servers of all slices.
    pub fn placement(&self) -> Arc<Placement> {
        self.placement.read().expect("no holder of the lock panics").clone()
    }

    /// Returns whether `version` can be read, as far as the other servers matter.
    pub fn serves(&self, version: u64) -> bool {
        if self.host.lacks(Safeguard::Confirmation) {
            return true;
        }
        self.spec.replicas <= 1 || version <= self.served.load(Ordering::Acquire)
    }

    /// All servers have the decisions that lead to `version`.
    pub fn serve(&self, version: u64) {
        self.served.fetch_max(version, Ordering::AcqRel);
        self.changed.send_replace(());
    }

    /// Keeps the decision that has led to the version at which this server has become a backup: the
    /// other servers that know it may die before all ranks do.
    pub fn remember(&self, decision: D) {
        let (decision, none) = (Arc::new(decision), Ready { slices: Vec::new(), copies: 0 });
        self.progress().last = Some(Decided { decision, reduced: none });
    }

    /// The servers of the slices are those of `placement` from now on, and the open attempt ends.
    /// If the job runs already, [`Self::begin_copy`] allocates the slices that are new here.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Invalid`] for a placement of another number of slices;
    /// [`Error::Internal`] if this server is to be the primary of a slice without content.
    pub fn new_placement(&self, epoch: u64, placement: Placement) -> Result<()> {
        let attempt = Attempt { epoch, number: 0, ..self.attempt() };
        check_placement(&self.spec, &placement)?;
        if self.version().is_none() {
            self.allocate(placement.slices_of(self.server).collect(), false)?;
        }
        for (index, is_primary) in placement.slices_of(self.server) {
            let slice = self.slices[index].get();
            let has_content = slice.is_some_and(|slice| slice.role().has_content());
            let role = match (has_content, is_primary) {
                (true, true) => Role::Primary,
                (true, false) => Role::Backup,
                (false, false) => Role::Empty,
                (false, true) => {
                    let cause = format!("slice {index} has no content on its new primary");
                    return Err(Error::Internal { cause });
                }
            };
            slice.into_iter().for_each(|slice| slice.set_role(role));
        }
        self.progress().copies = 0;
        *self.placement.write().expect("no holder of the lock panics") = Arc::new(placement);
        self.open_attempt(attempt, None)
    }

    /// Allocates slices that do not exist yet. If `is_empty`, they have no content.
    ///
    /// # Errors
    /// Those of [`Allocation::allocate`].
    fn allocate(&self, wanted: Vec<(usize, bool)>, is_empty: bool) -> Result<()> {
        let Self { spec, closed, slices, devices, .. } = self;
        let memory = &self.shares.memory;
        let lacks_ledger = self.host.lacks(Safeguard::Ledger);
        let populates = true;
        let arena = self.arena();
        let new =
            Allocation { devices, spec, closed, arena, slices, populates, memory, lacks_ledger };
        let spaces = new.allocate(wanted, self.attempt(), is_empty)?;
        self.spaces.lock().expect("no holder of the lock panics").extend(spaces);
        Ok(())
    }

    /// The slices of this server in the placement for which it has allocated no memory yet.
    pub(super) fn unallocated(&self) -> Vec<u32> {
        let placement = self.placement();
        let held = placement.slices_of(self.server).map(|(index, _)| index);
        let missing = held.filter(|&index| self.slices[index].get().is_none());
        missing.map(|index| index as u32).collect()
    }

    /// Begins to copy slices. Returns those that have no content yet. From now on the step needs
    /// their reduced gradients. If there is no memory for them, the coordinator is told, and the
    /// result is `None`.
    ///
    /// # Errors
    /// [`Error::NotHere`] or [`Error::Invalid`] for slices that this server does not hold.
    pub fn begin_copy(&self, number: u64, slices: &[u32]) -> Result<Option<Vec<u32>>> {
        let wanted: HashSet<u32> = slices.iter().copied().collect();
        let new = self.unallocated().into_iter().filter(|index| wanted.contains(index));
        let new = new.map(|index| (index as usize, false)).collect();
        let room = self.check_early(slices).and_then(|()| self.allocate(new, true));
        match room.and_then(|()| self.store_early(slices)) {
            Ok(()) => self.set_full(false),
            Err(error @ Error::OutOfMemory { .. }) => {
                self.refuse_copy(number, error.to_string());
                return Ok(None);
            }
            Err(error) => return Err(error),
        }
        let slices = slices.iter().map(|&index| Ok((index, self.slice(index)?)));
        Ok(Some(self.note_copy(number, slices.collect::<Result<_>>()?)))
    }

    /// The slices of a copy stay without content.
    pub fn refuse_copy(&self, number: u64, reason: String) {
        self.set_full(true);
        self.note_copy(number, Vec::new());
        self.tell(JobEvent::CopyRefused { number, reason });
    }

    /// Reports have the number of this copy from now on, and the step needs the gradients of
    /// `slices`. Returns those that have no content yet.
    fn note_copy(&self, number: u64, slices: Vec<(u32, &Slice<B>)>) -> Vec<u32> {
        let (mut empty, mut begun) = (Vec::new(), Vec::new());
        for (index, slice) in slices {
            match slice.role() {
                Role::Empty => empty.push((index, slice)),
                Role::Copying => begun.push(index),
                Role::Primary | Role::Backup => {}
            }
        }
        let (attempt, ready) = {
            let mut progress = self.progress();
            progress.copies = number;
            progress.waiting += empty.iter().filter(|(_, slice)| slice.group.is_some()).count();
            (progress.attempt, progress.reduced())
        };
        for (index, slice) in empty {
            slice.set_role(Role::Copying);
            begun.push(index);
        }
        if let Some(reduced) = ready {
            // An earlier report had another number.
            self.tell(JobEvent::Ready { attempt, reduced });
        }
        self.changed.send_replace(());
        begun
    }

    /// The number of the last copy that has begun.
    pub fn copies_begun(&self) -> u64 {
        self.progress().copies
    }

    /// Notified when [`Self::missing_reduced`] may have changed, among others.
    pub fn subscribe(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// The slices whose reduced gradient is missing here, by their primary, with the number of
    /// elements that have arrived; and their attempt.
    pub fn missing_reduced(&self) -> (Attempt, ByPrimary) {
        let (attempt, placement) = (self.attempt(), self.placement());
        let mut missing = ByPrimary::new();
        if self.version().is_none() {
            return (attempt, missing);
        }
        for (index, slice) in self.slices() {
            if let Some(arrived) = slice.reduced_elements(attempt) {
                let primary = placement.primary(index as usize);
                missing.entry(primary).or_default().push((index, arrived));
            }
        }
        (attempt, missing)
    }

    /// Stores elements of a slice's reduced gradient from the primary.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; those of [`Self::slice`].
    pub fn store_reduced(
        &self,
        attempt: Attempt,
        index: u32,
        offset: usize,
        bytes: &[u8],
    ) -> Result<()> {
        let slice = self.slice(index)?;
        let stored = slice.store_reduced(attempt, offset, bytes);
        let reduced = self.note(index, stored)?;
        self.finish_reduction(attempt, index, reduced);
        Ok(())
    }
}
