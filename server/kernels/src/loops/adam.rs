//! Adam and AdamW, with and without AMSGrad, with the operation order of `torch.optim.Adam` (single
//! tensor).
//!
//! Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015); Loshchilov and Hutter,
//! "Decoupled Weight Decay Regularization" (2019); Reddi, Kale and Kumar, "On the Convergence of
//! Adam and Beyond" (2018).

use zeroshard_model::optimizer::{Adam, AdamW};

use super::{Lerp, decayed, power, signed, vectorised};

/// A step's scalars.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Scalars {
    gradient: f32,
    /// Weight decay that is added to the gradient: 0 for AdamW.
    weight_decay: f32,
    /// The factor that decoupled weight decay applies to a parameter: 1 for Adam.
    kept: f32,
    first_moment: Lerp,
    beta2: f32,
    one_minus_beta2: f32,
    correction2_sqrt: f32,
    eps: f32,
    minus_step_size: f32,
}

impl Scalars {
    /// Adam's scalars of applied step `step` (from 1).
    pub fn adam(adam: &Adam, step: u64, coefficient: f32) -> Scalars {
        let correction2 = 1.0 - power(adam.beta2, step);
        Scalars {
            gradient: signed(coefficient, adam.maximize),
            weight_decay: adam.weight_decay as f32,
            kept: 1.0,
            first_moment: Lerp::keeping(adam.beta1),
            beta2: adam.beta2 as f32,
            one_minus_beta2: (1.0 - adam.beta2) as f32,
            correction2_sqrt: correction2.sqrt() as f32,
            eps: adam.eps as f32,
            minus_step_size: -(adam.lr / (1.0 - power(adam.beta1, step))) as f32,
        }
    }

    /// AdamW's scalars of applied step `step` (from 1).
    pub fn adamw(adamw: &AdamW, step: u64, coefficient: f32) -> Scalars {
        let &AdamW { lr, beta1, beta2, eps, weight_decay, amsgrad, maximize } = adamw;
        let adam = Adam { lr, beta1, beta2, eps, weight_decay: 0.0, amsgrad, maximize };
        Scalars {
            kept: (1.0 - lr * weight_decay) as f32,
            ..Scalars::adam(&adam, step, coefficient)
        }
    }

    /// The new moments.
    #[inline(always)]
    fn moments(&self, gradient: f32, parameter: f32, m: f32, v: f32) -> (f32, f32) {
        let g = decayed(gradient * self.gradient, parameter, self.weight_decay);
        (self.first_moment.to(m, g), v * self.beta2 + self.one_minus_beta2 * g * g)
    }

    /// The new parameter.
    #[inline(always)]
    fn parameter(&self, parameter: f32, m: f32, v: f32) -> f32 {
        let denominator = v.sqrt() / self.correction2_sqrt + self.eps;
        parameter * self.kept + self.minus_step_size * m / denominator
    }
}

vectorised! {
    /// A step.
    pub fn plain(
        s: &Scalars,
        parameter: &mut [f32],
        exp_avg: &mut [f32],
        exp_avg_sq: &mut [f32],
        gradient: &[f32],
    ) {
        let n = parameter.len();
        let (exp_avg, exp_avg_sq) = (&mut exp_avg[..n], &mut exp_avg_sq[..n]);
        let gradient = &gradient[..n];
        for i in 0..n {
            let (m, v) = s.moments(gradient[i], parameter[i], exp_avg[i], exp_avg_sq[i]);
            exp_avg[i] = m;
            exp_avg_sq[i] = v;
            parameter[i] = s.parameter(parameter[i], m, v);
        }
    }
}

vectorised! {
    /// A step that divides by the maximum of all second moments so far.
    pub fn amsgrad(
        s: &Scalars,
        parameter: &mut [f32],
        exp_avg: &mut [f32],
        exp_avg_sq: &mut [f32],
        max_exp_avg_sq: &mut [f32],
        gradient: &[f32],
    ) {
        let n = parameter.len();
        let (exp_avg, exp_avg_sq) = (&mut exp_avg[..n], &mut exp_avg_sq[..n]);
        let (largest, gradient) = (&mut max_exp_avg_sq[..n], &gradient[..n]);
        for i in 0..n {
            let (m, v) = s.moments(gradient[i], parameter[i], exp_avg[i], exp_avg_sq[i]);
            exp_avg[i] = m;
            exp_avg_sq[i] = v;
            let max = if v > largest[i] { v } else { largest[i] };
            largest[i] = max;
            parameter[i] = s.parameter(parameter[i], m, max);
        }
    }
}
