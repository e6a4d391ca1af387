//! Captures a step of a job's slices, so that it can be applied again elsewhere.

use std::sync::Arc;

use rayon::prelude::*;
use zeroshard_kernels::Backend;
use zeroshard_model::{Error, Result};

use super::Job;
use crate::{
    budget::Budget,
    slice::{CapturedSlice, Slice},
};

/// Captured slices by index; `None` for one that does not train.
pub type CapturedSlices = Vec<(u32, Option<CapturedSlice>)>;

impl<B: Backend, D: Send + Sync> Job<B, D> {
    /// The slices keep the contributions to the attempts that begin from now on, within a budget,
    /// so that `step` and later ones can be captured.
    ///
    /// # Errors
    /// [`Error::NotHere`] for a slice of which another server is the primary;
    /// [`Error::VersionGone`] if the step has begun. Nothing is kept then.
    pub fn begin_capture(&self, slices: &[u32], step: u64, budget: &Arc<Budget>) -> Result<()> {
        let slices: Vec<_> =
            slices.iter().map(|&index| self.primary_slice(index)).collect::<Result<_>>()?;
        slices.iter().for_each(|slice| slice.begin_capture(budget));
        // From the decision about the previous step on, slices begin the step one after the other.
        let current = self.attempt().step;
        if current < step {
            return Ok(());
        }
        slices.iter().for_each(|slice| slice.end_capture());
        Err(Error::VersionGone { job: self.spec.name.clone(), version: step, current })
    }

    /// The slices keep nothing more.
    pub fn end_capture(&self, slices: &[u32]) {
        let slices = slices.iter().filter_map(|&index| self.slice(index).ok());
        slices.for_each(Slice::end_capture);
    }

    /// Captures the open step, which is about to be decided.
    ///
    /// # Errors
    /// Those of [`Slice::capture`]; [`Error::NotHere`] if a slice has moved.
    pub fn capture(
        &self,
        slices: &[u32],
        step: u64,
        budget: &Arc<Budget>,
    ) -> Result<CapturedSlices> {
        let capture = |&index: &u32| {
            let slice = self.primary_slice(index)?;
            let captured = slice.group.map(|_| slice.capture(&self.spec.name, step, budget));
            Ok((index, captured.transpose()?))
        };
        slices.par_iter().map(capture).collect()
    }

    /// The hashes of slices at the version that the last decision has made.
    ///
    /// # Errors
    /// Those of [`Slice::digest`].
    pub fn digests(&self, slices: &[u32], version: u64) -> Result<Vec<[u8; 32]>> {
        let digest = |&index: &u32| self.slice(index)?.digest(&self.spec.name, version);
        slices.par_iter().map(digest).collect()
    }
}
