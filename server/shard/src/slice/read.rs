//! Reading a slice: a complete version of it.

use std::sync::Arc;

use std::borrow::Cow;

use bytes::Bytes;
use zeroshard_kernels::Backend;
use zeroshard_model::{
    AppliedSteps, Attempt, DType, Elements, Error, Result, geometry::blocks::BLOCK,
    optimizer::StateShape,
};

use super::{Inner, Slice, factors};
use crate::{state_selector::StateSelector, tier::Array};

/// The elements that are hashed at once: whole blocks.
const PIECE: usize = 4 * BLOCK;

impl<B: Backend> Slice<B> {
    /// A part of the slice at `version`, which the caller may hold for any time; `None` if the
    /// version, or its complete gradient, is not available yet.
    ///
    /// # Errors
    /// [`Error::VersionGone`] if a later version has replaced it; [`Error::OutOfMemory`] if the
    /// next step may be decided at any moment, and there is not enough memory for its result beside
    /// this version.
    pub fn read(&self, part: StateSelector, job: &str, version: u64) -> Result<Option<Array<B>>> {
        if self.version().is_none_or(|current| current < version) {
            return Ok(None);
        }
        let mut inner = self.lock();
        self.check_version(job, version)?;
        inner.check()?;
        let is_reported = inner.is_reported();
        let inner = &mut *inner;
        let buffer = match part {
            StateSelector::Parameters => inner.published.as_mut().unwrap_or(&mut inner.master),
            StateSelector::Master => &mut inner.master,
            StateSelector::State(position) => &mut inner.state[position],
            StateSelector::GradientSum => return inner.gradient_sum(&self.backend),
        };
        let held = buffer.current().clone();
        if is_reported {
            inner.reserve_versions(&self.backend)?;
        }
        Ok(Some(held))
    }

    /// The reduced gradient of `attempt` for a backup; `None` until every rank has contributed.
    ///
    /// # Errors
    /// Those of [`Attempt::refusal`] if the attempt has ended; [`Error::OutOfMemory`].
    pub fn reduced_of(&self, job: &str, attempt: Attempt) -> Result<Option<Array<B>>> {
        let mut inner = self.lock();
        match inner.attempt.cmp(&attempt) {
            std::cmp::Ordering::Less => Ok(None),
            std::cmp::Ordering::Equal => inner.gradient_sum(&self.backend),
            std::cmp::Ordering::Greater => Err(attempt.refusal(job, inner.attempt)),
        }
    }

    /// Elements of the slice from a buffer of [`Self::read`], as little-endian bytes of `dtype`.
    /// State tensors of another shape are repeated to the slice's.
    ///
    /// # Errors
    /// Those of [`Array::read`].
    pub fn values(
        &self,
        part: StateSelector,
        array: &Array<B>,
        elements: impl Into<Elements>,
        dtype: DType,
    ) -> Result<Bytes> {
        match self.shape_of(part) {
            StateShape::Elements => array.read(&self.backend, elements, dtype),
            factor => factors::repeat(&*self.backend, factor, array, &elements.into(), dtype),
        }
    }

    /// The backend that holds the slice.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The shape of a part of the slice.
    pub fn shape_of(&self, part: StateSelector) -> StateShape {
        match part {
            StateSelector::State(position) => {
                self.state_shapes.get(position).copied().unwrap_or(StateShape::Absent)
            }
            StateSelector::Parameters | StateSelector::Master | StateSelector::GradientSum => {
                StateShape::Elements
            }
        }
    }

    /// The state tensors of the optimizer that the slice has, by name, as parts.
    pub fn state_parts(&self) -> impl Iterator<Item = (Cow<'static, str>, StateSelector)> {
        let named = self.state_names.iter().enumerate();
        let parts =
            named.map(|(position, name)| (Cow::Borrowed(*name), StateSelector::State(position)));
        parts.filter(|(_, part)| self.shape_of(*part) != StateShape::Absent)
    }

