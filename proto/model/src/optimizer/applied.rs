//! The steps that were applied to a tensor.

use super::Optimizer;
use crate::{Error, JobSpec, Result};

/// The number of steps that were applied to a tensor, and the optimizer's scalar state after them.
/// They are equal for all elements of the tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AppliedSteps {
    /// The number of steps: those that were not skipped and had a gradient.
    pub count: u64,
    /// The values of [`Optimizer::scalar_state`], in that order. The rest is 0, and before the
    /// first step all are 0.
    pub scalar_state: [f32; 2],
    /// The number of steps that have counted for the running averages of the job.
    pub averaged: u64,
}

impl AppliedSteps {
    /// Steps of an optimizer without scalar state.
    pub const fn new(count: u64) -> Self {
        Self { count, scalar_state: [0.0; 2], averaged: 0 }
    }

    /// Steps of `optimizer`, with its scalar state.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the number of values is not that of [`Optimizer::scalar_state`] (after
    /// 0 steps: not 0), or if one of them is inf or NaN.
    pub fn of(optimizer: &Optimizer, count: u64, values: &[f32]) -> Result<Self> {
        let names = if count == 0 { &[] } else { optimizer.scalar_state() };
        if values.len() != names.len() || !values.iter().all(|value| value.is_finite()) {
            return Err(Error::invalid(
                format!("scalar state of {optimizer} after {count} applied steps"),
                format!("{values:?}"),
                format!("finite numbers for {names:?}"),
            ));
        }
        let mut applied = Self::new(count);
        applied.scalar_state[..values.len()].copy_from_slice(values);
        Ok(applied)
    }

    /// The values of [`Optimizer::scalar_state`]; none before the first step.
    pub fn scalar_state(&self, optimizer: &Optimizer) -> &[f32] {
        let number = if self.count == 0 { 0 } else { optimizer.scalar_state().len() };
        &self.scalar_state[..number]
    }
}

impl JobSpec {
    /// The steps applied to tensor number `tensor`, with the scalar state of its optimizer; none if
    /// it is not trained.
    ///
    /// # Errors
    /// Those of [`AppliedSteps::of`].
    pub fn applied_to(&self, tensor: usize, count: u64, values: &[f32]) -> Result<AppliedSteps> {
        let optimizer = self.optimizer_of(tensor);
        optimizer.map_or(Ok(AppliedSteps::default()), |it| AppliedSteps::of(it, count, values))
    }

    /// The scalar state of tensor number `tensor` after these steps.
    pub fn scalar_state_of(&self, tensor: usize, applied: &AppliedSteps) -> Vec<f32> {
        let optimizer = self.optimizer_of(tensor);
        optimizer.map_or_else(Vec::new, |it| applied.scalar_state(it).to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scalar_state_must_be_that_of_the_optimizer() {
        let [sgd, nadam, asgd] = ["sgd", "nadam", "asgd"].map(|name| name.parse().unwrap());
        for (optimizer, count, values) in
            [(&sgd, 3, &[][..]), (&nadam, 3, &[0.5]), (&asgd, 1, &[0.1, 1.0]), (&asgd, 0, &[])]
        {
            let applied = AppliedSteps::of(optimizer, count, values).unwrap();
            assert_eq!((applied.count, applied.scalar_state(optimizer)), (count, values));
        }
        for (optimizer, count, values) in [
            (&sgd, 3, &[0.5][..]),
            (&nadam, 3, &[]),
            (&nadam, 3, &[f32::NAN]),
            (&nadam, 0, &[0.5]),
            (&asgd, 3, &[0.1]),
            (&asgd, 3, &[0.1, 1.0, 1.0]),
        ] {
            let refused = AppliedSteps::of(optimizer, count, values);
            assert!(matches!(refused, Err(Error::Invalid { .. })), "{optimizer} {values:?}");
        }
    }
}
