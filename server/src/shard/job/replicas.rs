//! A job with replicas: the slices of which this server is a backup, and placements that change.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering},
};

use tokio::sync::watch;
use zeroshard_proto::{Error, Placement, Result, pb};

use super::{Allocation, Job, Ready, progress::Decided};
#[cfg(test)]
use crate::simulation::{Safeguard, is_missing};
use crate::{
    attempt::Attempt,
    backend::Backend,
    shard::{events::JobEvent, slice::Role},
};

/// Slices by the position of their primary in the placement, with a number of elements.
pub(crate) type ByPrimary = BTreeMap<usize, Vec<(u32, usize)>>;

impl<B: Backend> Job<B> {
    /// The servers of all slices.
    pub(crate) fn placement(&self) -> Arc<Placement> {
        self.placement.read().expect("no holder of the lock panics").clone()
    }

    /// Whether `version` can be read, as far as the other servers matter.
    pub(crate) fn serves(&self, version: u64) -> bool {
        #[cfg(test)]
        if is_missing(Safeguard::Confirmation) {
            return true;
        }
        self.spec.replicas <= 1 || version <= self.served.load(Ordering::Acquire)
    }

    /// All servers have the decisions that lead to `version`.
    pub(crate) fn serve(&self, version: u64) {
        self.served.fetch_max(version, Ordering::AcqRel);
        self.changed.send_replace(());
    }

    /// Keeps the decision that has led to the version at which this server has become a backup: the
    /// other servers that know it may die before all ranks do.
    pub(crate) fn remember(&self, decision: pb::Decision) {
        let (decision, none) = (Arc::new(decision), Ready { slices: Vec::new(), copies: 0 });
        self.progress().last = Some(Decided { decision, reduced: none });
    }

    /// The servers of the slices are those of `placement` from now on, and the open attempt ends.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Invalid`] for a placement of another number of slices;
    /// [`Error::Internal`] if this server is to be the primary of a slice
    /// without content.
    pub(crate) fn new_placement(&self, epoch: u64, placement: Placement) -> Result<()> {
        let attempt = Attempt { epoch, number: 0, ..self.attempt() };
        let runs = self.version().is_some();
        let Self { backend, spec, closed, slices, .. } = self;
        let (backend, tiers) = (&**backend, self.tiers.as_ref());
        let new = Allocation { backend, tiers, spec, closed, slices, populates: true };
        let spaces = new.allocate((&placement, self.server), self.attempt(), runs)?;
        self.spaces.lock().expect("no holder of the lock panics").extend(spaces);
        for (index, is_primary) in placement.slices_of(self.server) {
            let Some(slice) = slices[index].get() else { continue };
            let role = match (slice.role(), is_primary) {
                (Role::Primary | Role::Backup, true) => Role::Primary,
                (Role::Primary | Role::Backup, false) => Role::Backup,
                (Role::Copying | Role::Empty, false) => Role::Empty,
                (Role::Copying | Role::Empty, true) => {
                    let cause = format!("slice {index} has no content on its new primary");
                    return Err(Error::Internal { cause });
                }
            };
            slice.set_role(role);
        }
        self.progress().copies = 0;
        *self.placement.write().expect("no holder of the lock panics") = Arc::new(placement);
        self.open_attempt(attempt, None)
    }

    /// Begins to copy slices. Returns those that have no content yet. From now on the step needs
    /// their reduced gradients.
    ///
    /// # Errors
    /// [`Error::NotHere`] or [`Error::Invalid`] for slices that this server does not hold.
    pub(crate) fn begin_copy(&self, number: u64, slices: &[u32]) -> Result<Vec<u32>> {
        let (mut empty, mut begun) = (Vec::new(), Vec::new());
        for &index in slices {
            let slice = self.slice(index)?;
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
        Ok(begun)
    }

    /// The number of the last copy that has begun.
    pub(crate) fn copies_begun(&self) -> u64 {
        self.progress().copies
    }

    /// Notified when [`Self::missing_reduced`] may have changed, among others.
    pub(crate) fn subscribe(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// The slices whose reduced gradient is missing here, by their primary, with the number of
    /// elements that have arrived; and their attempt.
    pub(crate) fn missing_reduced(&self) -> (Attempt, ByPrimary) {
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
    pub(crate) fn store_reduced(
        &self,
        attempt: Attempt,
        index: u32,
        offset: usize,
        bytes: &[u8],
    ) -> Result<()> {
        let slice = self.slice(index)?;
        let reduced = slice.store_reduced(self.backend(), attempt, offset, bytes)?;
        self.finish_reduction(attempt, index, reduced);
        Ok(())
    }
}
