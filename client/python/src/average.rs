//! Running averages, as Python describes them.

use pyo3::prelude::*;
use zeroshard_client::Error;
use zeroshard_model::{RunningAverage, Warmup as Growth, Weights};

use crate::error::raise;

/// A name or two numbers.
#[derive(FromPyObject)]
pub(crate) enum Warmup {
    Name(String),
    Power(f64, f64),
}

/// Name, decay, warm-up, start and distance of updates.
pub(crate) type Average = (String, Option<f64>, Option<Warmup>, u64, u64);

/// # Errors
/// `InvalidArgumentError` for an unknown warm-up. The servers check the numbers.
pub(crate) fn averages(given: Vec<Average>) -> PyResult<Vec<RunningAverage>> {
    let one = |(name, decay, warmup, start, every): Average| {
        let warmup = match warmup {
            None => Growth::None,
            Some(Warmup::Name(name)) if name == "tenth" => Growth::Tenth,
            Some(Warmup::Name(name)) => {
                let found = format!("{name:?}");
                return Err(raise(Error::invalid("warmup", found, "\"tenth\" or a pair")));
            }
            Some(Warmup::Power(inv_gamma, power)) => Growth::Power { inv_gamma, power },
        };
        let weights = match decay {
            None => Weights::Equal,
            Some(decay) => Weights::Exponential { decay, warmup },
        };
        Ok(RunningAverage { name, weights, start, every })
    };
    given.into_iter().map(one).collect()
}
