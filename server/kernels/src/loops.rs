//! The loops: one file for each family of optimizers, with its formula, its scalars and its loop
//! over slices.
//!
//! Every loop is plain Rust, compiled three times (AVX-512, AVX2, the target's baseline) and
//! selected at run time. The compiler vectorises it. Because it never contracts to fused
//! multiply-adds and never reorders floating-point operations, all three give the same bits.
//!
//! The scalars have the layout of C, because the kernels for GPUs (`../cuda/kernels`) take them
//! too.

pub mod adadelta;
pub mod adafactor;
pub mod adagrad;
pub mod adam;
pub mod adamax;
pub mod asgd;
pub mod average;
pub mod convert;
pub mod lamb;
pub mod lion;
pub mod nadam;
pub mod prefetch;
pub mod radam;
pub mod rmsprop;
pub mod sgd;
pub mod stream;
pub mod sum;

/// An instruction set that this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level(Isa);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Baseline,
}

impl Level {
    /// The fastest instruction set of this machine.
    pub fn best() -> Level {
        Level::all()[0]
    }

    /// All instruction sets of this machine, fastest first.
    pub fn all() -> Vec<Level> {
        // INVARIANT: a `Level` is created only here, after checking the machine. The unsafe calls
        // rely on it.
        let mut levels = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                levels.push(Level(Isa::Avx512));
            }
            if is_x86_feature_detected!("avx2") {
                levels.push(Level(Isa::Avx2));
            }
        }
        levels.push(Level(Isa::Baseline));
        levels
    }
}

/// Compiles a function once for each instruction set. The generated function takes the [`Level`] as
/// its first argument.
macro_rules! vectorised {
    ($(#[$meta:meta])* pub fn $name:ident $(<$generic:ident: $bound:ident>)? (
        $($arg:ident: $type:ty),* $(,)?
    ) $(-> $output:ty)? $body:block) => {
        $(#[$meta])*
        pub fn $name $(<$generic: $bound>)? (
            level: $crate::loops::Level, $($arg: $type),*
        ) $(-> $output)? {
            #[inline(always)]
            fn body $(<$generic: $bound>)? ($($arg: $type),*) $(-> $output)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512 $(<$generic: $bound>)? ($($arg: $type),*) $(-> $output)? {
                body $(::<$generic>)? ($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2 $(<$generic: $bound>)? ($($arg: $type),*) $(-> $output)? {
                body $(::<$generic>)? ($($arg),*)
            }

            match level.0 {
                // SAFETY: such a level exists only if the machine has these instructions.
                #[cfg(target_arch = "x86_64")]
                $crate::loops::Isa::Avx512 => unsafe {
                    avx512 $(::<$generic>)? ($($arg),*)
                },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::loops::Isa::Avx2 => unsafe {
                    avx2 $(::<$generic>)? ($($arg),*)
                },
                $crate::loops::Isa::Baseline => body $(::<$generic>)? ($($arg),*),
            }
        }
    };
}
use vectorised;

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
