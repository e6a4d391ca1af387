//! Adadelta with the operation order of `torch.optim.Adadelta`: Zeiler, "ADADELTA: An Adaptive
//! Learning Rate Method" (2012).

use zeroshard_model::optimizer::Adadelta;

use super::{decayed, signed, vectorised};
use crate::kernel::{Update, elementwise};

/// A step's scalars.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Scalars {
    gradient: f32,
    weight_decay: f32,
    rho: f32,
    one_minus_rho: f32,
    eps: f32,
    minus_lr: f32,
}

impl Scalars {
    /// The scalars of a step.
    pub fn new(adadelta: &Adadelta, update: &Update<'_>) -> Scalars {
        Scalars {
            gradient: signed(update.coefficient, adadelta.maximize),
            weight_decay: adadelta.weight_decay as f32,
            rho: adadelta.rho as f32,
            one_minus_rho: (1.0 - adadelta.rho) as f32,
            eps: adadelta.eps as f32,
            minus_lr: -adadelta.lr as f32,
        }
    }
}

elementwise!(Adadelta, "adadelta", [square, delta]);

vectorised! {
    /// A step.
    pub fn step(
        s: &Scalars,
        parameter: &mut [f32],
        square_avg: &mut [f32],
        acc_delta: &mut [f32],
        gradient: &[f32],
    ) {
        let n = parameter.len();
        let (square_avg, acc_delta) = (&mut square_avg[..n], &mut acc_delta[..n]);
        let gradient = &gradient[..n];
        for i in 0..n {
            let g = decayed(gradient[i] * s.gradient, parameter[i], s.weight_decay);
            let square = square_avg[i] * s.rho + s.one_minus_rho * g * g;
            square_avg[i] = square;
            let delta = (acc_delta[i] + s.eps).sqrt() / (square + s.eps).sqrt() * g;
            acc_delta[i] = acc_delta[i] * s.rho + s.one_minus_rho * delta * delta;
            parameter[i] += delta * s.minus_lr;
        }
    }
}
