//! The loops. Each optimizer has a file of its name, with its formula, its scalars, its loop over
//! slices and the launches of its kernels for GPUs.
//!
//! Every loop is compiled for each instruction set: see [`zeroshard_loops`].
//!
//! The scalars have the layout of C, because the kernels for GPUs (`../cuda/kernels`) take them
//! too.

pub mod code;
pub mod prefetch;
pub mod running_average;
pub mod stream;
pub mod sum;

pub use zeroshard_loops::Level;
use zeroshard_loops::vectorised;

macro_rules! modules {
    ($($(#[$doc:meta])* $kind:ident $name:ident $table:tt)*) => { $(pub mod $name;)* };
}

zeroshard_model::optimizers!(modules);

/// `coefficient`, negated if the objective is maximised; the multiplication then equals torch's
/// `-gradient`.
fn signed(coefficient: f32, maximize: bool) -> f32 {
    if maximize { -coefficient } else { coefficient }
}

/// `gradient + weight_decay * parameter`; the gradient itself if there is no decay, as in torch.
#[inline(always)]
fn decayed(gradient: f32, parameter: f32, weight_decay: f32) -> f32 {
    if weight_decay == 0.0 { gradient } else { gradient + parameter * weight_decay }
}

/// A running average that moves towards `end`: `torch.lerp`, whose two formulas keep it exact at
/// both ends.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Lerp {
    weight: f32,
    from_end: bool,
}

impl Lerp {
    /// An average that keeps the fraction `decay` of its value.
    fn keeping(decay: f64) -> Lerp {
        Lerp::by(1.0 - decay)
    }

    /// An average that moves by the fraction `weight`.
    fn by(weight: f64) -> Lerp {
        let weight = weight as f32;
        let from_end = weight >= 0.5;
        Lerp { weight: if from_end { weight - 1.0 } else { weight }, from_end }
    }

    #[inline(always)]
    fn to(self, start: f32, end: f32) -> f32 {
        let base = if self.from_end { end } else { start };
        base + self.weight * (end - start)
    }
}

/// `base` to the power of `exponent`, by squaring. `f64::powi` and the C library's `pow` may differ
/// between machines in the last bit, and a step must not.
fn power(mut base: f64, mut exponent: u64) -> f64 {
    let mut result = 1.0;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= base;
        }
        base *= base;
        exponent >>= 1;
    }
    result
}

/// `base` to a power that is not an integer. It is computed without the C library, whose `pow` may
/// differ between machines in the last bit.
fn real_power(base: f64, exponent: f64) -> f64 {
    libm::pow(base, exponent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn power_agrees_with_the_library_within_rounding() {
        for base in [0.0, 0.5, 0.9, 0.99, 0.999, 0.9999] {
            for exponent in [0u64, 1, 2, 3, 10, 1000, 65_537] {
                let expected = f64::powf(base, exponent as f64);
                let error = (power(base, exponent) - expected).abs();
                assert!(error <= 1e-12 * expected, "{base} to the power of {exponent}");
            }
        }
    }
}
