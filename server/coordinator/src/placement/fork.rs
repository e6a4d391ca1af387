//! Fork: the sources of the slices of a job that continues from another job.
//!
//! A server copies the slices while it opens the job, from itself or from another server, at
//! exactly one version of the predecessor. CreateJob is therefore answered when the copy is
//! complete, and the predecessor is not needed after that. If the predecessor makes a step or ends
//! earlier, the creation fails with a typed error.

use std::{collections::HashMap, sync::Arc};

use zeroshard_model::{Fork, JobSpec, Placement, SliceSpec};

use crate::vocabulary::ids::ServerId;

/// A fork, with the spec and the placement of the predecessor.
#[derive(Debug, Clone, PartialEq)]
pub struct Source {
    pub fork: Arc<Fork>,
    pub spec: Arc<JobSpec>,
    pub placement: Arc<Placement>,
}

/// A copy of consecutive elements of a slice of the predecessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SliceCopy {
    /// The slice of the new job.
    pub slice: usize,
    /// The first element, within `slice`.
    pub offset: usize,
    /// The slice of the predecessor.
    pub source: usize,
    /// The first element, within `source`.
    pub source_offset: usize,
    /// The number of elements; never 0.
    pub length: usize,
    /// `true` if the optimizer state and the number of applied steps are copied as well.
    pub state: bool,
    /// `true` if the averages and the number of steps that have counted for them are copied.
    pub averages: bool,
}

impl Source {
    /// The copies into the slices that `placement` assigns to `server`, of a job of `spec`.
    pub fn copies(
        &self,
        spec: &JobSpec,
        placement: &Placement,
        server: ServerId,
    ) -> Vec<SliceCopy> {
        let tensors = self.spec.manifest.tensors().iter().enumerate();
        let by_name: HashMap<&str, usize> =
            tensors.map(|(index, tensor)| (tensor.name.as_str(), index)).collect();
        let mut copies = Vec::new();
        for (slice, _) in placement.slices_of(server) {
            let tensor = spec.manifest.tensor_of(slice);
            if let Some(&before) = by_name.get(tensor.name.as_str())
                && self.spec.manifest.tensors()[before].shape == tensor.shape
            {
                let state = self.carries_state(spec, slice, before);
                let trains = self.spec.optimizer_of(before).is_some()
                    && spec.optimizer_of_slice(slice).is_some();
                let averages = trains
                    && !self.fork.fresh_state
                    && self.spec.average_names() == spec.average_names();
                let cut = &spec.manifest.slices()[slice];
                self.add_copies((slice, cut), before, (state, averages), &mut copies);
            }
        }
        copies
    }

    /// Returns whether the optimizer state of the slice is copied from the predecessor's tensor
    /// `before`.
    fn carries_state(&self, spec: &JobSpec, slice: usize, before: usize) -> bool {
        let both = self.spec.optimizer_of(before).zip(spec.optimizer_of_slice(slice));
        let Some((old, new)) = both.filter(|_| !self.fork.fresh_state) else { return false };
        new.state().iter().all(|name| old.state().contains(name))
            && new.scalar_state() == old.scalar_state()
    }

    /// Adds the copies into slice number `slice`, which is `cut`. The slices of the predecessor's
    /// tensor may begin at other elements.
    fn add_copies(
        &self,
        (slice, cut): (usize, &SliceSpec),
        before: usize,
        (state, averages): (bool, bool),
        copies: &mut Vec<SliceCopy>,
    ) {
        let numbers = self.spec.manifest.slices_of(before);
        let cuts = &self.spec.manifest.slices()[numbers.clone()];
        let first = cuts.partition_point(|other| other.offset + other.numel <= cut.offset);
        let end = cut.offset + cut.numel;
        for (source, other) in numbers.zip(cuts).skip(first) {
            if other.offset >= end {
                break;
            }
            let from = cut.offset.max(other.offset);
            let to = end.min(other.offset + other.numel);
            copies.push(SliceCopy {
                slice,
                offset: from - cut.offset,
                source,
                source_offset: from - other.offset,
                length: to - from,
                state,
                averages,
            });
        }
    }
}
