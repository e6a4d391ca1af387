//! The content of slices that pulls and pins read: one part of the state at one version.

use zeroshard_kernels::Backend;
use zeroshard_model::{Attempt, DType, Result};
use zeroshard_proto::pb;
use zeroshard_shard::{slice::Slice, state_selector::StateSelector, tier::Array};

use super::{job::Job, state_selector};

/// The version and the part of the slices that a pull or a pin reads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Content {
    pub(crate) version: u64,
    pub(crate) part: StateSelector,
    /// The attempt whose reduced gradient a backup wants.
    pub(crate) attempt: Option<Attempt>,
}

impl Content {
    /// The content that a pull requests of a slice.
    ///
    /// # Errors
    /// Those of [`state_selector::of`].
    pub(super) fn of<B: Backend>(
        request: &pb::PullRequest,
        job: &Job<B>,
        slice: &Slice<B>,
    ) -> Result<Self> {
        let part = state_selector::of(request.part.as_ref(), &job.spec, slice.spec.tensor)?;
        Ok(Self { version: request.version, part, attempt: attempt_of(request) })
    }

    /// The content of a slice; `None` if it is not available yet.
    pub(crate) fn read<B: Backend>(
        self,
        job: &Job<B>,
        slice: &Slice<B>,
    ) -> Result<Option<Array<B>>> {
        let name = &job.spec.name;
        match self.attempt {
            Some(attempt) => slice.reduced_of(name, attempt),
            None if self.part != StateSelector::GradientSum && !job.serves(self.version) => {
                Ok(None)
            }
            None => slice.read(self.part, name, self.version),
        }
    }
}

/// The attempt whose reduced gradient a pull requests, if it is a backup's.
pub(super) fn attempt_of(request: &pb::PullRequest) -> Option<Attempt> {
    match request.part.as_ref()?.part.as_ref()? {
        pb::state_selector::Part::GradientSum(sum) => {
            let (epoch, step) = (request.epoch, request.version);
            sum.attempt.map(|number| Attempt { epoch, step, number })
        }
        _ => None,
    }
}

/// The additional memory that a step needs for `slice` if `part` of it is held.
pub(super) fn bytes_of<B: Backend>(job: &Job<B>, slice: &Slice<B>, part: StateSelector) -> u64 {
    let dtype = match part {
        StateSelector::Parameters => job.spec.manifest.tensors()[slice.spec.tensor].dtype,
        StateSelector::Master | StateSelector::State(_) | StateSelector::GradientSum => DType::F32,
    };
    (slice.shape_of(part).numel(slice.spec.numel) * dtype.size()) as u64
}
