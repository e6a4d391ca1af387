//! Adamax with the operation order of `torch.optim.Adamax` (single tensor): Kingma and Ba, "Adam: A
//! Method for Stochastic Optimization" (2015), section 7.1. torch and Paddle add epsilon at
//! different places; adding 0 at the other place changes no bit.

use zeroshard_model::optimizer::Adamax;

use super::{Lerp, decayed, power, signed, vectorised};
use crate::kernel::{Update, elementwise};

/// A step's scalars.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Scalars {
    gradient: f32,
    weight_decay: f32,
    first_moment: Lerp,
    beta2: f32,
    /// Added to the absolute value of the gradient.
    eps: f32,
    /// Added to the decayed norm.
    norm_eps: f32,
    minus_step_size: f32,
}

impl Scalars {
    /// The scalars of a step.
    pub fn new(adamax: &Adamax, update: &Update<'_>) -> Scalars {
        Scalars {
            gradient: signed(update.coefficient, adamax.maximize),
            weight_decay: adamax.weight_decay as f32,
            first_moment: Lerp::keeping(adamax.beta1),
            beta2: adamax.beta2 as f32,
            eps: if adamax.paddle { 0.0 } else { adamax.eps as f32 },
            norm_eps: if adamax.paddle { adamax.eps as f32 } else { 0.0 },
            minus_step_size: -(adamax.lr / (1.0 - power(adamax.beta1, update.step))) as f32,
        }
    }
}

elementwise!(Adamax, "adamax", [m, norm]);

vectorised! {
    /// A step.
    pub fn step(
        s: &Scalars,
        parameter: &mut [f32],
        exp_avg: &mut [f32],
        exp_inf: &mut [f32],
        gradient: &[f32],
    ) {
        let n = parameter.len();
        let (exp_avg, exp_inf) = (&mut exp_avg[..n], &mut exp_inf[..n]);
        let gradient = &gradient[..n];
        for i in 0..n {
            let g = decayed(gradient[i] * s.gradient, parameter[i], s.weight_decay);
            let m = s.first_moment.to(exp_avg[i], g);
            let (before, new) = (exp_inf[i] * s.beta2 + s.norm_eps, g.abs() + s.eps);
            let norm = if new > before { new } else { before };
            exp_avg[i] = m;
            exp_inf[i] = norm;
            parameter[i] += s.minus_step_size * m / norm;
        }
    }
}
