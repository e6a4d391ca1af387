//! Adagrad with the operation order of `torch.optim.Adagrad`: Duchi, Hazan and Singer, "Adaptive
//! Subgradient Methods for Online Learning and Stochastic Optimization" (2011).

use zeroshard_model::optimizer::Adagrad;

use super::{decayed, signed, vectorised};
use crate::kernel::{Update, elementwise};

/// A step's scalars.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Scalars {
    gradient: f32,
    weight_decay: f32,
    eps: f32,
    minus_lr: f32,
}

impl Scalars {
    /// The scalars of a step.
    pub fn new(adagrad: &Adagrad, update: &Update<'_>) -> Scalars {
        let lr = adagrad.lr / (1.0 + (update.step - 1) as f64 * adagrad.lr_decay);
        Scalars {
            gradient: signed(update.coefficient, adagrad.maximize),
            weight_decay: adagrad.weight_decay as f32,
            eps: adagrad.eps as f32,
            minus_lr: -lr as f32,
        }
    }
}

elementwise!(Adagrad, "adagrad", [sum]);

vectorised! {
    /// A step.
    pub fn step(s: &Scalars, parameter: &mut [f32], sum: &mut [f32], gradient: &[f32]) {
        let n = parameter.len();
        let (sum, gradient) = (&mut sum[..n], &gradient[..n]);
        for i in 0..n {
            let g = decayed(gradient[i] * s.gradient, parameter[i], s.weight_decay);
            let squares = sum[i] + g * g;
            sum[i] = squares;
            parameter[i] += s.minus_lr * g / (squares.sqrt() + s.eps);
        }
    }
}
