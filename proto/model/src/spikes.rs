//! Spikes: a job judges each step by the steps before it, and a step with a far larger gradient
//! norm or loss is a spike.
//!
//! [`RecentSteps`] is a pure function of earlier decisions. Servers and checkpoints keep it, so the
//! next coordinator judges a step exactly as this one would have.

use std::fmt;

use crate::{Error, Result};

/// The largest window of a median.
const MAX_WINDOW: u32 = 1000;

/// The maximum number of spikes that a limit can count.
const MAX_LIMIT: u32 = 100;

/// When a step counts as a spike, and what the job does then.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SpikePolicy {
    /// What happens to the step and the job.
    pub action: SpikeAction,
    /// A step is a spike if its gradient norm exceeds the median by this factor, which is greater
    /// than 1. A median of 0 allows any norm. `None`: the job does not compare norms.
    pub norm_factor: Option<f64>,
    /// The same factor for the mean loss over the ranks. A median that is not positive
    /// allows any loss. `None`: the job does not compare losses.
    pub loss_factor: Option<f64>,
    /// The median covers this many applied steps. The job judges no step before it has made as
    /// many.
    pub window: u32,
    /// A step is a spike if it completes this many steps in a row with inf or NaN. 0: the job does
    /// not count them.
    pub nonfinite_steps: u32,
    /// At the next spike after this many within the last `limit_batches` batches, the job stops.
    pub limit: u32,
    /// The number of batches within which `limit` counts spikes.
    pub limit_batches: u64,
}

/// What a job does after a spike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpikeAction {
    /// The step is skipped.
    Skip,
    /// The job returns to the newest checkpoint that is at least `steps` back. It skips the batches
    /// that the last `steps` steps used, including the spike's.
    Rewind {
        /// The number of steps, at least 1.
        steps: u64,
    },
    /// The job fails with an error that describes the spike, and keeps its checkpoints.
    Stop,
}

/// Everything that a policy on spikes needs to know about earlier steps.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RecentSteps {
    /// The gradient norms of the last applied steps, oldest first.
    pub norms: Vec<f64>,
    /// The losses of these steps. A step without a loss has no entry.
    pub losses: Vec<f64>,
    /// The number of steps in a row with inf or NaN.
    pub nonfinite: u32,
    /// The batches of the last spikes, ascending.
    pub spikes: Vec<u64>,
}

/// The figures of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepFigures {
    /// The norm of the gradient; not finite after an overflow.
    pub norm: f64,
    /// The mean loss of the ranks, if each of them has passed one.
    pub loss: Option<f64>,
    /// The number of its batch.
    pub batch: u64,
}

/// A step that is a spike.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spike {
    /// The reason.
    pub cause: SpikeCause,
    /// `true` if the job must stop, because it has reached its limit.
    pub is_over_limit: bool,
}

/// The reason why a step is a spike.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SpikeCause {
    /// The gradient norm is too large.
    Norm {
        /// The norm.
        norm: f64,
        /// The median of earlier norms.
        median: f64,
    },
    /// The loss is too large.
    Loss {
        /// The loss.
        loss: f64,
        /// The median of earlier losses.
        median: f64,
    },
    /// Too many steps in a row had inf or NaN.
    NotFinite {
        /// Their number.
        steps: u32,
    },
}

impl SpikePolicy {
    /// Creates a policy that takes `action` if a gradient norm exceeds ten times the median.
    pub fn new(action: SpikeAction) -> Self {
        Self {
            action,
            norm_factor: Some(10.0),
            loss_factor: None,
            window: 100,
            nonfinite_steps: 0,
            limit: 3,
            limit_batches: 1000,
        }
    }

    /// Checks the numbers.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn validate(&self) -> Result<()> {
        let factors = [("norm_factor", self.norm_factor), ("loss_factor", self.loss_factor)];
        for (what, factor) in factors {
            if let Some(factor) = factor.filter(|of| !(*of > 1.0 && of.is_finite())) {
                let what = format!("{what} of the policy on spikes");
                return Err(Error::invalid(what, factor, "a number greater than 1"));
            }
        }
        let is_idle = self.norm_factor.is_none() && self.loss_factor.is_none();
        if is_idle && self.nonfinite_steps == 0 {
            return Err(Error::refused(
                "the policy on spikes judges nothing; give it norm_factor, loss_factor or \
                 nonfinite_steps",
            ));
        }
        if !(1..=MAX_WINDOW).contains(&self.window) {
            let expected = format!("1 to {MAX_WINDOW} steps");
            return Err(Error::invalid("window of the policy on spikes", self.window, expected));
        }
        if self.limit > MAX_LIMIT {
            let expected = format!("at most {MAX_LIMIT} spikes");
            return Err(Error::invalid("limit of the policy on spikes", self.limit, expected));
        }
        if self.action == (SpikeAction::Rewind { steps: 0 }) {
            let expected = "at least 1";
            return Err(Error::invalid("rewind_steps of the policy on spikes", 0, expected));
        }
        Ok(())
    }
}

