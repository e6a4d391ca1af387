//! The running averages of a slice: state tensors behind those of its optimizer.

use std::{
    borrow::Cow,
    sync::{Arc, Weak},
};

use zeroshard_kernels::{Backend, weight_of};
use zeroshard_model::{JobSpec, Result, RunningAverage, average::AVERAGE_PARTS, checkpoint::Part};

use super::{Inner, Slice, versioned::in_memory};
use crate::state_selector::StateSelector;

/// The averages of a slice that takes gradients.
pub(super) struct Averages {
    of: Arc<[RunningAverage]>,
    /// The position of their first state tensor.
    first: usize,
    /// A skipped step does not count.
    skip: bool,
}

impl Averages {
    /// The averages of a slice of `job` whose optimizer has this number of state tensors. `trains`:
    /// it takes gradients.
    pub(super) fn of(job: &JobSpec, trains: bool, state: usize) -> Self {
        let of = if trains { job.averages.clone() } else { Arc::default() };
        Self { of, first: state, skip: job.averages_skip }
    }

    /// The number of their state tensors.
    pub(super) fn parts(&self) -> usize {
        AVERAGE_PARTS * self.of.len()
    }
}

impl<B: Backend> Slice<B> {
    /// The state tensors of the averages, by name, as parts.
    pub fn average_parts(&self) -> impl Iterator<Item = (Cow<'static, str>, StateSelector)> {
        let names = self.averages.of.iter().flat_map(RunningAverage::parts).map(Cow::Owned);
        names.zip((self.averages.first..).map(StateSelector::State))
    }

    /// Returns whether a part of a checkpoint is an average, and this job has none.
    pub(super) fn is_dropped_average(&self, part: Part) -> bool {
        let Averages { of, first, .. } = &self.averages;
        self.group.is_some()
            && of.is_empty()
            && matches!(part, Part::State(position) if position >= *first)
    }

    /// The averages begin with the current values, unless some steps have counted for them already.
    ///
    /// # Errors
    /// Those of [`super::versioned::Versioned::next`].
    pub(super) fn begin_averages(&self, inner: &mut Inner<B>) -> Result<()> {
        if inner.applied.averaged > 0 || !self.role().has_content() {
            return Ok(());
        }
        (0..self.averages.of.len()).try_for_each(|number| self.move_average(inner, number, 1.0))
    }

    /// Counts a step for the averages, and updates those that it is the turn of. `applied`: the
    /// step was not skipped.
    ///
    /// # Errors
    /// Those of [`Self::step`].
    pub(super) fn average(&self, inner: &mut Inner<B>, applied: bool) -> Result<()> {
        let Averages { of, skip, .. } = &self.averages;
        if of.is_empty() || !self.role().takes_gradients() || *skip && !applied {
            return Ok(());
        }
        inner.applied.averaged += 1;
        for (number, average) in of.iter().enumerate() {
            if let Some(update) = average.update(inner.applied.averaged) {
                self.move_average(inner, number, weight_of(average, update))?;
                // What a checkpoint holds is not the current version any more.
                inner.hold = Weak::new();
            }
        }
        Ok(())
    }

    /// Moves an average by the fraction `weight` towards the master weights.
    fn move_average(&self, inner: &mut Inner<B>, number: usize, weight: f64) -> Result<()> {
        let first = self.averages.first + AVERAGE_PARTS * number;
        let [high, low] = &mut inner.state[first..first + AVERAGE_PARTS] else {
            unreachable!("an average has this number of parts")
        };
        let backend = &*self.backend;
        let average = [high, low];
        let master = inner.master.current();
        let Some(steps) = self.tiers.as_ref().and_then(|tiers| tiers.steps()) else {
            let [high, low] = average;
            let average = [in_memory(high.next(backend)?), in_memory(low.next(backend)?)];
            let master = master.memory().expect("all arrays are in memory");
            return Ok(backend.average(weight, master, average)?);
        };
        average.iter().try_for_each(|array| array.settle(backend))?;
        inner.master.settle(backend)?;
        let [high, low] = average;
        let average = [high.next(backend)?, low.next(backend)?];
        steps.average(backend, weight, (self.spec.numel, master), average)
    }
}
