//! Applies a captured step again, to one slice at a time and on any device.
//!
//! It does what a server does, with the same functions: a slice is read as from a checkpoint, gets
//! the contributions of the ranks, and makes the step. It neither knows nor needs a job, other
//! slices or a clock.

use bytes::Bytes;
use zeroshard_kernels::Backend;
use zeroshard_model::{
    Attempt, Error, JobSpec, Result, checkpoint::Part, geometry::SliceContributors,
};

use crate::{
    budget::Budget,
    device::{Device, Home},
    round::{Chunk, Contributed},
    senders::{self, Sent},
    slice::{Apply, CapturedSlice, Role, Slice, Step},
    tier::Places,
};

/// A step to be applied again.
#[derive(Clone, Copy)]
pub struct Replay<'a> {
    /// The job.
    pub spec: &'a JobSpec,
    /// The step, which takes version `step` to `step + 1`.
    pub step: u64,
    /// What the step applies; `None`: it is skipped.
    pub apply: Option<Apply<'a>>,
}

/// What a slice has become.
#[derive(Debug)]
pub struct Replayed {
    /// The hash of the slice before the step.
    pub before: [u8; 32],
    /// The figures of each rank's contribution.
    pub figures: Vec<Contributed>,
    /// The sum of squares of the reduced gradient.
    pub sum_of_squares: f64,
    /// The hash of the slice after the step.
    pub after: [u8; 32],
}

impl Replay<'_> {
    /// Applies the step to slice number `index`, whose arrays are then in the memory of `device`.
    ///
    /// # Errors
    /// [`Error::Refused`] and [`Error::Invalid`] if `captured` is not a complete step of such a
    /// slice; [`Error::OutOfMemory`]; [`Error::Device`].
    pub fn run<B: Backend>(
        &self,
        device: &Device<B>,
        index: u32,
        captured: &CapturedSlice,
    ) -> Result<Replayed> {
        let Self { spec, step, apply } = *self;
        if let Some(apply) = &apply {
            spec.validate_step(apply.groups)?;
        }
        let slice = self.restored(device, index, captured)?;
        let before = slice.digest(&spec.name, step)?;
        let sum_of_squares = self.reduce(&slice, index, captured)?;
        let figures = slice.contributions();
        let next = Attempt { step: step + 1, ..self.attempt() };
        slice.step(index, &Step { apply, next, absent: &[] })?;
        let after = slice.digest(&spec.name, next.step)?;
        Ok(Replayed { before, figures, sum_of_squares, after })
    }

    fn attempt(&self) -> Attempt {
        Attempt::first(1, self.step)
    }

    /// The slice as it was before the step.
    fn restored<B: Backend>(
        &self,
        device: &Device<B>,
        index: u32,
        captured: &CapturedSlice,
    ) -> Result<Slice<B>> {
        let manifest = &self.spec.manifest;
        let Some(cut) = manifest.slices().get(index as usize) else {
            let expected =
                format!("less than the job's number of slices, {}", manifest.slices().len());
            return Err(Error::invalid("slice", index, expected));
        };
        let home = Home { device, places: Places::default(), arena: None };
        let contributions = self.spec.contributions(cut.tensor);
        let role = Role::Primary;
        let slice =
            Slice::allocate(home, self.spec, index as usize, &contributions, self.attempt(), role)?;
        let found = captured.state.iter().map(Bytes::len);
        if slice.group.is_none() || !found.eq(slice.state_bytes()) {
            return Err(Error::refused(format!(
                "the captured state of slice {index} is not that of tensor {:?}, so the capture is \
                 incomplete; capture another step",
                manifest.tensors()[cut.tensor].name
            )));
        }
        for (position, bytes) in captured.state.iter().enumerate() {
            let part = position.checked_sub(1).map_or(Part::Values, Part::State);
            slice.restore(part, 0, bytes)?;
        }
        slice.set_applied(captured.applied);
        slice.publish(self.step)?;
        Ok(slice)
    }

    /// Adds the contributions. Returns the sum of squares of the reduced gradient.
    fn reduce<B: Backend>(
        &self,
        slice: &Slice<B>,
        index: u32,
        captured: &CapturedSlice,
    ) -> Result<f64> {
        let (attempt, parked) = (self.attempt(), Budget::new(u64::MAX));
        let mut reduced = None;
        for chunk in &captured.chunks {
            let all = &slice.pushers;
            let of = senders::contributors_of(self.spec, index, all, chunk.rank, Sent::Gradient)?;
            check_bounds(index, of, chunk)?;
            let (_, complete) = slice.contribute(attempt, chunk, &parked, || Ok(()))?;
            reduced = reduced.or(complete);
        }
        for &rank in &captured.absent {
            reduced = reduced.or(slice.absent(attempt, rank, || Ok(()))?);
        }
        let reduced = reduced.ok_or_else(|| {
            let rank = slice.missing_rank().unwrap_or_default();
            Error::refused(format!(
                "the captured gradient of slice {index} lacks elements of rank {rank}, so the \
                 capture is incomplete; capture another step"
            ))
        })?;
        Ok(reduced.sum_of_squares)
    }
}

/// Checks that a contribution has whole elements, within those of its rank.
fn check_bounds(index: u32, of: &SliceContributors, chunk: &Chunk) -> Result<()> {
    let (bytes, numel) = (chunk.bytes.len(), of.elements.numel());
    let elements = bytes / chunk.dtype.size();
    let fits = chunk.offset.checked_add(elements).is_some_and(|end| end <= numel);
    if fits && bytes % chunk.dtype.size() == 0 {
        return Ok(());
    }
    Err(Error::refused(format!(
        "the captured gradient of slice {index} has {bytes} bytes of rank {} from element {} on, \
         of {numel} elements; capture another step",
        chunk.rank, chunk.offset
    )))
}

#[cfg(test)]
#[path = "replay_tests.rs"]
mod tests;
