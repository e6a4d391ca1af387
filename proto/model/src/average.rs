//! Running averages of the weights of a job, which shard servers keep beside the optimizer state.

use std::borrow::Cow;

use crate::{
    Error, JobSpec, Result,
    job::check_number,
    limits::{MAX_AVERAGE_NAME, MAX_AVERAGES},
    name::check_name,
    optimizer::StateShape,
};

/// The number of state tensors of an average: its values, and what f32 cannot hold of them.
pub const AVERAGE_PARTS: usize = 2;
/// What stands before the name of an average in the name of its state tensor.
const PREFIX: &str = "average.";
/// What stands behind the name of an average in the name of what f32 cannot hold of it.
const REST: &str = ".rest";

/// A running average of the master weights of a job. It begins with the initial parameters.
#[derive(Debug, Clone, PartialEq)]
pub struct RunningAverage {
    /// Its name, unique in the job.
    pub name: String,
    /// The weights of the parameters of earlier steps.
    pub weights: Weights,
    /// The step, counted from 1, after which the average becomes equal to the parameters for the
    /// first time.
    pub start: u64,
    /// The number of steps from one update to the next.
    pub every: u64,
}

/// The weights that parameters of different steps have in a running average.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Weights {
    /// All have the same weight: stochastic weight averaging (Izmailov et al., 2018).
    Equal,
    /// An update keeps the fraction `decay` of the average: an exponential moving average. With a
    /// warm-up, early updates keep less.
    Exponential {
        /// From 0 to 1.
        decay: f64,
        /// How the fraction grows up to `decay`.
        warmup: Warmup,
    },
}

/// The fraction of an average that update number `n` keeps at most, if the first one has number 0.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Warmup {
    /// There is no warm-up.
    #[default]
    None,
    /// `(1 + n) / (10 + n)`, as in TensorFlow's `ExponentialMovingAverage` and `EMAModel` of
    /// diffusers.
    Tenth,
    /// `1 - (1 + n / inv_gamma) ** -power`, as in `EMAModel` of diffusers with `use_ema_warmup` and
    /// in `ModelEmaV3` of timm.
    Power {
        /// Greater than 0.
        inv_gamma: f64,
        /// Greater than 0.
        power: f64,
    },
}

impl RunningAverage {
    /// An exponential moving average of the parameters after each step.
    pub fn exponential(name: impl Into<String>, decay: f64) -> Self {
        let weights = Weights::Exponential { decay, warmup: Warmup::None };
        Self { name: name.into(), weights, start: 1, every: 1 }
    }

    /// The number of the update that happens when `averaged` steps have counted, from 0.
    pub fn update(&self, averaged: u64) -> Option<u64> {
        let since = averaged.checked_sub(self.start)?;
        since.is_multiple_of(self.every).then(|| since / self.every)
    }

    /// The names of its state tensors: of its values, which readers get, and of what f32 cannot
    /// hold of them.
    pub fn parts(&self) -> [String; AVERAGE_PARTS] {
        let values = values_of(&self.name);
        let rest = format!("{values}{REST}");
        [values, rest]
    }

    fn validate(&self) -> Result<()> {
        check_name("name of an average", &self.name, MAX_AVERAGE_NAME)?;
        if self.name.contains(['/', '.']) {
            let expected = "a name without dots and slashes";
            return Err(Error::invalid("name of an average", format!("{:?}", self.name), expected));
        }
        let check = |what: &str, value: f64, is_valid: bool, expected: &str| match is_valid {
            true => Ok(()),
            false => {
                Err(Error::invalid(format!("{what} of average {:?}", self.name), value, expected))
            }
        };
        for (what, steps) in [("start", self.start), ("every", self.every)] {
            check(what, steps as f64, steps > 0, "a number of steps, at least 1")?;
        }
        let Weights::Exponential { decay, warmup } = self.weights else { return Ok(()) };
        check("decay", decay, (0.0..=1.0).contains(&decay), "0 to 1")?;
        let Warmup::Power { inv_gamma, power } = warmup else { return Ok(()) };
        let is_positive = |value: f64| value > 0.0 && value.is_finite();
        check("inv_gamma", inv_gamma, is_positive(inv_gamma), "greater than 0")?;
        check("power", power, is_positive(power), "greater than 0")
    }
}

/// The name of the state tensor with the values of the average of this name.
pub fn values_of(name: &str) -> String {
    format!("{PREFIX}{name}")
}

/// Checks the averages of a job.
///
/// # Errors
/// [`Error::Invalid`] for too many averages, two of the same name, and numbers out of range.
pub(crate) fn validate(averages: &[RunningAverage]) -> Result<()> {
    check_number("averages", averages.len(), MAX_AVERAGES)?;
    averages.iter().try_for_each(RunningAverage::validate)?;
    for (number, average) in averages.iter().enumerate() {
        if averages[..number].iter().any(|earlier| earlier.name == average.name) {
            let found = format!("{:?} twice", average.name);
            return Err(Error::invalid("name of an average", found, "unique in the job"));
        }
    }
    Ok(())
}

