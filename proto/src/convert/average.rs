//! Running averages in messages.

use zeroshard_model::{Error, Result, RunningAverage, Warmup, Weights};

use crate::pb;

impl From<&RunningAverage> for pb::RunningAverage {
    fn from(average: &RunningAverage) -> Self {
        let RunningAverage { name, weights, start, every } = average;
        let message = Self { name: name.clone(), start: *start, every: *every, ..Self::default() };
        let Weights::Exponential { decay, warmup } = *weights else { return message };
        let message = Self { decay: Some(decay), ..message };
        match warmup {
            Warmup::None => Self { warmup: pb::Warmup::None.into(), ..message },
            Warmup::Tenth => Self { warmup: pb::Warmup::Tenth.into(), ..message },
            Warmup::Power { inv_gamma, power } => {
                Self { warmup: pb::Warmup::Power.into(), inv_gamma, power, ..message }
            }
        }
    }
}

impl TryFrom<pb::RunningAverage> for RunningAverage {
    type Error = Error;

    fn try_from(message: pb::RunningAverage) -> Result<Self> {
        let pb::RunningAverage { name, decay, warmup, inv_gamma, power, start, every } = message;
        let warmup = match pb::Warmup::try_from(warmup) {
            Ok(pb::Warmup::Unspecified | pb::Warmup::None) => Warmup::None,
            Ok(pb::Warmup::Tenth) => Warmup::Tenth,
            Ok(pb::Warmup::Power) => Warmup::Power { inv_gamma, power },
            Err(_) => {
                let what = format!("warmup of average {name:?}");
                return Err(Error::invalid(what, warmup, "NONE, TENTH or POWER"));
            }
        };
        let weights = match decay {
            Some(decay) => Weights::Exponential { decay, warmup },
            None if warmup == Warmup::None => Weights::Equal,
            None => {
                return Err(Error::refused(format!(
                    "average {name:?} has a warm-up and no decay; set the decay"
                )));
            }
        };
        Ok(Self { name, weights, start: start.max(1), every: every.max(1) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_survive_the_wire() {
        let ema = RunningAverage::exponential("slow", 0.999);
        let with = |warmup| Weights::Exponential { decay: 0.5, warmup };
        for weights in [
            Weights::Equal,
            with(Warmup::None),
            with(Warmup::Tenth),
            with(Warmup::Power { inv_gamma: 1.0, power: 0.75 }),
        ] {
            let average = RunningAverage { weights, start: 7, every: 3, ..ema.clone() };
            assert_eq!(RunningAverage::try_from(pb::RunningAverage::from(&average)), Ok(average));
        }
    }

    #[test]
    fn an_average_with_an_unknown_warmup_is_refused() {
        let message = || pb::RunningAverage::from(&RunningAverage::exponential("slow", 0.9));
        let unknown = pb::RunningAverage { warmup: 7, ..message() };
        assert!(matches!(RunningAverage::try_from(unknown), Err(Error::Invalid { .. })));
        let warmup = pb::Warmup::Tenth.into();
        let without_decay = pb::RunningAverage { decay: None, warmup, ..message() };
        assert!(matches!(RunningAverage::try_from(without_decay), Err(Error::Refused { .. })));
    }
}
