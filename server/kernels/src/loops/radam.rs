//! RAdam with the operation order of `torch.optim.RAdam` (single tensor): Liu et al., "On the
//! Variance of the Adaptive Learning Rate and Beyond" (2020), algorithm 2.

use zeroshard_model::optimizer::RAdam;

use super::{Lerp, decayed, power, signed, vectorised};
use crate::kernel::{Update, elementwise};

/// A step's scalars.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Scalars {
    gradient: f32,
    /// Weight decay that is added to the gradient: 0 if it is decoupled.
    weight_decay: f32,
    /// The factor that decoupled weight decay applies to a parameter: 1 if it is not decoupled.
    kept: f32,
    first_moment: Lerp,
    beta2: f32,
    one_minus_beta2: f32,
    correction1: f32,
    lr: f32,
    eps: f32,
    /// If not, the variance of the adaptive learning rate is not tractable yet, and the step is one
    /// of SGD with momentum.
    is_rectified: bool,
    correction2_sqrt: f32,
    rectification: f32,
}

impl Scalars {
    /// The scalars of a step.
    pub fn new(radam: &RAdam, update: &Update<'_>) -> Scalars {
        let decay = |decoupled| match radam.decoupled_weight_decay == decoupled {
            true => radam.weight_decay,
            false => 0.0,
        };
        let remaining = power(radam.beta2, update.step);
        let correction2 = 1.0 - remaining;
        let longest = 2.0 / (1.0 - radam.beta2) - 1.0;
        let length = longest - 2.0 * update.step as f64 * remaining / correction2;
        let rectification = (length - 4.0) * (length - 2.0) * longest
            / ((longest - 4.0) * (longest - 2.0) * length);
        Scalars {
            gradient: signed(update.coefficient, radam.maximize),
            weight_decay: decay(false) as f32,
            kept: (1.0 - radam.lr * decay(true)) as f32,
            first_moment: Lerp::keeping(radam.beta1),
            beta2: radam.beta2 as f32,
            one_minus_beta2: (1.0 - radam.beta2) as f32,
            correction1: (1.0 - power(radam.beta1, update.step)) as f32,
            lr: radam.lr as f32,
            eps: radam.eps as f32,
            // The approximated simple moving average is longer than 5 steps.
            is_rectified: length > 5.0,
            correction2_sqrt: correction2.sqrt() as f32,
            rectification: rectification.sqrt() as f32,
        }
    }
}

elementwise!(RAdam, "radam", [m, v]);

vectorised! {
    /// A step.
    pub fn step(
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
            let kept = parameter[i] * s.kept;
            let g = decayed(gradient[i] * s.gradient, kept, s.weight_decay);
            let m = s.first_moment.to(exp_avg[i], g);
            let v = exp_avg_sq[i] * s.beta2 + s.one_minus_beta2 * g * g;
            exp_avg[i] = m;
            exp_avg_sq[i] = v;
            let mut update = m / s.correction1 * s.lr;
            if s.is_rectified {
                let adaptive = 1.0 / (v.sqrt() + s.eps) * s.correction2_sqrt;
                update = update * adaptive * s.rectification;
            }
            parameter[i] = kept - update;
        }
    }
}