impl JobSpec {
    /// The state tensors of tensor number `tensor` by name, with their shapes: those of its
    /// optimizer, then those of the averages. None if it is not trained.
    pub fn state_of(&self, tensor: usize) -> Vec<(Cow<'static, str>, StateShape)> {
        let Some(optimizer) = self.optimizer_of(tensor) else { return Vec::new() };
        let shapes = optimizer.state_shapes(&self.manifest.tensors()[tensor].shape);
        let own = optimizer.state().iter().map(|&name| Cow::Borrowed(name)).zip(shapes);
        let averages = self.averages.iter().flat_map(RunningAverage::parts);
        own.chain(averages.map(|name| (Cow::Owned(name), StateShape::Elements))).collect()
    }

    /// The position among the state tensors of tensor number `tensor`; `None` if it has no such
    /// state.
    pub fn state_position(&self, tensor: usize, name: &str) -> Option<usize> {
        let own = self.optimizer_of(tensor)?.state();
        if let Some(position) = own.iter().position(|known| *known == name) {
            return Some(position);
        }
        let mut parts = self.averages.iter().flat_map(RunningAverage::parts);
        parts.position(|known| known == name).map(|position| own.len() + position)
    }

    /// The average of this name.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the job has none.
    pub fn average(&self, name: &str) -> Result<&RunningAverage> {
        self.averages.iter().find(|average| average.name == name).ok_or_else(|| {
            let expected = match &self.average_names()[..] {
                [] => "no average, because the job keeps none".to_owned(),
                names => format!("one of {names:?}"),
            };
            Error::invalid(format!("average of job {:?}", self.name), format!("{name:?}"), expected)
        })
    }

    /// The names of the averages, in their order.
    pub fn average_names(&self) -> Vec<&str> {
        self.averages.iter().map(|average| average.name.as_str()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Manifest, TensorSpec};

    fn spec(averages: Vec<RunningAverage>) -> JobSpec {
        let frozen = TensorSpec { frozen: true, ..TensorSpec::new("frozen", [2]) };
        let manifest = Manifest::new(vec![TensorSpec::new("w", [2]), frozen]).unwrap();
        let averages = averages.into();
        JobSpec { averages, ..JobSpec::new("job", manifest, vec!["adamw".parse().unwrap()]) }
    }

    #[test]
    fn the_state_of_averages_follows_that_of_the_optimizer() {
        let spec = spec(["slow", "fast"].map(|name| RunningAverage::exponential(name, 0.9)).into());
        assert_eq!(spec.validate(), Ok(()));
        let names: Vec<_> = spec.state_of(0).into_iter().map(|(name, _)| name).collect();
        assert_eq!(
            names,
            [
                "exp_avg",
                "exp_avg_sq",
                "average.slow",
                "average.slow.rest",
                "average.fast",
                "average.fast.rest"
            ]
        );
        for (position, name) in names.iter().enumerate() {
            assert_eq!(spec.state_position(0, name), Some(position));
        }
        assert_eq!(spec.state_position(0, "average.other"), None);
        assert!(spec.state_of(1).is_empty());
        assert_eq!(spec.state_position(1, "average.slow"), None);
    }

    #[test]
    fn updates_are_counted_from_the_start() {
        let average =
            RunningAverage { start: 3, every: 2, ..RunningAverage::exponential("a", 0.9) };
        let updates: Vec<_> = (0..8).map(|averaged| average.update(averaged)).collect();
        assert_eq!(updates, [None, None, None, Some(0), None, Some(1), None, Some(2)]);
    }

    #[test]
    fn averages_that_mean_nothing_are_refused() {
        let ema = |decay| RunningAverage::exponential("a", decay);
        let power = |inv_gamma, power| RunningAverage {
            weights: Weights::Exponential {
                decay: 0.9,
                warmup: Warmup::Power { inv_gamma, power },
            },
            ..ema(0.9)
        };
        for valid in [ema(0.0), ema(1.0), power(1.0, 0.7)] {
            assert_eq!(spec(vec![valid]).validate(), Ok(()));
        }
        for (averages, what) in [
            (vec![ema(1.1)], "decay of average \"a\""),
            (vec![ema(f64::NAN)], "decay of average \"a\""),
            (vec![power(0.0, 1.0)], "inv_gamma of average \"a\""),
            (vec![power(1.0, f64::INFINITY)], "power of average \"a\""),
            (vec![RunningAverage { every: 0, ..ema(0.9) }], "every of average \"a\""),
            (vec![RunningAverage { start: 0, ..ema(0.9) }], "start of average \"a\""),
            (vec![RunningAverage::exponential("a.b", 0.9)], "name of an average"),
            (vec![RunningAverage::exponential("", 0.9)], "name of an average"),
            (vec![ema(0.9), ema(0.8)], "name of an average"),
            (
                (0..=MAX_AVERAGES)
                    .map(|i| RunningAverage::exponential(i.to_string(), 0.9))
                    .collect(),
                "number of averages",
            ),
        ] {
            match spec(averages).validate() {
                Err(Error::Invalid { what: found, .. }) => assert_eq!(found, what),
                other => panic!("{what}: {other:?}"),
            }
        }
    }
}
