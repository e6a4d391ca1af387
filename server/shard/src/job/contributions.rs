//! Records who contributed to the last steps: how large each rank's gradient of each tensor was,
//! its hash, and when it arrived. Operators look here for the gradient that spoiled a step.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Mutex,
    time::Duration,
};

use zeroshard_kernels::Backend;
use zeroshard_loops::tally::Tally;
use zeroshard_model::{Error, Result};

use super::arrivals::Arrivals;
use crate::slice::Slice;

/// The maximum number of contributions in all recorded steps of a job. They take about 4 MiB. A
/// single step with more is not recorded.
const MAX_RECORDS: usize = 1 << 16;

/// The maximum number of recorded steps.
const MAX_STEPS: usize = 1000;

/// The contributions to one step, in the slices for which this server was the primary.
#[derive(Debug, Clone, Default)]
pub struct StepContributions {
    /// The step.
    pub step: u64,
    /// The tallies by tensor and rank, summed over slices. In a job with groups, a rank stands for
    /// its share of the group's sum.
    pub figures: BTreeMap<(u32, u32), Tally>,
    /// The arrival of each rank's last gradient, as the time since this server received the first
    /// gradient of the attempt.
    pub arrived: BTreeMap<u32, Duration>,
    /// `true` if the step has too many contributions, so that they were not recorded.
    is_too_large: bool,
}

/// The contributions to the last steps.
#[derive(Debug, Default)]
pub(super) struct Contributions {
    steps: VecDeque<StepContributions>,
    /// The number of contributions in these steps.
    records: usize,
}

/// Collects the contributions to a step, while threads apply its slices.
#[derive(Debug)]
pub(super) struct Collected(Mutex<StepContributions>);

impl Collected {
    pub(super) fn new(step: u64, arrivals: Arrivals) -> Self {
        let arrived = arrivals.by_rank();
        Self(Mutex::new(StepContributions { step, arrived, ..StepContributions::default() }))
    }

    /// Adds the contributions to a slice. Call this before the slice makes its step, which drops
    /// them.
    pub(super) fn add<B: Backend>(&self, slice: &Slice<B>) {
        let of_slice = slice.contributions();
        let mut all = self.0.lock().expect("no holder of the lock panics");
        for one in of_slice {
            let key = (slice.spec.tensor as u32, one.rank);
            if all.figures.len() >= MAX_RECORDS && !all.figures.contains_key(&key) {
                all.is_too_large = true;
                return;
            }
            all.figures.entry(key).or_default().add(one.tally);
        }
    }
}

impl Contributions {
    /// Adds the contributions to a step.
    pub(super) fn push(&mut self, step: Collected) {
        let mut step = step.0.into_inner().expect("no holder of the lock panics");
        if step.is_too_large {
            step.figures.clear();
        }
        self.records += step.figures.len();
        self.steps.push_back(step);
        while self.records > MAX_RECORDS || self.steps.len() > MAX_STEPS {
            self.records -= self.steps.pop_front().map_or(0, |first| first.figures.len());
        }
    }

    /// Returns the contributions to `step` of a job.
    ///
    /// # Errors
    /// [`Error::Refused`] if the step has not been decided yet, if it is not recorded any more, or
    /// if it has too many contributions.
    pub(super) fn of(&self, job: &str, step: u64) -> Result<StepContributions> {
        let Some(found) = self.steps.iter().find(|of| of.step == step) else {
            let refusal = match (self.steps.front(), self.steps.back()) {
                (Some(first), Some(last)) => format!(
                    "the contributions to step {step} of job {job:?} are not recorded on this \
                     server; it has those to steps {} to {}",
                    first.step, last.step
                ),
                _ => format!(
                    "the contributions to step {step} of job {job:?} are not recorded on this \
                     server, which has decided no step of the job yet"
                ),
            };
            return Err(Error::refused(refusal));
        };
        if found.is_too_large {
            return Err(Error::refused(format!(
                "step {step} of job {job:?} has more than {MAX_RECORDS} contributions on this \
                 server, which does not record as many"
            )));
        }
        Ok(found.clone())
    }
}