impl RecentSteps {
    /// Judges a step. Returns `None` unless it is a spike.
    pub fn judge(&self, policy: &SpikePolicy, step: StepFigures) -> Option<Spike> {
        let cause = self.cause(policy, step)?;
        let first = step.batch.saturating_sub(policy.limit_batches.saturating_sub(1));
        // The step itself may have been judged before.
        let earlier = self.spikes.iter().filter(|&&at| at >= first && at != step.batch).count();
        Some(Spike { cause, is_over_limit: earlier >= policy.limit as usize })
    }

    fn cause(&self, policy: &SpikePolicy, step: StepFigures) -> Option<SpikeCause> {
        let StepFigures { norm, loss, .. } = step;
        if !step.is_finite() {
            let steps = self.nonfinite.saturating_add(1);
            let is_last = policy.nonfinite_steps > 0 && steps >= policy.nonfinite_steps;
            return is_last.then_some(SpikeCause::NotFinite { steps });
        }
        let window = policy.window as usize;
        if let Some((factor, median)) = policy.norm_factor.zip(median(&self.norms, window))
            && median > 0.0
            && norm > factor * median
        {
            return Some(SpikeCause::Norm { norm, median });
        }
        let (factor, (loss, median)) =
            policy.loss_factor.zip(loss.zip(median(&self.losses, window)))?;
        let is_spike = median > 0.0 && loss > factor * median;
        is_spike.then_some(SpikeCause::Loss { loss, median })
    }

    /// Adds a decided step. Only an applied step counts for the medians.
    pub fn add(&mut self, policy: &SpikePolicy, step: StepFigures, applied: bool) {
        self.nonfinite = if step.is_finite() { 0 } else { self.nonfinite.saturating_add(1) };
        if !applied || !step.is_finite() {
            return;
        }
        let window = policy.window as usize;
        let keep = |values: &mut Vec<f64>, value: f64| {
            values.push(value);
            values.drain(..values.len().saturating_sub(window));
        };
        keep(&mut self.norms, step.norm);
        if let Some(loss) = step.loss {
            keep(&mut self.losses, loss);
        }
    }

    /// Adds a spike at this batch. Adding the same batch again changes nothing.
    pub fn add_spike(&mut self, policy: &SpikePolicy, batch: u64) {
        self.spikes.retain(|&earlier| earlier != batch);
        self.spikes.push(batch);
        self.spikes.sort_unstable();
        self.spikes.drain(..self.spikes.len().saturating_sub(policy.limit.max(1) as usize));
    }

    /// Adds the spikes that the same job has had at a later version. A job that returns to a
    /// checkpoint must not forget its spikes, or it would never reach its limit.
    pub fn with_spikes_of(mut self, later: &Self) -> Self {
        self.spikes.extend(&later.spikes);
        self.spikes.sort_unstable();
        self.spikes.dedup();
        self.spikes.drain(..self.spikes.len().saturating_sub(MAX_LIMIT as usize));
        self
    }

    /// Checks figures that come from the network or a file.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there are more than any policy keeps, or if an applied step cannot
    /// have them.
    pub fn validate(&self) -> Result<()> {
        for (what, values) in [("norms", &self.norms), ("losses", &self.losses)] {
            let is_valid = |value: &f64| value.is_finite() && (what == "losses" || *value >= 0.0);
            if values.len() > MAX_WINDOW as usize || !values.iter().all(is_valid) {
                let found = format!("{} numbers", values.len());
                let expected = format!("at most {MAX_WINDOW} finite ones");
                return Err(Error::invalid(format!("{what} of the last steps"), found, expected));
            }
        }
        let most = MAX_LIMIT as usize;
        if self.spikes.len() > most || !self.spikes.is_sorted() {
            let expected = format!("at most {most}, in ascending order");
            return Err(Error::invalid("spikes of the last steps", self.spikes.len(), expected));
        }
        Ok(())
    }
}

impl StepFigures {
    fn is_finite(&self) -> bool {
        self.norm.is_finite() && self.loss.is_none_or(f64::is_finite)
    }
}

/// Returns the median of the last `window` values; `None` if there are fewer. If `window` is even,
/// returns the lower of the two middle values, as `torch.median` does.
fn median(values: &[f64], window: usize) -> Option<f64> {
    let last = &values[values.len().checked_sub(window)?..];
    let mut sorted = last.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get((window - 1) / 2).copied()
}

