//! The content of slices that pulls and pins read: one part of the state at one version.

use zeroshard_kernels::Backend;
use zeroshard_model::{Attempt, DType, JobSpec, Result};
use zeroshard_proto::pb::{self, state_part};
use zeroshard_shard::{part::Part, slice::Slice, tier::Array};

use super::{job::Job, part};

/// The version and the part of the slices that a pull or a pin reads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Content {
    pub(crate) version: u64,
    pub(crate) part: Part,
    /// The attempt whose reduced gradient a backup wants.
    pub(crate) attempt: Option<Attempt>,
}

impl Content {
    /// The content that a pull requests.
    ///
    /// # Errors
    /// [`Error::Invalid`](zeroshard_model::Error::Invalid) for an unknown part.
    pub(super) fn of(request: &pb::PullRequest, job: &JobSpec) -> Result<Self> {
        // All groups have the same state tensors.
        let part = part::of(request.part.as_ref(), &job.groups[0])?;
        let number = match request.part.as_ref().and_then(|part| part.part.as_ref()) {
            Some(state_part::Part::GradientSum(sum)) => sum.attempt,
            _ => None,
        };
        let (epoch, version) = (request.epoch, request.version);
        let attempt = number.map(|number| Attempt { epoch, step: version, number });
        Ok(Self { version, part, attempt })
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
            None if self.part != Part::GradientSum && !job.serves(self.version) => Ok(None),
            None => slice.read(self.part, name, self.version),
        }
    }
}

/// The additional memory that a step needs for `slice` if `part` of it is held.
pub(super) fn bytes_of<B: Backend>(job: &Job<B>, slice: &Slice<B>, part: Part) -> u64 {
    let dtype = match part {
        Part::Parameters => job.spec.manifest.tensors()[slice.spec.tensor].dtype,
        Part::Master | Part::State(_) | Part::GradientSum => DType::F32,
    };
    (slice.shape_of(part).numel(slice.spec.numel) * dtype.size()) as u64
}
