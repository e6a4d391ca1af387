//! Running averages of the parameters.
//!
//! A step moves an average that keeps 0.9999 of its value by less than half a unit in the last
//! place of f32, as soon as the parameter is within 0.03% of it; an f32 average would then stand
//! still. An average is therefore the sum of two f32 numbers: the nearest f32, which readers get,
//! and the rest. Together they have about 48 bits.

use zeroshard_model::{RunningAverage, Warmup, Weights};

use super::{real_power, vectorised};

/// The fraction by which an update, counted from 0, moves an average towards the parameters.
pub fn weight_of(average: &RunningAverage, update: u64) -> f64 {
    let number = update as f64;
    match average.weights {
        _ if update == 0 => 1.0,
        Weights::Equal => 1.0 / (number + 1.0),
        Weights::Exponential { decay, warmup } => {
            let most = match warmup {
                Warmup::None => decay,
                Warmup::Tenth => (1.0 + number) / (10.0 + number),
                Warmup::Power { inv_gamma, power } => {
                    1.0 - real_power(1.0 + number / inv_gamma, -power)
                }
            };
            1.0 - decay.min(most)
        }
    }
}

vectorised! {
    /// Moves an average by the fraction `weight` towards `values`, in f64. With weight 1 it becomes
    /// equal to them, whatever it was.
    pub fn step(weight: f64, values: &[f32], high: &mut [f32], low: &mut [f32]) {
        let n = values.len();
        let (high, low) = (&mut high[..n], &mut low[..n]);
        for i in 0..n {
            let before = f64::from(high[i]) + f64::from(low[i]);
            let value = f64::from(values[i]);
            let after = if weight == 1.0 { value } else { before + weight * (value - before) };
            // All NaN have the same bits on every machine, and an infinite average has no rest.
            let rounded = after as f32;
            let rounded = if rounded.is_nan() { f32::NAN } else { rounded };
            let rest = (after - f64::from(rounded)) as f32;
            high[i] = rounded;
            low[i] = if rounded.is_finite() { rest } else { 0.0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loops::Level;

    fn ema(decay: f64, warmup: Warmup) -> RunningAverage {
        let weights = Weights::Exponential { decay, warmup };
        RunningAverage { weights, ..RunningAverage::exponential("a", decay) }
    }

    #[test]
    fn the_first_update_takes_the_parameters_and_a_warmup_ends_at_the_decay() {
        let power = Warmup::Power { inv_gamma: 1.0, power: 0.75 };
        for warmup in [Warmup::None, Warmup::Tenth, power] {
            let average = ema(0.99, warmup);
            assert_eq!(weight_of(&average, 0), 1.0);
            assert_eq!(weight_of(&average, 1_000_000), 1.0 - 0.99);
        }
        assert_eq!(weight_of(&ema(0.99, Warmup::Tenth), 2), 1.0 - 3.0 / 12.0);
        assert_eq!(weight_of(&ema(0.99, power), 15), 1.0 - (1.0 - 0.125));
        let equal = RunningAverage { weights: Weights::Equal, ..ema(0.0, Warmup::None) };
        assert_eq!([0, 1, 3].map(|update| weight_of(&equal, update)), [1.0, 0.5, 0.25]);
    }

    #[test]
    fn a_slow_average_of_equal_values_reaches_them() {
        let (mut high, mut low) = ([0.9f32], [0.0f32]);
        for _ in 0..400_000 {
            step(Level::best(), 1e-4, &[1.0], &mut high, &mut low);
        }
        assert_eq!(high, [1.0], "an f32 average would stand still at 0.9997");
    }
}