impl fmt::Display for SpikeCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let times = |f: &mut fmt::Formatter<'_>, what: &str, value: f64, median: f64| {
            let factor = value / median;
            write!(f, "its {what} {value:.4e} is {factor:.1} times the median {median:.4e}")
        };
        match *self {
            Self::Norm { norm, median } => times(f, "gradient norm", norm, median),
            Self::Loss { loss, median } => times(f, "loss", loss, median),
            Self::NotFinite { steps: 1 } => write!(f, "it has inf or NaN"),
            Self::NotFinite { steps } => {
                write!(f, "it is the last of {steps} steps in a row with inf or NaN")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> SpikePolicy {
        let nonfinite_steps = 2;
        SpikePolicy { window: 3, nonfinite_steps, ..SpikePolicy::new(SpikeAction::Skip) }
    }

    fn figures(norm: f64, loss: Option<f64>, batch: u64) -> StepFigures {
        StepFigures { norm, loss, batch }
    }

    fn after(norms: &[f64]) -> RecentSteps {
        let mut recent = RecentSteps::default();
        for (batch, &norm) in (0..).zip(norms) {
            recent.add(&policy(), figures(norm, Some(norm), batch), true);
        }
        recent
    }

    #[test]
    fn a_norm_far_above_the_median_is_a_spike_once_the_window_is_full() {
        let huge = figures(1000.0, None, 9);
        assert_eq!(after(&[1.0, 2.0]).judge(&policy(), huge), None);
        let recent = after(&[50.0, 1.0, 3.0, 2.0]);
        assert_eq!(recent.norms, [1.0, 3.0, 2.0], "the window has the last ones");
        assert_eq!(recent.judge(&policy(), figures(20.0, None, 9)), None, "not more than 10 times");
        let spike = recent.judge(&policy(), figures(20.1, None, 9)).unwrap();
        assert_eq!(spike.cause, SpikeCause::Norm { norm: 20.1, median: 2.0 });
        assert!(!spike.is_over_limit);
    }

    #[test]
    fn a_loss_is_compared_with_a_positive_median_only() {
        let policy = SpikePolicy { norm_factor: None, loss_factor: Some(2.0), ..policy() };
        let recent = after(&[1.0, 3.0, 2.0]);
        assert_eq!(recent.judge(&policy, figures(1e9, None, 9)), None);
        assert_eq!(recent.judge(&policy, figures(1.0, Some(4.0), 9)), None);
        let spike = recent.judge(&policy, figures(1.0, Some(4.5), 9)).unwrap();
        assert_eq!(spike.cause, SpikeCause::Loss { loss: 4.5, median: 2.0 });
        let negative = RecentSteps { losses: vec![-3.0, -2.0, -1.0], ..recent };
        assert_eq!(negative.judge(&policy, figures(1.0, Some(100.0), 9)), None);
    }

    #[test]
    fn steps_with_inf_or_nan_are_counted_in_a_row() {
        let (mut recent, nan) = (after(&[1.0, 1.0, 1.0]), figures(f64::NAN, None, 3));
        assert_eq!(recent.judge(&policy(), nan), None);
        recent.add(&policy(), nan, false);
        let by_loss = figures(1.0, Some(f64::INFINITY), 4);
        let spike = recent.judge(&policy(), by_loss).unwrap();
        assert_eq!(spike.cause, SpikeCause::NotFinite { steps: 2 });
        recent.add(&policy(), figures(1.0, None, 4), true);
        assert_eq!(recent.judge(&policy(), nan), None, "the row was interrupted");
    }

    #[test]
    fn skipped_steps_do_not_move_the_median() {
        let mut recent = after(&[1.0, 1.0, 1.0]);
        for batch in 3..9 {
            recent.add(&policy(), figures(500.0, None, batch), false);
        }
        assert_eq!(recent.norms, [1.0, 1.0, 1.0]);
    }

    #[test]
    fn the_limit_counts_spikes_within_a_number_of_batches() {
        let policy = SpikePolicy { limit: 2, limit_batches: 100, ..policy() };
        let mut recent = after(&[1.0, 1.0, 1.0]);
        let is_over = |recent: &RecentSteps, batch| {
            recent.judge(&policy, figures(500.0, None, batch)).unwrap().is_over_limit
        };
        for batch in [10, 20] {
            assert!(!is_over(&recent, batch));
            recent.add_spike(&policy, batch);
        }
        recent.add_spike(&policy, 20); // the same step, decided again
        assert!(is_over(&recent, 109));
        assert!(!is_over(&recent, 110), "batch 10 is 100 batches before");
        let none = SpikePolicy { limit: 0, ..policy };
        assert!(recent.judge(&none, figures(500.0, None, 10_000)).unwrap().is_over_limit);
    }

    #[test]
    fn policies_that_judge_nothing_or_have_numbers_out_of_range_are_refused() {
        let valid = SpikePolicy::new(SpikeAction::Rewind { steps: 100 });
        assert!(valid.validate().is_ok());
        let invalid = [
            SpikePolicy { norm_factor: Some(1.0), ..valid },
            SpikePolicy { loss_factor: Some(f64::NAN), ..valid },
            SpikePolicy { norm_factor: None, ..valid },
            SpikePolicy { window: 0, ..valid },
            SpikePolicy { window: 1001, ..valid },
            SpikePolicy { limit: 101, ..valid },
            SpikePolicy { action: SpikeAction::Rewind { steps: 0 }, ..valid },
        ];
        for policy in invalid {
            assert!(policy.validate().is_err(), "{policy:?}");
        }
        let recent = RecentSteps { norms: vec![f64::NAN], ..RecentSteps::default() };
        assert!(recent.validate().is_err());
    }

    #[test]
    fn a_cause_is_a_sentence_with_figures() {
        let cause = SpikeCause::Norm { norm: 8123.0, median: 10.0 };
        let text = "its gradient norm 8.1230e3 is 812.3 times the median 1.0000e1";
        assert_eq!(cause.to_string(), text);
    }
}
