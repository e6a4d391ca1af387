//! Lets readers follow a job, and receive what each step has changed. The slices record changes as
//! long as somebody asks for them.

use std::sync::{Arc, atomic::Ordering};

use zeroshard_kernels::Backend;
use zeroshard_model::{Error, Result, View};

use super::{Job, followers::MOST_BOXES};
use crate::{
    budget::Budget,
    slice::{Slice, Unhashed},
};

impl<B: Backend, D: Send + Sync> Job<B, D> {
    /// Notes that somebody follows a tensor in `view`.
    ///
    /// # Errors
    /// [`Error::Refused`] if too many other boxes of the tensor are followed.
    pub fn note_follower(&self, tensor: usize, view: &View) -> Result<()> {
        match self.followers.ask(tensor, view, self.host.now()) {
            true => Ok(()),
            false => Err(Error::refused(format!(
                "{MOST_BOXES} boxes of tensor {:?} are followed, which is the maximum; follow one \
                 of these boxes or the whole tensor, or wait until nobody has asked for one of \
                 them for a minute",
                self.spec.manifest.tensors()[tensor].name
            ))),
        }
    }

    /// Notes that reader number `id` asks for changes. `version`: the one that it has. Readers that
    /// have no number (0) are not counted.
    pub fn note_reader(&self, id: u64, version: Option<u64>) {
        if id != 0 {
            self.followers.note(id, version, self.host.now());
        }
    }

    /// Returns the readers that have asked lately: the number of each, and how many versions it is
    /// behind the newest one; `None`: it has no version yet.
    pub fn behind(&self) -> Vec<(u64, Option<u64>)> {
        let newest = self.readable_version().unwrap_or_default();
        let readers = self.followers.readers(self.host.now()).into_iter();
        let lag = |had: u64| newest.saturating_sub(had);
        readers.map(|(id, version)| (id, version.map(lag))).collect()
    }

    /// Slice number `index`, whose content this server has as its primary or as a backup.
    ///
    /// # Errors
    /// Those of [`Self::slice`].
    pub fn followed_slice(&self, index: u32) -> Result<&Slice<B>> {
        match self.slice(index)? {
            slice if slice.role().has_content() => Ok(slice),
            _ => Err(Error::NotHere { job: self.spec.name.clone(), slice: index }),
        }
    }

    /// Records the changes of a slice in `view` from now on. If this returns values, the caller
    /// must hash them: until then [`crate::slice::Slice::changes`] knows nothing. `budget` is the
    /// server's, and one job takes at most three quarters of it.
    ///
    /// # Errors
    /// Those of [`Self::followed_slice`] and of [`crate::slice::Slice::follow`].
    pub fn follow(
        &self,
        index: u32,
        view: &View,
        budget: &Arc<Budget>,
    ) -> Result<Option<Unhashed<B>>> {
        self.followed_slice(index)?.follow(view, self.followers.budget(budget))
    }

    /// Drops the changes in each view that nobody has asked for lately.
    pub fn end_follows(&self) {
        for (tensor, view) in self.followers.ended(|| self.host.now()) {
            let slices = self.spec.manifest.slices_of(tensor);
            let held = slices.filter_map(|slice| self.slice(slice as u32).ok());
            held.for_each(|slice| slice.unfollow(&view));
        }
    }

    /// Returns the newest version that this server can serve for all of its slices.
    pub fn readable_version(&self) -> Option<u64> {
        let version = self.version()?;
        match self.serves(version) {
            true => Some(version),
            false => Some(version.min(self.served.load(Ordering::Acquire))),
        }
    }
}