    /// The applied steps at `version`.
    ///
    /// # Errors
    /// [`Error::VersionGone`].
    pub fn applied(&self, job: &str, version: u64) -> Result<AppliedSteps> {
        let inner = self.lock();
        self.check_version(job, version)?;
        Ok(inner.applied)
    }

    /// BLAKE3 of size, applied steps, master weights, optimizer state and averages at `version`.
    pub fn digest(&self, job: &str, version: u64) -> Result<[u8; 32]> {
        let (applied, buffers) = {
            let mut inner = self.lock();
            self.check_version(job, version)?;
            inner.check()?;
            let inner = &mut *inner;
            let is_reported = inner.is_reported();
            let mut buffers = Vec::with_capacity(1 + inner.state.len());
            let parts = [&inner.master].into_iter().chain(&inner.state);
            buffers.extend(parts.map(|buffer| buffer.current().clone()));
            if is_reported {
                inner.reserve_versions(&self.backend)?;
            }
            (inner.applied, buffers)
        };
        let mut hasher = self.hasher(&applied);
        for array in &buffers {
            let (numel, dtype) = (array.numel(&self.backend), array.dtype(&self.backend));
            for start in (0..numel).step_by(PIECE) {
                let range = start..numel.min(start + PIECE);
                hasher.update(&array.read(&self.backend, range, dtype)?);
            }
        }
        Ok(*hasher.finalize().as_bytes())
    }

    /// A hash that contains the size of the slice and its applied steps. Master weights, optimizer
    /// state and averages follow.
    pub(super) fn hasher(&self, applied: &AppliedSteps) -> blake3::Hasher {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(self.spec.numel as u64).to_le_bytes());
        hasher.update(&applied.count.to_le_bytes());
        applied.scalar_state.iter().for_each(|value| _ = hasher.update(&value.to_le_bytes()));
        if self.average_parts().next().is_some() {
            hasher.update(&applied.averaged.to_le_bytes());
        }
        hasher
    }

    pub(super) fn check_version(&self, job: &str, version: u64) -> Result<()> {
        match self.version() {
            Some(current) if current == version => Ok(()),
            _ => Err(self.gone(job, version)),
        }
    }

    fn gone(&self, job: &str, version: u64) -> Error {
        let current = self.version().unwrap_or_default();
        Error::VersionGone { job: job.to_owned(), version, current }
    }
}

impl<B: Backend> Inner<B> {
    /// # Errors
    /// The failure of a disk or device that has left undefined elements in the slice.
    pub(super) fn check(&self) -> Result<()> {
        self.broken.clone().map_or(Ok(()), Err)
    }

    /// Remembers a failure that leaves undefined elements in the slice.
    pub(super) fn note<T>(&mut self, done: Result<T>) -> Result<T> {
        if let Err(error @ (Error::Storage { .. } | Error::Device { .. })) = &done {
            self.broken.get_or_insert_with(|| error.clone());
        }
        done
    }

    /// The reduced gradient, zeros if no rank has one; `None` until every rank has contributed.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    fn gradient_sum(&mut self, backend: &B) -> Result<Option<Array<B>>> {
        let Some(open) = self.open.as_ref().filter(|open| open.round.is_complete()) else {
            return Ok(None);
        };
        let sum = open.sum.current();
        if !open.round.is_absent_everywhere() {
            if self.master.current().is_read() && self.can_rotate(backend) {
                // The next version takes the place of the gradient.
                let mut copy = sum.another(backend)?;
                copy.copy_from(backend, sum)?;
                return Ok(Some(copy));
            }
            let held = sum.clone();
            if open.is_reported {
                self.reserve_versions(backend)?;
            }
            return Ok(Some(held));
        }
        let numel = sum.numel(backend);
        let zeros = backend.allocate(DType::F32, numel);
        let zeros = zeros.map_err(|failure| failure.of("a gradient of zeros that is read"))?;
        Ok(Some(Array::Memory(Arc::new(zeros))))
    }
}
