//! Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2.

use zeroshard_model::optimizer::Lion;

use super::{signed, vectorised};

/// A step's scalars.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Scalars {
    gradient: f32,
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    kept: f32,
    lr: f32,
}

impl Scalars {
    /// The scalars of any step.
    pub fn new(lion: &Lion, coefficient: f32) -> Scalars {
        Scalars {
            gradient: signed(coefficient, lion.maximize),
            beta1: lion.beta1 as f32,
            one_minus_beta1: (1.0 - lion.beta1) as f32,
            beta2: lion.beta2 as f32,
            one_minus_beta2: (1.0 - lion.beta2) as f32,
            kept: (1.0 - lion.lr * lion.weight_decay) as f32,
            lr: lion.lr as f32,
        }
    }
}

vectorised! {
    /// A step. The sign of zero is zero.
    pub fn step(s: &Scalars, parameter: &mut [f32], exp_avg: &mut [f32], gradient: &[f32]) {
        let n = parameter.len();
        let (exp_avg, gradient) = (&mut exp_avg[..n], &gradient[..n]);
        for i in 0..n {
            let g = gradient[i] * s.gradient;
            let c = exp_avg[i] * s.beta1 + g * s.one_minus_beta1;
            let change = if c == 0.0 { 0.0 } else { s.lr.copysign(c) };
            parameter[i] = parameter[i] * s.kept - change;
            exp_avg[i] = exp_avg[i] * s.beta2 + g * s.one_minus_beta2;
        }
    }
}
